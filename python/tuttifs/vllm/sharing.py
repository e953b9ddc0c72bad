"""One read of the drives for ranks that hold the same KV (MLA).

The first of them, the leader, reads and verifies files in memory that all of them map; each copies from there to its
own blocks. They take up loads in the same order, that of the scheduler's steps. The leader says when a layer is in the
memory, and fills its place anew when all followers have copied it. A follower that the leader has lost, or that did not
find it, reads for itself.

Only processes of one user and of one session find each other: the socket's name is made of the session's token.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import logging
import mmap
import os
import socket
import struct
import time
from typing import List, NamedTuple, Optional, Sequence

log = logging.getLogger("tuttifs.vllm")

FIND_SECONDS = 10.0  # that the leader waits for its followers, once in a session, and they for it
COPY_SECONDS = 30.0  # that it waits for a follower's copies

BEGIN, LAYER, BATCH, LOST = range(4)  # what the leader says; followers say nothing but that they have copied a layer
_HEADER = struct.Struct("=I")


class Channel:
    """Messages of integers between two processes of one user."""

    def __init__(self, s: socket.socket) -> None:
        self._socket = s
        _, uid, _ = struct.unpack("iII", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            s.close()
            raise PermissionError("a process of another user")

    def send(self, *numbers: int) -> None:
        body = array.array("q", numbers).tobytes()
        self._socket.sendall(_HEADER.pack(len(body)) + body)

    def receive(self) -> List[int]:
        (n,) = _HEADER.unpack(self._exactly(_HEADER.size))
        numbers = array.array("q")
        numbers.frombytes(self._exactly(n))
        return numbers.tolist()

    def _exactly(self, n: int) -> bytes:
        b = bytearray()
        while len(b) < n:
            more = self._socket.recv(min(n - len(b), 1 << 16))
            if not more:
                raise ConnectionResetError("the other rank has gone")
            b += more
        return bytes(b)

    def send_memory(self, fd: int) -> None:
        socket.send_fds(self._socket, [b"m"], [fd])

    def receive_memory(self) -> int:
        word, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if word != b"m" or len(fds) != 1:
            raise ConnectionResetError("the other rank has gone")
        return fds[0]

    def close(self) -> None:
        """Ends calls that wait, too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def address(token: bytes, rank: int) -> str:
    """Where the leader of those who hold a rank's KV listens."""
    return "\0tuttifs-" + hashlib.sha256(b"tuttifs loads" + token + struct.pack("<I", rank)).hexdigest()


class Leader:
    """The side of the rank that reads. But for `close` its methods are called by one thread."""

    def __init__(self, token: bytes, rank: int, followers: int, size: int) -> None:
        self._followers: List[Channel] = []
        self._missing = followers
        self._behind: List[int] = []  # of each follower: layers that it has not copied
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._fd = os.memfd_create("tuttifs-loads", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size)
            self.memory = mmap.mmap(self._fd, size)
            self._listener.bind(address(token, rank))
            self._listener.listen(followers)
        except OSError:
            self.close()
            raise

    def find(self) -> None:
        """Waits for the followers, and shows them the memory. Those that do not come in time read for themselves."""
        limit = time.monotonic() + FIND_SECONDS
        try:
            while self._missing:
                self._listener.settimeout(max(0.01, limit - time.monotonic()))
                s, _ = self._listener.accept()
                s.settimeout(COPY_SECONDS)
                with contextlib.suppress(OSError):
                    follower = Channel(s)
                    follower.send_memory(self._fd)
                    self._followers.append(follower)
                    self._behind.append(0)
                    self._missing -= 1
        except OSError as e:
            log.warning("tuttifs: %d of the ranks with this one's KV read it for themselves: %s", self._missing, e)
        self._listener.close()

    def begin(self, load: int, files: int, slots: Sequence[int]) -> None:
        """So many files of a load come, in batches, one after the other in the slots."""
        self._say(BEGIN, load, files, *slots)

    def layer(self) -> None:
        """The next layer of the batch is there."""
        self._say(LAYER)
        self._behind = [n + 1 for n in self._behind]

    def batch(self, failed: Sequence[int]) -> None:
        """The batch is over. failed: the files of it that are not whole."""
        self._say(BATCH, *failed)

    def lost(self, load: int) -> None:
        """The load will not be completed, or not even begin."""
        self._say(LOST, load)

    def copied(self) -> None:
        """Waits until all followers have copied what was said to be there."""
        for i in range(len(self._followers) - 1, -1, -1):
            try:
                while self._behind[i]:
                    self._followers[i].receive()
                    self._behind[i] -= 1
            except OSError as e:
                self._lose(i, e)

    def _say(self, *numbers: int) -> None:
        for i in range(len(self._followers) - 1, -1, -1):
            try:
                self._followers[i].send(*numbers)
            except OSError as e:
                self._lose(i, e)

    def complete(self) -> bool:
        """Whether all followers have what was said to be there, as far as this rank knows."""
        self.copied()
        return not self._missing

    def _lose(self, i: int, e: OSError) -> None:
        self._missing += 1
        log.warning("tuttifs: a rank with this one's KV is lost, and reads it for itself: %s", e)
        self._followers.pop(i).close()
        self._behind.pop(i)

    def close(self) -> None:
        self._listener.close()
        for follower in self._followers:
            follower.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Coming(NamedTuple):
    """A load's files, and the slots in which their batches are."""

    files: int
    slots: List[int]


class Follower:
    """The side of a rank that copies. It is found or not; where a method raises OSError the leader is gone."""

    def __init__(self, token: bytes, rank: int) -> None:
        self._address = address(token, rank)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._channel: Optional[Channel] = None
        self.memory: Optional[mmap.mmap] = None

    def find(self) -> bool:
        """Finds the leader, and maps its memory."""
        limit = time.monotonic() + FIND_SECONDS
        try:
            while True:
                try:
                    self._socket.connect(self._address)
                    break
                except ConnectionRefusedError:  # it is not there yet
                    if time.monotonic() > limit:
                        raise
                    time.sleep(0.01)
            self._channel = Channel(self._socket)
            self._socket.settimeout(2 * FIND_SECONDS)
            fd = self._channel.receive_memory()
            try:
                self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
            self._socket.settimeout(None)
            return True
        except OSError as e:
            log.warning("tuttifs: this rank reads for itself what another has: %s", e)
            self.close()
            return False

    def _heard(self) -> List[int]:
        if self._channel is None:
            raise ConnectionResetError("the leader was not found")
        return self._channel.receive()

    def begin(self, load: int) -> Optional[Coming]:
        """What of a load comes; None: it is lost."""
        kind, number, *more = self._heard()
        if kind not in (BEGIN, LOST) or number != load:
            raise ConnectionResetError("the ranks do not load the same")
        return Coming(more[0], more[1:]) if kind == BEGIN else None

    def layer(self) -> bool:
        """Waits for the next layer. False: the load is lost."""
        return self._heard()[0] == LAYER

    def copied(self) -> None:
        """Says that this rank has copied the layer."""
        assert self._channel is not None
        self._channel.send()

    def batch(self) -> Optional[List[int]]:
        """Waits for the end of the batch: its files that are not whole. None: the load is lost."""
        kind, *failed = self._heard()
        return failed if kind == BATCH else None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._socket.close()
