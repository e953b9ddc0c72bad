"""LMCache on a mount: a storage plugin.

    local_cpu: true
    chunk_size: 256
    pre_caching_hash_algorithm: sha256_cbor
    storage_plugins: [tuttifs]
    extra_config:
      storage_plugin.tuttifs.module_path: tuttifs.lmcache
      storage_plugin.tuttifs.class_name: TuttifsBackend
      tuttifs.path: /mnt/kv
      tuttifs.revision: "..."
      tuttifs.dtype: bfloat16
      tuttifs.quantisation: none
      tuttifs.scale_format: none

docs/engines.md has the set-up, the options and what to do when something is wrong. Every chunk of a rank is a file.
"""
# mypy: disable-error-code="import-not-found, misc, no-any-return, import-untyped"

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import logging
import threading
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from .errors import IdentityError, InvalidError
from .pages import Holds, PageOptions, Pages, Region, Staging, attach, refuse_unknown
from .vllm.identity import digest, pool_name

log = logging.getLogger("tuttifs.lmcache")

PREFIX = "tuttifs."
WHERE = f"extra_config, as {PREFIX}..."


def named(key: Any) -> bytes:
    """A file's key for LMCache's, which names model, ranks, data type, tags, and a chained hash of the tokens."""
    return hashlib.sha256(b"tuttifs lmcache chunk 1" + str(key.to_string()).encode()).digest()


def options(extra: Optional[Mapping[str, Any]]) -> PageOptions:
    """What a user sets in LMCache's extra_config, next to what is for others."""
    given = {k[len(PREFIX):]: v for k, v in (extra or {}).items() if k.startswith(PREFIX)}
    return PageOptions.parse(given, WHERE)


def refuse(config: Any) -> None:
    """What would make a chunk depend on more than its key says, or come in another form."""
    if config.pre_caching_hash_algorithm == "builtin":
        raise IdentityError("LMCache's default hash is no cryptographic one, so that different prompts may have equal "
                            "keys: set pre_caching_hash_algorithm to sha256_cbor")
    if config.enable_blending:
        raise IdentityError("with enable_blending a chunk depends on more than what comes before it")
    if config.use_layerwise:
        raise InvalidError("use_layerwise is not supported: a file holds all layers of a chunk")


def chunk_bytes(metadata: Any) -> int:
    """The bytes of a whole chunk of one rank."""
    shapes, dtypes = metadata.get_shapes(), metadata.get_dtypes()
    return sum(s.numel() * d.itemsize for s, d in zip(shapes, dtypes))


def identity(metadata: Any, o: PageOptions) -> Dict[str, Any]:
    """The identity of one rank's chunks. `IdentityError` names all that is not known."""
    texts = {"model": metadata.model_name, "revision": o.revision, "dtype": o.dtype, "quantisation": o.quantisation,
             "scale_format": o.scale_format, "kv_dtype": metadata.kv_dtype}
    size = chunk_bytes(metadata)
    numbers = {"world_size": metadata.world_size, "chunk_size": metadata.chunk_size, "chunk bytes": size}
    refuse_unknown(texts, numbers, WHERE)
    shape = [[list(s) for s in metadata.get_shapes()], [str(d) for d in metadata.get_dtypes()], list(metadata.kv_shape),
             metadata.use_mla]
    return {"model": str(metadata.model_name), "revision": f"{o.revision}, computed {digest(o.computed)}",
            "weights_epoch": o.weights_epoch,
            "dtype": f"{o.dtype}, cache {str(metadata.kv_dtype).replace('torch.', '')}",
            "quantisation": o.quantisation, "scale_format": o.scale_format,
            "layout": f"{form(metadata).name}, {digest(shape)}",
            "page_bytes": size, "block_tokens": metadata.chunk_size, "file_tokens": metadata.chunk_size,
            # LMCache counts all ranks of an engine, of whatever parallelism, in one.
            "tp": metadata.world_size, "pp": 1, "cp": 1,
            "group": f"chunks of rank {metadata.worker_id} of {metadata.world_size}"}


def form(metadata: Any) -> Any:
    """How LMCache lays out the chunks of such a model."""
    return MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD


