"""LMCache's L2 adapter: with the installed package's storage manager and controllers, on a real mount."""

import argparse
import json
import math
import os
import shlex
import sys
import time
import unittest
import unittest.mock
from typing import Any, Dict, List

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests"))

import torch  # noqa: E402
from damaged import damage  # noqa: E402
from documented import block  # noqa: E402
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec  # noqa: E402
from lmcache.v1.distributed.config import (  # noqa: E402
    EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig)
from lmcache.v1.distributed.internal_api import L2AdapterListener  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import (  # noqa: E402
    add_l2_adapters_args, parse_args_to_l2_adapters_config)
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager  # noqa: E402
from lmcache.v1.distributed.storage_manager import StorageManager  # noqa: E402
from lmcache.v1.multiprocess.token_hasher import TokenHasher  # noqa: E402
from volume import Volume, need_mount  # noqa: E402

import tuttifs  # noqa: E402
from tuttifs import lmcache_mp as adapter  # noqa: E402

CHUNK, MODEL = 16, "org/m"
KV = MemoryLayoutDesc([torch.Size([2, 3, CHUNK, 64])], [torch.bfloat16])
STATE = MemoryLayoutDesc([torch.Size([3, 50]), torch.Size([7])], [torch.float32, torch.uint8])
LAYOUTS = {0: KV, 1: STATE}
HASHER = TokenHasher(CHUNK, "blake3")
SAYS = {"revision": "1", "dtype": "bfloat16", "quantisation": "none", "scale_format": "none"}


def rank(n: int = 0, of: int = 1) -> int:
    return ObjectKey.ComputeKVRank(of, n, of, n)


def chunks(tokens: List[int], group: int = 0, **changes: Any) -> List[ObjectKey]:
    """The keys of a prompt's whole chunks, as the server makes them."""
    hashes = HASHER.compute_chunk_hashes(tokens)
    return [ObjectKey(**{"chunk_hash": h, "model_name": MODEL, "kv_rank": rank(), "object_group_id": group, **changes})
            for h in hashes]


def prompt(what: int, n: int) -> List[int]:
    return [what * 1000 + i for i in range(n * CHUNK + 3)]


def octets(o: Any) -> torch.Tensor:
    """An object's bytes, without what its memory is rounded up by."""
    return o.raw_tensor.view(torch.uint8)[:o.get_size()]


