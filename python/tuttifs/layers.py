"""The layers of a batch of files on their way, and waiting for them."""

from __future__ import annotations

import asyncio
import ctypes as C
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Dict, Generator, List, Optional, Sequence, Set, Type

from . import _lib
from .errors import Error, InvalidError, error
from .leases import Leases

if TYPE_CHECKING:
    from .store import Memory, Pool


def stream_handle(stream: Any) -> Optional[int]:
    """The driver's handle of a PyTorch stream, of an integer, or of None (the default stream)."""
    return getattr(stream, "cuda_stream", stream) or None


def event_handle(event: Any) -> Optional[int]:
    """The driver's handle of a PyTorch event, of an integer, or of None."""
    if event is None:
        return None
    handle = getattr(event, "cuda_event", event)
    if not handle:  # PyTorch makes it when it is first recorded
        raise InvalidError("the event was never recorded: it would hold nothing back")
    return int(handle)


class Layers:
    """One rank's objects of some leased files, made by `Pool.retrieve` or `Pool.store`. `with` closes them.

    Every layer is begun (`begin`, all of them ahead if you like) and waited for; then `check` says whether every file
    is whole. A store ends with `finish`, before `Reservation.commit`.
    """

    def __init__(self, pool: "Pool", leases: Leases, wanted: Optional[Sequence[int]], memory: Optional["Memory"],
                 blocks: Optional[Sequence[int]], rank: int) -> None:
        """wanted: the numbers of the leases that are to be stored. None: all are retrieved."""
        if (memory is None) != (blocks is None):
            raise InvalidError("memory goes with blocks")
        if blocks is not None and len(blocks) != len(leases):
            raise InvalidError(f"{len(blocks)} blocks for {len(leases)} leases")
        self._lib, self.pool, self.storing = pool._lib, pool, wanted is not None
        self.slots = range(len(leases)) if wanted is None else wanted  # slot i of the batch is leases[slots[i]]
        self._memory = memory  # kept from being given back by the garbage collector
        n = len(self.slots)
        places = None
        if blocks is not None:
            places = _lib.integers(C.c_uint64, blocks if n == len(blocks) else [int(blocks[i]) for i in self.slots])
        self._h = C.c_void_p()
        self._lib.layers_open(pool._h, rank, _lib.STORE if self.storing else 0, leases._c(self.slots), n,
                              None if memory is None else memory._h, places, C.byref(self._h))
        self._lock = threading.Lock()
        self._begun: Set[Transfer] = set()  # and not waited for
        self._closed = False

    def begin(self, layer: int, after: Any = None) -> "Transfer":
        """Begins to move a layer of all files from or to their blocks, and returns at once.

        after: a PyTorch event (or the driver's handle). A retrieve: recorded behind the last work that uses the
            blocks' old contents. A store: behind the work that produces them.

        Raises `NotSupportedError` for an event with the CPU executor, `StoreBufferError` where a store buffer that
        refuses is full, `InvalidError` for a layer that the pool has not.
        """
        verb = self._lib.store_layer if self.storing else self._lib.retrieve_layer
        return self._give(after, lambda event, out: verb(self._h, layer, event, out))

    def begin_at(self, layer: int, memory: "Memory", offsets: Sequence[int], after: Any = None) -> "Transfer":
        """`begin` for flat memory (`Session.register_flat`): object j of slot i begins at `offsets[i * n + j]`, with n
        objects in the layer and rank. Slot i is `leases[layers.slots[i]]`.

        offsets: bytes from the memory's start, shape [len(layers.slots) * n], any integer dtype.
        """
        verb = self._lib.store_layer_at if self.storing else self._lib.retrieve_layer_at
        table = _lib.integers(C.c_uint64, offsets)
        return self._give(after, lambda event, out: verb(self._h, layer, memory._h, table, len(offsets), event, out))

    def _give(self, after: Any, verb: Callable[[Optional[int], Any], None]) -> "Transfer":
        h = C.c_void_p()
        verb(event_handle(after), C.byref(h))
        transfer = Transfer(self, h, after)
        with self._lock:
            self._begun.add(transfer)
        return transfer

    def _ended(self, transfer: "Transfer") -> None:
        with self._lock:
            self._begun.discard(transfer)

    def move_all(self, layers: int, after: Any = None) -> None:
        """Moves layers 0 to layers - 1, waits for them, and raises where a file is not whole. A store is finished
        too."""
        for transfer in [self.begin(layer, after) for layer in range(layers)]:
            transfer.wait()
        self.check()
        if self.storing:
            self.finish()

    def wait(self) -> None:
        """Waits for every transfer that was begun. Raises what is wrong with one as a whole; see `Transfer.wait`."""
        with self._lock:
            begun = list(self._begun)
        for transfer in begun:
            transfer.wait()

    def failed(self) -> Dict[int, Error]:
        """The files that failed, by the number of their lease. Complete when all transfers have been waited for."""
        n = len(self.slots)
        codes, count = (C.c_int32 * max(1, n))(), C.c_uint64()
        self._lib.failed(self._h, codes, n, C.byref(count))
        if not count.value:
            return {}
        text = self._lib.last_error()  # the first one's
        found: Dict[int, Error] = {}
        for i, code in enumerate(codes[:n]):
            if code:
                found[self.slots[i]] = error(code, text if not found else f"lease {self.slots[i]} failed")
        return found

    def check(self) -> None:
        """Raises the first failed file's error, if any failed: `ChecksumError`, `DriveError`, ..."""
        failed = self.failed()
        for i, e in failed.items():
            raise error(e.code or 0, f"{len(failed)} of {len(self.slots)} files failed, the first is that of "
                        f"lease {i}: {e.text}")

    def finish(self) -> None:
        """Writes the trailers of a store, once every layer has been waited for. With a store buffer it waits first until
        the drives have the layers. Raises `IncompleteError` where a layer was not stored."""
        self._lib.finish(self._h)

    def close(self) -> None:
        """Waits for what is in flight and gives the layers back, and their transfers."""
        if self._closed or self.pool._closed or not self.pool.session._finalizer.alive:
            return
        self._closed = True
        self._lib.layers_close(self._h)

    def __enter__(self) -> "Layers":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()


class Transfer:
    """A layer in flight. `await transfer` waits as `wait` does, without keeping the event loop."""

    def __init__(self, layers: Layers, h: C.c_void_p, after: Any) -> None:
        self._layers, self._lib, self._h = layers, layers._lib, h
        self._after = after  # the event is the caller's, and must outlive the transfer
        self._lock = threading.Lock()
        self._result: Optional[List[Error]] = None  # once waited for: no error, or the one

    def wait_on(self, stream: Any = None) -> None:
        """Makes what is enqueued on a PyTorch stream from now on wait for the transfer, and returns when that is
        enqueued. With the CPU executor it waits as `wait` does."""
        if self._result is None:
            self._lib.wait_on(self._h, stream_handle(stream))

    def wait(self) -> None:
        """Waits until the layer is in place and verified (a store: on the drives). May be called again. An error is
        for the whole; a file that fails alone is for `Layers.failed`."""
        with self._lock:
            if self._result is None:
                try:
                    self._lib.wait(self._h)
                    self._result = []
                except Error as e:
                    self._result = [e]  # the library has given the transfer back all the same
                self._after = None
                self._layers._ended(self)
        for failure in self._result:
            raise failure

    def __await__(self) -> Generator[Any, None, None]:
        # Where the task is cancelled, the thread waits on; Layers.close waits for it.
        return asyncio.to_thread(self.wait).__await__()
