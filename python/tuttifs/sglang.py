"""SGLang's hierarchical cache on a mount: a storage backend of its dynamic loader.

    python -m sglang.launch_server --model MODEL --enable-hierarchical-cache --page-size 64
        --hicache-mem-layout page_first --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "tuttifs", "module_path": "tuttifs.sglang", "class_name": "TuttifsStorage", "interface_v1": 1,
          "hicache_storage_pass_prefix_keys": true, "path": "/mnt/kv", "revision": "...", "dtype": "bfloat16",
          "quantisation": "none", "scale_format": "none"}'

docs/engines.md has the set-up, the options and what to do when something is wrong. Every page of a host pool is a file.
"""
# mypy: disable-error-code="import-not-found, misc, no-any-return, import-untyped"

from __future__ import annotations

import hashlib
import logging
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from sglang.srt.mem_cache.hicache_storage import (HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo,
                                                  PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult)

from .errors import IdentityError, InvalidError
from .pages import PageOptions, Pages, Region, Staging, attach, refuse_unknown, restorable
from .vllm.identity import digest, pool_name

log = logging.getLogger("tuttifs.sglang")

WHERE = "hicache_storage_backend_extra_config"

# What the loader and the controller read of the same dictionary.
_LOADER = {"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"}

# Flags of the server that change what is computed. Where this process has them, they are part of the identity.
_FLAGS = ("model_path", "revision", "dtype", "quantization", "kv_cache_dtype", "quantization_param_path", "load_format",
          "json_model_override_args", "model_impl", "torchao_config", "mamba_ssm_dtype", "speculative_algorithm",
          "speculative_draft_model_path", "speculative_draft_model_revision")

# What host pools tell of their pages.
_DTYPES = ("dtype", "temporal_dtype", "conv_dtype")
_GEOMETRY = (*_DTYPES, "start_layer", "end_layer", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank",
             "qk_rope_head_dim", "kv_cache_dim", "storage_format_tag", "num_mamba_layers", "temporal_state_shape",
             "conv_state_shapes")


def named(key: str) -> bytes:
    """A file's key for SGLang's, which is a chained SHA-256 in hexadecimal digits."""
    return hashlib.sha256(b"tuttifs sglang page 1" + key.encode()).digest()


def flags() -> Dict[str, str]:
    """The server's flags, as far as this version of SGLang tells."""
    context = sys.modules.get("sglang.srt.runtime_context")
    try:
        arguments = context.get_server_args() if context else None
        return {f: str(getattr(arguments, f)) for f in _FLAGS if arguments is not None and hasattr(arguments, f)}
    except (AttributeError, RuntimeError, ValueError):  # there are none yet
        return {}


def replicated(config: HiCacheStorageConfig, name: str, pool: Any) -> bool:
    """Whether all tensor-parallel ranks have the same pages. Then one of them stores. States are divided among ranks
    whatever the attention is, and so are pools with heads, as a draft model's may be."""
    return bool(config.is_mla_model) and name != PoolName.MAMBA.value and not hasattr(pool, "head_num")


def identity(config: HiCacheStorageConfig, options: PageOptions, name: str, pool: Any,
             parts: Sequence[int]) -> Dict[str, Any]:
    """The identity of one host pool's pages. `IdentityError` names all that is not known."""
    if config.dcp_size != 1:
        raise IdentityError("decode context parallelism is not supported")
    texts = {"model": config.model_name, "revision": options.revision, "dtype": options.dtype,
             "quantisation": options.quantisation, "scale_format": options.scale_format, "layout": pool.layout}
    numbers = {"page_size": pool.page_size, "tp": config.tp_size, "pp": config.pp_size, "cp": config.attn_cp_size,
               "page bytes": sum(parts)}
    stored = ", ".join(str(getattr(pool, n)).replace("torch.", "") for n in _DTYPES if hasattr(pool, n))
    refuse_unknown({**texts, "the cache's data type": stored}, numbers, WHERE)
    same = replicated(config, name, pool)
    rank = "all ranks" if same else f"rank {config.tp_rank} of {config.tp_size}"
    shape = [type(pool).__name__, parts, [str(getattr(pool, n, None)) for n in _GEOMETRY]]
    return {"model": str(config.model_name),
            "revision": f"{options.revision}, computed {digest([options.computed, flags()])}",
            "weights_epoch": options.weights_epoch, "dtype": f"{options.dtype}, cache {stored}",
            "quantisation": options.quantisation, "scale_format": options.scale_format,
            "layout": f"{pool.layout}, {digest(shape)}", "page_bytes": sum(parts), "block_tokens": pool.page_size,
            "file_tokens": pool.page_size, "tp": 1 if same else config.tp_size, "pp": config.pp_size,
            "cp": config.attn_cp_size,
            "group": f"{name}, {rank}, stage {config.pp_rank}, context {config.attn_cp_rank}"}


