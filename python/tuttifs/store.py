"""Mounts, sessions and pools: what an engine has for as long as it runs."""

from __future__ import annotations

import ctypes as C
import dataclasses
import itertools
import json
import os
import secrets
import struct
import weakref
from types import TracebackType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Type, Union

from . import _lib
from .errors import Error, InvalidError
from .events import Events
from .layers import Layers
from .layout import Extent, Object, Paged, Run, extent
from .leases import Lease, Leases, Pinned, Reservation
from .scheduling import Scheduled

KEY_BYTES = 32
_ITEM = struct.Struct("=32s32sII")  # _lib.Item


def encoded(text: str, what: str) -> bytes:
    """Text for C, which would end at a NUL."""
    if "\0" in text:
        raise InvalidError(f"{what} holds a NUL")
    return text.encode()


class Closing:
    """`with x:` closes x. To close twice is nothing."""

    def close(self) -> None:
        """Ends what it is."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()


class Store(Closing):
    """A mount, found by any path in it.

    >>> with Store("/mnt/kv") as store, store.session() as session:
    ...     pool = session.pool("llama", identity, paged.objects())

    Raises `NotMountedError` where the path lies in no mount, `ForkedError` in a child that was forked when the library
    was loaded already.
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"]) -> None:
        self._lib = _lib.loaded()
        self.path = os.fspath(path)
        self._h = C.c_void_p()
        if "\0" in self.path:
            raise InvalidError("the path holds a NUL")
        self._lib.open(os.fsencode(self.path), C.byref(self._h))
        self._finalizer = weakref.finalize(self, _quietly, self._lib.close, self._h)

    def session(self, device: Any = "cpu", *, auto: bool = False, polling: bool = False, **options: Any) -> "Session":
        """A new session, of which this process is the first member. Waits for the daemon.

        device: the executor, and where registered tensors are: "cpu"; "cuda", "cuda:1", a `torch.device` or an
            ordinal; a GPU's PCI bus address or UUID.
        auto: with a GPU: take the CPU where there is no driver or no GPU.
        polling: with a GPU: kernels that poll in place of the ring. A baseline, not for use.
        options: lanes, depth, dma_bytes, bounce_bytes, staging_bytes, arena_bytes, chunk_commands, deadline_ms,
            store_bytes, keep_bytes as in include/libtuttifs.h; 0 or left out for the defaults. slack_table: the path of
            a table that the scheduler begins with, refused if it is of another machine or of a model with another cache
            than a pool's. Switches, True or left out: store_refuse, no_scheduler, no_budget, reads_not_first,
            any_slack_table (takes such a table all the same; `describe` says what differs); real, for queue pairs of
            the SSDs themselves where the mount gives this user any (`-o real`): `describe` says of which drives, and
            the others' stay mediated.
        """
        return Session(self, None, _device(device, auto, polling), options)

    def join(self, token: bytes, device: Any = "cpu", *, auto: bool = False, polling: bool = False,
             **options: Any) -> "Session":
        """Joins the session with that token (`Session.token`, 16 bytes), as each rank's process does. The rest is as in
        `session`."""
        if len(token) != 16:
            raise InvalidError(f"a session's token has 16 bytes, this one {len(token)}")
        return Session(self, token, _device(device, auto, polling), options)

    def close(self) -> None:
        """Closes the mount. Its sessions go on."""
        if self._finalizer.detach():
            self._lib.close(self._h)


def _quietly(f: Any, *arguments: Any) -> None:
    """The end of what was not closed. In a forked child nothing of the parent's is touched."""
    try:
        f(*arguments)
    except Error:
        pass


def _end_session(lib: _lib.Library, h: C.c_void_p, keep: Dict[int, Any]) -> None:
    """The memory that was registered may go only when nothing is in flight any more."""
    _quietly(lib.session_close, h)
    keep.clear()


@dataclasses.dataclass(frozen=True)
class SessionStats:
    """What a session's executor has done. With the CPU executor only `gpu` and `lanes` say anything."""

    gpu: bool
    lanes: int  # that still work
    commands: int
    bytes_read: int
    bytes_written: int
    chunks: int
    builds: int
    harvests: int
    gathers: int
    checksum_failures: int
    timeouts: int
    io_thread_ns: int
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """What a session's store buffer (option `store_bytes`) holds and has done; all 0 where there is none."""

    bytes: int  # of the buffer
    fill: int  # bytes taken
    peak: int  # at most
    objects: int  # that the drives do not have yet
    object_bytes: int
    oldest_ns: int  # how long the oldest has been there
    stored_objects: int  # that came through it
    stored_bytes: int
    refused: int  # layers
    blocked_ns: int  # in which a store waited for room


