"""SGLang's backend: with the installed package's loader, host pools and controller, on a real mount."""

import argparse
import dataclasses
import os
import random
import shlex
import sys
import threading
import unittest
import warnings
from typing import Any, Dict, List, Optional

warnings.simplefilter("ignore")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests"))

import torch  # noqa: E402
from damaged import damage  # noqa: E402
from documented import block  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo,  # noqa: E402
                                                  PoolHitPolicy, PoolName, PoolTransfer)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry, base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from volume import Volume, need_mount  # noqa: E402

import tuttifs  # noqa: E402
from tuttifs import sglang as adapter  # noqa: E402

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # what it leaves free of a server's memory

PAGE, LAYERS = 4, 3
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
ONE = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}


def mha(layout: str = "page_first", heads: int = 2, dtype: torch.dtype = torch.float16, page: int = PAGE) -> Any:
    device = MHATokenToKVPool(64, page, dtype, heads, 16, LAYERS, "cpu", False)
    host = MHATokenToKVPoolHost(device.get_device_pool_infos()[0].buffer_info, 2, 0, page, layout, pin_memory=False,
                                device_capacity_tokens=device.size, start_layer=device.start_layer,
                                end_layer=device.end_layer)
    host.of = device
    fill(host.kv_buffer)
    return host


def mla(layout: str = "page_first") -> Any:
    device = MLATokenToKVPool(64, PAGE, torch.float16, 32, 8, LAYERS, "cpu", False)
    host = MLATokenToKVPoolHost(device.get_device_pool_infos()[0].buffer_info, 2, 0, PAGE, layout, pin_memory=False,
                                device_capacity_tokens=device.size, start_layer=device.start_layer,
                                end_layer=device.end_layer, target_layer_num=LAYERS)
    fill(host.kv_buffer)
    return host


def mamba() -> Any:
    info = MambaStateBufferInfo(temporal=torch.zeros(2, 16, 4, 8), conv=(torch.zeros(2, 16, 3, 5, dtype=torch.bfloat16),))
    host = MambaPoolHost(info, 2, 0, device_capacity=16, pin_memory=False, layout="page_first")
    for buffer in (host.temporal_buffer, *host.conv_buffer):
        fill(buffer)
    return host


def fill(tensor: torch.Tensor) -> None:
    octets = tensor.view(torch.uint8)
    octets.copy_(torch.randint(0, 256, octets.shape, dtype=torch.uint8))


def pages(host: Any, numbers: List[int]) -> torch.Tensor:
    """The indices of pages of a host pool."""
    return torch.cat([torch.arange(n * host.page_size, (n + 1) * host.page_size) for n in numbers])


def content(host: Any, numbers: List[int]) -> List[torch.Tensor]:
    return [host.get_data_page(n * host.page_size, flat=True).clone().view(torch.uint8) for n in numbers]


def hashes(seed: Any, n: int) -> List[str]:
    r = random.Random(str(seed))
    return get_storage_hash_str([r.randrange(1 << 20) for _ in range(n * PAGE)], None, page_size=PAGE)


class Mounted(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        need_mount()
        cls.volume = cls.enterClassContext(Volume())

    def extra(self, **more: Any) -> Dict[str, Any]:
        extra = {"backend_name": "tuttifs", "module_path": "tuttifs.sglang", "class_name": "TuttifsStorage",
                 "interface_v1": 1, "path": self.volume.path, "revision": self.id(), "dtype": "float16",
                 "quantisation": "none", "scale_format": "none", "retry_seconds": 0.05, **more}
        return {k: v for k, v in extra.items() if v is not None}

    def config(self, extra: Optional[Dict[str, Any]] = None, **changes: Any) -> HiCacheStorageConfig:
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=True, model_name="m", extra_config=self.extra(**(extra or {})))
        return dataclasses.replace(config, **changes)

    def backend(self, host: Any, extra: Optional[Dict[str, Any]] = None, **changes: Any) -> Any:
        """A backend by SGLang's own loader, as its controller makes it."""
        backend = StorageBackendFactory.create_backend("dynamic", self.config(extra, **changes), host)
        self.addCleanup(backend.close)
        backend.register_mem_pool_host(host)
        return backend

    def same(self, host: Any, numbers: List[int], wanted: List[torch.Tensor]) -> None:
        for n, a, b in zip(numbers, content(host, numbers), wanted, strict=True):
            self.assertTrue(torch.equal(a, b), f"page {n}")


