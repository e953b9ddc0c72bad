"""What the adapters for SGLang and LMCache share: needs neither of them, nor PyTorch."""

import random
import time
import unittest
import unittest.mock

import tuttifs
from tuttifs.pages import Holds, PageOptions, Pages, Region, Staging, attach, refuse_unknown, restorable
from volume import IDENTITY, Volume, need_mount

PARTS = (5 << 20, 4096, 700)  # one of three objects, and one that is no whole unit
PAGE = sum(PARTS)


class Pure(unittest.TestCase):
    def test_options(self):
        o = PageOptions.parse({"path": "/x", "revision": "r", "retry_seconds": 1, "tenant": 3}, "here")
        self.assertEqual((o.path, o.revision, o.retry_seconds, o.tenant, o.dtype), ("/x", "r", 1, 3, ""))
        for given, text in (({}, "path"), ({"path": ""}, "path"), ({"path": 3}, "path"), ({"path": "/x", "a": 1}, "has no a"),
                            ({"path": "/x", "tenant": "1"}, "tenant"), ({"path": "/x", "tenant": True}, "tenant"),
                            ({"path": "/x", "tenant": 1 << 32}, "tenant"), ({"path": "/x", "max_bytes": -1}, "max_bytes"),
                            ({"path": "/x", "revision": None}, "revision")):
            with self.assertRaisesRegex(tuttifs.InvalidError, "here.*" + text, msg=str(given)):
                PageOptions.parse(given, "here")

    def test_unknown(self):
        refuse_unknown({"a": "none", "b": "x"}, {"c": 1}, "here")
        for texts, numbers in (({"a": ""}, {}), ({"a": None}, {}), ({"a": " Auto"}, {}), ({"a": "unknown"}, {}), ({}, {"a": 0})):
            with self.assertRaisesRegex(tuttifs.IdentityError, "in full: a. Say it in here"):
                refuse_unknown(texts, numbers, "here")

    def test_restorable(self):
        r = random.Random(1)
        for _ in range(300):
            stored, window = [r.random() < 0.7 for _ in range(r.randrange(12))], r.randrange(1, 14)
            wanted = [n for n in range(1, len(stored) + 1) if all(stored[max(0, n - window):n])]
            self.assertEqual(restorable(stored, window), wanted)


