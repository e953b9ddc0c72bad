"""The tier below vLLM's host memory, driven as vLLM's manager drives it."""

import os
import sys
import time
import unittest
import unittest.mock
from types import SimpleNamespace
from typing import Any, List

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests"))

from volume import Volume, need_mount
from vllm.v1.kv_offload import config as offload
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import tuttifs
from tuttifs.vllm.tier import named

CHUNKS, BYTES = 12, 3 << 20  # two objects a chunk


def spec(**changes: Any) -> Any:
    config = offload.OffloadingConfig(
        groups=(offload.OffloadingGroupConfig(16, ("a", "b"), 0),), worker_kv_bytes_per_block=BYTES,
        enable_kv_cache_events=True, extra_config={}, engine_id="e",
        model=offload.OffloadingModelConfig("m", "bfloat16"),
        cache=offload.OffloadingCacheConfig(16, 1), parallel=offload.OffloadingParallelConfig(
            0, 1, 1, 1, 1, 1, 0, 1, None, True), kv_cache_layout="LBNHC")
    config = offload.OffloadingConfig(**{**vars(config), **changes})
    return SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=True))


class Tier(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        need_mount()
        cls.volume = Volume()
        cls.addClassCleanup(cls.volume.close)

    def tier(self, memory: np.ndarray, **more: Any) -> Any:
        config = {"type": "TuttifsTier", "module_path": "tuttifs.vllm.tier", "path": self.volume.path,
                  "revision": self.id(), "dtype": "bfloat16",
                  "quantisation": "none", "scale_format": "none", "retry_seconds": 0.05, **more}
        described = config.pop("spec", spec())
        tier = SecondaryTierFactory.create_secondary_tier(config, memoryview(memory), described)
        self.addCleanup(tier.shutdown)
        return tier

    def look(self, tier: Any, keys: List[Any], request: str) -> List[LookupResult]:
        context, limit = ReqContext(request), time.monotonic() + 20
        tier.on_new_request(context)
        while True:
            found = [tier.lookup(k, context) for k in keys]
            if LookupResult.RETRY not in found:
                tier.on_request_finished(context)
                return found
            assert time.monotonic() < limit
            tier.on_schedule_end(None)
            time.sleep(0.01)

    def done(self, tier: Any) -> JobResult:
        limit = time.monotonic() + 30
        while True:
            results = list(tier.get_finished_jobs())
            if results:
                self.assertEqual(len(results), 1)
                return results[0]
            assert time.monotonic() < limit
            time.sleep(0.01)

    def job(self, number: int, keys: List[Any], chunks: List[int], load: bool) -> TransferJob:
        return TransferJob(number, keys, np.array(chunks), load, ReqContext(f"r{number}"))

    def test_stored_and_loaded(self) -> None:
        r = np.random.default_rng(1)
        memory = r.integers(0, 256, (CHUNKS, BYTES), dtype=np.uint8)
        before = memory.copy()
        tier = self.tier(memory)
        keys = [make_offload_key(bytes([i]) * 32, i % 2) for i in range(6)]
        self.assertEqual(self.look(tier, keys, "a"), [LookupResult.MISS] * 6)
        tier.submit_store(self.job(1, keys[:4], [3, 1, 4, 5], False))
        result = self.done(tier)
        self.assertEqual((result.job_id, result.success, result.transfer_bytes), (1, True, 4 * BYTES))
        self.assertEqual([e.keys for e in tier.take_events()], [keys[:4]])
        self.assertEqual(self.look(tier, [keys[4], *keys[:4]], "b"), [LookupResult.MISS] + [LookupResult.HIT] * 4)
        tier.submit_load(self.job(2, [keys[2], keys[0]], [8, 9], True))
        self.assertTrue(self.done(tier).success)
        self.assertTrue((memory[8] == before[4]).all() and (memory[9] == before[3]).all())
        self.assertTrue((np.delete(memory, (8, 9), 0) == np.delete(before, (8, 9), 0)).all())
        self.assertEqual(list(tier.take_events()), [])
        end = tier._attachment.get()
        self.volume.run("evict", self.volume.path, end.pool.name, named(keys[3]).hex())
        tier._hear_at = 0.0
        self.assertEqual([(e.keys, e.removed) for e in tier.take_events()], [([keys[3]], True)])
        tier.submit_store(self.job(3, keys[3:4], [5], False))
        self.assertTrue(self.done(tier).success)
        self.assertEqual([(e.keys, e.removed) for e in tier.take_events()], [(keys[3:4], False)])
        # Another engine has them too; another model has not.
        self.assertEqual(self.look(self.tier(memory), keys[:4], "c"), [LookupResult.HIT] * 4)
        other = spec(model=offload.OffloadingModelConfig("other", "bfloat16"))
        self.assertEqual(self.look(self.tier(memory, spec=other), keys[:4], "d"), [LookupResult.MISS] * 4)

    def test_some_are_gone(self) -> None:
        memory = np.full((CHUNKS, BYTES), 7, np.uint8)
        tier = self.tier(memory)
        keys = [make_offload_key(bytes([50 + i]) * 32, 0) for i in range(3)]
        tier.submit_store(self.job(1, keys[:2], [0, 1], False))
        self.assertTrue(self.done(tier).success)
        memory[5:8] = 0
        tier.submit_load(self.job(2, keys, [5, 6, 7], True))
        result = self.done(tier)
        self.assertEqual((result.success, result.successful_keys), (False, tuple(keys[:2])))
        self.assertTrue((memory[5:7] == 7).all() and not memory[7].any())
        tier.drain_jobs()
        self.assertFalse(tier.has_pending_work())

    def test_a_load_that_fails_is_a_miss(self) -> None:
        """Whatever it was: vLLM would promote what a request has found again and again."""
        memory = np.full((CHUNKS, BYTES), 7, np.uint8)
        keys = [make_offload_key(bytes([90 + i]) * 32, 0) for i in range(2)]
        tier, context = self.tier(memory, retry_seconds=3600), ReqContext("r")
        tier.submit_store(self.job(1, keys, [0, 1], False))
        self.assertTrue(self.done(tier).success)
        while {tier.lookup(k, context) for k in keys} != {LookupResult.HIT}:
            tier.on_schedule_end(None)
        self.volume.kill()
        self.addCleanup(self.volume.mount)
        for number, key in enumerate(keys):  # the session is gone, and then known to be
            self.assertEqual(tier.lookup(key, context), LookupResult.HIT)
            tier.submit_load(self.job(2 + number, [key], [5], True))
            self.assertFalse(self.done(tier).success)
            self.assertEqual(tier.lookup(key, context), LookupResult.MISS)

    def test_refused(self) -> None:
        memory = np.zeros((CHUNKS, BYTES), np.uint8)
        for more in ({"revision": ""}, {"dtype": "auto"}, {"quantisation": "auto"}, {"scale_format": "unknown"}):
            with self.assertRaises(tuttifs.IdentityError):
                self.tier(memory, **more)

    def test_what_is_kept_apart(self) -> None:
        memory = np.zeros((CHUNKS, BYTES), np.uint8)
        key = make_offload_key(b"k" * 32, 0)
        tier = self.tier(memory)
        tier.submit_store(self.job(1, [key], [0], False))
        self.assertTrue(self.done(tier).success)
        self.assertEqual(self.look(self.tier(memory), [key], "same"), [LookupResult.HIT])
        changes: List[Any] = [
            {"dtype": "float16"}, {"computed": "rope"}, {"weights_epoch": 1}, {"revision": "s"}, {"quantisation": "fp8"},
            {"scale_format": "tensor"}, {"spec": spec(model=offload.OffloadingModelConfig("m", "float8"))}]
        for n, more in enumerate(changes):
            self.assertEqual(self.look(self.tier(memory, **more), [key], f"{n}"), [LookupResult.MISS], more)
        with unittest.mock.patch("vllm.__version__", "0.31.0"):
            self.assertEqual(self.look(self.tier(memory), [key], "older"), [LookupResult.MISS])

    def test_reset_ends_it(self) -> None:
        """The weights may be others then."""
        memory = np.full((CHUNKS, BYTES), 7, np.uint8)
        keys = [make_offload_key(bytes([70 + i]) * 32, 0) for i in range(2)]
        for fixed in (True, False):
            tier = self.tier(memory, fixed_weights=fixed)
            tier.submit_store(self.job(1, keys[:1], [0], False))
            self.assertTrue(self.done(tier).success)
            context = ReqContext("open")
            while tier.lookup(keys[0], context) != LookupResult.HIT:
                tier.on_schedule_end(None)
            tier.drain_jobs()
            self.assertEqual(tier.lookup(keys[0], context), LookupResult.HIT if fixed else LookupResult.MISS)
            self.assertEqual(self.look(tier, keys[:1], "new"), [LookupResult.HIT if fixed else LookupResult.MISS])
            memory[5] = 0
            tier.submit_load(self.job(2, keys[:1], [5], True))
            self.assertEqual((self.done(tier).success, bool(memory[5].all())), (fixed, fixed))
        tier.submit_store(self.job(3, keys[1:], [0], False))
        self.assertFalse(self.done(tier).success)
        self.assertEqual(self.look(self.tier(memory), keys, "other"), [LookupResult.HIT, LookupResult.MISS])


if __name__ == "__main__":
    unittest.main()
