"""The library by ctypes: the structures and functions of include/libtuttifs.h, and where the library is.

It is loaded at the first use, not at import: a process that has only imported `tuttifs` may fork.
"""

from __future__ import annotations

import array
import ctypes as C
import os
from typing import Any, Callable, Dict, List, Optional, Tuple

from .errors import InvalidError, error

MAJOR = 1
NATIVE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_native")  # what a wheel brings along

GPU, GPU_AUTO, POLLING = 1, 2, 4  # flags of sessions
STORE_REFUSE, NO_SCHEDULER, NO_BUDGET, READS_NOT_FIRST, ANY_SLACK_TABLE, REAL = 8, 16, 32, 64, 128, 256
STORE = 1  # of layers
PARTIAL = 1  # of reservations
PADDED = 1  # of host memory
KV_REMOVED = 2  # of events

u8, u16, u32, u64, vp, cp = C.c_uint8, C.c_uint16, C.c_uint32, C.c_uint64, C.c_void_p, C.c_char_p
_CODES = {u16: "H", u32: "I", u64: "Q"}  # of array
_MOST = {u16: (1 << 16) - 1, u32: (1 << 32) - 1, u64: (1 << 64) - 1}


class Checked(C.Structure):
    """A structure of the caller's. ctypes would cut integers that do not fit."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        for name, value in [*zip((f[0] for f in self._fields_), values), *named.items()]:
            if isinstance(value, int) and getattr(self, name) != value:
                raise InvalidError(f"{name} {value} is out of range")


class Sized(Checked):
    """A structure that begins with its size."""

    size: int

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.size = C.sizeof(self)


class SessionOptions(Sized):
    _fields_ = [("size", u32), ("flags", u32), ("device", cp), ("lanes", u32), ("depth", u32), ("dma_bytes", u64),
                ("bounce_bytes", u64), ("staging_bytes", u64), ("arena_bytes", u64), ("chunk_commands", u32),
                ("deadline_ms", u32), ("store_bytes", u64), ("slack_table", cp),
                ("keep_bytes", u64), ("reserved", u64)]


class SessionStats(Sized):
    _fields_ = [("size", u32), ("gpu", u32), ("lanes", u32), ("reserved", u32)] + [(n, u64) for n in (
        "commands", "bytes_read", "bytes_written", "chunks", "builds", "harvests", "gathers", "checksum_failures",
        "timeouts", "io_thread_ns", "device_bytes")]


class StoreStats(Sized):
    _fields_ = [("size", u32), ("refuse", u32)] + [(n, u64) for n in (
        "bytes", "fill", "peak", "objects", "object_bytes", "oldest_ns", "stored_objects", "stored_bytes", "refused",
        "blocked_ns")]


class Offer(Sized):
    _fields_ = [("size", u32), ("load", u32), ("known", u32), ("reserved", u32), ("restore_ns", u64),
                ("recompute_ns", u64)]


class SchedulerStats(Sized):
    _fields_ = [("size", u32), ("reserved", u32)] + [(n, u64) for n in (
        "passes", "layers", "decode_steps", "bubbles", "bubble_ns", "first_bubble_ns", "read_hidden_ns",
        "read_exposed_ns", "write_ns", "deferred_objects", "deferred_bytes", "issued_off_bytes", "issued_age_bytes",
        "issued_high_bytes", "issued_window_bytes", "issued_decode_bytes", "issued_idle_bytes", "oldest_age_ns",
        "overruns", "beside", "offers", "offers_refused", "estimates", "estimated_ns", "took_ns", "error_ns",
        "window_ns")] + [(n, C.c_double) for n in ("window_factor", "read_factor", "write_factor")]


class PoolStats(Sized):
    _fields_ = [("size", u32), ("reserved", u32)] + [(n, u64) for n in (
        "hits", "misses", "commits", "aborts", "evicted", "bad", "files", "slots_used", "slots_free", "bytes_used",
        "bytes_capacity")]


class KeepStats(Sized):
    _fields_ = [("size", u32), ("reserved", u32)] + [(n, u64) for n in (
        "slots", "blocks", "slot_bytes", "declined", "kept", "hits", "written", "refused", "evicted", "bad",
        "failed")]


class Run(Checked):
    _fields_ = [("bytes", u32), ("kind", u32)]


class Object(Checked):
    _fields_ = [("layer", u16), ("rank", u16), ("first_run", u32), ("run_count", u32)]


class PoolOptions(Sized):
    _fields_ = [("size", u32), ("tokens_per_file", u32), ("name", cp), ("identity", cp), ("family", cp),
                ("objects", C.POINTER(Object)), ("runs", C.POINTER(Run)), ("object_count", u32), ("run_count", u32),
                ("min_bytes", u64), ("max_bytes", u64), ("max_slots", u32), ("trailing_hit", u32),
                ("keep_bytes", u64), ("reserved", u64 * 3)]


class StridedRun(Checked):
    _fields_ = [("base", u64), ("stride", u64), ("bytes", u64)]


class Paged(Sized):
    _fields_ = [("size", u32), ("classes", u32), ("runs_per_class", u32), ("reserved0", u32), ("blocks", u64),
                ("runs", C.POINTER(StridedRun)), ("reserved", u64 * 4)]


class Media(C.Structure):
    _fields_ = [("start", u64), ("tokens", u64), ("id", cp), ("id_bytes", u64)]


class Prompt(Sized):
    _fields_ = [("size", u32), ("tokens_per_file", u32), ("tenant", u32), ("reserved0", u32), ("adapter", cp),
                ("adapter_bytes", u64), ("salt", cp), ("salt_bytes", u64), ("media", C.POINTER(Media)),
                ("media_count", u64), ("last", cp), ("files", u64), ("reserved", u64 * 4)]


class Lease(C.Structure):
    _fields_ = [("slot", u32), ("tokens", u32), ("generation", u64), ("seed", u8 * 16), ("status", u32),
                ("reserved", u32)]


class Item(C.Structure):
    _fields_ = [("key", u8 * 32), ("parent", u8 * 32), ("tokens", u32), ("position", u32)]


class KvEvent(C.Structure):
    _fields_ = [("key", u8 * 32), ("tenant", u32), ("kind", u32)]


FUNCTIONS: Dict[str, List[Any]] = {
    "open": [cp, vp], "close": [vp], "session_create": [vp, vp, vp], "session_join": [vp, vp, vp, vp],
    "session_token": [vp, vp], "session_describe": [vp, vp, u64], "session_dma": [vp, vp, vp],
    "session_stats": [vp, vp], "store_stats": [vp, vp], "prefill": [vp, u32, u32, u32], "layer_done": [vp, u32, vp],
    "decode_step": [vp, u32], "end_pass": [vp], "offer": [vp, u32, u32, u32, vp], "scheduler_stats": [vp, vp],
    "layer_bubbles": [vp, vp, u64], "session_close": [vp], "pool_open": [vp, vp, vp], "pool_close": [vp],
    "pool_stats": [vp, vp], "keep_stats": [vp, vp],
    "register_host": [vp, vp, u64, u32, vp], "register_device": [vp, u64, u64, vp],
    "register_paged": [vp, vp, vp], "memory_cost": [vp, vp], "unregister": [vp], "keys": [vp, vp, u64, vp, vp],
    "peek": [vp, u32, vp, u64, vp], "present": [vp, u32, vp, u64, vp],
    "pin": [vp, u32, u64, vp, u64, vp, vp], "release": [vp, u64],
    "reserve": [vp, u32, u64, vp, u64, u32, vp, vp], "commit": [vp, u64, vp, u64],
    "commit_from": [vp, u64, vp, u64, vp, u64], "abort": [vp, u64],
    "report_bad": [vp, u32, u64], "events": [vp, vp, vp, u64, vp, vp],
    "layers_open": [vp, u16, u32, vp, u64, vp, vp, vp],
    "retrieve_layer": [vp, u16, vp, vp], "store_layer": [vp, u16, vp, vp],
    "retrieve_layer_at": [vp, u16, vp, vp, u64, vp, vp], "store_layer_at": [vp, u16, vp, vp, u64, vp, vp],
    "wait_on": [vp, vp], "wait": [vp], "finish": [vp], "failed": [vp, vp, u64, vp], "layers_close": [vp],
}


class Library:
    """The loaded library: `lib.pin(...)` is tuttifs_pin, and raises where that returns a negative code."""

    def __init__(self, path: str) -> None:
        so = C.CDLL(path)
        so.tuttifs_version.restype = u32
        version = so.tuttifs_version()
        if version >> 16 != MAJOR:
            raise ImportError(f"{path} is version {version >> 16}.{version & 0xffff} of libtuttifs; this package "
                              f"is for version {MAJOR}")
        self.path, self.version = path, (version >> 16, version & 0xffff)
        self._so = so
        so.tuttifs_last_error.restype = cp
        for name, arguments in FUNCTIONS.items():
            f = getattr(so, "tuttifs_" + name)
            f.argtypes, f.restype = arguments, C.c_int
            setattr(self, name, self._checked(f, name, [(i, _MOST[t]) for i, t in enumerate(arguments) if t in _MOST]))

    def _checked(self, f: Any, name: str, integers: List[Tuple[int, int]]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            for i, most in integers:
                if not 0 <= arguments[i] <= most:
                    raise InvalidError(f"{name}: {arguments[i]} is out of range: 0 to {most}")
            code = f(*arguments)
            if code < 0:
                raise error(code, self.last_error())
        return call

    def last_error(self) -> str:
        """The text of this thread's last call."""
        text: bytes = self._so.tuttifs_last_error()
        return text.decode(errors="replace")

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(f"libtuttifs has no function tuttifs_{name}")