class Backend(Mounted):
    """The backend as the controller's threads call it."""

    def test_the_interface_is_complete(self) -> None:
        self.assertTrue(issubclass(adapter.TuttifsStorage, HiCacheStorage))
        for name in ("batch_exists_v2", "batch_get_v2", "batch_set_v2", "batch_get_v1", "batch_set_v1", "clear"):
            self.assertIsNot(getattr(adapter.TuttifsStorage, name), getattr(HiCacheStorage, name))

    def test_round_trip(self) -> None:
        for make, layouts in ((mha, LAYOUTS), (mla, LAYOUTS[:3])):
            for layout in layouts:
                with self.subTest(pool=make.__name__, layout=layout):
                    host, keys = make(layout), hashes((make, layout), 5)
                    one = self.backend(host, is_mla_model=make is mla)
                    self.assertTrue(one._kv.direct)
                    self.assertEqual(one.batch_exists(keys), 0)
                    wanted = content(host, [7, 3, 9, 1])
                    self.assertEqual(one.batch_set_v1(keys[:4], pages(host, [7, 3, 9, 1])), [True] * 4)
                    self.assertEqual(one.batch_exists(keys), 4)
                    self.assertEqual(one.batch_exists(keys[2:]), 2)
                    self.assertEqual((one.exists(keys[3]), one.exists(keys[4])), (True, False))
                    # Another instance finds them, in a pool of its own, and touches no other page.
                    other = make(layout)
                    rest = [n for n in range(other.page_num) if n not in (2, 4, 6, 8)]
                    before = content(other, rest)
                    two = self.backend(other, is_mla_model=make is mla)
                    self.assertEqual(two.batch_get_v1(keys, pages(other, [2, 4, 6, 8, 10])), [True] * 4 + [False])
                    self.same(other, [2, 4, 6, 8], wanted)
                    self.same(other, rest, before)

    def test_flat_pages_are_the_same(self) -> None:
        """Pages that are moved in place and those that the older interface copies are the same bytes."""
        for layout in LAYOUTS:
            host, keys = mha(layout), hashes(layout, 3)
            backend = self.backend(host)
            wanted = content(host, [5, 6, 7])
            self.assertTrue(backend.batch_set(keys[:2], [host.get_data_page(n * PAGE) for n in (5, 6)]))
            self.assertTrue(backend.set(keys[2], host.get_data_page(7 * PAGE)))
            self.assertEqual(backend.batch_get_v1(keys, pages(host, [10, 11, 12])), [True] * 3)
            self.same(host, [10, 11, 12], wanted)
            into = [host.get_dummy_flat_data_page() for _ in range(3)]
            found = backend.batch_get([*keys, "none"], [*into, host.get_dummy_flat_data_page()])
            self.assertIsNone(found[3])
            for a, b, c in zip(found, into, wanted):
                self.assertIs(a, b)
                self.assertTrue(torch.equal(a.view(torch.uint8), c))
            self.assertTrue(torch.equal(backend.get(keys[0]).view(torch.uint8), wanted[0]))
            self.assertFalse(backend.set("x", torch.zeros(3)))

    def test_restart(self) -> None:
        host, keys = mha(), hashes("restart", 4)
        backend, wanted = self.backend(host), content(host, [0, 1, 2, 3])
        self.assertEqual(backend.batch_set_v1(keys, pages(host, [0, 1, 2, 3])), [True] * 4)
        self.volume.kill()
        # Nothing raises while there is no mount, and nothing is a hit.
        self.assertEqual(backend.batch_get_v1(keys, pages(host, [4, 5, 6, 7])), [False] * 4)
        self.assertEqual(backend.batch_set_v1(hashes("more", 1), pages(host, [0])), [False])
        self.assertEqual((backend.batch_exists(keys), backend.exists(keys[0])), (0, False))
        self.volume.mount()
        fresh = self.backend(mha())
        self.assertEqual(fresh.batch_exists(keys), 4)
        for _ in range(400):
            if backend.batch_exists(keys) == 4:
                break
            threading.Event().wait(0.05)
        self.assertEqual(backend.batch_get_v1(keys, pages(host, [4, 5, 6, 7])), [True] * 4)
        self.same(host, [4, 5, 6, 7], wanted)

    def test_damage_is_a_miss(self) -> None:
        host, keys = mha(), hashes("damage", 3)
        backend, wanted = self.backend(host), content(host, [0, 1, 2])
        self.assertEqual(backend.batch_set_v1(keys, pages(host, [0, 1, 2])), [True] * 3)
        damage(self.volume, backend._kv.pages.name, adapter.named(keys[1]))
        self.assertEqual(backend.batch_get_v1(keys, pages(host, [5, 6, 7])), [True, False, True])
        self.same(host, [5, 7], [wanted[0], wanted[2]])
        self.assertEqual(backend.batch_exists(keys), 1)  # the daemon has looked, and evicted it
        self.assertEqual(backend.batch_set_v1(keys, pages(host, [0, 1, 2])), [True] * 3)
        self.assertEqual(backend.batch_exists(keys), 3)

    def test_full(self) -> None:
        host = mha()
        backend = self.backend(host, {"max_bytes": 1 << 20})
        stored: List[str] = []
        for i in range(40):  # old pages make room
            keys = hashes(("full", i), 8)
            self.assertEqual(backend.batch_set_v1(keys, pages(host, list(range(8)))), [True] * 8)
            stored += keys
        there = backend._kv.pages.present([adapter.named(k) for k in stored])
        self.assertIn(False, there)
        held = backend._kv.pages.hold([adapter.named(k) for k, found in zip(stored, there) if found])
        self.assertEqual(sum(len(pinned) for _, pinned in held), sum(there))
        good = [backend.batch_set_v1(hashes(("over", i), 1), pages(host, [0]))[0] for i in range(40)]
        self.assertFalse(good[-1])  # everything is held: it is not stored, and nothing is raised
        for _, pinned in held:
            pinned.release()
        self.assertEqual(backend.batch_set_v1(hashes("after", 1), pages(host, [0])), [True])

    def test_clear(self) -> None:
        host, keys = mha(), hashes("clear", 3)
        backend, other = self.backend(host), self.backend(mha(), {"weights_epoch": 1})
        for b in (backend, other):
            self.assertEqual(b.batch_set_v1(keys, pages(host, [0, 1, 2])), [True] * 3)
        backend.clear()
        self.assertEqual((backend.batch_exists(keys), other.batch_exists(keys)), (0, 3))

    def test_wrong_arguments(self) -> None:
        host = mha()
        backend = self.backend(host)
        for indices in (pages(host, [0]), None):
            self.assertEqual(backend.batch_set_v1(hashes("w", 2), indices), [False] * 2)
            self.assertEqual(backend.batch_get_v1(hashes("w", 2), indices), [False] * 2)
        self.assertEqual(backend.batch_set_v1([], torch.zeros(0, dtype=torch.int64)), [])

    def test_states_and_windows(self) -> None:
        """Of a state the last page is needed, of a window the last ones: which prefixes can be continued."""
        host, window, state = mha(), mha("layer_first", heads=1), mamba()
        backend, keys = self.backend(host), hashes("hybrid", 8)
        for pool, name in ((host, PoolName.KV), (window, PoolName.SWA), (state, PoolName.MAMBA)):
            backend.register_mem_host_pool_v2(pool, name)
        self.assertFalse(backend._kinds["mamba"].direct)
        info = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
        self.assertEqual(backend.batch_set_v1(keys[:7], pages(host, list(range(7)))), [True] * 7)
        swa = PoolTransfer(name=PoolName.SWA, host_indices=pages(window, [0, 1, 2]), keys=keys[2:5],
                           hit_policy=PoolHitPolicy.TRAILING_PAGES)
        last = PoolTransfer(name=PoolName.SWA, host_indices=pages(window, [3]), keys=keys[6:7],
                            hit_policy=PoolHitPolicy.TRAILING_PAGES)
        states = PoolTransfer(name=PoolName.MAMBA, host_indices=torch.tensor([3, 8]), keys=[keys[3], keys[6]],
                              hit_policy=PoolHitPolicy.TRAILING_PAGES)
        wanted, old = content(state, [3, 8]), content(window, [0, 1, 2])
        self.assertEqual(backend.batch_set_v2([swa, states], info), {PoolName.SWA: [True] * 3, PoolName.MAMBA: [True] * 2})
        self.assertEqual(backend.batch_set_v2([last], info), {PoolName.SWA: [True]})

        def look(*transfers: PoolTransfer) -> Any:
            r = backend.batch_exists_v2(keys, list(transfers))
            return r.kv_hit_pages, {str(k): n for k, n in r.extra_pool_hit_pages.items()}, r.restorable_prefix_pages
        two = PoolTransfer(name=PoolName.SWA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        one = PoolTransfer(name=PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        self.assertEqual(look(), (7, {"kv": 7}, [1, 2, 3, 4, 5, 6, 7]))
        self.assertEqual(look(two), (5, {"kv": 7, "swa": 5}, [4, 5]))
        self.assertEqual(look(one), (7, {"kv": 7, "mamba": 7}, [4, 7]))
        self.assertEqual(look(two, one), (4, {"kv": 7, "swa": 5, "mamba": 7}, [4]))
        self.assertEqual(look(PoolTransfer(name=PoolName.SWA))[0], 0)  # all pages of it
        self.assertEqual(look(PoolTransfer(name=PoolName.DRAFT))[0], 0)  # no such pool
        got = backend.batch_get_v2([
            PoolTransfer(name=PoolName.MAMBA, host_indices=torch.tensor([11, 12, 13]), keys=[keys[3], keys[6], keys[0]]),
            PoolTransfer(name=PoolName.SWA, host_indices=pages(window, [8, 9, 10]), keys=keys[2:5])])
        self.assertEqual(got, {PoolName.MAMBA: [True, True, False], PoolName.SWA: [True] * 3})
        self.same(state, [11, 12], wanted)
        self.same(window, [8, 9, 10], old)

    def test_what_is_kept_apart(self) -> None:
        """Each field alone: no hit of what another configuration has stored."""
        keys = hashes("apart", 2)
        base = self.backend(mha())
        self.assertEqual(base.batch_set_v1(keys, pages(mha(), [0, 1])), [True] * 2)
        self.assertEqual(self.backend(mha()).batch_exists(keys), 2)
        self.assertEqual(self.backend(mha(), dp_rank=3).batch_exists(keys), 2)  # replicas share
        others = [(mha(), {n: v}, {}) for n, v in (
            ("revision", "other"), ("weights_epoch", 1), ("dtype", "bfloat16"), ("quantisation", "fp8"),
            ("scale_format", "e8m0"), ("computed", "rope"), ("tenant", 5))]
        others += [(mha(), {}, {n: v, **more}) for n, v, more in (
            ("model_name", "n", {}), ("tp_rank", 1, {"tp_size": 2}), ("tp_size", 2, {}), ("pp_rank", 1, {"pp_size": 2}),
            ("pp_size", 2, {}), ("attn_cp_rank", 1, {"attn_cp_size": 2}), ("attn_cp_size", 2, {}))]
        others += [(mha("layer_first"), {}, {}), (mha("page_head"), {}, {}), (mha(heads=4), {}, {}),
                   (mha(dtype=torch.bfloat16), {}, {}), (mla(), {}, {})]
        for i, (host, extra, changes) in enumerate(others):
            self.assertEqual(self.backend(host, extra, **changes).batch_exists(keys), 0, f"{i}: {extra} {changes}")

    def test_ranks_of_mla_share(self) -> None:
        host, keys = mla(), hashes("mla", 2)
        first = self.backend(host, is_mla_model=True, tp_size=2)
        self.assertEqual(first.batch_set_v1(keys, pages(host, [0, 1])), [True] * 2)
        self.assertEqual(self.backend(mla(), is_mla_model=True, tp_size=2, tp_rank=1).batch_exists(keys), 2)
        self.assertEqual(self.backend(mla(), is_mla_model=True, tp_size=8, tp_rank=5).batch_exists(keys), 2)
        for name, pool, shared in ((PoolName.MAMBA, mamba(), False), (PoolName.DRAFT, mha(), False), (PoolName.INDEXER, mla(), True)):
            names = set()
            for rank in range(2):
                b = self.backend(mla(), is_mla_model=True, tp_size=2, tp_rank=rank)
                b.register_mem_host_pool_v2(pool, name)
                names.add(b._kinds[name.value].pages.name)
            self.assertEqual(len(names) == 1, shared, name)

    def test_as_documented(self) -> None:
        """The server's own parsers take it, and its loader makes a backend of it."""
        words = shlex.split(block("## SGLang", self.volume.path))
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        args = parser.parse_args(["--model-path", "m", *words])
        self.assertEqual((args.page_size, args.hicache_mem_layout, args.hicache_storage_backend),
                         (64, "page_first", "dynamic"))
        extra, *_, prefix_keys = HybridCacheController.parse_storage_backend_extra_config(
            args.hicache_storage_backend_extra_config)
        self.assertTrue(prefix_keys)
        self.assertEqual(self.backend(mha(), extra).batch_exists(hashes("documented", 1)), 0)

    def test_refused(self) -> None:
        for extra in ({"revision": ""}, {"dtype": "auto"}, {"quantisation": "unknown"}, {"scale_format": None}):
            with self.assertRaises(tuttifs.IdentityError, msg=str(extra)):
                self.backend(mha(), extra)
        with self.assertRaises(tuttifs.IdentityError):
            self.backend(mha(), model_name=None)
        with self.assertRaises(tuttifs.IdentityError):
            self.backend(mla(), is_mla_model=True, dcp_size=2, tp_size=2, logical_page_size=8)
        for extra in ({"path": None}, {"paht": "/x"}, {"tenant": "a"}, {"tenant": -1}, {"lanes": 1.5}):
            with self.assertRaises(tuttifs.InvalidError, msg=str(extra)):
                self.backend(mha(), extra)
        with self.assertRaises(tuttifs.NotMountedError):
            self.backend(mha(), {"path": "/tmp"})


class Controller(Mounted):
    """SGLang's own controller, with its threads."""

    def controller(self, host: Any, **more: Any) -> Any:
        class Allocator:
            def get_kvcache(self) -> Any:
                return host.of
        with get_parallel().override(**ONE):
            controller = HiCacheController(Allocator(), host, PAGE, None, threading.Event(), write_policy="write_through",
                                           storage_backend="dynamic", model_name="m",
                                           storage_backend_extra_config=self.extra(**more))
        self.addCleanup(controller.detach_storage_backend)
        return controller

    def restore(self, controller: Any, host: Any, tokens: List[int]) -> Any:
        """What the scheduler does to have a prompt's pages in the host pool."""
        operation = controller.prefetch("r", tokens)
        controller.prefetch_hit_queue.get(timeout=30)
        n = len(operation.hash_value)
        if n:
            operation.host_indices = host.alloc(n * PAGE)
            controller.prefetch_buffer.put(operation)
            while not controller.ack_prefetch_queue.get(timeout=30).completed_req:
                pass
        return operation

    def test_backup_and_prefetch(self) -> None:
        for v1 in (0, 1):
            host, tokens = mha("layer_first"), list(range(1000 * v1, 1000 * v1 + 10 * PAGE))
            one = self.controller(host, interface_v1=v1)
            indices = host.alloc(9 * PAGE)
            numbers = [int(i) // PAGE for i in indices[::PAGE]]
            wanted = content(host, numbers)
            keys = get_storage_hash_str(tokens, None, page_size=PAGE)
            one.write_storage(indices, tokens[:9 * PAGE], keys[:9], [])
            self.assertEqual(one.ack_backup_queue.get(timeout=30).completed_tokens, 9 * PAGE)
            other = mha("layer_first")
            two = self.controller(other, interface_v1=v1)
            found = self.restore(two, other, tokens)
            self.assertEqual(found.storage_hit_count, 9 * PAGE)
            self.same(other, [int(i) // PAGE for i in found.host_indices[::PAGE]], wanted)
            self.assertEqual(self.restore(two, other, [9, *tokens]).storage_hit_count, 0)

    def hybrid(self) -> Any:
        """SGLang's controller of hybrid models: full attention, a sliding window, and states."""
        host, window, state = mha("layer_first"), mha("layer_first", heads=1), mamba()
        group = HostPoolGroup([PoolEntry(PoolName.KV, host, host.of, lambda layer: layer, is_primary_index_anchor=True),
                               PoolEntry(PoolName.SWA, window, window.of, lambda layer: layer),
                               PoolEntry(PoolName.MAMBA, state, None, lambda layer: layer)])

        class Allocator:
            def get_kvcache(self) -> Any:
                return host.of
        with get_parallel().override(**ONE):
            controller = HybridCacheController(
                Allocator(), group, PAGE, None, threading.Event(), write_policy="write_through", storage_backend="dynamic",
                model_name="m", storage_backend_extra_config=self.extra(interface_v1=1))
        self.addCleanup(controller.detach_storage_backend)
        return controller, host, window, state

    def test_windows_and_states(self) -> None:
        """A prompt is backed up, with states at its third and seventh page and a window at its end; of another prompt
        with the same beginning as much is prefetched as all pools can continue."""
        one, host, window, state = self.hybrid()
        tokens = list(range(5000, 5000 + 7 * PAGE))
        keys = get_storage_hash_str(tokens, None, page_size=PAGE)
        trailing = PoolHitPolicy.TRAILING_PAGES

        def backup(first: int, end: int, states: int) -> Any:
            indices, last = host.alloc((end - first) * PAGE), window.alloc(2 * PAGE)
            numbers.extend(int(i) // PAGE for i in indices[::PAGE])
            saved = state.alloc(1)
            one.write_storage(indices, tokens[first * PAGE:end * PAGE], keys[first:end], keys[:first], [
                PoolTransfer(name=PoolName.SWA, host_indices=last, keys=keys[end - 2:end], hit_policy=trailing),
                PoolTransfer(name=PoolName.MAMBA, host_indices=saved, keys=[keys[states]], hit_policy=trailing)])
            done = one.ack_backup_queue.get(timeout=30)
            self.assertEqual(done.completed_tokens, (end - first) * PAGE)
            return content(window, [int(i) // PAGE for i in last[::PAGE]]), content(state, [int(saved[0])])
        numbers: List[int] = []
        saved = {3: backup(0, 3, 2), 7: backup(3, 7, 6)}
        for length, hit in ((7, 7), (6, 3), (3, 3), (2, 0)):
            with self.subTest(length=length):
                two, into, windows, states = self.hybrid()
                transfers = [PoolTransfer(name=PoolName.SWA, host_indices=windows.alloc(2 * PAGE), keys=keys[:2],
                                          hit_policy=trailing),
                             PoolTransfer(name=PoolName.MAMBA, host_indices=states.alloc(1), keys=keys[:1],
                                          hit_policy=trailing)]
                operation = two.prefetch(CacheRequestHandle("r", 0), tokens[:length * PAGE], extra_pools=transfers)
                two.prefetch_hit_queue.get(timeout=30)
                self.assertEqual(operation.storage_hit_count, hit * PAGE)
                if hit:
                    operation.host_indices = into.alloc(hit * PAGE)
                    two.prefetch_buffer.put(operation)
                    hits: Dict[str, int] = {}
                    while not (ack := two.ack_prefetch_queue.get(timeout=30)).completed_req:
                        hits.update({n: pages for n, pages in (ack.pool_hits or {}).items() if pages})
                    self.assertEqual(hits, {"swa": 2, "mamba": 1})
                    for pool, indices, wanted in zip(
                            (into, windows, states), (operation, *transfers), (content(host, numbers[:hit]), *saved[hit])):
                        found = [int(i) // pool.page_size for i in indices.host_indices[::pool.page_size]]
                        self.same(pool, found, wanted)


if __name__ == "__main__":
    unittest.main()