class OnAMount(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_mount()
        cls.volume = Volume()
        cls.addClassCleanup(cls.volume.close)

    def setUp(self):
        self.options = PageOptions(self.volume.path, retry_seconds=0.05)
        self.attachment = attach(self.options)
        self.addCleanup(self.attachment.close)
        self.pages = Pages(self.attachment, self.options, self.id().split(".")[-1], {**IDENTITY, "page_bytes": PAGE}, PARTS)

    def places(self, region, n):
        """Pages whose parts lie in another order than theirs, with gaps."""
        return [[region.address + i * (PAGE + 64) + at for at in (4096 + 700, 700, 0)] for i in range(n)]

    def test_round_trip(self):
        r, n = random.Random(2), 4
        keys = [r.randbytes(32) for _ in range(n)]
        one, two = (Region(memoryview(bytearray(n * (PAGE + 64)))) for _ in range(2))
        one.array[:] = r.randbytes(len(one.array))
        self.assertEqual(self.pages.store(keys[:1], one, self.places(one, 1)), [True])
        self.assertEqual(self.pages.store(keys[1:3], one, self.places(one, 3)[1:], keys[:1]), [True] * 2)
        self.assertEqual(self.pages.store(keys[:3], two, self.places(two, 3)), [True] * 3)  # they are there
        self.assertEqual((self.pages.leading(keys), self.pages.leading(keys[::-1])), (3, 0))
        self.assertEqual(self.pages.present(keys[::-1]), [False, True, True, True])
        self.assertEqual(self.pages.load(keys, two, self.places(two, n)), [True] * 3 + [False])
        for i in range(3):
            at = i * (PAGE + 64)
            self.assertEqual(two.array[at:at + PAGE], one.array[at:at + PAGE])
            self.assertEqual(two.array[at + PAGE:at + PAGE + 64], bytes(64))
        # The same bytes by way of a copy, a page at a time.
        seen = {}
        staging = Staging(self.pages, 1, lambda size: memoryview(bytearray(size)))
        self.assertEqual(staging.load(keys, lambda i, page: seen.__setitem__(i, bytes(page))), [True] * 3 + [False])
        for i, page in seen.items():
            at = i * (PAGE + 64)
            self.assertEqual(page, bytes(one.array[at + 4796:at + PAGE]) + bytes(one.array[at + 700:at + 4796])
                             + bytes(one.array[at:at + 700]))
        self.assertEqual(staging.store(keys[3:], lambda i, page: page.__setitem__(slice(None), seen[0]), keys[:3]), [True])
        self.assertEqual(self.pages.leading(keys), 4)

    def test_removed(self):
        keys = [bytes([i + 1]) * 32 for i in range(4)]
        region = Region(memoryview(bytearray(PAGE + 64)))
        place = self.places(region, 1)
        self.assertEqual(self.pages.store(keys[:3], region, place * 3), [True] * 3)
        self.assertEqual(self.pages.remove(keys[1:]), 2)
        self.assertEqual(self.pages.present(keys), [True, False, False, False])
        self.assertEqual((self.pages.clear(), self.pages.clear(), self.pages.leading(keys)), (1, 0, 0))

    def stored(self, keys, before=()):
        region = Region(memoryview(bytearray(PAGE + 64)))
        self.assertEqual(self.pages.store(keys, region, self.places(region, 1) * len(keys), before), [True] * len(keys))

    def test_held(self):
        """Pages that are held stay; a pin of several is ended with its last page."""
        keys = [bytes([i + 1]) * 32 for i in range(6)]
        self.stored([*keys[:2], *keys[3:5]])
        self.assertEqual([(at, len(pinned)) for at, pinned in self.pages.hold(keys)], [(0, 2), (3, 2)])
        holds = Holds()
        self.addCleanup(holds.close)
        for _ in range(2):
            self.assertEqual(holds.add(self.pages, keys), [True, True, False, True, True, False])
        run = holds._held[keys[0]][1]
        self.assertEqual((holds.end(keys[0]), run.left, holds.end(keys[2])), (True, 1, False))
        self.assertEqual(holds.end(keys[1]), True)
        with self.assertRaises(tuttifs.NotFoundError):  # it was released
            run.pinned.pool._lib.release(run.pinned.pool._h, run.pinned.request)
        self.assertEqual([holds.end(k) for k in keys], [True, True, False, True, True, False])
        self.assertEqual((holds.end(keys[3]), holds.end(keys[0])), (True, False))
        holds.close()
        self.assertFalse(holds.end(keys[4]))

    def test_held_piece_by_piece(self):
        """A pin may be shorter than the run that is there: what follows is pinned as well."""
        class Shorter:
            lengths = [2, 0, 1]

            def present(self, keys, tenant):
                return [True] * 4 + [False]

            def pin(self, keys, tenant):
                return keys[:self.lengths.pop(0)]

        keys = [bytes([i + 1]) * 32 for i in range(5)]
        with unittest.mock.patch.object(self.pages, "_try", lambda what, otherwise: what(None, Shorter())):
            self.assertEqual(self.pages.hold(keys), [(0, keys[:2]), (3, keys[3:4])])

    def test_gone(self):
        keys = [bytes([i + 1]) * 32 for i in range(4)]
        self.assertIsNone(self.pages.gone())
        self.stored(keys, None)
        self.assertEqual(self.pages.gone(), [])
        self.assertEqual(self.pages.remove(keys[1:3]), 2)
        self.stored(keys[1:2], None)  # it is there again
        self.assertEqual((self.pages.gone(), self.pages.gone()), ([keys[2]], []))
        self.volume.kill()
        self.assertEqual(self.pages.gone(), [])
        self.volume.mount()
        limit = time.monotonic() + 30
        while self.pages.gone() is not None and time.monotonic() < limit:
            time.sleep(0.02)
        self.assertEqual((self.pages.present(keys), self.pages.gone()), ([True, True, False, True], []))

    def test_made_without_a_mount(self):
        """Pages of a mount that is gone are misses until it is back."""
        self.volume.kill()
        pages = Pages(self.attachment, self.options, "late", {**IDENTITY, "page_bytes": PAGE}, PARTS)
        self.assertEqual((pages.leading([bytes(32)]), pages.present([bytes(32)])), (0, [False]))
        self.volume.mount()
        self.pages, limit = pages, time.monotonic() + 30
        while self.attachment.get() is None and time.monotonic() < limit:
            time.sleep(0.02)
        self.stored([bytes([1]) * 32])

    def test_by_themselves(self):
        """Pages that hang on nothing: any may go without the others."""
        keys = [bytes([i + 1]) * 32 for i in range(3)]
        self.stored(keys, None)
        self.volume.run("evict", self.volume.path, self.pages.name, "--prefix", keys[2].hex())
        self.assertEqual(self.pages.present(keys), [True, True, False])
        chained = [bytes([i + 11]) * 32 for i in range(3)]
        self.stored(chained)
        self.volume.run("evict", self.volume.path, self.pages.name, "--prefix", chained[2].hex())
        self.assertEqual(self.pages.present(chained), [False] * 3)

    def test_outside(self):
        """A page that lies outside of the memory is neither stored nor loaded, and nothing is raised."""
        region = Region(memoryview(bytearray(PAGE + 64)))
        inside, key = self.places(region, 1)[0], bytes([9]) * 32
        for place in ([inside[0] + 65, *inside[1:]], [inside[0], inside[1], region.address - 1], inside[:2]):
            self.assertEqual(self.pages.store([key], region, [place]), [False])
            self.assertEqual(self.pages.leading([key]), 0)
        self.assertEqual(self.pages.store([key], region, [inside]), [True])
        self.assertEqual((self.pages.store([], region, []), self.pages.load([], region, [])), ([], []))


if __name__ == "__main__":
    unittest.main()
