#!/usr/bin/env python3
"""Tensor-parallel ranks in processes of their own, each with its GPU, restore from one volume at once.

The processes join one session by its token. Each stores its rank's half of every file: the files are there for nobody
until the last rank has committed. Then the pools are cleared and restored, by each rank alone and by all at once, and
every byte is compared. Printed are the rates, their sum against one GPU's, and the host's memory bandwidth: the rate at
which threads copy, since a drive in memory copies every byte once.

  make build lib
  scripts/ranks_restore.py                 # all GPUs of the machine
  scripts/ranks_restore.py --device cpu --ranks 2 --layers 4 --files 32   # to try it without a GPU
"""

import argparse
import ctypes
import dataclasses
import hashlib
import json
import multiprocessing
import os
import statistics
import threading
import time

import kv_store
from kv_store import TORCH, number, tuttifs
from ram_volume import RamVolume

BLOCK_TOKENS, HEADS, HEAD = 64, 4, 128  # of a rank: half of Llama-3-8B's eight heads; K and V of 64 KiB each
ANSWER_SECONDS = 120


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--ranks", type=number(), help="default: one for each GPU; two with --device cpu")
    p.add_argument("--gpus", type=number(), help="that ranks share, in turn; default: all of the machine")
    p.add_argument("--layers", type=number(), default=32)
    p.add_argument("--files", type=number(), default=512)
    p.add_argument("--runs", type=number(), default=5, help="of each case, in turn; the median counts")
    p.add_argument("--drives", type=number(most=kv_store.DRIVES_MAX), default=4)
    kv_store.add_volume_arguments(p, "the daemon's polling threads for each rank (default: by the cores)")
    p.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    a = p.parse_args()
    if not TORCH:
        p.error("this needs PyTorch")
    if a.device == "cpu":
        a.ranks = a.ranks or 2
        a.gpus = a.ranks
    else:
        import torch
        kv_store.check_gpus(p, a.gpus or 1)
        a.gpus = a.gpus or torch.cuda.device_count()
        a.ranks = a.ranks or a.gpus
    a.pollers = a.pollers or max(1, min(10, (os.cpu_count() or 1) * 5 // 8 // a.ranks))
    kv_store.check_files(p, a)
    return a


class Rank:
    """What one process does; the parent calls its methods by name."""

    def __init__(self, a, rank, mount, token):
        import torch
        self.torch, self.a, self.rank = torch, a, rank
        self.device = torch.device("cpu" if a.device == "cpu" else f"cuda:{rank % a.gpus}")
        if a.device != "cpu":
            torch.cuda.set_device(self.device)
        self.mount = tuttifs.Store(mount)
        self.session = self.mount.join(token, self.device) if token else self.mount.session(self.device)
        self.run = BLOCK_TOKENS * HEADS * HEAD * 2
        identity = {"model": "tensor-parallel", "revision": "random", "weights_epoch": 1, "dtype": "bf16",
                    "quantisation": "none", "scale_format": "none", "layout": "NHD", "page_bytes": 2 * self.run,
                    "block_tokens": BLOCK_TOKENS, "file_tokens": BLOCK_TOKENS, "tp": a.ranks, "pp": 1, "cp": 1,
                    "group": "full"}
        # The CPU executor takes one run a block, so K and V of a block lie together there.
        shape = (a.files, 2, self.run) if a.device == "cpu" else (2, a.files, self.run)
        g = torch.Generator(device=self.device).manual_seed(100 + rank)
        self.memory = [torch.randint(256, shape, dtype=torch.uint8, device=self.device, generator=g)
                       for _ in range(a.layers)]
        self.wanted = [t.clone() for t in self.memory]
        self.bytes = sum(t.numel() for t in self.memory)
        paged = tuttifs.Paged.of(self.memory, 0 if a.device == "cpu" else 1)
        self.pool = self.session.pool("ranks", identity, paged.objects(a.ranks))
        self.registered = self.session.register(paged)
        self.blocks = torch.randperm(a.files, generator=torch.Generator().manual_seed(7)).tolist()
        self.keys, parent = [], b"ranks"
        for i in range(a.files):
            parent = hashlib.sha256(parent + i.to_bytes(4, "little")).digest()
            self.keys.append(parent)
        self.request = 0

    def about(self):
        return self.session.describe()

    def token(self):
        return self.session.token

    def synchronize(self):
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def store(self):
        """Stores this rank's objects of all files, uncommitted. Returns the rate in bytes a second."""
        self.slots = self.pool.reserve(self.keys, reserve=1)
        self.synchronize()
        begin = time.perf_counter()
        with self.pool.store(self.slots, self.registered, self.blocks, rank=self.rank) as layers:
            layers.move_all(self.a.layers)
        return self.bytes / (time.perf_counter() - begin)

    def commit_begin(self):
        """Commits in the background: that ends when the last rank has committed."""
        def commit():
            try:
                self.slots.commit([self.rank])
            except tuttifs.Error as e:
                self.commit_error = e
        self.commit_error = None
        self.committer = threading.Thread(target=commit)
        self.committer.start()

    def commit_end(self):
        self.committer.join()
        if self.commit_error:
            raise self.commit_error

    def peek(self):
        return self.pool.peek(self.keys)

    def prepare(self):
        """Clears the pool, and leases the files."""
        for t in self.memory:
            t.zero_()
        self.synchronize()
        self.request += 1
        request = self.request * self.a.ranks + self.rank
        self.leases = self.pool.pin(self.keys, request)
        if len(self.leases) != self.a.files:
            raise RuntimeError(f"rank {self.rank}: {len(self.leases)} of {self.a.files} files found")

    def restore(self):
        """Restores all layers. Returns when it began and ended, by a clock that all processes share."""
        begin = time.monotonic()
        layers = self.pool.retrieve(self.leases, self.registered, self.blocks, rank=self.rank)
        for transfer in [layers.begin(layer) for layer in range(self.a.layers)]:
            transfer.wait()
        end = time.monotonic()
        layers.check()
        layers.close()
        return begin, end

    def verify(self):
        """Compares every byte, and ends the leases."""
        self.synchronize()
        for layer, (got, want) in enumerate(zip(self.memory, self.wanted)):
            if not self.torch.equal(got, want):
                raise RuntimeError(f"rank {self.rank}: layer {layer} was not restored as it was stored")
        self.leases.release()

    def size(self):
        return self.bytes

    def stats(self):
        return dataclasses.asdict(self.session.stats())

    def close(self):
        self.session.close()
        self.mount.close()


def serve(pipe, a, rank, mount, token):
    """The body of a rank's process."""
    try:
        r = Rank(a, rank, mount, token)
        pipe.send((None, None))
        while True:
            name = pipe.recv()
            pipe.send((None, getattr(r, name)()))
            if name == "close":
                return
    except EOFError:
        return  # the parent is gone
    except Exception as e:
        pipe.send((f"{type(e).__name__}: {e}", None))


class Process:
    """A rank's process, as the parent sees it."""

    def __init__(self, a, rank, mount, token):
        context = multiprocessing.get_context("spawn")  # a forked child could not use the library
        self.rank = rank
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, a, rank, mount, token), daemon=True)
        self.process.start()
        other.close()
        self.answer()

    def answer(self):
        if not self.pipe.poll(ANSWER_SECONDS):
            raise RuntimeError(f"rank {self.rank} does not answer")
        try:
            error, result = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"rank {self.rank} ended") from None
        if error:
            raise RuntimeError(f"rank {self.rank}: {error}")
        return result

    def call(self, name):
        self.pipe.send(name)
        return self.answer()


