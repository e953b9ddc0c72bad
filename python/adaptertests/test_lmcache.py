"""LMCache's plugin: with the installed package's loader and engine, CPU tensors, on a real mount."""

import asyncio
import inspect
import os
import sys
import tempfile
import time
import unittest
from typing import Any, Dict, List

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("PYTHONHASHSEED", "0")  # a chain's root is the same in all processes
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests"))

import torch  # noqa: E402
from damaged import damage  # noqa: E402
from documented import block  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.cache_engine import LMCacheEngineBuilder  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.pin_monitor import PinMonitor  # noqa: E402
from lmcache.v1.storage_backend import CreateStorageBackends  # noqa: E402
from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface, StoragePluginInterface  # noqa: E402
from volume import Volume, need_mount  # noqa: E402

import tuttifs  # noqa: E402
from tuttifs import lmcache as adapter  # noqa: E402

CHUNK, LAYERS, HEADS, WIDTH = 16, 3, 2, 32
BYTES = 2 * LAYERS * CHUNK * HEADS * WIDTH * 2


def metadata(**changes: Any) -> LMCacheMetadata:
    return LMCacheMetadata(**{
        "model_name": "org/m", "world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0,
        "kv_dtype": torch.bfloat16, "kv_shape": (LAYERS, 2, CHUNK, HEADS, WIDTH), "chunk_size": CHUNK, **changes})


class Connector(MockGPUConnector):
    """An engine's KV of one prompt, as LMCache's connectors move it."""

    def __init__(self, kv: torch.Tensor) -> None:  # [2, layers, tokens, hidden]
        super().__init__((LAYERS, 2, CHUNK, HEADS, WIDTH))
        self.kv = kv

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for o, start, end in zip(memory_objs, starts, ends):
            o.tensor.copy_(self.kv[:, :, start:end])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for o, start, end in zip(memory_objs, starts, ends):
            self.kv[:, :, start:end] = o.tensor


def key(i: int, **changes: Any) -> CacheEngineKey:
    return CacheEngineKey(**{"model_name": "org/m", "world_size": 1, "worker_id": 0, "chunk_hash": 1000 + i,
                             "dtype": torch.bfloat16, **changes})


def eventually(what: Any) -> None:
    limit = time.monotonic() + 30
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


