"""What a user sets in vLLM's kv_connector_extra_config."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional

from ..errors import InvalidError


@dataclasses.dataclass(frozen=True)
class Options:
    """A field without a default must be given; unknown names are refused, so that a misspelt one is not ignored."""

    path: str  # any path in the mount
    file_tokens: int = 0  # tokens of a file, a multiple of the engine's blocks. 0: so many that objects have 64 KiB
    revision: str = ""  # of the model; "" for what the model's hub says
    fixed_weights: bool = False  # they never change while the engine runs: it may be reset, as by sleep, and go on
    weights_epoch: int = 0  # to be raised whenever weights change under the same revision (training)
    tenant: int = 0  # of requests that name none in their kv_transfer_params
    min_bytes: int = 0  # kept for each pool
    max_bytes: int = 0  # each pool's limit, 0 for the volume's
    layerwise: bool = False  # loads inside the step, layer by layer. Default: before it, the whole request
    staging_bytes: int = 256 << 20  # of every rank, half for loads and half for stores
    scheduler: bool = True  # what the engine computes is told to the session's scheduler, which paces loads and stores
    slack_table: str = ""  # path of a table that the scheduler begins with
    any_slack_table: bool = False  # also one of another machine, or of a model with another cache
    store_bytes: int = 0  # of every rank: memory in which stores wait until the drives have time. 0: none
    retry_seconds: float = 5.0  # between attempts to open a mount again that was lost
    shutdown_seconds: float = 30.0  # that the engine's end waits for stores on their way
    lanes: int = 0  # as in Store.session
    depth: int = 0

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Options":
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InvalidError(f"kv_connector_extra_config has no {', '.join(unknown)}; it knows "
                               f"{', '.join(sorted(known))}")
        if not given.get("path"):
            raise InvalidError('kv_connector_extra_config needs "path", a path in the mount')
        for name, value in given.items():
            # With annotations as text, a default's type stands in for the field's.
            wanted: Any = str if name == "path" else type(known[name].default)
            if wanted is float and type(value) is int:
                continue
            if type(value) is not wanted:
                raise InvalidError(f"kv_connector_extra_config: {name} is a {wanted.__name__}, not {value!r}")
        o = cls(**given)
        negative = [n for n, v in dataclasses.asdict(o).items() if isinstance(v, (int, float)) and v < 0]
        if negative:
            raise InvalidError(f"kv_connector_extra_config: {', '.join(negative)} is negative")
        if o.staging_bytes < STAGING_MIN:
            raise InvalidError(f"kv_connector_extra_config: staging_bytes is {o.staging_bytes}, at least {STAGING_MIN} "
                               "are needed")
        return o


STAGING_MIN = 1 << 20


def tenant_of(parameters: Optional[Mapping[str, Any]], default: int) -> int:
    """A request's tenant: "tuttifs_tenant" in its kv_transfer_params, or the default."""
    tenant = (parameters or {}).get("tuttifs_tenant", default)
    if type(tenant) is not int or not 0 <= tenant < 1 << 32:
        raise InvalidError(f"tuttifs_tenant {tenant!r}: a number from 0 to 2**32 - 1")
    return tenant
