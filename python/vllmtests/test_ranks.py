"""Ranks in processes of their own, as vLLM's tensor parallelism has them, without vLLM: what all of them hold is read
from the drives once, and what they store is there when all have committed. TUTTIFS_TEST_DEVICE=cuda runs them on
a GPU, all on one."""

import json
import multiprocessing
import os
import signal
import sys
import time
import unittest
from typing import Any, List, Set, Tuple

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests"))

from test_worker import BLOCK_BYTES, BLOCKS, DEVICE, FILE, FULL, Mounted, Shared, Side, plain, prompt, request, table

import tuttifs
from tuttifs.vllm import sharing
from tuttifs.vllm.messages import Report, Step
from tuttifs.vllm.worker import Caches, Rank, Worker

SECONDS = 90.0


class Served:
    """What a rank's process does, by the names of the methods."""

    def __init__(self, options: Any, rank: Rank, find_seconds: float) -> None:
        sharing.FIND_SECONDS = find_seconds
        self.caches = dict(zip(FULL.layers, plain(len(FULL.layers))))
        self.worker = Worker(options, Caches((FULL,), BLOCKS, self.caches), rank)

    def fill(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for t in self.caches.values():
            t.copy_(torch.randn(t.shape, generator=g).to(torch.bfloat16))

    def step(self, step: Step) -> Tuple[Report, Tuple[Set[str], Set[str], Set[int]]]:
        w = self.worker
        w.begin(step)
        w.start_loads(step)
        for name in FULL.layers:
            w.wait_for_layer(name)
            w.layer_done(name)
        w.gather(step)
        ended = w.finished_loads()
        return w.report(), ended

    def blocks(self, numbers: List[int]) -> List[bytes]:
        """The blocks' bytes, layer after layer."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return [t[n].contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in self.caches.values()
                for n in numbers]

    def never_commit(self) -> None:
        """Writes its part of a store, and goes no further."""
        self.worker._commit = lambda store, part: time.sleep(SECONDS)  # type: ignore[method-assign]

    def written(self) -> bool:
        """Whether that is so."""
        end = self.worker._end
        assert end is not None
        return self.worker._reservation is not None and len(end.stores._free) == end.stores.count

    def sleep(self) -> None:
        self.worker.suspend()
        self.worker.resume()

    def attached(self) -> bool:
        return self.worker._end is not None

    def shares(self) -> bool:
        end = self.worker._end
        assert end is not None
        return end.follower is not None or end.leader is not None and bool(end.leader._followers)

    def close(self) -> None:
        self.worker.close()


def serve(pipe: Any, *arguments: Any) -> None:
    served = Served(*arguments)
    pipe.send(None)
    name = ""
    while name != "close":
        name, *arguments = pipe.recv()
        pipe.send(getattr(served, name)(*arguments))


class Process:
    """A rank's process, as the test sees it."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    def answer(self) -> Any:
        assert self.pipe.poll(SECONDS), "a rank does not answer"
        return self.pipe.recv()

    def call(self, name: str, *arguments: Any) -> Any:
        self.pipe.send((name, *arguments))
        return self.answer()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class Engine(Shared):
    """An engine whose ranks are processes."""

    def __init__(self, test: Mounted, ranks: int, replicas: int, find_seconds: float = 10.0, **more: Any) -> None:
        super().__init__(test, (FULL,), ranks, replicas, **more)
        self.ranks = [Process(self.options, Rank(r // replicas, r % replicas, replicas), find_seconds)
                      for r in range(ranks)]
        test.addCleanup(self.close)
        for r in self.ranks:
            r.answer()

    def every(self, name: str, *arguments: Any) -> List[Any]:
        for r in self.ranks:
            r.pipe.send((name, *arguments))
        return [r.answer() for r in self.ranks]

    def run(self, step: Step) -> Report:
        reports, self.ended = map(list, zip(*self.every("step", step)))
        whole = reports[0]
        for r in reports[1:]:
            whole = whole.merge(r)
        return whole

    def lose(self, rank: int) -> None:
        self.ranks.pop(rank).kill()

    def close(self) -> None:
        for r in self.ranks:
            if r.process.is_alive():
                r.call("close")
            r.pipe.close()
            r.process.join(SECONDS)


class Replicas(Mounted):
    """Ranks that hold the same KV, as with MLA."""

    def read(self) -> int:
        """Bytes that engines have read from the drives since the mount."""
        with open(os.path.join(self.volume.path, ".tuttifs/stats")) as f:
            n: int = json.load(f)["io"]["bytes_read"]
        return n

    def stored(self, files: int, seed: int) -> List[bytes]:
        """Stores a prompt by three ranks of this process, of which one stores. Returns its blocks."""
        a, at = Side(self, ranks=3, replicas=3), table(7, files)
        a.fill(seed)
        a.store(request("a", prompt(seed, files)), [at])
        self.assertEqual(len(a.events), files)
        return [a.block(0, name, n).contiguous().view(torch.uint8).cpu().numpy().tobytes()
                for name in FULL.layers for n in at[:2 * files]]

    def all_have(self, engine: Engine, blocks: List[int], wanted: List[bytes]) -> None:
        for got in engine.every("blocks", blocks):
            self.assertEqual(got, wanted)

    def test_one_read_for_all(self) -> None:
        files = 120  # more than the memory holds
        wrote = self.stored(files, 2000)
        for layerwise in (False, True):
            b, bt, before = Engine(self, 3, 3, layerwise=layerwise), table(8, files), self.read()
            self.assertEqual(b.load(request("b", prompt(2000, files)), [bt]), files * FILE)
            self.assertEqual((b.failed, b.bad), (set(), set()))
            self.assertEqual(b.every("shares"), [True] * 3)
            size = files * BLOCK_BYTES * 2 * len(FULL.layers)
            read = self.read() - before
            self.assertGreaterEqual(read, size)
            self.assertLess(read, 2 * size)  # with trailers and what is behind odd lengths
            self.all_have(b, bt[:2 * files], wrote)

    def test_damage(self) -> None:
        wrote = self.stored(6, 2010)
        b, bt, tokens = Engine(self, 3, 3), table(8, 6), prompt(2010, 6)
        b.every("fill", 1)
        self.damage(b, tuttifs.keys(tokens, FILE)[2])
        self.assertEqual(b.load(request("b", tokens), [bt]), 6 * FILE)
        self.assertEqual((b.failed, b.bad), ({"b"}, set(bt[4:6])))
        self.all_have(b, bt[:12], [bytes(len(x)) if i % 12 in (4, 5) else x for i, x in enumerate(wrote)])
        self.assertEqual(b.scheduling.matched(request("c", tokens), 0), 2 * FILE)  # evicted

    def test_a_rank_dies(self) -> None:
        """The others go on, and read once all the same; when it is the leader they read for themselves. And all
        ranks leave and find each other again, as where they sleep."""
        wrote = self.stored(100, 2020)
        b, bt, tokens = Engine(self, 3, 3), table(8, 100), prompt(2020, 100)
        for turn, lost in enumerate((None, None, 2, 0)):
            if lost is not None:
                b.lose(lost)
            for n in range(2):  # the first may find out
                b.load(request(f"{turn} {n}", tokens), [bt])
            self.assertEqual((b.failed, b.bad), (set(), set()))
            self.assertEqual(b.every("shares"), [lost != 0] * len(b.ranks))
            self.all_have(b, bt[:200], wrote)
            if turn == 0:
                b.every("sleep")
            b.every("fill", 5)

    def test_ranks_that_do_not_find_each_other(self) -> None:
        wrote = self.stored(20, 2030)
        b, bt, tokens = Engine(self, 3, 3, find_seconds=0.5), table(8, 20), prompt(2030, 20)
        b.lose(0)  # before it has begun
        self.assertEqual(b.load(request("b", tokens), [bt]), 20 * FILE)
        self.assertEqual(b.every("shares"), [False] * 2)
        self.all_have(b, bt[:40], wrote)


    def test_what_a_rank_may_not_have_taints_the_step(self) -> None:
        """The rank that stores has its load, and cannot know whether all have theirs, whose output is in all it
        computes."""
        self.stored(4, 2050)
        b, bt, tokens = Engine(self, 3, 3, layerwise=True, scheduler=False), table(8, 4), prompt(2050, 4)
        b.load(request("warm", tokens), [bt])
        b.lose(2)
        r, o = request("b", tokens), request("o", prompt(2051, 2))
        b.scheduling.matched(o, 0)
        b.scheduling.allocated(r, [bt], b.matched(r))
        b.turn({"o": 2 * FILE, "b": 1}, [table(9, 4)])
        b.settle()
        self.assertEqual(b.scheduling.matched(request("again", o.all_token_ids), 0), 0)
        self.assertEqual(b.events, [])
        p = request("p", prompt(2052, 2))  # beside no load
        b.store(p, [table(10, 2)])
        self.assertEqual(b.scheduling.matched(request("more", p.all_token_ids), 0), 2 * FILE)


class AllRanks(Mounted):
    def test_a_rank_dies_before_it_commits(self) -> None:
        """What one rank has not committed is there for nobody, and can be stored again."""
        a, at, tokens = Engine(self, 2, 1), table(7, 4), prompt(2100, 4)
        a.every("fill", 1)
        a.ranks[1].call("never_commit")
        r = request("a", tokens)
        a.scheduling.matched(r, 0)
        a.turn({"a": 4 * FILE}, [at])
        limit = time.monotonic() + SECONDS
        while not a.ranks[1].call("written"):  # every object is on the drives
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.02)
        self.assertEqual(a.scheduling.matched(request("early", tokens), 0), 0)
        a.lose(1)
        a.settle()  # the other rank's commit has ended
        self.assertEqual(a.events, [])
        self.assertEqual(a.scheduling.matched(request("late", tokens), 0), 0)
        self.assertTrue(a.ranks[0].call("attached"))  # the session goes on
        b, bt = Side(self, ranks=2), table(8, 4)
        b.fill(2)
        b.store(request("b", tokens), [bt])
        self.assertEqual(len(b.events), 4)
        self.assertEqual(b.load(request("c", tokens), [at]), 4 * FILE)
        self.same(b, bt, b, at, last=8)


if __name__ == "__main__":
    unittest.main()