class Mounted(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        need_mount()
        cls.volume = cls.enterClassContext(Volume())

    def extra(self, **more: Any) -> Dict[str, Any]:
        ours = {"path": self.volume.path, "revision": self.id(), "dtype": "bfloat16", "quantisation": "none",
                "scale_format": "none", "retry_seconds": 0.05, **more}
        return {"storage_plugin.tuttifs.module_path": "tuttifs.lmcache", "save_only_first_rank": False,
                "storage_plugin.tuttifs.class_name": "TuttifsBackend", **{f"tuttifs.{k}": v for k, v in ours.items()}}

    def config(self, extra: Any = None, **changes: Any) -> Any:
        return LMCacheEngineConfig.from_defaults(**{
            "chunk_size": CHUNK, "local_cpu": False, "max_local_cpu_size": 0.01, "storage_plugins": ["tuttifs"],
            "pre_caching_hash_algorithm": "sha256_cbor", "save_unfull_chunk": True,
            "extra_config": self.extra(**(extra or {})), **changes})


class Backend(Mounted):
    """The backend as LMCache's storage manager calls it."""

    def backend(self, extra: Any = None, **changes: Any) -> Any:
        """By LMCache's own loader."""
        PinMonitor.GetOrCreate(self.config())  # as the engine does
        loop = asyncio.new_event_loop()
        self.addCleanup(loop.close)
        made = CreateStorageBackends(self.config(extra), metadata(**changes), loop, dst_device="cpu")
        self.assertIn("tuttifs", made)
        self.addCleanup(made["LocalCPUBackend"].close)
        self.addCleanup(made["tuttifs"].close)
        return made["tuttifs"]

    def objects(self, backend: Any, n: int, tokens: int = CHUNK) -> List[Any]:
        made = [backend.local_cpu_backend.allocate(torch.Size([2, LAYERS, tokens, HEADS * WIDTH]), torch.bfloat16,
                                                   MemoryFormat.KV_2LTD) for _ in range(n)]
        for o in made:
            o.tensor.copy_(torch.randn(o.tensor.shape))
        return made

    def put(self, backend: Any, keys: List[Any], objects: List[Any]) -> List[Any]:
        """Stores, and returns the keys that LMCache is told are stored."""
        stored: List[Any] = []
        for future in backend.batched_submit_put_task(keys, objects, on_complete_callback=stored.append) or ():
            future.result(60)
        return stored

    def same(self, found: List[Any], wanted: List[Any]) -> None:
        for a, b in zip(found, wanted, strict=True):
            self.assertEqual(a is None, b is None)
            if a is not None:
                self.assertTrue(torch.equal(a.tensor, b.tensor))
                self.assertEqual((a.meta.fmt, a.meta.shape, a.meta.dtype), (b.meta.fmt, b.meta.shape, b.meta.dtype))

    def test_the_interface_is_complete(self) -> None:
        self.assertTrue(issubclass(adapter.TuttifsBackend, StoragePluginInterface))
        self.assertFalse(inspect.isabstract(adapter.TuttifsBackend))
        for name in ("batched_contains", "batched_async_contains", "batched_get_blocking", "batched_get_non_blocking",
                     "touch_cache"):
            self.assertIsNot(getattr(adapter.TuttifsBackend, name), getattr(StorageBackendInterface, name))

    def test_round_trip(self) -> None:
        one, keys = self.backend(), [key(i) for i in range(5)]
        self.assertIsNotNone(one._chunks._region)  # in place
        objects = self.objects(one, 4)
        counts = [o.get_ref_count() for o in objects]
        self.assertEqual(one.batched_contains(keys), 0)
        self.assertEqual(self.put(one, keys, objects), keys[:4])
        self.assertEqual([o.get_ref_count() for o in objects], counts)
        self.assertFalse(one.exists_in_put_tasks(keys[0]))
        self.assertEqual((one.batched_contains(keys), one.batched_contains(keys[2:]), one.contains(keys[4])), (4, 2, False))
        two = self.backend()
        self.same(two.batched_get_blocking(keys), [*objects, None])
        self.same([two.get_blocking(keys[2])], [objects[2]])
        self.same(two.batched_get_blocking([keys[4], keys[1]]), [None, objects[1]])
        self.assertEqual(self.put(two, keys[:1], self.objects(two, 1)), keys[:1])  # it is there
        self.same(two.batched_get_blocking(keys[:1]), objects[:1])

    def test_async(self) -> None:
        backend, keys = self.backend(), [key(i) for i in range(4)]
        objects = self.objects(backend, 3)
        self.put(backend, keys, objects)

        async def look() -> Any:
            return (await backend.batched_async_contains("r", keys, pin=True),
                    await backend.batched_get_non_blocking("r", keys))
        n, found = backend.loop.run_until_complete(look())
        self.assertEqual(n, 3)
        self.same(found, objects)
        self.assertTrue(all(o.is_pinned for o in found))
        self.assertEqual([backend.unpin(k) for k in keys], [True] * 3 + [False])

    def test_copies(self) -> None:
        """Objects outside of LMCache's buffer."""
        backend, keys = self.backend({"staging_bytes": BYTES}), [key(i) for i in range(3)]
        objects = self.objects(backend, 3)
        chunks = backend._chunks
        chunks._region = None
        self.assertEqual(self.put(backend, keys, objects), keys)
        self.same(backend.batched_get_blocking(keys), objects)
        self.same(self.backend().batched_get_blocking(keys), objects)

    def test_memory_ends_after_its_stores(self) -> None:
        """LMCache closes its local CPU backend first."""
        backend, keys = self.backend(), [key(i) for i in range(12)]
        futures = backend.batched_submit_put_task(keys, self.objects(backend, 12))
        backend.local_cpu_backend.get_memory_allocator().close()
        self.assertTrue(all(f.done() for f in futures))
        self.assertEqual(self.backend().batched_contains(keys), 12)
        self.assertEqual(backend.batched_contains(keys), 0)  # it is closed
        self.assertIsNone(backend.batched_submit_put_task(keys[:1], self.objects(self.backend(), 1)))

    def test_partial_chunks_are_left_out(self) -> None:
        backend = self.backend()
        self.assertEqual(self.put(backend, [key(0)], self.objects(backend, 1, tokens=CHUNK - 1)), [])
        self.assertFalse(backend.contains(key(0)))

    def test_restart(self) -> None:
        backend, keys = self.backend(), [key(i) for i in range(3)]
        objects = self.objects(backend, 3)
        self.put(backend, keys, objects)
        self.volume.kill()
        self.assertEqual(backend.batched_get_blocking(keys), [None] * 3)
        self.assertEqual(self.put(backend, [key(9)], objects[:1]), [])
        self.assertEqual((backend.batched_contains(keys, pin=True), backend.pin(keys[0]), backend.unpin(keys[0])),
                         (0, False, False))
        self.volume.mount()
        self.same(self.backend().batched_get_blocking(keys), objects)
        eventually(lambda: backend.batched_contains(keys) == 3)
        self.same(backend.batched_get_blocking(keys), objects)

    def test_damage_is_a_miss(self) -> None:
        backend, keys = self.backend(), [key(i) for i in range(3)]
        objects = self.objects(backend, 3)
        self.put(backend, keys, objects)
        damage(self.volume, backend._chunks.pages.name, adapter.named(keys[1]))
        self.same(backend.batched_get_blocking(keys), [objects[0], None, objects[2]])
        self.assertEqual(backend.batched_contains(keys), 1)
        self.assertEqual(self.put(backend, keys, objects), keys)
        self.same(backend.batched_get_blocking(keys), objects)

    def test_full(self) -> None:
        backend = self.backend({"max_bytes": 1 << 20})
        objects = self.objects(backend, 4)
        for i in range(0, 200, 4):
            self.assertEqual(len(self.put(backend, [key(i + j) for j in range(4)], objects)), 4)
        held = [key(i) for i in range(200) if backend.pin(key(i))]
        self.assertTrue(0 < len(held) < 200)
        lost = [self.put(backend, [key(1000 + i)], objects[:1]) for i in range(60)]
        self.assertEqual(lost[-1], [])
        self.assertTrue(all(backend.contains(k) for k in held))
        self.assertTrue(all(backend.unpin(k) for k in held))
        self.assertEqual(self.put(backend, [key(5000)], objects[:1]), [key(5000)])

    def test_removed(self) -> None:
        backend, keys = self.backend(), [key(i) for i in range(3)]
        self.put(backend, keys, self.objects(backend, 3))
        self.assertEqual((backend.remove(keys[1]), backend.remove(keys[1])), (True, False))
        self.assertEqual(backend.batched_contains(keys), 1)
        self.assertEqual(backend.batched_remove(keys), 2)
        self.put(backend, keys, self.objects(backend, 3))
        self.assertEqual(backend.clear(), 3 * CHUNK)
        self.assertEqual(backend.batched_contains(keys), 0)

    def test_what_is_kept_apart(self) -> None:
        """Each field alone: no hit of what another configuration has stored."""
        base = self.backend()
        self.put(base, [key(0)], self.objects(base, 1))
        self.assertTrue(self.backend().contains(key(0)))
        for n, v in (("revision", "other"), ("weights_epoch", 1), ("dtype", "float16"), ("quantisation", "fp8"),
                     ("scale_format", "e8m0"), ("computed", "rope"), ("tenant", 5)):
            self.assertFalse(self.backend({n: v}).contains(key(0)), n)
        for n, v in (("model_name", "n"), ("world_size", 2), ("worker_id", 1), ("kv_dtype", torch.float16), ("use_mla", True),
                     ("kv_shape", (LAYERS, 2, CHUNK, HEADS * 2, WIDTH // 2)), ("chunk_size", 2 * CHUNK)):
            self.assertFalse(self.backend(None, **{n: v}).contains(key(0)), n)
        for n, v in (("model_name", "n"), ("world_size", 2), ("worker_id", 1), ("chunk_hash", 7), ("dtype", torch.float16),
                     ("request_configs", {"lmcache.tag.user": "a"})):
            self.assertFalse(base.contains(key(0, **{n: v})), n)

    def test_as_documented(self) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
            f.write(block("### Set-up inside an engine", self.volume.path))
            f.flush()
            config = LMCacheEngineConfig.from_file(f.name)
        self.assertEqual((config.chunk_size, config.storage_plugins), (256, ["tuttifs"]))
        changed = metadata(chunk_size=256, kv_shape=(LAYERS, 2, 256, HEADS, WIDTH))
        self.assertIsNotNone(adapter.TuttifsBackend("cpu", config, changed, None, None)._chunks.pages)

    def test_refused(self) -> None:
        def make(extra: Any = None, changes: Any = None, **fields: Any) -> Any:
            return adapter.TuttifsBackend("cpu", self.config(extra, **(changes or {})), metadata(**fields), None, None)
        for extra in ({"revision": ""}, {"dtype": "auto"}, {"quantisation": "unknown"}, {"scale_format": ""}):
            with self.assertRaises(tuttifs.IdentityError, msg=str(extra)):
                make(extra)
        for changes in ({"pre_caching_hash_algorithm": "builtin"}, {"enable_blending": True}, {"use_layerwise": True}):
            with self.assertRaises(tuttifs.Error, msg=str(changes)):
                make(None, changes)
        with self.assertRaises(tuttifs.IdentityError):
            make(model_name="")
        for extra in ({"path": ""}, {"paht": "/x"}, {"tenant": "a"}, {"max_bytes": -1}):
            with self.assertRaises(tuttifs.InvalidError, msg=str(extra)):
                make(extra)
        with self.assertRaises(tuttifs.NotMountedError):
            make({"path": "/tmp"})


class Engine(Mounted):
    """LMCache's own engine."""

    def engine(self, name: str, kv: torch.Tensor) -> Any:
        engine = LMCacheEngineBuilder.get_or_create(name, self.config(), metadata(), Connector(kv), lambda *_: None,
                                                    lambda o, *_: o)
        self.addCleanup(LMCacheEngineBuilder.destroy, name)
        engine.post_init()
        self.assertIn("tuttifs", engine.storage_manager.storage_backends)
        return engine

    def test_store_and_retrieve(self) -> None:
        tokens = list(range(100, 100 + 5 * CHUNK + 3))
        shape = (2, LAYERS, len(tokens), HEADS * WIDTH)
        kv = torch.randn(shape).to(torch.bfloat16)
        one = self.engine("one", kv)
        self.assertEqual(one.lookup(tokens), 0)
        one.store(tokens)
        eventually(lambda: one.lookup(tokens) == 5 * CHUNK)
        empty = torch.zeros(shape, dtype=torch.bfloat16)
        two = self.engine("two", empty)
        self.assertEqual(two.lookup(tokens, lookup_id="r", pin=True), 5 * CHUNK)
        mask = two.retrieve(tokens, req_id="r")
        self.assertEqual(int(mask.sum()), 5 * CHUNK)
        two.lookup_unpin("r")
        self.assertEqual(two.storage_manager.storage_backends["tuttifs"]._holds._held, {})
        self.assertTrue(torch.equal(empty[:, :, :5 * CHUNK], kv[:, :, :5 * CHUNK]))
        self.assertEqual(int(empty[:, :, 5 * CHUNK:].abs().sum()), 0)
        self.assertEqual(two.lookup([7, *tokens]), 0)
        self.assertEqual(two.lookup(tokens[:3 * CHUNK] + [1] * CHUNK), 3 * CHUNK)


if __name__ == "__main__":
    unittest.main()
