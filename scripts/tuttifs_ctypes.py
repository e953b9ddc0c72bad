"""libtuttifs for Python, by ctypes: what include/libtuttifs.h says holds here.

Calls release the interpreter's lock while they wait. Keys are 32 bytes; streams and events are PyTorch's, or integers.
"""

import ctypes as C
import os
import struct

GPU, GPU_AUTO, POLLING = 1, 2, 4  # flags of sessions
STORE = 1  # flag of layers
PINNED, NEW, JOINED, EXISTS, PENDING = 1, 2, 3, 4, 5  # Lease.status
MAJOR = 1

u8, u16, u32, u64, vp, cp = C.c_uint8, C.c_uint16, C.c_uint32, C.c_uint64, C.c_void_p, C.c_char_p


class Sized(C.Structure):
    """A structure that begins with its size."""

    def __init__(self, **values):
        super().__init__(**values)
        self.size = C.sizeof(self)


class SessionOptions(Sized):
    _fields_ = [("size", u32), ("flags", u32), ("device", cp), ("lanes", u32), ("depth", u32), ("dma_bytes", u64),
                ("bounce_bytes", u64), ("staging_bytes", u64), ("arena_bytes", u64), ("chunk_commands", u32),
                ("deadline_ms", u32), ("store_bytes", u64), ("reserved", u64 * 3)]


class SessionStats(Sized):
    _fields_ = [("size", u32), ("gpu", u32), ("lanes", u32), ("reserved", u32)] + [(n, u64) for n in (
        "commands", "bytes_read", "bytes_written", "chunks", "builds", "harvests", "gathers", "checksum_failures",
        "timeouts", "io_thread_ns", "device_bytes")]


class PoolStats(Sized):
    _fields_ = [("size", u32), ("reserved", u32)] + [(n, u64) for n in (
        "hits", "misses", "commits", "aborts", "evicted", "bad", "files", "slots_used", "slots_free", "bytes_used",
        "bytes_capacity")]


class Run(C.Structure):
    _fields_ = [("bytes", u32), ("kind", u32)]


class Object(C.Structure):
    _fields_ = [("layer", u16), ("rank", u16), ("first_run", u32), ("run_count", u32)]


class PoolOptions(Sized):
    _fields_ = [("size", u32), ("tokens_per_file", u32), ("name", cp), ("identity", cp), ("family", cp),
                ("objects", C.POINTER(Object)), ("runs", C.POINTER(Run)), ("object_count", u32), ("run_count", u32),
                ("min_bytes", u64), ("max_bytes", u64), ("max_slots", u32), ("trailing_hit", u32),
                ("reserved", u64 * 4)]


class StridedRun(C.Structure):
    _fields_ = [("base", u64), ("stride", u64), ("bytes", u64)]


class Paged(Sized):
    _fields_ = [("size", u32), ("classes", u32), ("runs_per_class", u32), ("reserved0", u32), ("blocks", u64),
                ("runs", C.POINTER(StridedRun)), ("reserved", u64 * 4)]


class Lease(C.Structure):
    _fields_ = [("slot", u32), ("tokens", u32), ("generation", u64), ("seed", u8 * 16), ("status", u32),
                ("reserved", u32)]


class Item(C.Structure):
    _fields_ = [("key", u8 * 32), ("parent", u8 * 32), ("tokens", u32), ("position", u32)]


class Error(Exception):
    """A call that failed: code is its negative TUTTIFS_E*."""

    def __init__(self, code, text):
        super().__init__(f"{text} ({code})")
        self.code = code


