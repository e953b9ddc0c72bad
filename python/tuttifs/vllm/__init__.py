"""vLLM's KV connector: prefixes of prompts are restored from a mount, and stored to it, beyond the engine's memory.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TuttifsConnector",
        "kv_connector_module_path": "tuttifs.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": "/mnt/kv"}}'

docs/engines.md has the set-up, the options and what to do when something is wrong. Only `TuttifsConnector` needs vLLM,
and imports it when it is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TuttifsConnector"]


def __getattr__(name: str) -> Any:
    if name == "TuttifsConnector":
        from .connector import TuttifsConnector
        return TuttifsConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