class TuttifsBackend(StoragePluginInterface):
    """Chunks of one rank. What a mount does never raises: a chunk is not stored then, or is a miss."""

    def __init__(self, dst_device: str = "cpu", config: Any = None, metadata: Any = None, local_cpu_backend: Any = None,
                 loop: Optional[asyncio.AbstractEventLoop] = None) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if config is None or metadata is None:
            raise InvalidError("the backend needs LMCache's configuration and metadata")
        refuse(config)
        self._options = options(config.extra_config)
        identity(metadata, self._options)  # what is wrong with it is said at the start
        self._attachment = attach(self._options)
        self._lock = threading.Lock()
        self._made: Optional[_Chunks] = None
        self._putting: Set[Any] = set()
        self._holds = Holds()
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "tuttifs-load")
        self._storer = concurrent.futures.ThreadPoolExecutor(1, "tuttifs-store")
        if local_cpu_backend is not None:
            _first(self.close, local_cpu_backend.get_memory_allocator())

    @property
    def _chunks(self) -> "_Chunks":
        """Made when first used: only then LMCache knows the engine's groups of layers."""
        with self._lock:
            if self._made is None:
                self._made = _Chunks(self._attachment, self._options, self.metadata, self.local_cpu_backend)
            return self._made

    def __str__(self) -> str:
        return "TuttifsBackend"

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: List[Any], pin: bool = False) -> int:
        names, pages = [named(k) for k in keys], self._chunks.pages
        n = pages.leading(names)
        if not pin:
            return n
        held = self._holds.add(pages, names[:n])
        n = (held + [False]).index(False)
        for name, there in zip(names[n:], held[n:]):
            if there:  # and what is before it went meanwhile
                self._holds.end(name)
        return n

    async def batched_async_contains(self, lookup_id: str, keys: List[Any], pin: bool = False) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._loader, self.batched_contains, keys, pin)

    def pin(self, key: Any) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: Any) -> bool:
        """Ends one pin of a key, whichever call made it."""
        return self._holds.end(named(key))

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self._lock:
            return key in self._putting

    def batched_submit_put_task(self, keys: Sequence[Any], objs: List[Any], transfer_spec: Any = None,
                                on_complete_callback: Optional[Callable[[Any], None]] = None
                                ) -> Optional[List["concurrent.futures.Future[None]"]]:
        """Stores whole chunks, in a thread of its own. What is left of a prompt behind its last whole chunk is
        not stored."""
        chunks = self._chunks
        with self._lock:
            pairs = {k: o for k, o in zip(keys, objs) if k not in self._putting and chunks.takes(o)}
            self._putting |= set(pairs)
        for o in pairs.values():
            o.ref_count_up()
        if not pairs:
            return None
        try:
            return [self._storer.submit(self._put, chunks, pairs, on_complete_callback)]
        except RuntimeError:  # it is closed
            self._done(pairs)
            return None

    def _put(self, chunks: "_Chunks", pairs: Dict[Any, Any], callback: Optional[Callable[[Any], None]]) -> None:
        stored: List[Any] = []
        try:
            good = chunks.store([named(k) for k in pairs], list(pairs.values()))
            stored = [k for k, there in zip(pairs, good) if there]
        except Exception:
            log.exception("tuttifs: chunks were not stored")
        finally:
            self._done(pairs)
        for key in stored if callback is not None else ():
            try:
                callback(key)
            except Exception:
                log.exception("tuttifs: what LMCache does when a chunk is stored failed")

    def _done(self, pairs: Dict[Any, Any]) -> None:
        with self._lock:
            self._putting -= set(pairs)
        for o in pairs.values():
            o.ref_count_down()

    def get_blocking(self, key: Any) -> Optional[Any]:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: List[Any]) -> List[Optional[Any]]:
        return self._chunks.load([named(k) for k in keys], busy_loop=True)

    async def batched_get_non_blocking(self, lookup_id: str, keys: List[Any], transfer_spec: Any = None) -> List[Any]:
        """The leading chunks that are whole, pinned as LMCache's own disk pins them."""
        def work() -> List[Any]:
            found = self._chunks.load([named(k) for k in keys], busy_loop=False)
            whole = found.index(None) if None in found else len(found)
            for o in found[whole:]:
                if o is not None:
                    o.ref_count_down()
            for o in found[:whole]:
                o.pin()  # type: ignore[union-attr]
            return found[:whole]
        return await asyncio.get_running_loop().run_in_executor(self._loader, work)

    def remove(self, key: Any, force: bool = True) -> bool:
        """Removes a chunk, for all engines."""
        return self._chunks.pages.remove([named(key)]) == 1

    def clear(self) -> int:
        """Removes all chunks of this rank, for all engines. How many tokens they had."""
        return self._chunks.pages.clear() * self.metadata.chunk_size

    def touch_cache(self) -> None:
        """A pin has touched it."""

    def get_allocator_backend(self) -> Any:
        if self.local_cpu_backend is None:
            raise InvalidError("LMCache's local CPU backend is needed: max_local_cpu_size must be above 0")
        return self.local_cpu_backend

    def close(self) -> None:
        """Waits for what is being stored. May be called twice."""
        self._storer.shutdown()
        self._loader.shutdown()
        self._holds.close()
        self._attachment.close()