def eventually(what: Any) -> Any:
    limit = time.monotonic() + 30
    while not (found := what()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


class Listener(L2AdapterListener):
    def __init__(self) -> None:
        self.stored: List[ObjectKey] = []
        self.deleted: List[ObjectKey] = []

    def on_l2_keys_stored(self, keys: List[ObjectKey], sizes: List[int]) -> None:
        self.stored += keys

    def on_l2_keys_accessed(self, keys: List[ObjectKey]) -> None:
        pass

    def on_l2_keys_deleted(self, keys: List[ObjectKey]) -> None:
        self.deleted += keys


class Server(unittest.TestCase):
    """The server's storage, as its modules call it."""

    @classmethod
    def setUpClass(cls) -> None:
        need_mount()
        cls.volume = cls.enterClassContext(Volume())

    def params(self, more: Any = None, **model: Any) -> Dict[str, Any]:
        says = {**SAYS, "computed": self.id(), **model}
        return {"path": self.volume.path, "chunk_size": CHUNK, "retry_seconds": 0.05, "models": {MODEL: says}, **(more or {})}

    @staticmethod
    def memory() -> L1MemoryManagerConfig:
        return L1MemoryManagerConfig(size_in_bytes=8 << 20, use_lazy=False, shm_name="")

    def server(self, more: Any = None, **model: Any) -> StorageManager:
        """By LMCache's own command line and factory."""
        given = {"type": "plugin", "module_path": "tuttifs.lmcache_mp", "class_name": "TuttifsL2Adapter",
                 "adapter_params": self.params(more, **model)}
        parser = add_l2_adapters_args(argparse.ArgumentParser())
        adapters = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", json.dumps(given)]))
        made = StorageManager(StorageManagerConfig(L1ManagerConfig(self.memory()), EvictionConfig("noop"), adapters))
        self.addCleanup(made.close)
        return made

    @staticmethod
    def adapter(server: StorageManager) -> Any:
        one, = server._l2_adapters.values()
        return one

    def write(self, server: StorageManager, keys: List[ObjectKey], layout: Any = KV) -> List[torch.Tensor]:
        """What an engine computes goes to the server, and from there to the mount. Its bytes."""
        objects = server.reserve_write(keys, layout)
        self.assertEqual(set(objects), set(keys))
        for o in objects.values():
            octets(o).copy_(torch.randint(0, 256, (o.get_size(),), dtype=torch.uint8))
        wanted = [octets(objects[k]).clone() for k in keys]
        server.finish_write(keys)
        return wanted

    def written(self, server: StorageManager, keys: List[ObjectKey], layout: Any = KV) -> List[torch.Tensor]:
        wanted = self.write(server, keys, layout)
        one = self.adapter(server)
        eventually(lambda: all(there for k in keys for there in self.present(one, [k])))
        return wanted

    @staticmethod
    def present(one: Any, keys: List[ObjectKey]) -> List[bool]:
        layouts = [LAYOUTS[k.object_group_id] for k in keys]
        kinds = [one._kind(adapter.form(k, d.shapes, d.dtypes)) for k, d in zip(keys, layouts)]
        return [kind.pages.present([adapter.named(k)])[0] if kind else False for k, kind in zip(keys, kinds)]

    def locked(self, a: Any, keys: List[ObjectKey]) -> List[int]:
        """What a lookup finds, and locks. Its answer is given once."""
        task = a.submit_lookup_and_lock_task(keys, LAYOUTS)
        found = eventually(lambda: a.query_lookup_and_lock_result(task))
        self.assertIsNone(a.query_lookup_and_lock_result(task))
        return sorted(found.get_indices_list())

    def prefetch(self, server: StorageManager, *rows: Any) -> List[List[int]]:
        """Which objects of each row are in the server's memory then; a row is keys, and a window."""
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, keys[0].object_group_id, LAYOUTS[keys[0].object_group_id], window)
                                 for keys, window in rows])
        handle = server.submit_prefetch_task(spec)
        self.assertTrue(server.wait_prefetch_status(handle, 30))
        result = server.query_prefetch_status(handle)
        return [sorted(row.get_indices_list()) for row in result.hit_cells]

    def read(self, server: StorageManager, keys: List[ObjectKey]) -> List[torch.Tensor]:
        with server.read_prefetched_results(keys) as objects:
            found = [octets(o).clone() for o in objects]
        server.finish_read_prefetched(keys)
        return found

    def same(self, found: List[torch.Tensor], wanted: List[torch.Tensor]) -> None:
        self.assertEqual(len(found), len(wanted))
        for a, b in zip(found, wanted):
            self.assertTrue(torch.equal(a, b))

    def test_store_and_prefetch(self) -> None:
        """What one server has stored, another restores, in place."""
        one, keys = self.server(), chunks(prompt(1, 6))
        wanted = self.written(one, keys[:5])
        two = self.server()
        self.assertEqual(self.prefetch(two, (keys, -1)), [[0, 1, 2, 3, 4]])
        self.same(self.read(two, keys[:5]), wanted)
        held = self.adapter(two)
        self.assertEqual(held._holds._held, {})  # LMCache has unlocked what it loaded
        kind, = held._kinds.values()
        self.assertIsNone(kind._staging._region)
        self.assertEqual(self.prefetch(two, (chunks(prompt(2, 3)), -1)), [[]])
        status = held.report_status()
        self.assertEqual((status["is_healthy"], status["pools"]), (True, [kind.pages.name]))

    def test_windows_and_states(self) -> None:
        """A group of states needs its last object only: the longest prefix that all groups can continue."""
        one, tokens = self.server(), prompt(1, 6)
        full, state = chunks(tokens), chunks(tokens, 1)
        self.written(one, full)
        wanted = self.written(one, [state[1], state[3]], STATE)
        two = self.server()
        hit = self.prefetch(two, (full, -1), (state, 1))
        self.assertEqual(hit, [[0, 1, 2, 3], [3]])
        self.same(self.read(two, [state[3]]), wanted[1:])

    def test_copies(self) -> None:
        """Objects outside of the memory that LMCache describes."""
        one, keys = self.server({"staging_bytes": 1}), chunks(prompt(1, 3))
        self.adapter(one)._region = None
        wanted = self.written(one, keys)
        two = self.server()
        self.adapter(two)._region = None
        self.assertEqual(self.prefetch(two, (keys, -1)), [[0, 1, 2]])
        self.same(self.read(two, keys), wanted)
        kind, = self.adapter(two)._kinds.values()
        self.assertIsNotNone(kind._staging._region)

    def test_locks(self) -> None:
        """What a lookup has found stays until it is unlocked, and is unlocked key by key."""
        one, keys = self.server(), chunks(prompt(1, 4))
        self.written(one, keys[:3])
        a = self.adapter(one)
        for _ in range(2):
            self.assertEqual(self.locked(a, keys), [0, 1, 2])
        kind, = a._kinds.values()
        self.volume.run("evict", self.volume.path, kind.pages.name, "--all")
        self.assertEqual(self.present(a, keys), [True] * 3 + [False])
        a.submit_unlock(keys)
        a.submit_unlock(keys[:2])
        self.volume.run("evict", self.volume.path, kind.pages.name, "--all")
        self.assertEqual(self.present(a, keys), [True] * 3 + [False])  # one pin for the run, to its last key
        a.submit_unlock(keys[2:])
        a.submit_unlock(keys)  # more than there were
        self.volume.run("evict", self.volume.path, kind.pages.name, "--all")
        self.assertEqual(self.present(a, keys), [False] * 4)

    def test_evictions_are_told(self) -> None:
        """LMCache's listeners hear what has been stored, and what the mount has evicted; usage follows."""
        one, listener = self.server(), Listener()
        a = self.adapter(one)
        a.register_listener(listener)
        keys = chunks(prompt(1, 3), cache_salt="customer")
        self.written(one, keys)
        eventually(lambda: len(listener.stored) == 3)
        kind, = a._kinds.values()
        size = kind.pages.bytes
        self.assertEqual(dict(a.get_usage().bytes_by_cache_salt), {"customer": 3 * size})
        self.volume.run("evict", self.volume.path, kind.pages.name, adapter.named(keys[1]).hex())
        a._heard = 0.0
        self.prefetch(one, (chunks(prompt(9, 1)), -1))
        self.assertEqual(eventually(lambda: listener.deleted), [keys[1]])
        self.assertEqual(a.get_usage().total_bytes_used, 2 * size)
        a.delete([keys[0], keys[1]])
        self.assertEqual(listener.deleted, [keys[1], keys[0]])
        self.assertEqual((a.get_usage().total_bytes_used, self.present(a, keys)), (size, [False, False, True]))

    def test_restart(self) -> None:
        one, keys = self.server(), chunks(prompt(1, 3))
        wanted = self.written(one, keys)
        self.volume.kill()
        two_keys = chunks(prompt(2, 2))
        self.write(one, two_keys)  # LMCache goes on with its own memory
        self.assertEqual(self.prefetch(one, (chunks(prompt(3, 2)), -1)), [[]])
        self.volume.mount()
        two = self.server()
        self.assertEqual(self.prefetch(two, (keys, -1)), [[0, 1, 2]])
        self.same(self.read(two, keys), wanted)
        a = self.adapter(one)
        eventually(lambda: a.report_status()["is_healthy"])
        self.written(one, chunks(prompt(4, 2)))

    def test_damage_is_a_miss(self) -> None:
        one, keys = self.server(), chunks(prompt(1, 3))
        wanted = self.written(one, keys)
        kind, = self.adapter(one)._kinds.values()
        damage(self.volume, kind.pages.name, adapter.named(keys[1]))
        two = self.server()
        self.assertEqual(self.prefetch(two, (keys, -1)), [[0]])
        self.same(self.read(two, keys[:1]), wanted[:1])
        self.assertEqual(self.present(self.adapter(two), keys), [True, False, True])

    def test_full(self) -> None:
        """Where everything is held nothing is stored, which LMCache is told; and nothing is raised."""
        a = adapter.TuttifsL2Adapter(self.params({"max_bytes": 1 << 20}))
        self.addCleanup(a.close)
        memory = L1MemoryManager(self.memory())
        self.addCleanup(memory.close)
        objects = memory.allocate(KV, 1)[1]
        self.addCleanup(memory.free, objects)
        held: List[ObjectKey] = []
        for i in range(200):
            keys = chunks(prompt(i, 1))
            task = a.submit_store_task(keys, objects)
            result = eventually(a.pop_completed_store_tasks)[task]
            if not result.is_successful():
                break
            if self.locked(a, keys):
                held += keys
        self.assertTrue(0 < len(held) < 200)
        self.assertFalse(result.is_successful())
        a.submit_unlock(held)

    def test_what_is_kept_apart(self) -> None:
        """Each field alone: no hit of what another configuration has stored."""
        tokens = prompt(1, 2)
        self.written(self.server(), chunks(tokens))

        def hits(more: Any = None, changes: Any = None, **model: Any) -> List[int]:
            a = adapter.TuttifsL2Adapter(self.params(more, **model))
            self.addCleanup(a.close)
            return self.locked(a, chunks(tokens, **(changes or {})))
        self.assertEqual(hits(), [0, 1])
        for n, v in (("revision", "2"), ("weights_epoch", 1), ("dtype", "float16"), ("quantisation", "fp8"),
                     ("scale_format", "e8m0"), ("computed", "rope"), ("tenant", 5)):
            self.assertEqual(hits(**{n: v}), [], n)
        self.assertEqual(hits({"chunk_size": 2 * CHUNK}), [])
        for n, v in (("kv_rank", rank(0, 2)), ("cache_salt", "other"), ("model_name", "org/n")):
            self.assertEqual(hits({"models": {m: {**SAYS, "computed": self.id()} for m in (MODEL, "org/n")}}, {n: v}), [], n)
        self.assertEqual(hits(changes={"model_name": "org/unknown"}), [])

    def test_weak_hash(self) -> None:
        """A hash that is not made to tell prompts apart for good is not believed."""
        a = adapter.TuttifsL2Adapter(self.params())
        self.addCleanup(a.close)
        keys = [ObjectKey(ObjectKey.IntHash2Bytes(7), MODEL, rank())]
        with self.assertLogs("tuttifs.lmcache", "WARNING") as said:
            for _ in range(2):
                self.assertEqual(self.locked(a, keys), [])
        self.assertEqual(len(said.output), 1)
        self.assertIn("--hash-algorithm", said.output[0])

    def test_refusals(self) -> None:
        """An error that passes keeps a model out for a while, one that lasts for good."""
        f = adapter.form(chunks(prompt(1, 1))[0], KV.shapes, KV.dtypes)
        for error, lasts in ((tuttifs.AgainError, False), (tuttifs.NoSpaceError, False), (tuttifs.QuotaError, False),
                             (tuttifs.InvalidError, True), (tuttifs.ExistsError, True)):
            a = adapter.TuttifsL2Adapter(self.params({"retry_seconds": 600.0}))
            self.addCleanup(a.close)
            with unittest.mock.patch.object(adapter, "Kind", side_effect=error("no room")) as tried:
                with self.assertLogs("tuttifs.lmcache", "WARNING") as said:
                    self.assertIsNone(a._kind(f))
                self.assertIsNone(a._kind(f))
                self.assertEqual((tried.call_count, len(said.output)), (1, 1))
            self.assertEqual(a._refused[f] == math.inf, lasts)
            if not lasts:
                a._refused[f] = time.monotonic()
                self.assertIsInstance(a._kind(f), adapter.Kind)

    def test_lookup_that_fails(self) -> None:
        """A lookup that LMCache gets no hits of holds nothing."""
        one, keys = self.server(), chunks(prompt(1, 3))
        self.written(one, keys)
        a = self.adapter(one)
        for fails in ("_notify_keys_accessed", "_hear"):
            a._heard = 0.0
            with unittest.mock.patch.object(a, fails, side_effect=RuntimeError("a listener's")), \
                    self.assertLogs("tuttifs.lmcache", "ERROR"):
                self.assertEqual(self.locked(a, keys), [])
            self.assertEqual(a._holds._held, {})
        self.assertEqual(self.locked(a, keys), [0, 1, 2])
        a.submit_unlock(keys)

    def test_closed(self) -> None:
        """What was begun has ended when the adapter is closed, and nothing is held any more."""
        one, keys = self.server(), chunks(prompt(1, 2))
        self.written(one, keys)
        a = adapter.TuttifsL2Adapter(self.params())
        fds = {a.get_store_event_fd(), a.get_lookup_and_lock_event_fd(), a.get_load_event_fd()}
        self.assertEqual(len(fds), 3)
        task = a.submit_lookup_and_lock_task(keys, LAYOUTS)
        a.close()
        self.assertEqual(a.query_lookup_and_lock_result(task).popcount(), 2)
        kind, = self.adapter(one)._kinds.values()
        self.volume.run("evict", self.volume.path, kind.pages.name, "--all")
        self.assertEqual(self.present(self.adapter(one), keys), [False, False])

    def test_as_documented(self) -> None:
        words = shlex.split(block("### Set-up of the server", self.volume.path, MODEL))
        self.assertEqual(words[:2], ["lmcache", "server"])
        parser = add_l2_adapters_args(argparse.ArgumentParser())
        config, = parse_args_to_l2_adapters_config(parser.parse_known_args(words[2:])[0]).adapters
        made = create_l2_adapter(config)
        self.addCleanup(made.close)
        self.assertEqual((made._options.chunk_size, list(made._options.models)), (256, [MODEL]))
        self.assertEqual(words[words.index("--chunk-size") + 1], "256")

    def test_interface(self) -> None:
        self.assertTrue(issubclass(adapter.TuttifsL2Adapter, L2AdapterInterface))
        self.assertEqual(adapter.TuttifsL2Adapter.__abstractmethods__, frozenset())

    def test_refused(self) -> None:
        for wrong in ({"chunk_size": 0}, {"chunk_size": "16"}, {"models": {}}, {"models": [MODEL]}, {"paht": "/x"},
                      {"path": ""}, {"models": {MODEL: {**SAYS, "revison": "1"}}}):
            with self.assertRaises(tuttifs.InvalidError, msg=str(wrong)):
                adapter.TuttifsL2Adapter(self.params(wrong))
        for wrong in ({"revision": ""}, {"dtype": "auto"}, {"quantisation": "unknown"}, {"scale_format": ""}):
            with self.assertRaises(tuttifs.IdentityError, msg=str(wrong)):
                adapter.TuttifsL2Adapter(self.params(**wrong))
        with self.assertRaises(tuttifs.NotMountedError):
            adapter.TuttifsL2Adapter(self.params({"path": "/tmp"}))


if __name__ == "__main__":
    unittest.main()
