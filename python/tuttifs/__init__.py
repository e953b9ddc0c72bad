"""tuttifs for Python: the KV cache of inference engines on a mount.

    with tuttifs.Store("/mnt/kv") as store, store.session() as session: ...

See docs/python.md. `Store`, `Session`, `Pool` and what they make are the library's objects; every call that can wait
releases the interpreter's lock. `keys` computes content keys, `Paged` finds the runs of tensors' blocks; neither needs
a mount. Importing loads nothing and starts nothing: the library is loaded with the first `Store`.
"""

from __future__ import annotations

from ._lib import find as _find
from .contentkeys import Media, keys
from .errors import (AgainError, BusyError, ChecksumError, ClosedError, Code, DefectError, DriveError, Error,
                     ExistsError, ForkedError, IdentityError, IncompleteError, InvalidError, NoDeviceError,
                     NoMemoryError, NoSpaceError, NotFoundError, NotLeasedError, NotMountedError, NotSupportedError,
                     PendingError, QuotaError, ReadOnlyError, StaleError, StoreBufferError, TimedOutError)
from .events import Event, Events
from .layers import Layers, Transfer
from .layout import Class, Object, Paged, Run, StridedRun
from .leases import Lease, Leases, Pinned, Reservation, Status
from .scheduling import Offer, SchedulerStats
from .store import KeepStats, Memory, Pool, PoolStats, Session, SessionStats, Store, StoreStats

__version__ = "0.1"

__all__ = [
    "AgainError", "BusyError", "ChecksumError", "Class", "ClosedError", "Code", "DefectError", "DriveError",
    "Error", "Event", "Events", "ExistsError", "ForkedError", "IdentityError", "IncompleteError", "InvalidError",
    "KeepStats", "Layers", "Lease", "Leases", "Media", "Memory", "NoDeviceError", "NoMemoryError", "NoSpaceError",
    "NotFoundError", "NotLeasedError", "NotMountedError", "NotSupportedError", "Object", "Offer", "Paged",
    "PendingError", "Pinned", "Pool", "PoolStats", "QuotaError", "ReadOnlyError", "Reservation", "Run",
    "SchedulerStats", "Session", "SessionStats", "StaleError", "Status", "Store", "StoreBufferError", "StoreStats",
    "StridedRun", "TimedOutError", "Transfer", "binary", "keys",
]


def binary() -> str:
    """The path of the command `tuttifs`: TUTTIFS_BINARY, the wheel's, or the one in PATH."""
    import shutil
    path = _find("TUTTIFS_BINARY", "tuttifs") or shutil.which("tuttifs")
    if path is None:
        raise FileNotFoundError("there is no tuttifs here: install a wheel that brings it along (make wheel), or the "
                                "command (make install), or set TUTTIFS_BINARY to its path")
    return path
