"""Both sides of the connector without vLLM: every byte of what is stored and restored, in all layouts, for several
ranks and groups. TUTTIFS_TEST_DEVICE=cuda runs them on a GPU."""

import ctypes
import dataclasses
import gc
import mmap
import os
import random
import sys
import time
import unittest
import unittest.mock
import weakref
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests"))

from volume import Volume, need_mount

import tuttifs
import tuttifs.vllm.worker
from tuttifs.vllm import identity, options, scheduler
from tuttifs.vllm.files import Group
from tuttifs.vllm.messages import PoolSpec, Report, Step
from tuttifs.vllm.sleeping import follow
from tuttifs.vllm.worker import Caches, Rank, Worker

DEVICE = torch.device(os.environ.get("TUTTIFS_TEST_DEVICE", "cpu"))
BLOCKS, HEADS, TOKENS, WIDTH, FILE = 256, 2, 8, 48, 16
BLOCK_BYTES = HEADS * TOKENS * WIDTH * 2
FULL = Group(0, ("a", "b", "c"), TOKENS, (BLOCK_BYTES,) * 3)
WINDOW = Group(1, ("w",), TOKENS, (BLOCK_BYTES,), window=20)  # 2 files


def plain(layers: int) -> List[torch.Tensor]:
    return [torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16, device=DEVICE) for _ in range(layers)]


