"""LMCache's multi-process server on a mount: an L2 adapter of its plugin door.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "tuttifs.lmcache_mp",
        "class_name": "TuttifsL2Adapter", "adapter_params": {"path": "/mnt/kv", "chunk_size": 256, "models": {"MODEL": {
        "revision": "...", "dtype": "bfloat16", "quantisation": "none", "scale_format": "none"}}}}'

docs/engines.md has the set-up, the options and what to do when something is wrong. Every object is a file.
"""
# mypy: disable-error-code="import-not-found, misc, no-any-return, import-untyped"

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import hashlib
import itertools
import logging
import math
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from .errors import Error, ExistsError, IdentityError, InvalidError
from .pages import Holds, PageOptions, Pages, Region, Staging, attach, refuse_unknown
from .vllm.identity import digest, pool_name

log = logging.getLogger("tuttifs.lmcache")

WHERE = "adapter_params"
HASH_BYTES = 32  # of a chunk's hash, where it is a cryptographic one
HEAR_SECONDS = 1.0  # between looks for what has been evicted
LASTING = (IdentityError, InvalidError, ExistsError)  # errors of a kind that no later attempt makes good


def named(key: Any) -> bytes:
    """A file's key for LMCache's, whose texts hold no @."""
    text = "@".join([key.chunk_hash.hex(), key.model_name, f"{key.kv_rank:x}", f"{key.object_group_id:x}", key.cache_salt])
    return hashlib.sha256(b"tuttifs lmcache object 1" + text.encode()).digest()


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user sets: for all models, and for each."""

    common: PageOptions
    chunk_size: int
    models: Dict[str, PageOptions]

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Options":
        rest = {k: v for k, v in given.items() if k not in ("chunk_size", "models")}
        chunk, models = given.get("chunk_size"), given.get("models")
        if type(chunk) is not int or chunk < 1:
            raise InvalidError(f'{WHERE} needs "chunk_size", the server\'s: tokens of a chunk')
        if not isinstance(models, dict) or not models or not all(isinstance(m, dict) for m in models.values()):
            raise InvalidError(f'{WHERE} needs "models": for the name of each the options that say what it is')
        each = {n: PageOptions.parse({**rest, **m}, f"{WHERE}, models, {n}") for n, m in models.items()}
        for n, o in each.items():
            refuse_unknown({"model": n, "revision": o.revision, "dtype": o.dtype, "quantisation": o.quantisation,
                            "scale_format": o.scale_format}, {}, f"{WHERE}, models, {n}")
        return cls(PageOptions.parse(rest, WHERE), chunk, each)


# What objects have the same form: model, rank, object group, shapes and data types.
Form = Tuple[str, int, int, Tuple[Tuple[int, ...], ...], Tuple[Any, ...]]


def form(key: Any, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Form:
    return (key.model_name, key.kv_rank, key.object_group_id, tuple(tuple(s) for s in shapes), tuple(dtypes))


def object_bytes(f: Form) -> int:
    return sum(dtype.itemsize * math.prod(shape) for shape, dtype in zip(f[3], f[4]))


def identity(f: Form, o: PageOptions, chunk_size: int) -> Dict[str, Any]:
    """The identity of objects of one form. `IdentityError` where it holds nothing."""
    model, rank, group, shapes, dtypes = f
    size, ranks = object_bytes(f), rank >> 24
    if not size or not ranks:
        raise IdentityError(f"objects of {size} bytes of one rank of {ranks}")
    stored = ", ".join(sorted({str(d).replace("torch.", "") for d in dtypes}))
    return {"model": model, "revision": f"{o.revision}, computed {digest(o.computed)}", "weights_epoch": o.weights_epoch,
            "dtype": f"{o.dtype}, cache {stored}", "quantisation": o.quantisation, "scale_format": o.scale_format,
            "layout": f"LMCache object, {digest([[list(s) for s in shapes], [str(d) for d in dtypes]])}",
            "page_bytes": size, "block_tokens": chunk_size, "file_tokens": chunk_size,
            # LMCache counts all ranks of an engine, of whatever parallelism, in one.
            "tp": ranks, "pp": 1, "cp": 1, "group": f"object group {group}, rank {rank:x}"}


class Kind:
    """The objects of one form: in place in LMCache's memory, else by way of a copy."""

    def __init__(self, f: Form, attachment: Any, options: Options, region: Optional[Region]) -> None:
        o = options.models[f[0]]
        fields = identity(f, o, options.chunk_size)
        self.pages = Pages(attachment, o, pool_name(fields, "lmcache"), fields, [object_bytes(f)])
        self._region = region
        self._staging = Staging(self.pages, o.staging_bytes, lambda n: memoryview(bytearray(n)))
        log.info("tuttifs: objects of %d tokens, %d bytes of %s in %s", options.chunk_size, self.pages.bytes, f[0],
                 self.pages.name)

    def _places(self, objects: Sequence[Any]) -> Optional[List[List[int]]]:
        r, n = self._region, self.pages.bytes
        inside = r is not None and all(r.address <= o.data_ptr <= r.address + r.bytes - n for o in objects)
        return [[o.data_ptr] for o in objects] if inside else None

    def store(self, names: Sequence[bytes], objects: Sequence[Any]) -> List[bool]:
        places = self._places(objects)
        if places is not None and self._region is not None:
            return self.pages.store(names, self._region, places, None)
        return self._staging.store(names, lambda i, page: copied(page, objects[i].byte_array), None)

    def load(self, names: Sequence[bytes], objects: Sequence[Any]) -> List[bool]:
        places = self._places(objects)
        if places is not None and self._region is not None:
            return self.pages.load(names, self._region, places)
        return self._staging.load(names, lambda i, page: copied(objects[i].byte_array, page))