def every(ranks, name):
    """Calls all ranks at once."""
    for r in ranks:
        r.pipe.send(name)
    return [r.answer() for r in ranks]


def copy_bandwidth(threads):
    """Bytes a second that so many threads copy in the host's memory."""
    size, rounds = 64 << 20, 8
    buffers = [(ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)) for _ in range(threads)]
    start = threading.Barrier(threads + 1)

    def copy(to, source):
        ctypes.memmove(to, source, size)  # faults its pages in
        start.wait()
        for _ in range(rounds):
            ctypes.memmove(to, source, size)
    workers = [threading.Thread(target=copy, args=b) for b in buffers]
    for w in workers:
        w.start()
    start.wait()
    begin = time.perf_counter()
    for w in workers:
        w.join()
    return threads * rounds * size / (time.perf_counter() - begin)


def restored(ranks):
    """One restore by these ranks at once: each one's rate, and that of all from the first's begin to the last's end."""
    every(ranks, "prepare")
    spans = every(ranks, "restore")
    every(ranks, "verify")
    sizes = every(ranks, "size")
    each = [n / (end - begin) for n, (begin, end) in zip(sizes, spans)]
    return each, sum(sizes) / (max(end for _, end in spans) - min(begin for begin, _ in spans))


def measure(a, ranks):
    report = {"output_version": 1, "ranks": a.ranks, "gpus": a.gpus, "layers": a.layers, "files": a.files,
              "runs": a.runs, "pollers": a.pollers, "executors": every(ranks, "about"),
              "bytes_of_a_rank": ranks[0].call("size"),
              "object_bytes": 2 * BLOCK_TOKENS * HEADS * HEAD * 2}
    report["store_gb_per_second"] = [rate / 1e9 for rate in every(ranks, "store")]
    for r in ranks[:-1]:
        r.call("commit_begin")
    time.sleep(0.2)  # time for a fault to show
    early = ranks[-1].call("peek")
    if early:
        raise SystemExit(f"{early} files were visible before the last rank had committed")
    ranks[-1].call("commit_begin")
    every(ranks, "commit_end")
    if any(n != a.files for n in every(ranks, "peek")):
        raise SystemExit("not all files are there after the last commit")
    alone, together, each = [], [], []
    for turn in range(1 + a.runs):  # the first warms up
        singles = [restored([r])[1] for r in ranks]
        rates, both = restored(ranks)
        if turn:
            alone.append(statistics.mean(singles))
            each.append(rates)
            together.append(both)
    threads = min(64, os.cpu_count() or 1)
    report["restore_alone_gb_per_second"] = statistics.median(alone) / 1e9
    report["restore_each_gb_per_second"] = [statistics.median(r[i] for r in each) / 1e9 for i in range(a.ranks)]
    report["restore_together_gb_per_second"] = statistics.median(together) / 1e9
    report["copy_threads"], report["copy_gb_per_second"] = threads, copy_bandwidth(threads) / 1e9
    by_gpus = 0.9 * min(a.ranks, a.gpus) * report["restore_alone_gb_per_second"]
    by_memory = report["copy_gb_per_second"]
    report["bar_gb_per_second"] = min(by_gpus, by_memory)
    report["bar_is"] = "0.9 of the GPUs' own rates" if by_gpus <= by_memory else "memory bandwidth"
    report["met_bar"] = report["restore_together_gb_per_second"] >= report["bar_gb_per_second"]
    report["stats"] = every(ranks, "stats")
    return report


