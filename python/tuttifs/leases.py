"""Leases: a session's hold on files, and the two ways to come by them."""

from __future__ import annotations

import asyncio
import ctypes as C
import enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Sequence, Type, Union, overload

from . import _lib
from .errors import ClosedError, NotFoundError, StaleError

if TYPE_CHECKING:
    from .layers import Layers
    from .store import Pool


class Status(enum.IntEnum):
    """What a lease is good for."""

    PINNED = 1  # readable
    NEW = 2  # reserved: to be written
    JOINED = 3  # reserved by another rank of this session: write this rank's objects
    EXISTS = 4  # stored already: nothing to write
    PENDING = 5  # another engine is storing it
    DECLINED = 6  # the mount's admission policy does not want it: nothing to write
    OTHER = 255  # of a later version: nothing to write

    @property
    def to_be_written(self) -> bool:
        """Whether this rank is to write the file."""
        return self in (Status.NEW, Status.JOINED)


class Lease(NamedTuple):
    """A file's slot, leased to the session."""

    slot: int
    tokens: int
    generation: int
    seed: bytes  # 16 bytes, of its checksums
    status: Status


class Leases(Sequence[Lease]):
    """Leases in the order of their keys. A slice is `Leases` too, and good for as long as the whole."""

    def __init__(self, array: Any, count: int, first: int = 0) -> None:
        self._array, self._first, self._count = array, first, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Lease: ...

    @overload
    def __getitem__(self, index: slice) -> "Leases": ...

    def __getitem__(self, index: Union[int, slice]) -> Union[Lease, "Leases"]:
        if isinstance(index, slice):
            begin, end, step = index.indices(self._count)
            if step != 1:
                raise ValueError("a slice of leases has the step 1")
            return Leases(self._array, max(0, end - begin), self._first + begin)
        if not -self._count <= index < self._count:
            raise IndexError(f"lease {index} of {self._count}")
        c = self._array[self._first + index % self._count]
        try:
            status = Status(c.status)
        except ValueError:
            status = Status.OTHER
        return Lease(c.slot, c.tokens, c.generation, bytes(c.seed), status)

    def to_be_written(self) -> List[int]:
        """The numbers of the leases whose files this rank is to write."""
        wanted, first = (Status.NEW, Status.JOINED), self._first
        return [i for i in range(self._count) if self._array[first + i].status in wanted]

    def _c(self, some: Optional[Sequence[int]]) -> Any:
        """The leases, or some of them, for C."""
        if some is None or len(some) == self._count:
            return C.byref(self._array, self._first * C.sizeof(_lib.Lease)) if self._count else None
        return (_lib.Lease * max(1, len(some)))(*[self._array[self._first + i] for i in some])


class Pinned(Leases):
    """The longest stored prefix of some keys, leased for reading. `with` releases it."""

    def __init__(self, pool: "Pool", request: int, array: Any, count: int) -> None:
        super().__init__(array, count)
        self.pool, self.request = pool, request
        self._held = count > 0  # a pin that finds nothing has nothing to be released

    def release(self) -> None:
        """Ends the leases, for every rank that pinned by this request: one of them does so, when all are done."""
        if self._held:
            self._held = False
            self.pool._lib.release(self.pool._h, self.request)

    def __enter__(self) -> "Pinned":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        try:
            self.release()
        except (ClosedError, StaleError):
            pass  # they went with the session


class Reservation(Leases):
    """Slots to be written. `with` gives up what was not committed."""

    def __init__(self, pool: "Pool", reserve: int, array: Any, count: int) -> None:
        super().__init__(array, count)
        self.pool, self.reserve = pool, reserve
        self._open = count > 0  # the daemon knows nothing of an empty one

    def commit(self, ranks: Sequence[int] = (0,), loads: Sequence["Layers"] = ()) -> None:
        """Says that this process has written all objects of the ranks, and waits until the files are durable: until the
        last rank of any process has committed. They are visible from then on, and not before.

        ranks: whose objects, shape [n]; integers below 65,536.
        loads: what this process has retrieved for the files to be computed from, and not closed. Where a file of those
            failed the reservation is aborted instead, for all ranks, and that file's error is raised: what was computed
            from it is wrong, although its checksums are right (docs/libtuttifs.md, "When a load fails").

        Raises `IncompleteError` where an object was not written, `NotFoundError` where another rank has aborted.
        """
        if self:
            lib, h, table = self.pool._lib, self.pool._h, _lib.integers(C.c_uint16, ranks)
            if loads:
                from_ = (C.c_void_p * len(loads))(*[load._h for load in loads])
                lib.commit_from(h, self.reserve, table, len(ranks), from_, len(loads))
            else:
                lib.commit(h, self.reserve, table, len(ranks))
        self._open = False

    async def commit_async(self, ranks: Sequence[int] = (0,), loads: Sequence["Layers"] = ()) -> None:
        """`commit`, without keeping the event loop. Where the task is cancelled, the commit goes on."""
        await asyncio.to_thread(self.commit, ranks, loads)

    def abort(self) -> None:
        """Gives the slots back, for all ranks, as long as one of them has not committed. Raises `NotFoundError` where
        all have, or another rank has aborted."""
        self._open = False
        if self:
            self.pool._lib.abort(self.pool._h, self.reserve)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        if self._open:
            try:
                self.abort()
            except (NotFoundError, ClosedError, StaleError):
                pass  # another rank has aborted, or a commit that failed has; or all of it went with the session
