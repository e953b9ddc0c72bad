"""What can go wrong: one exception for each code of the library, all of them `Error`."""

from __future__ import annotations

import enum
from typing import Optional


class Code(enum.IntEnum):
    """The codes of include/libtuttifs.h (Linux errno values)."""

    EPERM = 1
    ENOENT = 2
    EIO = 5
    EBADF = 9
    ECHILD = 10
    EAGAIN = 11
    ENOMEM = 12
    EDEFECT = 14
    EBUSY = 16
    EEXIST = 17
    ENODEV = 19
    EINVAL = 22
    ENOSPC = 28
    EROFS = 30
    ENODATA = 61
    EBADMSG = 74
    EILSEQ = 84
    ENOTSUP = 95
    ENOBUFS = 105
    ETIMEDOUT = 110
    EINPROGRESS = 115
    ESTALE = 116
    EDQUOT = 122
    ENOTMOUNT = 2001


class Error(Exception):
    """A call that failed.

    `code` is the library's positive number (a `Code`, or an int that only a later version knows), `text` says what
    failed and what to do. The subclass says which code it is.
    """

    default: Optional[Code] = None  # the code of a subclass

    def __init__(self, text: str, code: Optional[int] = None) -> None:
        super().__init__(text)
        self.text = text
        number = self.default if code is None else code
        self.code: Optional[int] = number


class NotLeasedError(Error, PermissionError):
    """EPERM: not leased to this session, being committed, or another user's session."""

    default = Code.EPERM


class NotFoundError(Error, LookupError):
    """ENOENT: no such pool, request, reservation or lease; leases also expire."""

    default = Code.ENOENT


class DriveError(Error):
    """EIO: a drive or command failed."""

    default = Code.EIO


class ClosedError(Error):
    """EBADF: it was closed, or what it was made from."""

    default = Code.EBADF


class ForkedError(Error):
    """ECHILD: the library was loaded before a fork, and this is the child. Start workers by "spawn" or "forkserver", or
    open the mount after forking; to import `tuttifs` before is fine."""

    default = Code.ECHILD


class AgainError(Error):
    """EAGAIN: still busy after the deadline; try again later."""

    default = Code.EAGAIN


class NoMemoryError(Error):
    """ENOMEM: memory that is not registered, is too small, or is not to be had."""

    default = Code.ENOMEM


class DefectError(Error):
    """EDEFECT: a defect of the library; the text says where."""

    default = Code.EDEFECT


class BusyError(Error):
    """EBUSY: in use by a transfer in flight."""

    default = Code.EBUSY


class ExistsError(Error):
    """EEXIST: the pool exists with another identity or geometry."""

    default = Code.EEXIST


class NoDeviceError(Error):
    """ENODEV: no usable GPU or driver."""

    default = Code.ENODEV


class InvalidError(Error, ValueError):
    """EINVAL: an argument that can never be right."""

    default = Code.EINVAL


class NoSpaceError(Error):
    """ENOSPC: more than the pool can hold, or everything else is pinned or reserved; the text says which."""

    default = Code.ENOSPC


class ReadOnlyError(Error):
    """EROFS: the mount is read-only."""

    default = Code.EROFS


class IncompleteError(Error):
    """ENODATA: not every object was written."""

    default = Code.ENODATA


class IdentityError(Error):
    """EBADMSG: the pool's identity is incomplete or not understood."""

    default = Code.EBADMSG


class ChecksumError(Error):
    """EILSEQ: the bytes are not those that were stored."""

    default = Code.EILSEQ


class NotSupportedError(Error):
    """ENOTSUP: not with this executor."""

    default = Code.ENOTSUP


class StoreBufferError(Error):
    """ENOBUFS: the store buffer is full, and the session refuses then: store later, or not at all."""

    default = Code.ENOBUFS


class TimedOutError(Error, TimeoutError):
    """ETIMEDOUT: the deadline passed."""

    default = Code.ETIMEDOUT


class PendingError(Error):
    """EINPROGRESS: another engine is storing one of these keys."""

    default = Code.EINPROGRESS


class StaleError(Error):
    """ESTALE: the daemon or the session is gone. Close everything and open the mount again: what was committed is
    there."""

    default = Code.ESTALE


class QuotaError(Error):
    """EDQUOT: the tenant is over its quota."""

    default = Code.EDQUOT


class NotMountedError(Error):
    """ENOTMOUNT: the path lies in no tuttifs mount."""

    default = Code.ENOTMOUNT


_BY_CODE = {c.default: c for c in list(globals().values())
            if isinstance(c, type) and issubclass(c, Error) and c.default is not None}


def error(code: int, text: str) -> Error:
    """The exception for a code, positive or negative."""
    number = abs(code)
    try:
        number = Code(number)
    except ValueError:
        return Error(text, number)  # a later library's
    return _BY_CODE[number](text)
