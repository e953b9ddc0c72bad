"""Blocks that a mount declines, and a session keeps."""

import time
import unittest
from typing import Any, Dict

import tuttifs
from volume import IDENTITY, SESSION, Cache, Volume, restore, store


class Admission(unittest.TestCase):
    """On a mount that admits what is asked for a second time."""

    def setUp(self) -> None:
        self.volume = Volume()
        self.addCleanup(self.volume.close)
        self.volume.unmount()
        self.volume.mount("admission=second-touch")
        self.mount = tuttifs.Store(self.volume.path)
        self.addCleanup(self.mount.close)
        self.cache = Cache()

    def session(self, **options: Any) -> "tuttifs.Session":
        every: Dict[str, Any] = {**SESSION, **options}
        session = self.mount.session(**every)
        self.addCleanup(session.close)
        return session

    def open(self, session: "tuttifs.Session", **options: Any) -> "tuttifs.Pool":
        return session.pool("kept", IDENTITY, self.cache.paged().objects(), **options)

    def test_declined(self) -> None:
        pool = self.open(self.session())
        with pool.reserve(tuttifs.keys(list(range(20)), 4)) as reservation:
            self.assertEqual({x.status for x in reservation}, {tuttifs.Status.DECLINED})
        self.assertEqual(pool.keep_stats().slots, 0)

    def test_kept(self) -> None:
        session = self.session(keep_bytes=4 << 20)
        self.assertIn("4 MiB for blocks that are declined", session.describe())
        pool, other = self.open(session, keep_bytes=2 << 20), self.open(self.session())
        memory = session.register(self.cache.paged())
        keys = tuttifs.keys(list(range(100, 120)), 4)
        store(pool, memory, self.cache, keys, [3, 1, 7, 5, 20])
        kept = pool.keep_stats()
        self.assertEqual((kept.declined, kept.kept, kept.blocks, kept.hits), (5, 5, 5, 0))
        self.assertLessEqual(kept.slots * kept.slot_bytes, 2 << 20)
        self.assertEqual((pool.peek(keys), other.peek(keys)), (5, 0))
        restore(self, pool, memory, self.cache, keys, [4, 6, 8, 10, 12])
        self.assertEqual(pool.keep_stats().hits, 5)
        deadline = time.monotonic() + 20
        while pool.keep_stats().written < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual((pool.keep_stats().written, pool.keep_stats().blocks, other.peek(keys)), (5, 0, 5))
        restore(self, pool, memory, self.cache, keys, [14, 16, 18, 20, 22])
        self.assertEqual((pool.keep_stats().hits, pool.stats().bad), (5, 0))

    def test_refused(self) -> None:
        session = self.session()
        for wrong in (4096, 1 << 41):
            with self.assertRaises(tuttifs.InvalidError):
                self.session(keep_bytes=wrong)
        with self.assertRaises(tuttifs.InvalidError):
            every: Dict[str, Any] = {**SESSION, "keep_bytes": 4 << 20}
            self.mount.join(session.token, **every)
