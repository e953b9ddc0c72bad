#!/usr/bin/env python3
"""Time to first token of a Llama-3-8B-shaped model whose prompt's prefix is cached, by where the cache is.

A model with random weights prefills a long prompt into a paged KV pool and stores the blocks through libtuttifs, on a
volume that this program makes in memory. Then, for each fraction of the prompt that is cached, it computes the rest:
  recompute  all of it, no cache
  hbm        with the prefix already in the pool: what a restore is measured against
  tuttifs    with the pool cleared, and the prefix restored layer by layer ahead of the layers' compute
  dram       the same from pinned host memory by the copy engine, one call for each run of each block
  dram-batch the same with one call for each layer
Hidden states of all new tokens and the logits are compared with those of hbm, bit for bit, and so is the pool.

  make build lib
  scripts/llama_restore.py
  scripts/llama_restore.py --device cpu --tokens 512 --layers 3 --block 16   # tiny shapes, to try it without a GPU
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import threading
import time

import kv_store
from kv_store import TORCH, Store, note, number, numbers
from ram_volume import RamVolume

if TORCH:
    import torch

    import kv_model
    from kv_model import Dram, Model, random_tokens, same_bits


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kv_store.add_arguments(p)
    p.add_argument("--tokens", type=number(), default=65536, help="of the prompt")
    p.add_argument("--piece", type=number(), default=8192, help="most new tokens of one forward pass")
    p.add_argument("--cached", type=numbers(number(most=99)), default=[50, 75, 90, 95, 98],
                   help="per cent of the prompt")
    p.add_argument("--runs", type=number(), default=5, help="of each case, in turn; the median counts")
    p.add_argument("--modes", default="hbm,tuttifs,dram,dram-batch", help="of these, in this order; hbm is needed")
    p.add_argument("--drives", type=number(most=kv_store.DRIVES_MAX), default=4)
    p.add_argument("--churn", action="store_true", help="grow and shrink PyTorch's memory meanwhile: no times then")
    p.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    a = p.parse_args()
    if not TORCH:
        p.error("this needs PyTorch")
    kv_store.settle(p, a)
    a.modes = a.modes.split(",")
    unknown = set(a.modes) - {"hbm", "tuttifs", "dram", "dram-batch"}
    if unknown:
        p.error(f"--modes: {', '.join(sorted(unknown))}: not one of hbm, tuttifs, dram, dram-batch")
    if a.cpu:
        a.modes = [m for m in a.modes if not m.startswith("dram")]
    if "hbm" not in a.modes:
        p.error("--modes: hbm is what the others are compared with")
    kv_store.check_whole_blocks(p, "--tokens", a.tokens, a.block)
    kv_store.check_whole_blocks(p, "--piece", a.piece, a.block)
    if a.tokens * min(a.cached) // 100 < a.block:
        p.error(f"--cached {min(a.cached)}: of {a.tokens} tokens that is less than a block of {a.block}")
    return a


class Tuttifs(Store):
    """The prompt's blocks on a mount."""

    def __init__(self, a, model, mount):
        super().__init__(a, model, mount)
        self.request = 0

    def begin(self, blocks):
        """Looks the first blocks up and begins to restore their first layer."""
        self.request += 1
        marks = [time.perf_counter()]
        self.leases = self.pin(self.request, blocks)
        marks.append(time.perf_counter())
        after = self.event()  # the pool's last reader
        self.layers = self.pool.retrieve(self.leases, self.memory, self.model.places[:blocks])
        marks.append(time.perf_counter())
        self.transfers = [self.layers.begin(0, after)]
        marks.append(time.perf_counter())
        self.after = after
        self.phases = dict(zip(("pin", "trailers", "issue"), (y - x for x, y in zip(marks, marks[1:]))))
        self.phases.update(first=0.0, others=0.0)
        stream = torch.cuda.current_stream() if after else None

        def before(layer):
            begin = time.perf_counter()
            self.transfers[layer].wait_on(stream)
            self.phases["others" if layer else "first"] += time.perf_counter() - begin
            # Nothing can be computed before the first layer is there, so it has the drives to itself. From then on two
            # layers are under way beside the compute; to issue all of them at once would keep it waiting.
            while len(self.transfers) < min(layer + 3, self.model.layers):
                self.transfers.append(self.layers.begin(len(self.transfers), after))
        return before

    def end(self):
        for transfer in self.transfers:
            transfer.wait()
        self.layers.check()
        self.layers.close()
        self.leases.release()