def _first(close: Callable[[], None], allocator: Any) -> None:
    """LMCache gives its memory back before it closes plugins. What is being stored from it must have ended by then."""
    free = allocator.close

    def closing() -> None:
        close()
        free()
    allocator.close = closing


class _Chunks:
    """Chunks between LMCache's objects and files: in place in LMCache's buffer, else by way of a copy."""

    def __init__(self, attachment: Any, o: PageOptions, metadata: Any, local_cpu_backend: Any) -> None:
        self._shapes, self._dtypes, self._form = metadata.get_shapes(), metadata.get_dtypes(), form(metadata)
        fields = identity(metadata, o)
        self.pages = Pages(attachment, o, pool_name(fields, "lmcache"), fields, [chunk_bytes(metadata)])
        self._local = local_cpu_backend
        self._staging = Staging(self.pages, o.staging_bytes, lambda n: torch.zeros(n, dtype=torch.uint8))
        allocator = local_cpu_backend.get_memory_allocator() if local_cpu_backend is not None else None
        buffer = getattr(allocator, "buffer", None)
        self._region = None
        if isinstance(buffer, torch.Tensor) and buffer.device.type == "cpu" and buffer.is_contiguous() \
                and buffer.numel():
            self._region = Region(buffer)
        log.info("tuttifs: chunks of %d tokens, %d bytes in %s, %s", metadata.chunk_size, self.pages.bytes,
                 self.pages.name, "in place" if self._region else "copied")

    def takes(self, o: Any) -> bool:
        return o.get_size() == self.pages.bytes and o.metadata.fmt == self._form

    def _inside(self, objects: Sequence[Any]) -> bool:
        r = self._region
        return r is not None and all(r.address <= o.data_ptr and o.data_ptr + self.pages.bytes <= r.address + r.bytes
                                     for o in objects)

    def store(self, names: Sequence[bytes], objects: Sequence[Any]) -> List[bool]:
        if self._region is not None and self._inside(objects):
            return self.pages.store(names, self._region, [[o.data_ptr] for o in objects])
        return self._staging.store(names, lambda i, page: page.copy_(octets(objects[i])))

    def load(self, names: Sequence[bytes], busy_loop: bool) -> List[Optional[Any]]:
        """Chunks that are there and whole, in new objects of LMCache's; None for the others."""
        found: List[Optional[Any]] = [None] * len(names)
        if self._local is None:
            return found
        for i, there in enumerate(self.pages.present(names)):
            if there:
                found[i] = self._local.allocate(self._shapes, self._dtypes, self._form, busy_loop=busy_loop)
                if found[i] is None:
                    log.warning("tuttifs: LMCache has no memory for a chunk")
                    break
        some = [i for i, o in enumerate(found) if o is not None]
        objects, keys = [found[i] for i in some], [names[i] for i in some]
        if self._region is not None and self._inside(objects):
            good = self.pages.load(keys, self._region, [[o.data_ptr] for o in objects])  # type: ignore[union-attr]
        else:
            good = self._staging.load(keys, lambda i, page: octets(objects[i]).copy_(page))
        for i, whole in zip(some, good):
            if not whole:
                found[i].ref_count_down()  # type: ignore[union-attr]
                found[i] = None
        return found


def octets(o: Any) -> torch.Tensor:
    return torch.frombuffer(o.byte_array, dtype=torch.uint8)
