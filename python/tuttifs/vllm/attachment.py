"""A mount that may go away and come back, seen from one side of an engine."""

from __future__ import annotations

import logging
import threading
import time
from typing import Callable, Generic, Optional, Protocol, TypeVar

from .. import Session, Store
from ..errors import ClosedError, Error, NotMountedError, StaleError

log = logging.getLogger("tuttifs.vllm")

GONE = (StaleError, NotMountedError, ClosedError)  # what says that a session is no more


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class Attachment(Generic[T]):
    """What `open` made, until it is lost; then made again, in a thread of its own, so that no step waits for a daemon.

    The first opening is the caller's: what is wrong then is wrong with the configuration, and is raised.
    """

    def __init__(self, opened: Callable[[], T], retry_seconds: float) -> None:
        self._open, self._retry = opened, retry_seconds
        self._lock = threading.Lock()
        self._current: Optional[T] = opened()
        self._thread: Optional[threading.Thread] = None
        self._next = 0.0
        self._closed = False

    def get(self) -> Optional[T]:
        """What there is; None while there is nothing. May begin an attempt, and does not wait for it."""
        with self._lock:
            if self._current is None and not self._closed and self._thread is None and time.monotonic() >= self._next:
                self._thread = threading.Thread(target=self._attempt, name="tuttifs-attach", daemon=True)
                self._thread.start()
            return self._current

    def lost(self, what: T, why: BaseException) -> None:
        """Says that something made by this attachment is of no use any more. It is closed."""
        with self._lock:
            if self._current is not what:
                return
            self._current = None
            self._next = time.monotonic() + self._retry
        log.warning("tuttifs: the mount is gone, the engine goes on without: %s", why)
        quietly(what.close)

    def _attempt(self) -> None:
        made: Optional[T] = None
        try:
            made = self._open()
            log.warning("tuttifs: the mount is back")
        except (Error, OSError) as e:
            log.info("tuttifs: no mount yet: %s", e)
        with self._lock:
            self._thread = None
            self._next = time.monotonic() + self._retry
            if not self._closed:
                self._current = made
                return
        if made is not None:
            quietly(made.close)

    def close(self) -> None:
        with self._lock:
            self._closed, thread, current, self._current = True, self._thread, self._current, None
        if thread is not None:
            thread.join()
        if current is not None:
            quietly(current.close)


def quietly(f: Callable[[], None]) -> None:
    """Ends what may have ended already."""
    try:
        f()
    except Error as e:
        log.debug("tuttifs: %s", e)


class Mounted:
    """A mount with a session: `opened` makes it, `fill` what there is to be in it. Where either fails all is closed."""

    session: Session

    def __init__(self, path: str, opened: Callable[[Store], Session],
                 fill: Callable[[Session], None] = lambda session: None) -> None:
        self.mount = Store(path)
        try:
            self.session = opened(self.mount)
            fill(self.session)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if hasattr(self, "session"):
            quietly(self.session.close)
        quietly(self.mount.close)