FUNCTIONS = {
    "open": [cp, vp], "close": [vp], "session_create": [vp, vp, vp], "session_join": [vp, vp, vp, vp],
    "session_token": [vp, vp], "session_describe": [vp, vp, u64], "session_dma": [vp, vp, vp],
    "session_stats": [vp, vp], "session_close": [vp], "pool_open": [vp, vp, vp], "pool_close": [vp],
    "pool_stats": [vp, vp], "register_host": [vp, vp, u64, u32, vp], "register_device": [vp, u64, u64, vp],
    "register_paged": [vp, vp, vp], "memory_cost": [vp, vp], "unregister": [vp], "peek": [vp, u32, vp, u64, vp],
    "pin": [vp, u32, u64, vp, u64, vp, vp], "release": [vp, u64], "reserve": [vp, u32, u64, vp, u64, u32, vp, vp],
    "commit": [vp, u64, vp, u64], "abort": [vp, u64], "report_bad": [vp, u32, u64],
    "layers_open": [vp, u16, u32, vp, u64, vp, vp, vp], "retrieve_layer": [vp, u16, vp, vp],
    "store_layer": [vp, u16, vp, vp], "wait_on": [vp, vp], "wait": [vp], "finish": [vp], "failed": [vp, vp, u64, vp],
    "layers_close": [vp],
}


class Library:
    """The loaded library: lib.pin(...) is tuttifs_pin, and raises Error where that returns a negative code."""

    def __init__(self, path):
        self.so = C.CDLL(os.path.abspath(path))
        self.so.tuttifs_last_error.restype = cp
        self.so.tuttifs_version.restype = u32
        if self.so.tuttifs_version() >> 16 != MAJOR:
            raise ImportError(f"{path} has version {self.so.tuttifs_version() >> 16}, this module is for {MAJOR}")
        for name, arguments in FUNCTIONS.items():
            f = getattr(self.so, "tuttifs_" + name)
            f.argtypes, f.restype = arguments, C.c_int
            setattr(self, name, self.checked(f))

    def checked(self, f):
        def call(*arguments):
            code = f(*arguments)
            if code < 0:
                raise Error(code, self.so.tuttifs_last_error().decode(errors="replace"))
        return call

    def last_error(self):
        return self.so.tuttifs_last_error().decode(errors="replace")


def handle(stream_or_event):
    """The driver's handle of a PyTorch stream or event, of an integer, or of None."""
    for attribute in ("cuda_stream", "cuda_event"):
        if hasattr(stream_or_event, attribute):
            return getattr(stream_or_event, attribute) or None
    return stream_or_event or None


class Session:
    """A mount and this process's membership in a session on it."""

    def __init__(self, library, path, token=None, **options):
        self.lib, self.mount, self.h = library, vp(), vp()
        library.open(os.fsencode(path), C.byref(self.mount))
        try:
            o = SessionOptions(**options)
            if token is None:
                library.session_create(self.mount, C.byref(o), C.byref(self.h))
            else:
                library.session_join(self.mount, (u8 * 16)(*token), C.byref(o), C.byref(self.h))
        except Error:
            library.close(self.mount)
            raise

    def token(self):
        token = (u8 * 16)()
        self.lib.session_token(self.h, token)
        return bytes(token)

    def describe(self):
        text = C.create_string_buffer(1024)
        self.lib.session_describe(self.h, text, len(text))
        return text.value.decode()

    def stats(self):
        stats = SessionStats()
        self.lib.session_stats(self.h, C.byref(stats))
        return {name: getattr(stats, name) for name, _ in stats._fields_ if name not in ("size", "reserved")}

    def pool(self, name, identity, tokens_per_file, runs, objects, **limits):
        """runs: bytes of each; objects: (layer, rank, first run, number of runs)."""
        r = (Run * len(runs))(*[Run(n, 0) for n in runs])
        o = (Object * len(objects))(*[Object(*x) for x in objects])
        options = PoolOptions(name=name.encode(), identity=identity.encode(), tokens_per_file=tokens_per_file,
                              objects=o, runs=r, object_count=len(o), run_count=len(r), **limits)
        h = vp()
        self.lib.pool_open(self.h, C.byref(options), C.byref(h))
        return Pool(self, h)

    def register_paged(self, blocks, classes):
        """classes: for each, its runs as (address of block 0, stride, bytes). Returns a handle."""
        per = len(classes[0])
        runs = (StridedRun * (per * len(classes)))(*[StridedRun(*run) for c in classes for run in c])
        paged = Paged(classes=len(classes), runs_per_class=per, blocks=blocks, runs=runs)
        h = vp()
        self.lib.register_paged(self.h, C.byref(paged), C.byref(h))
        return h

    def unregister(self, memory):
        self.lib.unregister(memory)

    def cost(self, memory):
        n = u64()
        self.lib.memory_cost(memory, C.byref(n))
        return n.value

    def close(self):
        self.lib.session_close(self.h)
        self.lib.close(self.mount)