def _device(device: Any, auto: bool, polling: bool) -> Dict[str, Any]:
    """The options that say which executor."""
    name = str(device)
    if name == "cpu":
        if auto or polling:
            raise InvalidError('auto and polling go with a GPU: device="cuda"')
        return {}
    if name.startswith("cuda"):
        name = name[len("cuda"):].lstrip(":") or "0"
    flags = _lib.GPU | (_lib.GPU_AUTO if auto else 0) | (_lib.POLLING if polling else 0)
    return {"flags": flags, "device": encoded(name, "device")}


# Options of sessions: numbers, and what is on or off.
NUMBERS = {"lanes", "depth", "dma_bytes", "bounce_bytes", "staging_bytes", "arena_bytes", "chunk_commands",
           "deadline_ms", "store_bytes", "keep_bytes"}
SWITCHES = {"store_refuse": _lib.STORE_REFUSE, "no_scheduler": _lib.NO_SCHEDULER, "no_budget": _lib.NO_BUDGET,
            "reads_not_first": _lib.READS_NOT_FIRST, "any_slack_table": _lib.ANY_SLACK_TABLE, "real": _lib.REAL}


class Session(Closing, Scheduled):
    """This process's membership in a session, made by `Store.session` or `Store.join`. It may be used from all threads.

    Closing it, or its end as an object, ends what is in flight and everything that was made from it.
    """

    def __init__(self, store: Store, token: Optional[bytes], executor: Mapping[str, Any],
                 options: Mapping[str, Any]) -> None:
        self._lib = store._lib
        unknown = set(options) - NUMBERS - set(SWITCHES) - {"slack_table"}
        if unknown:
            raise TypeError(f"unknown options of a session: {', '.join(sorted(unknown))}")
        o = _lib.SessionOptions(**{k: v for k, v in options.items() if k in NUMBERS}, **executor)
        for switch, flag in SWITCHES.items():
            o.flags |= flag if options.get(switch) else 0
        if options.get("slack_table"):
            o.slack_table = os.fsencode(options["slack_table"])
        self._events: List[List[Any]] = [[]]
        self._h = C.c_void_p()
        if token is None:
            self._lib.session_create(store._h, C.byref(o), C.byref(self._h))
        else:
            self._lib.session_join(store._h, (C.c_uint8 * 16)(*token), C.byref(o), C.byref(self._h))
        self._keep: Dict[int, Any] = {}  # registered arrays, by their registration's handle
        self._dma: Optional["weakref.ref[Any]"] = None
        self._dma_range = range(0)
        self._finalizer = weakref.finalize(self, _end_session, self._lib, self._h, self._keep)

    @property
    def token(self) -> bytes:
        """16 bytes by which other processes of the same user join. Whoever has it has all the session's rights."""
        token = (C.c_uint8 * 16)()
        self._lib.session_token(self._h, token)
        return bytes(token)

    def describe(self) -> str:
        """Executor, device, DMA mode, bounce and staging memory, in words."""
        text = C.create_string_buffer(1024)
        self._lib.session_describe(self._h, text, len(text))
        return text.value.decode(errors="replace")

    def stats(self) -> SessionStats:
        """What the executor has done since the session was made."""
        s = _lib.SessionStats()
        self._lib.session_stats(self._h, C.byref(s))
        values = {f.name: getattr(s, f.name) for f in dataclasses.fields(SessionStats)}
        return SessionStats(**{**values, "gpu": bool(values["gpu"])})

    def store_stats(self) -> StoreStats:
        """What the store buffer holds and has done since the session was made."""
        s = _lib.StoreStats()
        self._lib.store_stats(self._h, C.byref(s))
        return StoreStats(**{f.name: getattr(s, f.name) for f in dataclasses.fields(StoreStats)})

    def dma(self) -> memoryview:
        """Memory that controllers reach directly, for host buffers: shape [bytes], format "B", writable. It is what of
        `dma_bytes` is left of bounce memory, store buffer and trailers (8 MiB of the default; with a GPU 16).
        `numpy.frombuffer(session.dma(), dtype)` and `torch.frombuffer` make arrays of it.

        Where they, or arrays made of them, are still referred to when the session is closed, it ends with the last of
        them: the memory is the session's.
        """
        address, n = C.c_void_p(), C.c_uint64()
        self._lib.session_dma(self._h, C.byref(address), C.byref(n))
        whole = self._dma() if self._dma else None
        if whole is None:
            whole = (C.c_uint8 * n.value).from_address(address.value or 0)
            self._dma = weakref.ref(whole)
            self._dma_range = range(address.value or 0, (address.value or 0) + n.value)
        return memoryview(whole).cast("B")

    def pool(self, name: str, identity: Union[str, Mapping[str, Any]], objects: Sequence[Object], *,
             family: Optional[str] = None, min_bytes: int = 0, max_bytes: int = 0, max_slots: int = 0,
             trailing_hit: int = 0, keep_bytes: int = 0) -> "Pool":
        """Opens or creates a pool and waits until it is durable.

        name: the pool's directory in the mount.
        identity: every field of docs/pool.md, as a mapping or JSON: what decides whether two blocks of equal keys are
            interchangeable. Its `file_tokens` is the number of tokens of a file.
        objects: of one file, for all ranks: `Paged.objects`, or a list of `Object`.
        family: with `trailing_hit`, the hit rule in it: 0 all, n the last n files.
        min_bytes, max_bytes, max_slots: what is kept for the pool, and its limits; 0 for none.
        keep_bytes: of the session's memory for blocks that the mount's admission policy declines; 0 for all that no
            other pool has.

        Raises `ExistsError` where a pool of that name has another identity or geometry, `IdentityError` for an identity
        that is incomplete.
        """
        text = identity if isinstance(identity, str) else json.dumps(dict(identity))
        try:
            tokens_per_file = int(json.loads(text)["file_tokens"])
        except (ValueError, KeyError, TypeError):
            tokens_per_file = 0  # the daemon says what is wrong with the identity
        runs = [Run(r) if isinstance(r, int) else r for o in objects for r in o.runs]
        firsts = itertools.accumulate((len(o.runs) for o in objects), initial=0)
        table = (_lib.Object * max(1, len(objects)))(*[
            _lib.Object(o.layer, o.rank, first, len(o.runs)) for o, first in zip(objects, firsts)])
        pieces = (_lib.Run * max(1, len(runs)))(*[_lib.Run(*r) for r in runs])
        options = _lib.PoolOptions(
            tokens_per_file=tokens_per_file, name=encoded(name, "name"), identity=encoded(text, "identity"),
            family=None if family is None else encoded(family, "family"), objects=table, runs=pieces,
            object_count=len(objects), run_count=len(runs), min_bytes=min_bytes, max_bytes=max_bytes,
            max_slots=max_slots, trailing_hit=trailing_hit, keep_bytes=keep_bytes)
        h = C.c_void_p()
        self._lib.pool_open(self._h, C.byref(options), C.byref(h))
        return Pool(self, name, tokens_per_file, h)

    def register(self, paged: Paged) -> "Memory":
        """Registers the blocks of a paged KV cache (`Paged.of`), once for all transfers from and to it.

        The tensors must be where the session's device is, and stay alive and unmoved until `Memory.close`; a reference
        to them is kept until then.

        Raises `NotSupportedError` with the CPU executor for blocks of several runs: see `Paged.of(object_per_run=True)`;
        `InvalidError` for tensors that are elsewhere than the device, `NoMemoryError` where it has no memory left.
        """
        self._same_device(paged.device)
        per = len(paged.classes[0].runs)
        runs = (_lib.StridedRun * (per * len(paged.classes)))(*[
            _lib.StridedRun(*r) for c in paged.classes for r in c.runs])
        options = _lib.Paged(classes=len(paged.classes), runs_per_class=per, blocks=paged.blocks, runs=runs)
        h = C.c_void_p()
        self._lib.register_paged(self._h, C.byref(options), C.byref(h))
        return Memory(self, h, paged.keep)

    def register_flat(self, array: Any, *, padded: bool = False) -> "Memory":
        """Registers one contiguous array, tensor or writable memoryview, of any shape and dtype, for `Layers.begin_at`.

        padded: (memory of `dma` only) every object has room for whole units of 4 KiB, of which up to 4,095 bytes behind
            its payload are overwritten; odd lengths are then reached directly.

        Raises `InvalidError` for an array that has gaps, is read-only, or is elsewhere than the device.
        """
        e = extent(array)
        n = contiguous_bytes(e)
        self._same_device(e.device)
        h = C.c_void_p()
        if e.device == "cpu":
            self._lib.register_host(self._h, e.address, n, _lib.PADDED if padded else 0, C.byref(h))
        elif padded:
            raise InvalidError("padded goes with memory of dma()")
        else:
            self._lib.register_device(self._h, e.address, n, C.byref(h))
        return Memory(self, h, None if e.address in self._dma_range else array)

    def _same_device(self, device: str) -> None:
        gpu = self.stats().gpu
        if gpu != (device != "cpu"):
            raise InvalidError(f"memory on {device}, where the executor is {'a GPU' if gpu else 'the CPU'}")

    def close(self) -> None:
        """Ends what is in flight, leaves the session, and closes everything made from it. Waits for calls in
        progress."""
        if not self._finalizer.detach():
            return
        dma = self._dma() if self._dma else None
        if dma is not None:
            weakref.finalize(dma, _end_session, self._lib, self._h, self._keep)
            return
        try:
            self._lib.session_close(self._h)
        finally:
            self._keep.clear()


