"""Layers of NumPy arrays without PyTorch, and of PyTorch tensors on the CPU and on a GPU."""

import unittest

import tuttifs
from volume import IDENTITY, SESSION, Mounted

FILES, BLOCKS, LAYERS = 6, 16, 2
PROMPT = list(range(4 * FILES))


class Numpy(Mounted):
    def setUp(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("python3 has no numpy here")
        super().setUp()
        self.np = numpy

    def round_trip(self, layers, axis, **how):
        """Stores and restores blocks of layers, and compares these and no others."""
        np, keys = self.np, tuttifs.keys(PROMPT, 4)
        paged = tuttifs.Paged.of(layers, axis, **how)
        self.assertEqual(paged.blocks, BLOCKS)
        pool = self.session.pool(self.pool.name + "-arrays", IDENTITY, paged.objects())
        with self.session.register(paged) as memory:
            random = np.random.default_rng(1)
            for a in layers:
                a[...] = random.integers(-100, 100, a.shape).astype(a.dtype)
            kept = [a.copy() for a in layers]
            source, target = np.arange(FILES), np.array([9, 15, 0, 3, 12, 7])
            with pool.reserve(keys) as r, pool.store(r, memory, source) as batch:
                batch.move_all(LAYERS)
                r.commit()
            for a in layers:
                a[...] = 1
            with pool.pin(keys) as leases, pool.retrieve(leases, memory, target) as batch:
                batch.move_all(LAYERS)
        others = [b for b in range(BLOCKS) if b not in target]
        for a, want in zip(layers, kept):
            np.testing.assert_array_equal(a.take(target, axis), want.take(source, axis))
            self.assertTrue((a.take(others, axis) == 1).all())

    def test_together(self):
        self.round_trip([self.np.empty((BLOCKS, 2, 4, 8, 16), self.np.float16) for _ in range(LAYERS)], 0)

    def test_apart(self):
        layers = [self.np.empty((2, BLOCKS, 4, 8, 16), self.np.float32) for _ in range(LAYERS)]
        with self.assertRaises(tuttifs.NotSupportedError):
            self.round_trip(layers, 1)

    def test_apart_as_objects(self):
        layers = [self.np.empty((2, BLOCKS, 4, 8, 16), self.np.int8) for _ in range(LAYERS)]
        self.round_trip(layers, 1, object_per_run=True)

    def test_layers_interleaved(self):
        whole = self.np.empty((BLOCKS, LAYERS, 2, 4, 100), self.np.int16)
        self.round_trip([whole[:, layer] for layer in range(LAYERS)], 0)

    def test_heads_first_in_memory(self):
        layers = [self.np.empty((BLOCKS, 2, 8, 4, 16), self.np.float16).transpose(0, 1, 3, 2, 4) for _ in range(LAYERS)]
        self.round_trip(layers, 0)

    def test_flat(self):
        np, keys = self.np, tuttifs.keys(PROMPT, 4)
        objects = [tuttifs.Object(layer, 0, (1000,)) for layer in range(LAYERS)]
        pool = self.session.pool(self.pool.name + "-objects", IDENTITY, objects)
        dma = np.frombuffer(self.session.dma(), np.uint8)
        source = np.random.default_rng(2).integers(0, 255, (LAYERS, FILES, 1000), dtype=np.uint8)
        with self.session.register_flat(source) as memory, pool.reserve(keys) as r, pool.store(r) as batch:
            for layer in range(LAYERS):
                batch.begin_at(layer, memory, [(layer * FILES + f) * 1000 for f in range(FILES)]).wait()
            batch.finish()
            r.commit()
        with self.session.register_flat(dma, padded=True) as memory, pool.pin(keys) as leases:
            with pool.retrieve(leases) as batch:
                batch.begin_at(1, memory, [4096 * f for f in range(FILES)]).wait()
                batch.check()
        np.testing.assert_array_equal(dma[:4096 * FILES].reshape(FILES, 4096)[:, :1000], source[1])


class Torch(Mounted):
    def setUp(self):
        try:
            import torch
        except ImportError:
            self.skipTest("python3 has no torch here")
        super().setUp()
        self.torch = torch

    def round_trip(self, session, device, shape, axis):
        torch, keys, gpu = self.torch, tuttifs.keys(PROMPT, 4), device != "cpu"
        layers = [torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(LAYERS)]
        kept = [t.clone() for t in layers]
        paged = tuttifs.Paged.of(layers, axis)
        pool = session.pool(f"torch-{device}-{axis}", IDENTITY, paged.objects())
        source, target = list(range(FILES)), [9, 15, 0, 3, 12, 7]

        def event():
            if not gpu:
                return None
            e = torch.cuda.Event()
            with self.assertRaises(tuttifs.InvalidError):
                tuttifs.layers.event_handle(e)
            e.record()
            return e

        with session.register(paged) as memory:
            self.assertEqual(memory.device_bytes > 0, gpu)
            with pool.reserve(keys) as r, pool.store(r, memory, source) as batch:
                batch.move_all(LAYERS, event())
                r.commit()
            for t in layers:
                t.fill_(1)
            with pool.pin(keys) as leases, pool.retrieve(leases, memory, target) as batch:
                transfers = [batch.begin(layer, event()) for layer in range(LAYERS)]
                for t, want, transfer in zip(layers, kept, transfers):
                    transfer.wait_on(torch.cuda.current_stream() if gpu else None)
                    got = t.index_select(axis, torch.tensor(target, device=device))
                    self.assertTrue(torch.equal(got, want.index_select(axis, torch.tensor(source, device=device))))
                batch.wait()
                batch.check()

    def test_cpu(self):
        self.round_trip(self.session, "cpu", (BLOCKS, 2, 4, 8, 16), 0)
        with self.assertRaises(tuttifs.NotSupportedError):
            self.round_trip(self.session, "cpu", (2, BLOCKS, 4, 8, 16), 1)

    def test_gpu(self):
        if not self.torch.cuda.is_available():
            self.skipTest("no GPU here")
        with self.store.session(self.torch.device("cuda", 0), deadline_ms=SESSION["deadline_ms"]) as session:
            self.assertTrue(session.stats().gpu)
            self.round_trip(session, "cuda:0", (BLOCKS, 2, 4, 8, 16), 0)
            self.round_trip(session, "cuda:0", (2, BLOCKS, 4, 8, 16), 1)
            with self.assertRaises(tuttifs.InvalidError):
                session.register(self.cache.paged())

    def test_keys(self):
        self.assertEqual(tuttifs.keys(self.torch.tensor([1, 2, 3]), 1), tuttifs.keys([1, 2, 3], 1))