def tokens_first(layers: int) -> List[torch.Tensor]:
    return [torch.zeros(BLOCKS, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
            for _ in range(layers)]


def interleaved(layers: int) -> List[torch.Tensor]:
    whole = torch.zeros(BLOCKS, layers, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    return [whole[:, i] for i in range(layers)]


def padded(layers: int) -> List[torch.Tensor]:
    return [torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH + 16, dtype=torch.bfloat16, device=DEVICE)[..., :WIDTH]
            for _ in range(layers)]


LAYOUTS = (plain, tokens_first, interleaved, padded)


class Shared:
    """An engine's scheduler's side, and its turns. Where its ranks are is for those who inherit from it."""

    ended: List[Tuple[Set[str], Set[str], Set[int]]]  # of each rank: what ended in the last step

    def __init__(self, test: "Mounted", groups: Sequence[Group], ranks: int, replicas: int, **more: Any) -> None:
        self.groups = groups
        self.options = options.Options.parse({"path": test.volume.path, "staging_bytes": 1 << 20, "retry_seconds": 0.05,
                                              **more})
        facts = identity.Facts("m", test.id(), 0, {"x": 1}, "bfloat16", "none", ranks, 1, 1, FILE)
        specs = []
        for g in groups:
            fields = identity.identity(facts, identity.GroupFacts(g, f"group {g.index}", "HNC", "bfloat16", "none"))
            specs.append(PoolSpec(g, identity.pool_name(fields), fields, test.id()[-30:] if len(groups) > 1 else "",
                                  tuple(identity.objects(g, FILE, ranks // replicas))))
        self.specs = specs
        self.scheduling = scheduler.Scheduling(self.options, FILE, specs)
        test.addCleanup(self.scheduling.close)
        self.events: List[Any] = []

    def run(self, step: Step) -> Report:
        """What a step does in every rank, in vLLM's order."""
        raise NotImplementedError

    def turn(self, scheduled: Optional[Dict[str, int]] = None, tables: Any = None) -> None:
        step = self.scheduling.step(scheduled or {}, lambda name: tables)
        report = self.run(step)
        self.scheduling.heard(report, set.intersection(*(e[0] for e in self.ended)) if self.ended else ())
        self.events += self.scheduling.take_events()

    def store(self, r: Any, tables: Any, tokens: Optional[int] = None) -> None:
        """Computes a request, and waits until what is stored of it is known."""
        self.scheduling.matched(r, 0)
        self.turn({r.request_id: len(r.all_token_ids) if tokens is None else tokens}, tables)
        self.settle()

    def settle(self) -> None:
        limit = time.monotonic() + 30
        while self.scheduling._stores:
            assert time.monotonic() < limit, "a store does not end"
            self.turn()
            time.sleep(0.01)

    def matched(self, r: Any, local: int = 0) -> int:
        """What is to be loaded, asked until the ranks have said so."""
        n = self.scheduling.matched(r, local)
        if n is None:
            self.turn()
            n = self.scheduling.matched(r, local)
        assert n is not None
        return n

    def load(self, r: Any, tables: Any, local: int = 0) -> int:
        """Loads what is stored of a request. Returns the tokens; `bad` and `failed` are what the ranks said."""
        n = self.matched(r, local)
        self.scheduling.allocated(r, tables, n)
        self.bad, self.failed = set(), set()
        report = self.run(self.scheduling.step({}, lambda name: tables))
        ended: List[Set[str]] = [set() for _ in self.ended]
        limit = time.monotonic() + 30
        while n:
            for e, (done, failed, bad) in zip(ended, self.ended):
                e |= done
                self.failed |= failed
                self.bad |= bad
            self.scheduling.heard(report, set.intersection(*ended))
            if self.options.layerwise or all(r.request_id in e for e in ended):
                break
            assert time.monotonic() < limit, "a load does not end"
            report = self.run(self.scheduling.step({}, lambda name: None))
        return n


class Side(Shared):
    """An engine whose ranks are in this process, with the tensors of each."""

    def __init__(self, test: "Mounted", groups: Sequence[Group] = (FULL,), layout: Any = plain, ranks: int = 1,
                 replicas: int = 1, **more: Any) -> None:
        super().__init__(test, groups, ranks, replicas, **more)
        self.caches: List[Dict[str, torch.Tensor]] = []
        self.workers: List[Worker] = []
        for rank in range(ranks):
            caches = {name: t for g in groups for name, t in zip(g.layers, layout(len(g.layers)))}
            self.caches.append(caches)
            worker = Worker(self.options, Caches(groups, BLOCKS, caches),
                            Rank(rank // replicas, rank % replicas, replicas))
            test.addCleanup(worker.close)
            self.workers.append(worker)

    def fill(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for caches in self.caches:
            for t in caches.values():
                t.copy_(torch.randn(t.shape, generator=g).to(torch.bfloat16))

    def run(self, step: Step) -> Report:
        reports = []
        self.ended: List[Tuple[set, set, set]] = []
        for w in self.workers:
            w.begin(step)
        for w in self.workers:
            w.start_loads(step)
        for w in self.workers:
            for g in self.groups:
                for name in g.layers:
                    w.wait_for_layer(name)
                    w.layer_done(name)
            w.gather(step)
        for w in self.workers:
            self.ended.append(w.finished_loads())
            reports.append(w.report())
        whole = reports[0]
        for r in reports[1:]:
            whole = whole.merge(r)
        return whole

    def block(self, rank: int, name: str, block: int) -> torch.Tensor:
        return self.caches[rank][name][block]


def request(name: str, tokens: List[int]) -> Any:
    return SimpleNamespace(request_id=name, all_token_ids=tokens, num_computed_tokens=0, num_prompt_tokens=len(tokens),
                           lora_request=None, cache_salt=None, mm_features=[], kv_transfer_params=None)


def prompt(seed: int, files: int) -> List[int]:
    r = random.Random(seed)
    return [r.randrange(1000) for _ in range(files * FILE + 5)]


def table(seed: int, files: int) -> List[int]:
    return random.Random(seed).sample(range(1, BLOCKS), files * FILE // TOKENS + 1)


class Mounted(unittest.TestCase):
    volume: Volume

    @classmethod
    def setUpClass(cls) -> None:
        need_mount()
        cls.volume = Volume()
        cls.addClassCleanup(cls.volume.close)

    def same(self, a: Side, at: List[int], b: Side, bt: List[int], group: Group = FULL, first: int = 0,
             last: Optional[int] = None, ranks: Optional[List[int]] = None) -> None:
        """Blocks first to last - 1 of b's table hold what a's do."""
        for rank in range(len(b.workers)):
            for name in group.layers:
                for i in range(first, len(bt) if last is None else last):
                    source = (ranks or list(range(len(b.workers))))[rank]
                    self.assertTrue(torch.equal(a.block(source, name, at[i]), b.block(rank, name, bt[i])),
                                    (rank, name, i))

    def damage(self, side: Shared, key: bytes, line: int = 0) -> None:
        for directory, _, names in os.walk(os.path.join(self.volume.path, side.specs[0].name)):
            for n in names:
                if n == key.hex():
                    extents = os.getxattr(os.path.join(directory, n), "user.tuttifs.extents").decode()
                    words = extents.splitlines()[line].split()
                    with open(self.volume.drives[int(words[1])], "r+b") as f:
                        f.seek(int(words[2]) * 4096 + 100)
                        byte = f.read(1)[0]
                        f.seek(int(words[2]) * 4096 + 100)
                        f.write(bytes([byte ^ 1]))
                    return
        self.fail("no such file")


class Bytes(Mounted):
    def test_layouts(self) -> None:
        """Stored from one layout, restored to another: a file holds blocks in the order of their axes."""
        for i, layout in enumerate(LAYOUTS):
            a = Side(self, layout=layout)
            a.fill(i)
            at, tokens = table(i, 4), prompt(i, 4)
            a.store(request("a", tokens), [at])
            self.assertEqual(len(a.events), 4)
            for other in LAYOUTS:
                with self.subTest(stored=layout.__name__, loaded=other.__name__):
                    b, bt = Side(self, layout=other), table(50 + i, 4)
                    self.assertEqual(b.load(request("b", tokens), [bt]), 4 * FILE)
                    self.same(a, at, b, bt, last=8)
                    self.assertEqual(b.bad, set())
                    untouched = set(range(BLOCKS)) - set(bt[:8])
                    self.assertFalse(any(b.block(0, n, x).any() for n in FULL.layers for x in untouched))

    def test_kernel_blocks(self) -> None:
        a, b = Side(self), Side(self)
        for s in (a, b):  # the same memory, as blocks of half the tokens
            for name in FULL.layers:
                half = torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, WIDTH, dtype=torch.bfloat16, device=DEVICE)
                s.caches[0][name] = half
            s.workers[0].caches = Caches(s.groups, BLOCKS, s.caches[0])
        a.fill(1)
        at, bt, tokens = table(1, 3), table(2, 3), prompt(200, 3)
        a.store(request("a", tokens), [at])
        self.assertEqual(b.load(request("b", tokens), [bt]), 3 * FILE)
        for name in FULL.layers:
            for i in range(6):
                for k in range(2):
                    self.assertTrue(torch.equal(a.block(0, name, 2 * at[i] + k), b.block(0, name, 2 * bt[i] + k)))

    def test_more_than_staging_memory_holds(self) -> None:
        for layerwise in (False, True):
            a, b = Side(self), Side(self, layerwise=layerwise)
            a.fill(3)
            files = 100
            at, bt, tokens = table(3, files), table(4, files), prompt(300 + layerwise, files)
            a.store(request("a", tokens), [at])
            a_end = a.workers[0]._end
            assert a_end is not None
            self.assertLess(a_end.stores.count, files)
            self.assertEqual(b.load(request("b", tokens), [bt]), files * FILE)
            self.same(a, at, b, bt, last=2 * files)

    def test_what_the_engine_has_stays(self) -> None:
        a, b = Side(self), Side(self)
        a.fill(5)
        at, bt, tokens = table(5, 4), table(6, 4), prompt(400, 4)
        a.store(request("a", tokens), [at])
        self.assertEqual(b.load(request("b", tokens), [bt], local=FILE + TOKENS), 2 * FILE + TOKENS)
        self.same(a, at, b, bt, first=3, last=8)
        self.assertFalse(any(b.block(0, n, x).any() for n in FULL.layers for x in bt[:3]))

    def test_a_partial_tail_is_left_out(self) -> None:
        a = Side(self)
        a.fill(7)
        tokens = prompt(500, 2)
        a.store(request("a", tokens), [table(7, 2)], tokens=FILE + TOKENS)  # one file and a half are computed
        self.assertEqual(Side(self).load(request("b", tokens), [table(8, 2)]), FILE)


class Failures(Mounted):
    def test_damage(self) -> None:
        for line, layerwise in ((0, False), (1, True), (2, False)):  # objects of layers
            a, b = Side(self), Side(self, layerwise=layerwise)
            a.fill(1)
            b.fill(2)
            at, bt, tokens = table(1, 4), table(2, 4), prompt(600 + line, 4)
            a.store(request("a", tokens), [at])
            keys = tuttifs.keys(tokens, FILE)
            self.damage(a, keys[1], line)
            r = request("b", tokens)
            self.assertEqual(b.load(r, [bt]), 4 * FILE)
            self.assertEqual((b.failed, b.bad), ({"b"}, set(bt[2:4])))
            self.assertFalse(any(b.block(0, n, x).any() for n in FULL.layers for x in bt[2:4]))
            self.same(a, at, b, bt, last=2)
            self.same(a, at, b, bt, first=4, last=8)
            # Evicted; and the request computes, and stores what was damaged, and only that.
            self.assertEqual(b.matched(r), 0)
            self.assertEqual(b.matched(request("c", tokens), 0), FILE)
            r.num_computed_tokens = FILE
            b.turn({"b": 3 * FILE}, [bt])
            b.settle()
            self.assertEqual(len(b.events), 1)
            self.assertEqual(b.matched(request("d", tokens), 0), 4 * FILE)

    def test_a_failed_load_taints_its_step(self) -> None:
        a, b = Side(self), Side(self, layerwise=True)
        a.fill(1)
        at, bt, tokens, others = table(1, 2), table(2, 2), prompt(700, 2), prompt(701, 1)
        a.store(request("a", tokens), [at])
        self.damage(a, tuttifs.keys(tokens, FILE)[0])
        r, o = request("b", tokens), request("o", others)
        b.matched(o, 0)
        self.assertEqual(b.matched(r), 2 * FILE)
        b.scheduling.allocated(r, [bt], 2 * FILE)
        first = b.scheduling.step({"o": FILE, "b": 1}, lambda name: [bt])
        self.assertEqual(len(first.stores), 1)
        report = b.run(first)
        # A step that was planned before the first one's failure was known is no better.
        p = request("p", prompt(702, 1))
        b.matched(p, 0)
        second = b.run(b.scheduling.step({"p": FILE}, lambda name: [table(9, 2)]))
        b.scheduling.heard(report, ())
        b.scheduling.heard(second, ())
        b.settle()
        self.assertEqual(b.scheduling.take_events(), [])
        self.assertEqual(b.workers[0].counts.take()["tainted_files"], 2)
        for s in (o, p):
            self.assertEqual(b.matched(request("again" + s.request_id, s.all_token_ids), 0), 0)
        q = request("q", prompt(703, 1))
        b.store(q, [table(10, 2)])
        self.assertEqual(b.matched(request("q2", q.all_token_ids), 0), FILE)

    def test_a_failed_load_is_reported_before_the_stores_are_gathered(self) -> None:
        """In the order that vLLM has with speculative decoding."""
        a, b = Side(self), Side(self, layerwise=True)
        a.fill(1)
        at, bt, tokens, o = table(1, 2), table(2, 2), prompt(710, 2), request("o", prompt(711, 1))
        a.store(request("a", tokens), [at])
        self.damage(a, tuttifs.keys(tokens, FILE)[0])
        r, w = request("b", tokens), b.workers[0]
        b.matched(o, 0)
        b.scheduling.allocated(r, [bt], b.matched(r))
        step = b.scheduling.step({"o": FILE, "b": 1}, lambda name: [table(9, 1)])
        load = w._load

        def late(*arguments: Any) -> Any:
            time.sleep(0.05)
            return load(*arguments)
        w._load = late  # type: ignore[assignment]
        w.begin(step)
        w.start_loads(step)
        failed, bad = w.finished_loads()[1:]
        self.assertEqual((failed, bad), ({"b"}, set(bt[:2])))
        self.assertEqual(w.report().failed, {"b": 0})
        w.gather(step)
        b.settle()
        self.assertEqual(b.events, [])
        self.assertEqual(b.matched(request("again", o.all_token_ids), 0), 0)

    def test_a_load_that_cannot_even_fail_ends(self) -> None:
        """As where the device has no memory for zeros."""
        a, at, tokens = Side(self), table(1, 4), prompt(720, 4)
        a.fill(1)
        a.store(request("a", tokens), [at])
        for i, layerwise in enumerate((False, True)):
            self.damage(a, tuttifs.keys(tokens, FILE)[2 - i])  # the one before has evicted what it found
            b, bt, r = Side(self, layerwise=layerwise), table(2, 4), request("b", tokens)

            def no_memory(*arguments: Any) -> None:
                raise torch.OutOfMemoryError("no memory")
            b.workers[0]._zero = no_memory  # type: ignore[assignment]
            files = 4 - 2 * i
            self.assertEqual(b.load(r, [bt]), files * FILE)
            self.assertEqual((b.failed, b.bad), ({"b"}, set(bt[:2 * files])))
            self.assertEqual((b.workers[0]._loading, b.scheduling._pins), (0, {}))
            self.assertEqual(b.matched(r), 0)

    def test_the_mount_goes(self) -> None:
        a, b = Side(self), Side(self)
        a.fill(1)
        at, bt, tokens = table(1, 3), table(2, 3), prompt(800, 3)
        a.store(request("a", tokens), [at])
        r = request("b", tokens)
        self.assertEqual(b.matched(r), 3 * FILE)
        b.scheduling.allocated(r, [bt], 3 * FILE)
        step = b.scheduling.step({}, lambda name: None)
        self.volume.kill()
        b.run(step)
        limit, bad = time.monotonic() + 60, set()
        while not b.ended[0][0]:
            self.assertLess(time.monotonic(), limit)
            b.run(dataclasses.replace(step, loads=[], number=step.number + 1))
        bad = b.ended[0][2]
        self.assertEqual(bad, set(bt[:6]))
        self.volume.mount()
        limit = time.monotonic() + 60
        while b.matched(request("c", tokens), 0) != 3 * FILE:
            self.assertLess(time.monotonic(), limit)
            b.scheduling.finished("c")
            time.sleep(0.05)
        self.assertEqual(b.load(request("d", tokens), [bt]), 3 * FILE)
        self.same(a, at, b, bt, last=6)


class Mapped:
    """Memory as vLLM's allocator has it: while it sleeps its addresses lead nowhere, and whoever touches it dies."""

    def __init__(self, caches: Dict[str, torch.Tensor]) -> None:
        self.caches = caches
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.pages = {name: mmap.mmap(-1, -(-t.numel() * t.element_size() // mmap.PAGESIZE) * mmap.PAGESIZE)
                      for name, t in caches.items()}
        for name, t in caches.items():
            caches[name] = torch.frombuffer(self.pages[name], dtype=t.dtype, count=t.numel()).view(t.shape)

    def protect(self, rights: int) -> None:
        for name, t in self.caches.items():
            size = ctypes.c_size_t(len(self.pages[name]))
            assert self.libc.mprotect(ctypes.c_void_p(t.data_ptr()), size, rights) == 0

    # vLLM's calls

    def sleep(self, offload_tags: Any = None) -> None:
        for t in self.caches.values():
            t.zero_()
        self.protect(0)

    def discard(self, tags: Any) -> None:
        self.sleep()

    def wake_up(self, tags: Any = None) -> None:
        self.protect(mmap.PROT_READ | mmap.PROT_WRITE)


class Sleeping(Mounted):
    def test_memory_goes_and_comes_back(self) -> None:
        a, b = Side(self), Side(self)
        worker = b.workers[0]
        if DEVICE.type == "cpu":
            allocator: Any = Mapped(b.caches[0])
            worker.caches = Caches(b.groups, BLOCKS, b.caches[0])
        else:
            allocator = SimpleNamespace(sleep=lambda offload_tags=None: None, discard=lambda tags: None,
                                        wake_up=lambda tags=None: None)
        follow(allocator, worker)
        a.fill(1)
        files = 30
        at, bt, tokens = table(1, files), table(2, files), prompt(1200, files)
        a.store(request("a", tokens), [at])
        self.assertEqual(b.load(request("b", tokens), [bt]), files * FILE)
        for take, tags in ((lambda: allocator.sleep(offload_tags=("weights",)), None),
                           (lambda: allocator.discard(("kv_cache",)), ["kv_cache"])):
            # Loads and stores that are under way end first.
            new, nt = request(f"new{tags}", prompt(1201 + bool(tags), files)), table(3, files)
            r = request(f"c{tags}", tokens)
            b.scheduling.allocated(r, [bt], b.matched(r))
            b.matched(new)
            b.run(b.scheduling.step({new.request_id: files * FILE}, lambda name: [nt]))
            before = weakref.ref(worker._end)
            take()
            gc.collect()
            self.assertIsNone(before())  # nothing is registered any more
            self.assertEqual(worker.finished_loads()[0] | b.ended[0][0], {r.request_id})
            # While it sleeps loads fail, and what there would be to store is not.
            r, other = request(f"d{tags}", tokens), request(f"o{tags}", prompt(1203, 2))
            self.assertEqual(b.load(r, [bt]), files * FILE)
            self.assertEqual((b.failed, b.bad), ({r.request_id}, set(bt[:2 * files])))
            b.store(other, [table(4, 2)])
            self.assertEqual(b.matched(request(f"p{tags}", other.all_token_ids)), 0)
            allocator.wake_up(["weights"])  # not ours, yet
            if DEVICE.type == "cpu":
                allocator.protect(0)
            self.assertIsNone(worker._attach(b.scheduling.step({}, lambda name: None)))
            allocator.wake_up(tags)
            self.assertEqual(b.load(request(f"e{tags}", tokens), [bt]), files * FILE)
            self.same(a, at, b, bt, last=2 * files)
            self.assertEqual(b.matched(request(f"q{tags}", prompt(1201 + bool(tags), files))), files * FILE)


class Refused(Mounted):
    def test_what_the_mount_does_not_take(self) -> None:
        """At the start: the first step would be too late."""
        for more in ({"lanes": 10000}, {"depth": 3}, {"store_bytes": 1}, {"slack_table": "/nonexistent"}):
            with self.subTest(more), self.assertRaises(tuttifs.InvalidError):
                Side(self, **more)

    @unittest.skipIf(DEVICE.type != "cpu", "staging memory is the device's")
    def test_staging_memory_that_the_session_has_not(self) -> None:
        """A store would wait for a slot for ever: the engine goes on without."""
        a = Side(self)
        with unittest.mock.patch.object(tuttifs.vllm.worker, "RING", 0), self.assertLogs("tuttifs.vllm") as told:
            a.store(request("a", prompt(1400, 2)), [table(1, 2)])
        self.assertIn("bytes for staging memory of 1048576", told.output[0])
        self.assertIsNone(a.workers[0]._end)


class Scheduled(Mounted):
    """What a session's scheduler is told of steps."""

    def stats(self, side: Side) -> tuttifs.SchedulerStats:
        end = side.workers[0]._end
        assert end is not None
        return end.session.scheduler_stats()

    def told(self, side: Side, *wanted: int) -> None:
        """Passes, layers and decode steps so far. A GPU's are told when its events have come."""
        limit = time.monotonic() + 20
        while True:
            s = self.stats(side)
            have = (s.passes, s.layers, s.decode_steps)
            if have == wanted or DEVICE.type == "cpu" or time.monotonic() > limit:
                self.assertEqual(have, wanted)
                return
            time.sleep(0.01)

    def compute(self, side: Side, r: Any, tokens: int, computed: int, tables: Any) -> None:
        """A step that computes some tokens of a request behind others."""
        r.num_computed_tokens = computed
        side.turn({r.request_id: tokens}, tables)

    def test_steps(self) -> None:
        for layerwise in (False, True):
            a, tokens, at = Side(self, layerwise=layerwise), prompt(1100 + layerwise, 4), table(1, 4)
            r = request("a", tokens)
            a.scheduling.matched(r, 0)
            self.compute(a, r, 4 * FILE, 0, [at])
            self.compute(a, r, 5, 4 * FILE, [at])
            self.told(a, 2, 6, 0)
            for i in range(3):
                self.compute(a, r, 1, len(tokens) + i, [at])
            self.told(a, 2, 6, 3)
            a.settle()

    def test_loads_that_no_step_waits_for_are_beside_compute(self) -> None:
        a, tokens, at, bt = Side(self), prompt(1110, 4), table(1, 4), table(2, 4)
        a.fill(1)
        a.store(request("a", tokens), [at])
        self.told(a, 1, 3, 0)
        r, o = request("b", tokens), request("o", prompt(1111, 1))
        a.scheduling.matched(o, 0)
        a.scheduling.allocated(r, [bt], a.matched(r))
        self.compute(a, o, FILE, 0, [table(3, 1)])  # it would be a pass, but for the load
        self.told(a, 1, 3, 1)
        self.assertEqual(self.stats(a).bubble_ns, 0)
        a.settle()

    def test_switched_off(self) -> None:
        a, tokens = Side(self, scheduler=False), prompt(1120, 2)
        a.store(request("a", tokens), [table(1, 2)])
        self.assertEqual(a.load(request("b", tokens), [table(2, 2)]), 2 * FILE)
        s = self.stats(a)
        self.assertEqual((s.passes, s.layers, s.decode_steps, s.offers), (0, 0, 0, 0))

    def test_what_is_computed_faster_is_not_loaded(self) -> None:
        """Layers are computed in no time here, so that as soon as that is known nothing is worth loading."""
        a = Side(self, layerwise=True)
        a.fill(1)
        tokens, at = prompt(1130, 4), table(1, 4)
        a.store(request("a", tokens), [at])
        self.assertEqual(a.scheduling._weigh, [])
        loads = 0
        for i in range(30):
            r = request(f"r{i}", tokens)
            self.assertIsNone(a.scheduling.matched(r, 0))  # the ranks are asked
            self.assertIsNone(a.scheduling.matched(r, 0))
            a.turn()
            n = a.matched(r)
            if n == 0:
                break
            self.assertEqual(n, 4 * FILE)
            loads += 1
            a.scheduling.allocated(r, [table(10 + i, 4)], n)
            self.compute(a, r, 5, n, [table(10 + i, 4)])
            # The same tokens again, and none loaded: what all of them take.
            b = request(f"c{i}", prompt(1131 + i, 4))
            a.scheduling.matched(b, 0)
            self.compute(a, b, len(tokens), 0, [at])
        self.assertEqual(n, 0)
        self.assertGreater(loads, 0)
        self.assertGreater(self.stats(a).offers_refused, 0)
        self.assertEqual(a.scheduling.counts.take()["refused_tokens"], 4 * FILE)
        a.settle()

    def test_stores_through_a_store_buffer(self) -> None:
        a, b = Side(self, store_bytes=16 << 20), Side(self)
        a.fill(9)
        at, bt, tokens = table(1, 60), table(2, 60), prompt(1140, 60)
        a.store(request("a", tokens), [at])
        self.assertGreater(self.stats(a).deferred_objects, 0)
        self.assertEqual(b.load(request("b", tokens), [bt]), 60 * FILE)
        self.same(a, at, b, bt, last=120)


class Tenants(Mounted):
    def test_quotas(self) -> None:
        """A tenant finds what is its own, and its quota makes it forget nobody's but that."""
        files, quota = 20, 8
        size = FULL.file_bytes(FILE) + 8192  # with its trailer, and what is rounded up
        self.volume.unmount()
        self.volume.mount(f"quota=7:{quota * size}")
        a, b = Side(self), Side(self, tenant=8)
        a.fill(1)
        at, bt, tokens = table(1, files), table(2, files), prompt(1300, files)
        mine = [request(f"{t}", tokens) for t in range(2)]
        mine[0].kv_transfer_params = {"tuttifs_tenant": 7}
        b.fill(2)
        b.store(request("theirs", tokens), [bt])
        a.store(mine[0], [at])
        counts = a.workers[0].counts.take()
        kept = int(counts["stored_files"])
        self.assertIn(kept, range(quota // 2, quota + 1))
        self.assertEqual(counts["unstored_files"], files - kept)
        # Two more prompts of the tenant take the place of its first.
        for i in range(2):
            again = request(f"again{i}", prompt(1301 + i, quota // 2))
            again.kv_transfer_params = {"tuttifs_tenant": 7}
            a.store(again, [table(5 + i, quota // 2)])
            again = request(f"look{i}", again.all_token_ids)
            again.kv_transfer_params = {"tuttifs_tenant": 7}
            self.assertEqual(a.matched(again), quota // 2 * FILE)
        self.assertEqual(a.matched(mine[1]), 0)  # tenant 0 has none of it
        c = Side(self, tenant=8)
        self.assertEqual(c.load(request("theirs again", tokens), [at]), files * FILE)
        self.same(b, bt, c, at, last=2 * files)


class Ranks(Mounted):
    def test_two_ranks(self) -> None:
        a, b = Side(self, ranks=2), Side(self, ranks=2)
        a.fill(1)
        at, bt, tokens = table(1, 3), table(2, 3), prompt(900, 3)
        a.store(request("a", tokens), [at])
        self.assertEqual(len(a.events), 3)
        self.assertEqual(b.load(request("b", tokens), [bt]), 3 * FILE)
        self.same(a, at, b, bt, last=6)

    def test_a_rank_without_the_session(self) -> None:
        """Nothing is promised or stored until it has it: the others would wait for it at each commit."""
        a, b = Side(self, ranks=2), Side(self, ranks=2)
        a.fill(1)
        at, bt, tokens = table(1, 3), table(2, 3), prompt(903, 3)
        a.store(request("a", tokens), [at])
        join, full = tuttifs.vllm.worker.End, True

        def end(options: Any, attached: Any, device: Any, rank: Rank) -> Any:
            if full and rank.number == 1:
                raise torch.OutOfMemoryError("no memory")
            return join(options, attached, device, rank)
        with unittest.mock.patch.object(tuttifs.vllm.worker, "End", end):
            self.assertEqual(b.load(request("b", tokens), [bt]), 3 * FILE)  # before anybody knew
            self.assertEqual(b.failed, {"b"})
            self.assertEqual(b.matched(request("c", tokens)), 0)
            o = request("o", prompt(904, 3))
            b.matched(o)
            self.assertEqual(b.scheduling.step({"o": 3 * FILE}, lambda name: [at]).stores, [])
            full = False
            limit = time.monotonic() + 60
            while not (n := b.matched(request("d", tokens))):
                self.assertLess(time.monotonic(), limit)
                b.turn()
                b.scheduling.finished("d")
            self.assertEqual(n, 3 * FILE)
        self.assertEqual(b.load(request("e", tokens), [bt]), 3 * FILE)
        self.same(a, at, b, bt, last=6)
        b.turn({"o": 3 * FILE}, [at])  # what was not stored then is now
        b.settle()
        self.assertEqual(len(b.events), 3)

    def test_one_rank_gives_up_for_all(self) -> None:
        a = Side(self, ranks=2)
        a.fill(1)
        tokens = prompt(901, 2)
        a.workers[0]._tainted = 1  # a load of the first step failed in this rank alone
        a.matched(request("a", tokens), 0)
        a.turn({"a": 2 * FILE}, [table(1, 2)])
        a.settle()
        self.assertEqual(a.events, [])
        self.assertEqual(a.matched(request("b", tokens), 0), 0)

    def test_who_reads_without_the_others_says_what_that_means(self) -> None:
        """Once: a rank on another host is never found."""
        b, tokens = Side(self, ranks=2, replicas=2, layerwise=True, scheduler=False), prompt(905, 2)
        b.store(request("a", tokens), [table(1, 2)])
        first = b.workers[0]._end
        assert first is not None and first.leader is not None
        with self.assertNoLogs("tuttifs.vllm"):
            self.assertEqual(b.load(request("b", tokens), [table(2, 2)]), 2 * FILE)
        first.leader._missing = 1
        with self.assertLogs("tuttifs.vllm") as told:
            for name in ("c", "d"):
                self.assertEqual(b.load(request(name, tokens), [table(2, 2)]), 2 * FILE)
        self.assertEqual(len(told.output), 1)
        self.assertIn("layerwise", told.output[0])

    def test_replicas_have_one_copy(self) -> None:
        a, b = Side(self, ranks=2, replicas=2), Side(self, ranks=2, replicas=2)
        a.fill(1)
        at, bt, tokens = table(1, 3), table(2, 3), prompt(902, 3)
        a.store(request("a", tokens), [at])
        self.assertEqual(len(a.events), 3)
        self.assertEqual(b.load(request("b", tokens), [bt]), 3 * FILE)
        self.same(a, at, b, bt, last=6, ranks=[0, 0])


class Hybrid(Mounted):
    """Full attention, and a window of 20 tokens: a hit needs the window's last two files."""

    def test_as_a_whole(self) -> None:
        a, b = Side(self, groups=(FULL, WINDOW)), Side(self, groups=(FULL, WINDOW))
        a.fill(1)
        files = 5
        tokens, at, aw = prompt(1000, files), table(1, files), table(3, files)
        r = request("a", tokens)
        a.matched(r, 0)
        a.turn({"a": 2 * FILE}, [at, aw])
        r.num_computed_tokens = 2 * FILE
        passed = [0, 0, *aw[2:]]  # the window has passed the first file
        a.turn({"a": 3 * FILE}, [at, passed])
        a.settle()
        bt, bw = table(2, files), table(4, files)
        self.assertEqual(b.load(request("b", tokens), [bt, [0] * 6 + bw[6:]]), files * FILE)
        self.same(a, at, b, bt, last=2 * files)
        self.same(a, aw, b, bw, group=WINDOW, first=6, last=2 * files)
        self.assertFalse(b.block(0, "w", 0).any())  # the null block

    def test_a_gap_in_the_window(self) -> None:
        a = Side(self, groups=(FULL, WINDOW))
        a.fill(1)
        tokens = prompt(1001, 4)
        r = request("a", tokens)
        a.matched(r, 0)
        # The last file's window blocks were given back before they could be stored.
        a.turn({"a": 4 * FILE}, [table(1, 4), [0] * 8])
        a.settle()
        self.assertEqual(a.matched(request("b", tokens), 0), 0)


if __name__ == "__main__":
    unittest.main()