def contiguous_bytes(e: Extent) -> int:
    """An array's length, where its bytes lie without gaps."""
    n = e.itemsize
    for stride, size in sorted((s, k) for s, k in zip(e.strides, e.shape) if k > 1):
        if stride != n:
            raise InvalidError(f"an array of shape {e.shape} and strides {e.strides} is not contiguous")
        n *= size
    return n if 0 not in e.shape else 0


class Memory(Closing):
    """Registered memory. It is given back by `close`, or with its session."""

    def __init__(self, session: Session, h: C.c_void_p, keep: Any) -> None:
        self._session, self._lib, self._h = session, session._lib, h
        session._keep[h.value or 0] = keep

    @property
    def device_bytes(self) -> int:
        """Device memory that the registration costs; 0 with the CPU executor."""
        n = C.c_uint64()
        self._lib.memory_cost(self._h, C.byref(n))
        return n.value

    def close(self) -> None:
        """Gives the registration back. `BusyError` while a transfer uses it: it can be tried again."""
        if (self._h.value or 0) in self._session._keep:
            self._lib.unregister(self._h)
            self._session._keep.pop(self._h.value or 0, None)


@dataclasses.dataclass(frozen=True)
class KeepStats:
    """A pool's part of the session's memory for blocks that were declined; all 0 where there is none."""

    slots: int  # room for so many
    blocks: int  # that are there now
    slot_bytes: int
    declined: int  # blocks that the mount did not want on its drives
    kept: int  # of them committed into the memory
    hits: int  # blocks that were pinned there
    written: int  # of them brought to the drives then
    refused: int  # and declined once more
    evicted: int  # that had to go for others
    bad: int  # whose bytes were not right any more
    failed: int  # that could not be brought to the drives when they were pinned


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Of a pool since the mount (the first six), and now."""

    hits: int
    misses: int
    commits: int
    aborts: int
    evicted: int
    bad: int
    files: int
    slots_used: int
    slots_free: int
    bytes_used: int
    bytes_capacity: int


def joined(keys: Sequence[bytes]) -> bytes:
    wrong = set(map(len, keys)) - {KEY_BYTES}  # no loop of Python's: a prompt has thousands
    if wrong:
        raise InvalidError(f"a key of {wrong.pop()} bytes: keys have {KEY_BYTES}")
    return b"".join(keys)


class Pool(Closing):
    """All files of one identity and geometry, made by `Session.pool`. Keys are 32 bytes each, root first:
    `tuttifs.keys`, or an engine's own chained hashes. Numbers of blocks and offsets are sequences of int, or arrays and
    tensors of shape [n] and any integer dtype.

    Every call raises `StaleError` where the daemon or the session is gone, and `ClosedError` after `close`.
    """

    def __init__(self, session: Session, name: str, tokens_per_file: int, h: C.c_void_p) -> None:
        self.session, self.name, self.tokens_per_file = session, name, tokens_per_file
        self._lib, self._h = session._lib, h
        self._closed = False

    def peek(self, keys: Sequence[bytes], tenant: int = 0) -> int:
        """How many leading keys are stored. No side effects."""
        n = C.c_uint64()
        self._lib.peek(self._h, tenant, joined(keys), len(keys), C.byref(n))
        return n.value

    def present(self, keys: Sequence[bytes], tenant: int = 0) -> List[bool]:
        """Which keys are stored, whatever is before them. No side effects."""
        there = (C.c_uint8 * max(1, len(keys)))()
        self._lib.present(self._h, tenant, joined(keys), len(keys), there)
        return [n == 1 for n in there[:len(keys)]]

    def pin(self, keys: Sequence[bytes], request: Optional[int] = None, tenant: int = 0) -> Pinned:
        """Leases the longest stored prefix for reading, until it is released.

        request: unique in the session while pinned. The same again, by whatever process of the session, answers the
            same. Left out: a random one. A pin that finds nothing is not remembered.
        """
        request = secrets.randbits(63) if request is None else request
        n, leases = C.c_uint64(), (_lib.Lease * max(1, len(keys)))()
        self._lib.pin(self._h, tenant, request, joined(keys), len(keys), leases, C.byref(n))
        return Pinned(self, request, leases, n.value)

    def reserve(self, keys: Sequence[bytes], start: int = 0, reserve: Optional[int] = None, tenant: int = 0,
                partial: bool = False, chained: bool = True) -> Reservation:
        """Leases slots for writing the files `keys[start:]` of a chain whose root is `keys[0]`: all or nothing.

        reserve: other ranks of the session join by the same id and keys. Left out: a random one.
        partial: a leading run, where not all fit.
        chained: False where it is not known which file hangs on which: each is by itself, and evicted by itself.
        Waits while space is being freed. Raises `NoSpaceError`, `QuotaError`, `PendingError`, and `AgainError` where
        that takes longer than the session's deadline.
        """
        if not 0 <= start <= len(keys):
            raise InvalidError(f"start {start} in a chain of {len(keys)} files")
        reserve = secrets.randbits(63) if reserve is None else reserve
        joined(keys)
        count, root = len(keys) - start, bytes(KEY_BYTES)
        if chained:
            parents = [root, *keys]
            rows = [_ITEM.pack(keys[i], parents[i], self.tokens_per_file, i) for i in range(start, len(keys))]
        else:
            rows = [_ITEM.pack(k, root, self.tokens_per_file, 0) for k in keys[start:]]
        items = b"".join(rows)
        n, leases = C.c_uint64(), (_lib.Lease * max(1, count))()
        self._lib.reserve(self._h, tenant, reserve, items, count, _lib.PARTIAL if partial else 0, leases, C.byref(n))
        return Reservation(self, reserve, leases, n.value)

    def retrieve(self, leases: Leases, memory: Optional[Memory] = None, blocks: Optional[Sequence[int]] = None, *,
                 rank: int = 0) -> Layers:
        """Prepares to bring one rank's objects of pinned files into blocks of registered memory.

        blocks: the block for each lease, shape [len(leases)]. memory and blocks are left out where layers are moved by
            `Layers.begin_at`.

        Reads and verifies the files' trailers first, and waits for them; one that is damaged is in `Layers.failed`.
        Raises `InvalidError` for a block that memory has not, or memory whose blocks have another length than the
        rank's objects.
        """
        return Layers(self, leases, None, memory, blocks, rank)

    def store(self, reservation: Leases, memory: Optional[Memory] = None, blocks: Optional[Sequence[int]] = None, *,
              rank: int = 0) -> Layers:
        """Prepares to store one rank's objects from blocks of registered memory.

        blocks: the block for each lease, shape [len(reservation)], also for those that need no writing: they are left
            out. Otherwise as in `retrieve`.
        """
        return Layers(self, reservation, reservation.to_be_written(), memory, blocks, rank)

    def events(self) -> Events:
        """What happens to the pool's files from now on, whoever does it: `poll` the answer now and then."""
        return Events(self)

    def report_bad(self, lease: Lease) -> None:
        """Says that a pinned file's bytes are damaged. The daemon looks itself, and evicts it if so. Waits for that.
        Raises `NotFoundError` where the file is not there any more."""
        self._lib.report_bad(self._h, lease.slot, lease.generation)

    def stats(self) -> PoolStats:
        """Hits, misses, and how full it is."""
        s = _lib.PoolStats()
        self._lib.pool_stats(self._h, C.byref(s))
        return PoolStats(**{f.name: getattr(s, f.name) for f in dataclasses.fields(PoolStats)})

    def keep_stats(self) -> KeepStats:
        """What became of blocks that the mount's admission policy declined, where the session has `keep_bytes`."""
        s = _lib.KeepStats()
        self._lib.keep_stats(self._h, C.byref(s))
        return KeepStats(**{f.name: getattr(s, f.name) for f in dataclasses.fields(KeepStats)})

    def close(self) -> None:
        """Closes the pool and the layers opened on it. Leases go on. After its session it is closed already."""
        if self._closed or not self.session._finalizer.alive:
            return
        self._closed = True
        self._lib.pool_close(self._h)

