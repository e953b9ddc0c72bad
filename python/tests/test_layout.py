"""Runs from strides. Neither the library nor NumPy is needed."""

import itertools
import random
import unittest

import tuttifs
from tuttifs.layout import Extent, runs_of_blocks
from volume import View


def contiguous(shape):
    strides, n = [], 2
    for k in reversed(shape):
        strides.insert(0, n)
        n *= k
    return tuple(strides)


class Runs(unittest.TestCase):
    def test_known_layouts(self):
        base = 1 << 20
        for name, shape, axis, wanted in (
                ("K and V apart", (2, 10, 16, 8, 4), 1, [(base, 1024, 1024), (base + 10240, 1024, 1024)]),
                ("K and V together", (10, 2, 16, 8, 4), 0, [(base, 2048, 2048)]),
                ("latents", (10, 16, 576), 0, [(base, 18432, 18432)]),
                ("blocks last but one", (3, 10, 8), -2, [(base, 16, 16), (base + 160, 16, 16), (base + 320, 16, 16)])):
            with self.subTest(name):
                blocks, runs = runs_of_blocks(Extent(base, shape, contiguous(shape), 2, "cpu"), axis)
                self.assertEqual((blocks, list(runs)), (10, wanted))

    def test_views(self):
        # Heads before tokens in memory, tokens before heads in the view: the order in memory counts.
        whole = (10, 2, 8, 16, 4)
        s = contiguous(whole)
        permuted = Extent(0, (10, 2, 16, 8, 4), (s[0], s[1], s[3], s[2], s[4]), 2, "cpu")
        self.assertEqual(runs_of_blocks(permuted, 0)[1], ((0, 2048, 2048),))
        # A layer of [blocks, layers, ...]: the step is that of all layers.
        layer = Extent(4096, (10, 2, 64), (3 * 256, 128, 2), 2, "cpu")
        self.assertEqual(runs_of_blocks(layer, 0)[1], ((4096, 768, 256),))
        # Rows with padding behind them.
        padded = Extent(0, (10, 3, 60), (3 * 128, 128, 2), 2, "cpu")
        self.assertEqual(runs_of_blocks(padded, 0)[1], ((0, 384, 120), (128, 384, 120), (256, 384, 120)))

    def test_every_byte_once(self):
        """Against the definition: all elements of a block, whatever the order of axes in memory."""
        r = random.Random(2)
        for _ in range(300):
            shape = tuple(r.randrange(2, 5) for _ in range(r.randrange(1, 5)))
            order, strides, step = list(range(len(shape))), [0] * len(shape), 2
            r.shuffle(order)
            for axis in order:  # with gaps at times
                strides[axis] = step
                step = step * shape[axis] + r.choice((0, 0, 6))
            axis = r.randrange(len(shape))
            blocks, runs = runs_of_blocks(Extent(100, shape, tuple(strides), 2, "cpu"), axis)
            self.assertEqual(blocks, shape[axis])
            self.assertEqual(sorted(runs), list(runs))
            for b in range(blocks):
                wanted = {100 + sum(i * s for i, s in zip(index, strides)) + k
                          for index in itertools.product(*map(range, shape)) if index[axis] == b for k in (0, 1)}
                got = [x.address + b * x.stride + k for x in runs for k in range(x.bytes)]
                self.assertEqual(len(got), len(set(got)))
                self.assertEqual(set(got), wanted)

    def test_refusals(self):
        for name, shape, strides, axis in (("broadcast", (4, 8), (0, 2), 0), ("backwards", (4, 8), (16, -2), 0),
                                           ("overlap", (4, 8), (8, 2), 0), ("no axis", (4,), (2,), 1),
                                           ("empty", (4, 0), (2, 2), 0)):
            with self.subTest(name), self.assertRaises(tuttifs.InvalidError):
                runs_of_blocks(Extent(0, shape, strides, 2, "cpu"), axis)


class Paged(unittest.TestCase):
    def test_classes_and_objects(self):
        layers = [View(bytearray(2 * 6 * 100), (2, 6, 100)) for _ in range(3)]
        paged = tuttifs.Paged.of(layers, 1)
        self.assertEqual([len(c.runs) for c in paged.classes], [2, 2, 2])
        runs = ((100, 0),) * 2
        self.assertEqual(paged.objects(2)[:3], [tuttifs.Object(0, 0, runs), tuttifs.Object(0, 1, runs),
                                               tuttifs.Object(1, 0, runs)])
        split = tuttifs.Paged.of(layers, 1, object_per_run=True)
        self.assertEqual([(c.layer, len(c.runs)) for c in split.classes], [(n // 2, 1) for n in range(6)])
        self.assertEqual(len(split.objects()), 6)

    def test_refusals(self):
        a, b = View(bytearray(600), (6, 100)), View(bytearray(500), (5, 100))
        two = View(bytearray(1200), (6, 2, 50), (100, 600, 1))
        for name, layers in (("blocks", [a, b]), ("runs", [a, two]), ("nothing", []), ("no array", [[1, 2]]),
                             ("read-only", [View(bytearray(600), (6, 100), read_only=True)]),
                             ("read-only view", [memoryview(bytes(8))])):
            with self.subTest(name), self.assertRaises(tuttifs.InvalidError):
                tuttifs.Paged.of(layers, 0)