class Kind:
    """The pages of one host pool. They are moved in place where each consists of pieces of one buffer in the order of
    addresses, which is the order of the flat page too; else by way of the flat page, which is a copy."""

    def __init__(self, name: str, pool: Any, config: HiCacheStorageConfig, options: PageOptions,
                 attachment: Any) -> None:
        self.pool = pool
        sample = pool.get_dummy_flat_data_page()
        self._dtype, flat = sample.dtype, sample.numel() * sample.element_size()
        if not flat:
            raise InvalidError(f"the host pool {name} holds no bytes of its own")
        parts = self._parts(flat)
        self.direct = bool(parts)
        parts = parts or [flat]
        fields = identity(config, options, name, pool, parts)
        self.pages = Pages(attachment, options, pool_name(fields, "sglang"), fields, parts)
        self._staging = Staging(self.pages, options.staging_bytes, lambda n: torch.zeros(n, dtype=torch.uint8))
        if self.direct:
            self._region = Region(pool.kv_buffer)
        log.info("tuttifs: pages of %d tokens, %d bytes of %s in %s, %s", pool.page_size, flat, name, self.pages.name,
                 "in place" if self.direct else "copied")

    def _parts(self, flat: int) -> List[int]:
        """The pieces of a page in the pool's buffer, [] where it is not so simple."""
        buffer = getattr(self.pool, "kv_buffer", None)
        if not isinstance(buffer, torch.Tensor) or buffer.device.type != "cpu" or not buffer.is_contiguous():
            return []
        try:
            found = sorted(zip(*self.pool.get_page_buffer_meta(torch.arange(self.pool.page_size))))
        except (AttributeError, AssertionError, NotImplementedError, TypeError, ValueError):
            return []
        first, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()
        inside = all(first <= at and at + size <= end for at, size in found)
        return [int(size) for _, size in found] if inside and sum(size for _, size in found) == flat else []

    def _addresses(self, indices: torch.Tensor) -> List[List[int]]:
        pointers, n = self.pool.get_page_buffer_meta(indices)[0], len(self.pages.parts)
        return [sorted(pointers[i:i + n]) for i in range(0, len(pointers), n)]

    def _fits(self, keys: Sequence[bytes], indices: Optional[torch.Tensor]) -> bool:
        if indices is not None and indices.numel() == len(keys) * self.pool.page_size:
            return True
        log.error("tuttifs: %d pages of %d tokens, and %s indices", len(keys), self.pool.page_size,
                  "no" if indices is None else indices.numel())
        return False

    def read(self, keys: Sequence[bytes], indices: Optional[torch.Tensor]) -> List[bool]:
        if indices is None or not self._fits(keys, indices):
            return [False] * len(keys)
        if self.direct:
            return self.pages.load(keys, self._region, self._addresses(indices))
        firsts = indices[::self.pool.page_size].tolist()
        return self._staging.load(
            keys, lambda i, page: self.pool.set_from_flat_data_page(firsts[i], page.clone().view(self._dtype)))

    def write(self, keys: Sequence[bytes], indices: Optional[torch.Tensor], before: Sequence[bytes]) -> List[bool]:
        if indices is None or not self._fits(keys, indices):
            return [False] * len(keys)
        if self.direct:
            return self.pages.store(keys, self._region, self._addresses(indices), before)
        firsts = indices[::self.pool.page_size].tolist()
        return self._staging.store(
            keys, lambda i, page: page.copy_(octets(self.pool.get_data_page(firsts[i], flat=True))), before)

    def read_flat(self, keys: Sequence[bytes], targets: Optional[Sequence[Any]]) -> List[Optional[torch.Tensor]]:
        found: List[Optional[torch.Tensor]] = [None] * len(keys)

        def take(i: int, page: torch.Tensor) -> None:
            target = targets[i] if targets is not None else None
            if target is None:
                found[i] = page.clone().view(self._dtype)
            elif target.numel() * target.element_size() == page.numel():
                found[i] = target.copy_(page.clone().view(target.dtype).reshape(target.shape))
        self._staging.load(keys, take)
        return found

    def write_flat(self, keys: Sequence[bytes], values: Optional[Sequence[Any]]) -> List[bool]:
        if values is None or len(values) != len(keys) or any(
                v is None or v.numel() * v.element_size() != self.pages.bytes for v in values):
            log.error("tuttifs: values that are not %d pages of %d bytes", len(keys), self.pages.bytes)
            return [False] * len(keys)
        return self._staging.store(keys, lambda i, page: page.copy_(octets(values[i])))


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).reshape(-1)