def copied(to: Any, source: Any) -> None:
    memoryview(to).cast("B")[:] = memoryview(source).cast("B")


class Door:
    """Tasks of one sort, one at a time, and what became of those that have ended: told by a descriptor."""

    def __init__(self, name: str) -> None:
        self.notifier = create_event_notifier()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._ended: Dict[int, Any] = {}

    def submit(self, number: int, work: Callable[[], Any], failed: Any) -> None:
        """Begins a task, which ends as `failed` where it raises."""
        self._thread.submit(self._run, number, work, failed)

    def _run(self, number: int, work: Callable[[], Any], failed: Any) -> None:
        result = failed
        try:
            result = work()
        except Exception:
            log.exception("tuttifs: a task of LMCache's failed")
        with self._lock:
            self._ended[number] = result
        self.notifier.notify()

    def take(self, number: int) -> Any:
        """A task's result, once; None while it is under way."""
        with self._lock:
            return self._ended.pop(number, None)

    def take_all(self) -> Dict[int, Any]:
        with self._lock:
            ended, self._ended = self._ended, {}
            return ended

    def finish(self) -> None:
        """Waits for what was begun."""
        self._thread.shutdown()


class TuttifsL2Adapter(L2AdapterInterface):
    """Objects of all models that the server's options name. What a mount does never raises: an object is not stored
    then, or is a miss. Eviction is the mount's: LMCache is told of it."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """Raises what is wrong with the options, or where there is no mount."""
        super().__init__()
        self._options = Options.parse(params)
        self._attachment = attach(self._options.common)
        self._region = None if l1_memory_desc is None else arena(l1_memory_desc)
        self._lock = threading.Lock()
        self._kinds: Dict[Form, Kind] = {}
        self._refused: Dict[Form, float] = {}  # when what is not stored is tried again, on time.monotonic
        self._warned = False  # of the hash
        self._holds = Holds()
        self._numbers = itertools.count(1)
        self._stores, self._lookups, self._loads = (Door(f"tuttifs-{n}") for n in ("store", "lookup", "load"))
        # What LMCache believes to be stored, by its pool. Whoever stores keeps it from whoever looks for what is gone.
        self._told_lock = threading.Lock()
        self._told: Dict[Kind, Dict[bytes, Any]] = {}
        self._heard = 0.0

    def get_store_event_fd(self) -> int:
        return self._stores.notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.notifier.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.notifier.fileno()

    def _kind(self, f: Form) -> Optional[Kind]:
        """None for what is not stored, which is said whenever it is tried."""
        with self._lock:
            if f in self._kinds or time.monotonic() < self._refused.get(f, 0.0):
                return self._kinds.get(f)
            try:
                if f[0] not in self._options.models:
                    raise IdentityError(f"{WHERE}, models, does not name it")
                self._kinds[f] = Kind(f, self._attachment, self._options, self._region)
            except Error as e:
                log.warning("tuttifs: objects of %s are not stored: %s", f[0], e)
                wait = math.inf if isinstance(e, LASTING) else self._options.common.retry_seconds
                self._refused[f] = time.monotonic() + wait
            return self._kinds.get(f)

    def _sorted(self, keys: Sequence[Any], forms: Sequence[Optional[Form]]) -> Dict[Kind, List[int]]:
        """The numbers of the keys of each kind, without those that are not stored."""
        found: Dict[Kind, List[int]] = {}
        for i, (key, f) in enumerate(zip(keys, forms)):
            if len(key.chunk_hash) != HASH_BYTES:
                if not self._warned:
                    self._warned = True
                    log.warning("tuttifs: nothing is stored: LMCache's hash is no cryptographic one, so that different "
                                "prompts may have equal keys: set --hash-algorithm to blake3")
                continue
            kind = self._kind(f) if f is not None else None
            if kind is not None:
                found.setdefault(kind, []).append(i)
        return found

    def submit_store_task(self, keys: List[Any], objects: List[Any]) -> int:
        number = next(self._numbers)
        self._stores.submit(number, lambda: self._store(keys, objects), L2StoreResult(False, 0))
        return number

    def _store(self, keys: List[Any], objects: List[Any]) -> Any:
        forms = [form(k, o.get_shapes(), o.get_dtypes()) for k, o in zip(keys, objects)]
        good: List[int] = []
        with self._told_lock:
            for kind, some in self._sorted(keys, forms).items():
                names = [named(keys[i]) for i in some]
                there = kind.store(names, [objects[i] for i in some])
                told = self._told.setdefault(kind, {})
                new = [(name, keys[i]) for name, i, ok in zip(names, some, there) if ok and name not in told]
                told.update(new)
                self._notify_keys_stored([k for _, k in new], [kind.pages.bytes] * len(new))
                good += [i for i, ok in zip(some, there) if ok]
            self._hear()
        return L2StoreResult(len(good) == len(keys), sum(objects[i].get_size() for i in good))

    def _hear(self) -> None:
        """Tells LMCache what has been evicted or removed, whoever did it."""
        self._heard = time.monotonic()
        for kind, told in self._told.items():
            gone = kind.pages.gone()
            if gone is None:
                names = list(told)
                gone = [n for n, there in zip(names, kind.pages.present(names)) if not there]
            keys = [told.pop(n) for n in gone if n in told]
            self._notify_keys_deleted(keys, [kind.pages.bytes] * len(keys))

    def pop_completed_store_tasks(self) -> Dict[int, Any]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: List[Any], group_layout_descs: Dict[int, Any]) -> int:
        number = next(self._numbers)
        self._lookups.submit(number, lambda: self._look(keys, group_layout_descs), Bitmap(len(keys)))
        return number

    def _look(self, keys: List[Any], layouts: Mapping[int, Any]) -> Any:
        forms = [None if d is None else form(k, d.shapes, d.dtypes)
                 for k, d in ((k, layouts.get(k.object_group_id)) for k in keys)]
        found = Bitmap(len(keys))
        try:
            for kind, some in self._sorted(keys, forms).items():
                for i, there in zip(some, self._holds.add(kind.pages, [named(keys[i]) for i in some])):
                    if there:
                        found.set(i)
            self._notify_keys_accessed([keys[i] for i in found.get_indices_list()])
            if time.monotonic() - self._heard > HEAR_SECONDS and self._told_lock.acquire(blocking=False):
                try:
                    self._hear()
                finally:
                    self._told_lock.release()
        except Exception:
            self.submit_unlock([keys[i] for i in found.get_indices_list()])  # LMCache hears of no hits
            raise
        return found

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: List[Any]) -> None:
        for key in keys:
            self._holds.end(named(key))

    def submit_load_task(self, keys: List[Any], objects: List[Any]) -> int:
        number = next(self._numbers)
        self._loads.submit(number, lambda: self._load(keys, objects), Bitmap(len(keys)))
        return number

    def _load(self, keys: List[Any], objects: List[Any]) -> Any:
        forms = [form(k, o.get_shapes(), o.get_dtypes()) for k, o in zip(keys, objects)]
        loaded = Bitmap(len(keys))
        for kind, some in self._sorted(keys, forms).items():
            for i, whole in zip(some, kind.load([named(keys[i]) for i in some], [objects[i] for i in some])):
                if whole:
                    loaded.set(i)
        return loaded

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.take(task_id)

    def delete(self, keys: List[Any]) -> None:
        """Removes objects, for all servers that share the mount."""
        with self._lock:
            kinds = [(f[:3], k) for f, k in self._kinds.items()]
        with self._told_lock:
            for of, kind in kinds:
                kind.pages.remove([named(k) for k in keys if (k.model_name, k.kv_rank, k.object_group_id) == of])
            self._hear()

    def report_status(self) -> Dict[str, Any]:
        with self._lock:
            pools = sorted(k.pages.name for k in self._kinds.values())
        return {"is_healthy": self._attachment.get() is not None, "type": type(self).__name__,
                "path": self._options.common.path, "pools": pools}

    def close(self) -> None:
        """Waits for what was begun, and ends all that was held."""
        doors = (self._stores, self._lookups, self._loads)
        for door in doors:
            door.finish()
        self._holds.close()
        self._attachment.close()
        for door in doors:
            door.notifier.close()


def arena(described: Any) -> Region:
    """LMCache's memory, which lives longer than its adapters."""
    return Region(memoryview((ctypes.c_uint8 * described.size).from_address(described.ptr)))
