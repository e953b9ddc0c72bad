"""What the tests share: a volume on files, mounted by the real command, and a small engine's cache."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from typing import Any, Dict, List, Optional

import tuttifs

IDENTITY: Dict[str, Any] = {
    "model": "m", "revision": "r", "weights_epoch": 1, "dtype": "bf16", "quantisation": "none", "scale_format": "none",
    "layout": "NHD", "page_bytes": 4096, "block_tokens": 4, "file_tokens": 4, "tp": 1, "pp": 1, "cp": 1,
    "group": "full"}

SESSION = {"lanes": 2, "depth": 64, "dma_bytes": 8 << 20, "bounce_bytes": 4 << 20, "deadline_ms": 20000}


def need_mount() -> None:
    """Skips where nothing can be mounted."""
    if os.geteuid() != 0:
        raise unittest.SkipTest("mounting needs root here")
    if not os.path.exists("/dev/fuse"):
        raise unittest.SkipTest("no /dev/fuse")


class Volume:
    """Three drives in files, formatted and mounted until `close`."""

    def __init__(self) -> None:
        need_mount()
        self.dir = tempfile.mkdtemp(prefix="tuttifs-python-")
        self.path = os.path.join(self.dir, "mnt")
        self.drives = [os.path.join(self.dir, f"drive{i}") for i in range(3)]
        os.mkdir(self.path)
        os.mkdir(os.path.join(self.dir, "run"), 0o700)
        try:
            self.run("mkfs", "-q", "-L", "python", "--size", "64m", *self.drives)
            self.mount()
        except BaseException:
            self.close()
            raise

    def run(self, *words: str) -> str:
        done = subprocess.run([tuttifs.binary(), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"tuttifs {words[0]}: {done.stderr.strip()}")
        return done.stdout

    def mount(self, options: str = "") -> None:
        self.run("mount", "-o", f"sockets={os.path.join(self.dir, 'run')},{options}", "--log",
                 os.path.join(self.dir, "log"), self.drives[0], self.path)

    def unmount(self) -> None:
        self.run("umount", self.path)

    def kill(self) -> None:
        """kill -9 of the daemon; what is left of the mount is taken away."""
        with open(os.path.join(self.path, ".tuttifs/version")) as f:
            pid = json.load(f)["pid"]
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}/fd") and os.listdir(f"/proc/{pid}/fd"):  # it holds the drives to its end
            time.sleep(0.01)
        subprocess.run(["umount", "-l", self.path], check=True)

    def close(self) -> None:
        if os.path.ismount(self.path):
            subprocess.run([tuttifs.binary(), "umount", self.path], stdin=subprocess.DEVNULL, capture_output=True)
        if os.path.ismount(self.path):
            subprocess.run(["umount", "-l", self.path])
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self) -> "Volume":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Cache:
    """A paged cache of three layers [blocks, 2, 2048] in host memory, without NumPy."""

    layers, blocks, block_bytes = 3, 24, 4096

    def __init__(self) -> None:
        self.memory = [bytearray(self.blocks * self.block_bytes) for _ in range(self.layers)]

    def paged(self) -> tuttifs.Paged:
        return tuttifs.Paged.of([View(m, (self.blocks, 2, self.block_bytes // 2)) for m in self.memory], 0)

    @staticmethod
    def content(layer: int, file: int) -> bytes:
        return bytes((layer * 31 + file * 7 + i * 13 + (i >> 8)) & 0xff for i in range(Cache.block_bytes))

    def fill(self, blocks: List[int], first: int = 0) -> None:
        for layer, m in enumerate(self.memory):
            for file, b in enumerate(blocks, first):
                m[b * self.block_bytes:(b + 1) * self.block_bytes] = self.content(layer, file)

    def block(self, layer: int, b: int) -> bytes:
        return bytes(self.memory[layer][b * self.block_bytes:(b + 1) * self.block_bytes])

    def same(self, test: unittest.TestCase, blocks: List[int]) -> None:
        for layer in range(self.layers):
            for file, b in enumerate(blocks):
                test.assertEqual(self.block(layer, b), self.content(layer, file), f"layer {layer}, file {file}")

    def clear(self) -> None:
        for m in self.memory:
            m[:] = bytes(len(m))


class View:
    """A bytearray as an array of bytes, as NumPy would show it."""

    def __init__(self, memory: bytearray, shape: Any, strides: Any = None, read_only: bool = False) -> None:
        self.memory = memory
        address = tuttifs.layout.extent(memoryview(memory)).address
        self.__array_interface__ = {"data": (address, read_only), "shape": shape, "strides": strides, "typestr": "|u1"}


def store(pool: tuttifs.Pool, memory: tuttifs.Memory, cache: Cache, keys: List[bytes], blocks: List[int]) -> None:
    """Stores a chain from what is computed for it."""
    cache.fill(blocks)
    with pool.reserve(keys) as reservation, pool.store(reservation, memory, blocks) as layers:
        layers.move_all(cache.layers)
        reservation.commit()


def restore(test: unittest.TestCase, pool: tuttifs.Pool, memory: tuttifs.Memory, cache: Cache, keys: List[bytes],
            blocks: List[int]) -> None:
    """Restores it into other blocks, and compares every byte."""
    cache.clear()
    with pool.pin(keys) as leases:
        test.assertEqual(len(leases), len(keys))
        with pool.retrieve(leases, memory, blocks) as layers:
            layers.move_all(cache.layers)
    cache.same(test, blocks)


class Mounted(unittest.TestCase):
    """Tests on one volume, with a session, a pool and a cache of each test's own."""

    volume: Optional[Volume] = None

    @classmethod
    def setUpClass(cls) -> None:
        cls.volume = Volume()
        cls.addClassCleanup(cls.volume.close)

    def setUp(self) -> None:
        assert self.volume is not None
        self.store = tuttifs.Store(self.volume.path)
        self.addCleanup(self.store.close)
        self.session = self.store.session(**SESSION)
        self.addCleanup(self.session.close)
        self.cache = Cache()
        self.pool = self.session.pool(self.id().split(".")[-1], IDENTITY, self.cache.paged().objects())
        self.memory = self.session.register(self.cache.paged())