class TuttifsStorage(HiCacheStorage):
    """A backend that never raises once it is attached: a mount that is gone, damaged or full is a miss."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Optional[Mapping[str, Any]] = None) -> None:
        self._config = storage_config
        given = {k: v for k, v in (storage_config.extra_config or {}).items() if k not in _LOADER}
        self._options = PageOptions.parse(given, WHERE)
        self._kinds: Dict[str, Kind] = {}
        self._attachment = attach(self._options)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        anchor = getattr(mem_pool_host, "anchor_entry", None)
        self._kind(PoolName.KV.value, anchor.host_pool if anchor is not None else mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._kind(PoolName(host_pool_name).value, host_pool)

    def _kind(self, name: str, pool: Any) -> None:
        known = self._kinds.get(name)
        if known is None or known.pool is not pool:
            self._kinds[name] = Kind(name, pool, self._config, self._options, self._attachment)

    @property
    def _kv(self) -> Kind:
        return self._kinds[PoolName.KV.value]

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: List[str], extra_info: Optional[HiCacheStorageExtraInfo] = None) -> int:
        return self._kv.pages.leading([named(k) for k in keys])

    def batch_exists_v2(self, keys: List[str], pool_transfers: Optional[List[PoolTransfer]] = None,
                        extra_info: Optional[HiCacheStorageExtraInfo] = None) -> PoolTransferResult:
        names = [named(k) for k in keys]
        n = self._kv.pages.leading(names)
        hits: Dict[str, int] = {PoolName.KV: n} if n else {}
        lengths = set(range(1, n + 1))
        for t in pool_transfers or []:
            if not lengths or t.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of pages that are counted already
            kind = self._kinds.get(PoolName(t.name).value)
            stored = kind.pages.present(names[:n]) if kind is not None else [False] * n
            window = n if t.hit_policy == PoolHitPolicy.ALL_PAGES else max(1, len(t.keys or ()))
            possible = restorable(stored, window)
            if possible:
                hits[t.name] = possible[-1]
            lengths &= set(possible)
        return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))

    def batch_get_v1(self, keys: List[str], host_indices: torch.Tensor,
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> List[bool]:
        return self._kv.read([named(k) for k in keys], host_indices)

    def batch_set_v1(self, keys: List[str], host_indices: torch.Tensor,
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> List[bool]:
        return self._kv.write([named(k) for k in keys], host_indices, _before(extra_info))

    def batch_get_v2(self, transfers: List[PoolTransfer],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> Dict[str, List[bool]]:
        return {t.name: self._moved(t, lambda kind, names: kind.read(names, t.host_indices)) for t in transfers}

    def batch_set_v2(self, transfers: List[PoolTransfer],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> Dict[str, List[bool]]:
        # Of a window or a state the pages before are not stored: a chain that names them would be evicted first.
        chain = {t.name: _before(extra_info) if t.hit_policy == PoolHitPolicy.ALL_PAGES else [] for t in transfers}
        return {t.name: self._moved(t, lambda kind, names: kind.write(names, t.host_indices, chain[t.name]))
                for t in transfers}

    def _moved(self, t: PoolTransfer, move: Any) -> List[bool]:
        kind, names = self._kinds.get(PoolName(t.name).value), [named(k) for k in t.keys or ()]
        return [False] * len(names) if kind is None else move(kind, names)

    def get(self, key: str, target_location: Optional[Any] = None,
            target_sizes: Optional[Any] = None) -> Optional[torch.Tensor]:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: List[str], target_locations: Optional[Any] = None,
                  target_sizes: Optional[Any] = None) -> List[Optional[torch.Tensor]]:
        return self._kv.read_flat([named(k) for k in keys], target_locations)

    def set(self, key: str, value: Optional[Any] = None, target_location: Optional[Any] = None,
            target_sizes: Optional[Any] = None) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(self, keys: List[str], values: Optional[Any] = None, target_locations: Optional[Any] = None,
                  target_sizes: Optional[Any] = None) -> bool:
        return all(self._kv.write_flat([named(k) for k in keys], target_locations if values is None else values))

    def clear(self) -> None:
        """Removes the pages of this model from the mount, for all engines that share them."""
        for kind in self._kinds.values():
            kind.pages.clear()

    def close(self) -> None:
        self._attachment.close()


def _before(extra_info: Optional[HiCacheStorageExtraInfo]) -> List[bytes]:
    prefix = extra_info.prefix_keys if extra_info is not None else None
    return [named(k) for k in prefix or ()]
