"""What decides whether two engines' blocks of equal keys are interchangeable, from an engine's configuration.

Nothing is guessed: what is not known is refused, because a wrong hit is wrong text. What vLLM's configuration says
about how tokens become KV, and has no field of its own in an identity, goes into a digest behind the revision.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ..errors import IdentityError
from .files import Group, pieces
from .options import Options

# Of a model's own configuration, what says nothing about how it computes.
_NEUTRAL = {"_name_or_path", "transformers_version", "_commit_hash"}

# vLLM's kinds of groups, and which of their fields is the window. Others keep states, or blocks that are filled
# otherwise.
_KINDS = {"FullAttentionSpec": "", "MLAAttentionSpec": "", "SlidingWindowSpec": "sliding_window",
          "SlidingWindowMLASpec": "sliding_window", "ChunkedLocalAttentionSpec": "attention_chunk_size"}


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything about an engine that is the same for all its groups."""

    model: str
    revision: str
    weights_epoch: int
    config: Mapping[str, Any]  # the model's own configuration, and what else changes what is computed
    model_dtype: str
    quantisation: str
    tp: int
    pp: int
    cp: int
    file_tokens: int


@dataclasses.dataclass(frozen=True)
class GroupFacts:
    """What a worker knows of one group's tensors."""

    group: Group
    kind: str
    layout: str  # the attention backend and a block's shape in it
    cache_dtype: str
    scale_format: str


def digest(value: Any) -> str:
    """A short name for a value made of what JSON knows, and of types and the like, which go in by name."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def version(vllm: str) -> str:
    """vLLM's, as far as what it stores may differ."""
    return "vLLM " + ".".join(vllm.split(".")[:2])


def identity(facts: Facts, g: GroupFacts) -> Dict[str, Any]:
    """The identity of one group's pool. `IdentityError` names all that is not known."""
    texts = {"model": facts.model, "revision": facts.revision, "model_dtype": facts.model_dtype,
             "cache_dtype": g.cache_dtype, "quantisation": facts.quantisation, "scale_format": g.scale_format,
             "layout": g.layout, "group": g.kind}
    numbers = {"page_bytes": sum(g.group.block_bytes), "block_tokens": g.group.block_tokens,
               "file_tokens": facts.file_tokens, "tp": facts.tp, "pp": facts.pp, "cp": facts.cp}
    unknown = [n for n, v in texts.items() if v.strip().lower() in ("", "auto", "unknown")]
    unknown += [n for n, v in numbers.items() if v < 1]
    if not facts.config:
        unknown.append("the model's configuration")
    if unknown:
        raise IdentityError(f"what the engine computes is not known in full: {', '.join(unknown)}. For a model in a "
                            'local directory give "revision" in kv_connector_extra_config, and change it with the '
                            "weights")
    layers = digest([g.group.layers, g.group.block_bytes, g.group.window])
    return {"model": facts.model, "revision": f"{facts.revision}, config {digest(facts.config)}, layers {layers}",
            "weights_epoch": facts.weights_epoch, "dtype": f"{facts.model_dtype}, cache {g.cache_dtype}",
            "quantisation": facts.quantisation, "scale_format": g.scale_format, "layout": g.layout, "group": g.kind,
            **numbers}


def pool_name(fields: Mapping[str, Any], engine: str = "vllm") -> str:
    """The directory of an identity's pool: readable, and one for each identity."""
    model = "".join(c if c.isalnum() or c in "-_." else "-" for c in str(fields["model"]).rstrip("/").split("/")[-1])
    return f"{engine}-{model[:32].strip('.') or 'model'}-{digest(dict(fields))[:16]}"


def objects(group: Group, file_tokens: int, ranks: int) -> List[Tuple[int, int, int]]:
    """A file's objects as (layer, rank, bytes): a layer's blocks one behind the other."""
    n = file_tokens // group.block_tokens
    return [(layer, rank, size) for layer, b in enumerate(group.block_bytes) for rank in range(ranks)
            for size in pieces(b * n)]


def group_of(index: int, names: Sequence[str], spec: Any) -> Tuple[Group, str]:
    """A vLLM group, and what kind it is. Refuses those whose blocks do not hold the KV of their tokens."""
    specs = getattr(spec, "kv_cache_specs", None)  # layers of one kind that differ in size
    each = [specs[name] for name in names] if specs else [spec] * len(names)
    kinds = {type(s).__name__ for s in each}
    if len(kinds) != 1 or not kinds <= set(_KINDS):
        raise IdentityError(f"layers of the kinds {', '.join(sorted(kinds))} cannot be stored: the connector knows "
                            f"{', '.join(sorted(_KINDS))}")
    kind = kinds.pop()
    if any(getattr(s, "prefix_replay_tokens", 0) for s in each):
        raise IdentityError("layers that replay a window of tokens after a hit cannot be stored")
    windows = {int(getattr(s, _KINDS[kind])) + int(getattr(s, "extra_retained_tokens", 0)) if _KINDS[kind] else 0
               for s in each}
    if len(windows) != 1:
        raise IdentityError(f"layers with the windows {sorted(windows)} in one group")
    window = windows.pop()
    group = Group(index, tuple(names), int(spec.block_size), tuple(int(s.unpadded_page_size_bytes) for s in each),
                  window)
    return group, f"group {index}, {kind}" + (f", window {window}" if window else "")