def text(r):
    print("\n".join(f"rank {i}: {about}" for i, about in enumerate(r["executors"])))
    print(f"{r['bytes_of_a_rank'] / 1e9:.2f} GB a rank, objects of {r['object_bytes'] >> 10} KiB; every byte compared; "
          "files were visible after the last rank's commit and not before")
    print("store, at once:   " + " ".join(f"{x:6.1f}" for x in r["store_gb_per_second"]) + " GB/s")
    print(f"restore, alone:   {r['restore_alone_gb_per_second']:6.1f} GB/s, mean of the GPUs")
    print("restore, at once: " + " ".join(f"{x:6.1f}" for x in r["restore_each_gb_per_second"])
          + f" GB/s; all {r['restore_together_gb_per_second']:.1f} GB/s, "
          f"{r['restore_together_gb_per_second'] / r['restore_alone_gb_per_second']:.2f} times one alone")
    print(f"host memory:      {r['copy_gb_per_second']:6.1f} GB/s copied by {r['copy_threads']} threads")
    met = "met" if r["met_bar"] else "NOT MET"
    print(f"bar:              {r['bar_gb_per_second']:6.1f} GB/s ({r['bar_is']}): {met}")


def main():
    a = arguments()
    object_bytes = 2 * BLOCK_TOKENS * HEADS * HEAD * 2
    volume_bytes = a.files * a.ranks * (a.layers * object_bytes + 8192)
    with RamVolume(a.tuttifs, a.where, a.drives, volume_bytes * 5 // 4 // a.drives + (64 << 20), a.pollers) as volume:
        ranks = [Process(a, 0, volume.mount, None)]
        try:
            token = ranks[0].call("token")
            for rank in range(1, a.ranks):
                ranks.append(Process(a, rank, volume.mount, token))
            report = measure(a, ranks)
            every(ranks, "close")
        finally:
            for r in ranks:
                r.pipe.close()
                r.process.join(20)
                if r.process.is_alive():
                    r.process.terminate()
    if a.json:
        print(json.dumps(report, indent=2))
    else:
        text(report)


if __name__ == "__main__":
    main()