def integers(kind: Any, values: Any) -> Any:
    """An array of C integers from a sequence, or from a NumPy array or a tensor of one dimension."""
    values = values.tolist() if hasattr(values, "tolist") else values
    try:
        packed = array.array(_CODES[kind], values)
    except (OverflowError, TypeError) as e:
        raise InvalidError(f"integers from 0 to {_MOST[kind]} are wanted: {e}") from None
    return (kind * len(packed)).from_buffer(packed) if packed else (kind * 1)()


def find(environment: str, *names: str) -> Optional[str]:
    """The file that a variable of the environment names, or the wheel's."""
    if environment in os.environ:
        return os.path.abspath(os.environ[environment])
    for name in names:
        path = os.path.join(NATIVE, name)
        if os.path.exists(path):
            return path
    return None


_library: Optional[Library] = None


def loaded() -> Library:
    """The library, loaded if it is not yet: TUTTIFS_LIBRARY, the wheel's, or the system's."""
    global _library
    if _library is None:  # two threads may both load it, and get the same
        name = f"libtuttifs.so.{MAJOR}"
        path = find("TUTTIFS_LIBRARY", name) or name
        try:
            _library = Library(path)
        except OSError as e:
            raise ImportError(f"libtuttifs cannot be loaded: {e}. Install a wheel that brings it along (make wheel), "
                              "or the library (make install-lib), or set TUTTIFS_LIBRARY to its path") from e
    return _library