def scale_format(spec: Any) -> str:
    """How a group's quantised KV is scaled, "none" if it is not quantised."""
    specs = getattr(spec, "kv_cache_specs", None)
    modes = {getattr(getattr(s, "kv_quant_mode", None), "name", "unknown").lower()
             for s in (specs.values() if specs else [spec])}
    special = {getattr(s, "cache_dtype_str", None) or "" for s in (specs.values() if specs else [spec])}
    return ", ".join(sorted(modes) + sorted(s for s in special if s and s != "auto"))


def facts_of(config: Any, options: Options, file_tokens: int) -> Facts:
    """What a VllmConfig says. The revision is the user's, or the commit that the model's hub gave."""
    model, parallel = config.model_config, config.parallel_config
    cp = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    if parallel.pipeline_parallel_size != 1 or cp != 1:
        raise IdentityError("pipeline and context parallelism are not supported: every rank must have all layers of "
                            "its heads, and all tokens")
    own = {k: v for k, v in model.hf_config.to_dict().items() if k not in _NEUTRAL}
    attention, load = config.attention_config, config.load_config
    computed = {
        "model": own, "code_revision": model.code_revision, "weights": str(model.model_weights),
        # Weights that are made up, and positions that are scaled by the longest prompt.
        "dummy": model.seed if str(load.load_format) == "dummy" else None,
        "max_model_len": model.max_model_len if _scales_by_length(own) else None,
        "attention": [attention.use_non_causal, attention.use_prefill_query_quantization,
                      attention.disable_flashinfer_q_quantization, str(attention.indexer_kv_dtype)],
        "lora": _lora(config.lora_config, model.dtype),
        "model_class_overrides": model.model_class_overrides, "model_impl": str(model.model_impl),
        "disable_sliding_window": model.disable_sliding_window, "quantization_config": model.quantization_config,
        "cache_dtype": str(config.cache_config.cache_dtype), "multimodal": _multimodal(model.multimodal_config),
        "kv_cache_dtype_skip_layers": config.cache_config.kv_cache_dtype_skip_layers,
        "kv_sharing_fast_prefill": config.cache_config.kv_sharing_fast_prefill,
        "speculative": _speculative(config.speculative_config)}
    commit = getattr(model.hf_config, "_commit_hash", None)
    return Facts(model=str(model.model), revision=options.revision or str(commit or "unknown"),
                 weights_epoch=options.weights_epoch, config=computed, model_dtype=_dtype(model.dtype),
                 quantisation=str(model.quantization or "none"), tp=parallel.tensor_parallel_size,
                 pp=parallel.pipeline_parallel_size, cp=cp, file_tokens=file_tokens)


def _dtype(dtype: Any) -> str:
    return str(dtype).replace("torch.", "")


def _scales_by_length(own: Mapping[str, Any]) -> bool:
    """Whether a model's rotary embedding is that of LongRoPE: it has two sets of factors."""
    text = json.dumps(own, default=str)
    return '"longrope"' in text or '"su"' in text


def _lora(lora: Any, model_dtype: Any) -> Any:
    """What is done with adapters behind the digests of their files; None for what is done by default."""
    if lora is None:
        return None
    dtype = _dtype(lora.lora_dtype)
    ways = [sorted(lora.target_modules or ()), bool(lora.enable_tower_connector_lora),
            None if dtype in ("auto", _dtype(model_dtype)) else dtype]
    return ways if any(ways) else None


def _multimodal(m: Any) -> Any:
    """What is done to media behind vLLM's digests of them."""
    names = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method", "media_io_kwargs",
             "mm_encoder_attn_dtype", "mm_device_do_normalize")
    return None if m is None else [str(getattr(m, n, None)) for n in names]


def _speculative(spec: Any) -> Any:
    """A draft model's layers are stored with the model's."""
    if spec is None:
        return None
    draft = getattr(spec, "draft_model_config", None)
    return [str(spec.method), str(spec.model), str(getattr(spec, "revision", None)),
            str(getattr(spec, "quantization", None)),
            draft.hf_config.to_dict() if draft is not None else None]