class Pool:
    def __init__(self, session, h):
        self.session, self.lib, self.h = session, session.lib, h

    def peek(self, keys, tenant=0):
        n = u64()
        self.lib.peek(self.h, tenant, b"".join(keys), len(keys), C.byref(n))
        return n.value

    def pin(self, request, keys, tenant=0):
        """The leases of the longest stored prefix."""
        n, leases = u64(), (Lease * max(1, len(keys)))()
        self.lib.pin(self.h, tenant, request, b"".join(keys), len(keys), leases, C.byref(n))
        return (Lease * n.value).from_buffer(leases) if n.value else (Lease * 0)()

    def release(self, request):
        self.lib.release(self.h, request)

    def reserve(self, reserve, keys, tokens, tenant=0, parent=bytes(32), position=0):
        """Leases for a chain of files, behind a parent that has position - 1 files before it, or from its root."""
        parents = [parent, *keys]
        items = (Item * len(keys)).from_buffer_copy(b"".join(
            struct.pack("=32s32sII", key, parents[i], tokens, position + i) for i, key in enumerate(keys)))
        n, leases = u64(), (Lease * len(keys))()
        self.lib.reserve(self.h, tenant, reserve, items, len(keys), 0, leases, C.byref(n))
        return leases

    def commit(self, reserve, ranks):
        self.lib.commit(self.h, reserve, (u16 * len(ranks))(*ranks), len(ranks))

    def abort(self, reserve):
        self.lib.abort(self.h, reserve)

    def stats(self):
        stats = PoolStats()
        self.lib.pool_stats(self.h, C.byref(stats))
        return {name: getattr(stats, name) for name, _ in stats._fields_ if name not in ("size", "reserved")}

    def layers(self, rank, leases, memory, blocks, store=False):
        """Slot i of the batch is leases[i], and goes to or comes from blocks[i]."""
        return Layers(self, rank, leases, memory, blocks, store)


class Layers:
    def __init__(self, pool, rank, leases, memory, blocks, store):
        self.lib, self.h, self.count = pool.lib, vp(), len(leases)
        if len(blocks) != len(leases):
            raise ValueError(f"{len(blocks)} blocks for {len(leases)} leases")
        table = (u64 * max(1, len(blocks)))(*blocks)
        self.lib.layers_open(pool.h, rank, STORE if store else 0, leases, len(leases), memory, table, C.byref(self.h))

    def retrieve(self, layer, after=None):
        h = vp()
        self.lib.retrieve_layer(self.h, layer, handle(after), C.byref(h))
        return Transfer(self.lib, h, after)

    def store(self, layer, after=None):
        h = vp()
        self.lib.store_layer(self.h, layer, handle(after), C.byref(h))
        return Transfer(self.lib, h, after)

    def finish(self):
        self.lib.finish(self.h)

    def check(self):
        """Raises if any slot has failed."""
        codes, n = (C.c_int32 * max(1, self.count))(), u64()
        self.lib.failed(self.h, codes, self.count, C.byref(n))
        if n.value:
            first = next(i for i, c in enumerate(codes) if c)
            raise Error(codes[first], f"{n.value} of {self.count} slots failed, the first is {first}: "
                        + self.lib.last_error())

    def close(self):
        self.lib.layers_close(self.h)


class Transfer:
    def __init__(self, library, h, after):
        self.lib, self.h = library, h
        self.after = after  # the event is to outlive the transfer

    def wait_on(self, stream):
        """Makes what is enqueued on the stream from now on wait for the transfer."""
        self.lib.wait_on(self.h, handle(stream))

    def wait(self):
        self.lib.wait(self.h)
        self.after = None
