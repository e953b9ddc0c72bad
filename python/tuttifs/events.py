"""What happens to a pool's files, whoever does it: stored by another engine, evicted, removed, found damaged."""

from __future__ import annotations

import ctypes as C
from typing import TYPE_CHECKING, List, NamedTuple

from . import _lib

if TYPE_CHECKING:
    from .store import Pool

_MOST = 1024  # events of one call of the library


class Event(NamedTuple):
    """What happened to one file."""

    key: bytes  # 32 bytes
    tenant: int
    removed: bool  # a miss from now on; else found from now on


class Events:
    """A pool's events since it was made by `Pool.events`. For one thread at a time."""

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.lost = 0
        self._since = C.c_uint64(0)
        self._room = (_lib.KvEvent * _MOST)()
        self._more()

    def poll(self) -> List[Event]:
        """What happened since the last call, in order; at once, [] for nothing. A call takes some 100 us.

        The daemon keeps a pool's last 65,536 events. `lost` is how many have been lost in all: when it grows, what is
        held of the pool is to be looked up again (`Pool.present`). Raises `StaleError` where the session is gone: a new
        one's events begin anew.
        """
        events: List[Event] = []
        while n := self._more():
            events += [Event(bytes(e.key), e.tenant, e.kind == _lib.KV_REMOVED) for e in self._room[:n]]
        return events

    def _more(self) -> int:
        told, lost = C.c_uint64(), C.c_uint64()
        self.pool._lib.events(self.pool._h, C.byref(self._since), self._room, _MOST, C.byref(told), C.byref(lost))
        self.lost += lost.value
        return told.value