class Churn:
    """with Churn(device): PyTorch's device memory grows and shrinks."""

    def __init__(self, device):
        self.device, self.stop = device, threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        torch.cuda.set_device(self.device)
        size = 1
        while not self.stop.is_set():
            x = torch.empty(size << 20, dtype=torch.uint8, device=self.device)
            del x
            torch.cuda.empty_cache()
            size = size * 7 % 509 + 1

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


class Bench:
    def __init__(self, a, mount):
        self.a = a
        note(f"weights and pool on {a.device} ...")
        self.model = Model(a)
        self.tokens = random_tokens(self.model, a.tokens)
        self.store_of = Tuttifs(a, self.model, mount)
        note(self.store_of.session.describe())
        self.recomputes = []
        for _ in range(1 + a.runs):
            seconds, (_, self.logits) = self.timed(lambda: self.model.prefill(self.tokens, 0, a.piece))
            self.recomputes.append(seconds)
        del self.recomputes[0]  # the first one warms up
        self.store_seconds = self.store_of.put(a.tokens // a.block)
        self.whole = [t.clone() for t in self.model.pool]
        self.dram = None
        if any(m.startswith("dram") for m in a.modes):
            self.dram = Dram(self.model)
            self.dram.fill()

    def timed(self, f):
        self.model.synchronize()
        begin = time.perf_counter()
        result = f()
        int(result[1].argmax())  # the first token, on the host
        return time.perf_counter() - begin, result

    def run(self, mode, blocks):
        """One time to first token, with the states, the logits and what the pool holds."""
        for t, whole in zip(self.model.pool, self.whole):
            t.copy_(whole) if mode == "hbm" else t.zero_()
        source = {"tuttifs": self.store_of, "dram": self.dram, "dram-batch": self.dram}.get(mode)

        def compute():
            before = None
            if mode == "tuttifs":
                before = source.begin(blocks)
            elif source:
                before = source.begin(blocks, mode == "dram-batch")
            return self.model.prefill(self.tokens, blocks * self.a.block, self.a.piece, before)

        seconds, result = self.timed(compute)
        if source:
            source.end()
        return seconds, result

    def same(self, mode, blocks, result, wanted):
        """Raises where anything differs from the HBM-resident run by a bit."""
        prefix = self.model.table_device[:blocks]
        for layer, (t, whole) in enumerate(zip(self.model.pool, self.whole)):
            for i in (0, 1):
                got, want = (p.select(self.model.kv_axis, i).index_select(0, prefix) for p in (t, whole))
                if not same_bits(got, want):
                    raise SystemExit(f"{mode}: layer {layer} was not restored as it was")
        for what, got, want in (("hidden states", result[0], wanted[0]), ("logits", result[1], wanted[1])):
            if not same_bits(got, want):
                raise SystemExit(f"{mode}: {what} differ from those of the HBM-resident run")

    def case(self, cached):
        blocks = self.a.tokens * cached // 100 // self.a.block
        times, phases = {mode: [] for mode in self.a.modes}, []
        wanted = None
        for turn in range(1 + self.a.runs):  # the first turn warms up, and is compared
            for mode in sorted(self.a.modes, key=lambda m: m != "hbm"):
                seconds, result = self.run(mode, blocks)
                if mode == "hbm" and wanted is None:
                    wanted = result
                self.same(mode, blocks, result, wanted)
                if turn:
                    times[mode].append(seconds)
                    if mode == "tuttifs":
                        phases.append(dict(self.store_of.phases))
        difference = float((wanted[1] - self.logits).abs().max() / self.logits.abs().max())
        if difference > 0.25:  # pieces differ, and so does rounding; a wrong mask or place would show as 1
            raise SystemExit(f"the HBM-resident run's logits are off the recomputed ones by {difference:.2f}")
        row = {"cached_percent": cached, "cached_tokens": blocks * self.a.block,
               "new_tokens": self.a.tokens - blocks * self.a.block,
               "logits_off_recompute": difference, "ttft_ms": {"recompute": 1e3 * statistics.median(self.recomputes)}}
        for mode in self.a.modes:
            row["ttft_ms"][mode] = 1e3 * statistics.median(times[mode])
        row["ratio_to_hbm"] = {mode: ms / row["ttft_ms"]["hbm"] for mode, ms in row["ttft_ms"].items()}
        # Runs of one turn are neighbours in time, so their ratios do not see the clocks drift.
        row["ratio_of_pairs"] = {mode: statistics.median(x / y for x, y in zip(times[mode], times["hbm"]))
                                 for mode in self.a.modes}
        if phases:  # where this process stood and waited
            row["tuttifs_waits_ms"] = {name: 1e3 * statistics.median(p[name] for p in phases) for name in phases[0]}
        row["runs_ms"] = {mode: [1e3 * s for s in times[mode]] for mode in self.a.modes}
        return row

    def close(self):
        self.store_of.close()


def table(report):
    modes = list(report["cases"][0]["ttft_ms"])
    print(f"{'cached':>7} {'new tokens':>10}" + "".join(f"{m + ' ms':>16}" for m in modes)
          + "".join(f"{m + '/hbm':>16}" for m in modes if m != "hbm"))
    for c in report["cases"]:
        ratios = {**c["ratio_to_hbm"], **c["ratio_of_pairs"]}
        print(f"{c['cached_percent']:>6}% {c['new_tokens']:>10}"
              + "".join(f"{c['ttft_ms'][m]:>16.1f}" for m in modes)
              + "".join(f"{ratios[m]:>16.4f}" for m in modes if m != "hbm"))
    for c in report["cases"]:
        if "tuttifs_waits_ms" in c:
            print(f"{c['cached_percent']:>6}% tuttifs waited, ms: "
                  + ", ".join(f"{name} {ms:.2f}" for name, ms in c["tuttifs_waits_ms"].items()))
    print(f"stored {report['store_bytes'] / 1e9:.2f} GB in {report['store_seconds']:.2f} s; "
          f"registered {report['registration']['runs']} runs in {report['registration']['seconds']:.3f} s with "
          f"{report['registration']['device_bytes']} bytes of device memory")
    print("states, logits and pool: equal to the HBM-resident run's, bit for bit")
    if "within_3_percent_to_95" in report:
        print("tuttifs within 3 % of hbm up to 95 % cached: " + ("yes" if report["within_3_percent_to_95"] else "NO"))


def measure(a):
    if not a.cpu:
        torch.cuda.set_device(a.device)
    volume_bytes = a.tokens // a.block * (a.layers * kv_model.object_bytes(a) + 8192)
    with RamVolume(a.tuttifs, a.where, a.drives, volume_bytes * 5 // 4 // a.drives + (64 << 20), a.pollers) as volume:
        bench = Bench(a, volume.mount)
        try:
            report = {"output_version": 1, "device": str(bench.model.device),
                      "executor": bench.store_of.session.describe(), "torch": torch.__version__, "layers": a.layers,
                      "tokens": a.tokens, "block_tokens": a.block,
                      "object_bytes": 2 * bench.model.run_bytes(), "runs": a.runs, "pollers": a.pollers,
                      "registration": bench.store_of.registration, "store_seconds": bench.store_seconds,
                      "store_bytes": 2 * bench.model.run_bytes() * len(bench.model.table) * a.layers, "cases": []}
            if not a.cpu:
                report["gpu"] = torch.cuda.get_device_name(bench.model.device)
            with Churn(bench.model.device) if a.churn and not a.cpu else contextlib.nullcontext():
                for cached in a.cached:
                    note(f"{cached} % cached ...")
                    report["cases"].append(bench.case(cached))
            if "tuttifs" in a.modes:
                report["within_3_percent_to_95"] = all(c["ratio_of_pairs"]["tuttifs"] <= 1.03 for c in report["cases"]
                                                       if c["cached_percent"] <= 95)
            report["session"] = dataclasses.asdict(bench.store_of.session.stats())
        finally:
            bench.close()
    if a.json:
        print(json.dumps(report, indent=2))
    else:
        table(report)


def main():
    a = arguments()
    with torch.inference_mode():
        measure(a)


if __name__ == "__main__":
    main()
