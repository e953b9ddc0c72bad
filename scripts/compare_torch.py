#!/usr/bin/env python3
"""Time to first token and rates of stores and loads, by where a prompt's KV is kept, with PyTorch layers.

A Llama-3-8B-shaped model with random weights computes a long prompt whose prefix is cached, and the cache is
  none           nowhere: all of it is computed
  resident       in the pool already: what no cache can be faster than
  dram           pinned host memory, layer by layer ahead of the layers' compute
  vllm-fs        files, as vLLM's fs tier keeps them: read into pinned host memory, then copied, then computed
  lmcache-disk   files, as LMCache's local disk keeps them, likewise
  tuttifs-whole  a mount, all layers before the first one computes
  tuttifs        a mount, layer by layer ahead of the layers' compute
Files and the mount's drives are in one directory, in memory unless --where says otherwise. In memory a read is a copy
by whoever reads: one thread (vllm-fs), four (lmcache-disk), or the --pollers; SSDs would do it for all of them. And
pages of memory are made when they are first written, those of files and, without --ahead, of drives. Each turn
measures every case of every system, in an order that rotates from turn to turn; ratios are of one turn's runs. After
every run the hidden states, the logits and what the pool holds are compared with the resident run's, bit for bit.

  make build lib
  scripts/compare_torch.py
  scripts/compare_torch.py --device cpu --tokens 1024 --layers 3 --block 16 --piece 256 --bandwidth-tokens 512
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

import kv_store
from kv_store import TORCH, chain, note, number, numbers
from ram_volume import RamVolume

if TORCH:
    import torch

    import file_tiers
    import kv_model
    from kv_model import Model, random_tokens, same_bits
    from llama_restore import Tuttifs
else:
    Tuttifs = object  # --help needs none

SYSTEMS = ["none", "resident", "dram", "vllm-fs", "lmcache-disk", "tuttifs-whole", "tuttifs"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kv_store.add_arguments(p)
    p.add_argument("--tokens", type=number(), default=65536, help="of the prompt")
    p.add_argument("--piece", type=number(), default=8192, help="most new tokens of one forward pass")
    p.add_argument("--cached", type=numbers(number(most=99)), default=[95, 90, 75, 50], help="per cent of the prompt")
    p.add_argument("--bandwidth-tokens", type=number(), default=16384,
                   help="stored and loaded without compute, each turn")
    p.add_argument("--runs", type=number(), default=3, help="of every case, in turn; at most")
    p.add_argument("--seconds", type=number(float, 0), default=170, help="no case begins that would not end by then")
    p.add_argument("--systems", default=",".join(SYSTEMS), help="of these; resident is needed")
    p.add_argument("--drives", type=number(most=kv_store.DRIVES_MAX), default=4)
    p.add_argument("--ahead", action="store_true", help="write the drives once before they are used, as no file is")
    p.add_argument("--json", metavar="FILE", help="write one JSON document there; - for the output, and no table")
    a = p.parse_args()
    a.begun = time.perf_counter()
    if not TORCH:
        p.error("this needs PyTorch")
    kv_store.settle(p, a)
    a.systems = a.systems.split(",")
    unknown = set(a.systems) - set(SYSTEMS)
    if unknown or "resident" not in a.systems:
        p.error(f"--systems: some of {', '.join(SYSTEMS)}, and resident is what the others are compared with")
    if "tuttifs-whole" in a.systems and "tuttifs" not in a.systems:
        p.error("--systems: tuttifs-whole reads what tuttifs has stored")
    a.multiple = max(a.block, 256)  # chunks of the file schemes are whole
    sizes = {"--tokens": a.tokens, "--piece": a.piece, "--bandwidth-tokens": a.bandwidth_tokens}
    bad = [f"{name} {n}" for name, n in sizes.items() if n % a.multiple]
    if bad or 256 % a.block or a.bandwidth_tokens > a.tokens:
        p.error(f"{', '.join(bad) or '--block or --bandwidth-tokens'}: blocks divide 256 tokens, and the others are "
                f"multiples of {a.multiple} up to --tokens")
    if a.tokens * min(a.cached) // 100 < a.multiple:
        p.error(f"--cached {min(a.cached)}: of {a.tokens} tokens that is less than {a.multiple}")
    if a.json and a.json != "-":
        kv_store.check_output(p, "--json", a.json)
    return a


class Mount(Tuttifs):
    """A mount, layer by layer: as llama_restore.py restores."""

    about = "a mount, layer by layer ahead of compute, two layers under way beside it"

    def use(self, names):
        self.keys = chain(names.encode(), len(self.model.places))

    def drop(self):
        pass  # the volume has room for all


class Whole:
    """The same files of the mount, and all layers are there before the first one computes."""

    about = "the same, all layers before the first one computes"

    def __init__(self, mount):
        self.mount = mount
        self.end = mount.end

    def use(self, names):
        self.mount.use(names)

    def begin(self, blocks):
        mount = self.mount
        mount.begin(blocks)
        for layer in range(len(mount.transfers), mount.model.layers):
            mount.transfers.append(mount.layers.begin(layer, mount.after))
        stream = torch.cuda.current_stream() if mount.after else None

        def before(layer):
            if layer == 0:
                for transfer in mount.transfers:
                    transfer.wait_on(stream)
        return before


class Comparison:
    def __init__(self, a):
        self.a, self.kept, self.turns, self.none, self.wanted = a, {}, 0, [], {}
        note(f"weights and pool on {a.device} ...")
        self.model = Model(a)
        self.tokens = random_tokens(self.model, a.tokens)
        self.times = {c: {s: [] for s in a.systems if s != "none"} for c in a.cached}

    def keep(self, mount, directory):
        """Makes what keeps KV, and has it store the prompt's."""
        a = self.a
        piece = a.piece // a.block
        if {"dram", "vllm-fs", "lmcache-disk"} & set(a.systems):
            note("pinned host memory ...")
        bytes_ = a.tokens // a.block * a.layers * 2 * self.model.run_bytes()
        # The file schemes take turns with one region: what they read is overwritten by whoever reads next.
        shared = self.host(bytes_) if {"vllm-fs", "lmcache-disk"} & set(a.systems) else None
        for name in a.systems:
            if name == "dram":
                self.kept[name] = file_tiers.HostMemory(self.model, self.host(bytes_))
            elif name == "vllm-fs":
                self.kept[name] = file_tiers.VllmFiles(self.model, shared, self.folder(directory, name), piece)
            elif name == "lmcache-disk":
                self.kept[name] = file_tiers.LocalDisk(self.model, shared, self.folder(directory, name), piece)
            elif name == "tuttifs":
                self.kept[name] = Mount(a, self.model, mount)
                note(self.kept[name].session.describe())
        self.sources = dict(self.kept)
        if "tuttifs-whole" in a.systems:
            self.sources["tuttifs-whole"] = Whole(self.kept["tuttifs"])
        note("the prompt, computed and stored ...")
        self.model.prefill(self.tokens, 0, a.piece)  # warms up
        self.model.synchronize()
        self.stored = {}
        for name, kept in self.kept.items():
            kept.use("prompt")
            self.stored[name] = self.clock(lambda k=kept: k.put(a.tokens // a.block))
        self.contents = [t.clone() for t in self.model.pool]
        self.rates = {s: {"store": [], "load": []} for s in self.kept}

    def host(self, bytes_):
        """Whole pages, for direct I/O; written once, so that no run pays for memory's first touch."""
        page = os.sysconf("SC_PAGE_SIZE")
        if self.model.cuda:
            return torch.empty(bytes_, dtype=torch.uint8, pin_memory=True).fill_(1)
        memory = torch.empty(bytes_ + page, dtype=torch.uint8).fill_(1)
        at = -memory.data_ptr() % page
        return memory[at:at + bytes_]

    @staticmethod
    def folder(directory, name):
        path = os.path.join(directory, name)
        os.mkdir(path)
        return path

    def clock(self, f):
        self.model.synchronize()
        begin = time.perf_counter()
        f()
        self.model.synchronize()
        return time.perf_counter() - begin

    def rotated(self, systems):
        n = self.turns % len(systems)
        return systems[n:] + systems[:n]

    def case(self, cached):
        """Each system once."""
        for system in self.rotated(self.a.systems):
            if system == "none":  # the same whatever is cached, so once a turn
                if cached == self.a.cached[0]:
                    self.none.append(self.run(system, 0)[0])
                continue
            blocks = self.blocks(cached)
            seconds, result = self.run(system, blocks)
            self.same(system, blocks, result, self.wanted[cached])
            self.times[cached][system].append(seconds)

    def run(self, system, blocks):
        """One time to first token, with the states and the logits."""
        for t, contents in zip(self.model.pool, self.contents):
            t.copy_(contents) if system == "resident" else t.zero_()
        source = self.sources.get(system)
        begin = 0 if system == "none" else blocks * self.a.block
        result = []

        def compute():
            before = source.begin(blocks) if source else None
            result.extend(self.model.prefill(self.tokens, begin, self.a.piece, before))
            int(result[1].argmax())  # the first token, on the host
        seconds = self.clock(compute)
        if source:
            source.end()
        return seconds, result

    def same(self, system, blocks, result, wanted):
        """Raises where anything differs from the resident run by a bit."""
        self.same_pool(system, blocks)
        for what, got, want in zip(("hidden states", "logits"), result, wanted):
            if not same_bits(got, want):
                raise SystemExit(f"{system}: {what} differ from the resident run's")

    def same_pool(self, system, blocks):
        prefix = self.model.table_device[:blocks]
        for layer, (t, contents) in enumerate(zip(self.model.pool, self.contents)):
            for i in (0, 1):
                got, want = (p.select(self.model.kv_axis, i).index_select(0, prefix) for p in (t, contents))
                if not same_bits(got, want):
                    raise SystemExit(f"{system}: layer {layer} was not restored as it was")

    def rate(self, system):
        """Stores blocks under new names and loads them again, without compute."""
        kept, blocks = self.kept[system], self.a.bandwidth_tokens // self.a.block
        for t, contents in zip(self.model.pool, self.contents):
            t.copy_(contents)
        kept.use(f"turn-{self.turns}")
        bytes_ = blocks * self.a.layers * 2 * self.model.run_bytes()
        self.rates[system]["store"].append(bytes_ / self.clock(lambda: kept.put(blocks)) / 1e9)
        for t in self.model.pool:
            t.zero_()

        def load():
            source = self.sources.get(f"{system}-whole", kept)
            before = source.begin(blocks)
            for layer in range(self.model.layers):
                before(layer)
        self.rates[system]["load"].append(bytes_ / self.clock(load) / 1e9)
        kept.end()
        self.same_pool(system, blocks)
        kept.drop()
        kept.use("prompt")

    def warm(self):
        """Every shape once, and every way once: what is done the first time only is none's. What the resident runs give
        is what all others must give."""
        for cached in self.a.cached:
            self.wanted[cached] = self.run("resident", self.blocks(cached))[1]
        for system in self.sources:
            self.run(system, self.blocks(max(self.a.cached)))

    def blocks(self, cached):
        """Whole chunks of all systems."""
        return self.a.tokens * cached // 100 // self.a.multiple * (self.a.multiple // self.a.block)

    def measure(self):
        """In turns, until the time is over."""
        self.warm()
        took = {}
        for self.turns in range(self.a.runs):
            note(f"turn {self.turns + 1} ...")
            for what in ["rates", *self.a.cached]:
                begin = time.perf_counter()
                if self.turns and begin - self.a.begun + 1.1 * took.get(what, 0.0) > self.a.seconds:
                    note("no time for more")
                    return
                if what == "rates":
                    for system in self.rotated(list(self.kept)):
                        self.rate(system)
                else:
                    self.case(what)
                took[what] = time.perf_counter() - begin

    def close(self):
        for kept in self.kept.values():
            kept.close()


def spread(values):
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "runs": len(values)}


def report(a, c):
    """What was measured, as one document."""
    r = {"output_version": 1, "device": str(c.model.device), "gpu": None, "torch": torch.__version__,
         "where": a.where, "pollers": a.pollers, "drives": a.drives, "written_ahead": a.ahead,
         "layers": a.layers, "tokens": a.tokens, "block_tokens": a.block,
         "kv_bytes_per_token": a.layers * 2 * c.model.run_bytes() // a.block,
         "bandwidth_tokens": a.bandwidth_tokens, "seconds": time.perf_counter() - a.begun,
         "systems": {name: source.about for name, source in c.sources.items()}, "cases": [], "rates": {},
         "prompt_stored_seconds": c.stored}
    if c.model.cuda:
        r["gpu"] = torch.cuda.get_device_name(c.model.device)
    if c.none:
        r["none_ms"] = spread([1e3 * t for t in c.none])
    for cached, times in c.times.items():
        case = {"cached_percent": cached, "systems": {}}
        for system, seconds in times.items():
            case["systems"][system] = {"ms": spread([1e3 * t for t in seconds]),
                                       "of_resident": spread(ratios(seconds, times["resident"]))}
            if c.none:
                case["systems"][system]["of_none"] = spread(ratios(seconds, c.none))
            if "tuttifs" in times:
                case["systems"][system]["of_tuttifs"] = spread(ratios(seconds, times["tuttifs"]))
        r["cases"].append(case)
    r["rates"] = {s: {verb: spread(values) for verb, values in rates.items()} for s, rates in c.rates.items()}
    return r


def ratios(some, others):
    """Of neighbours in time, so that a machine that drifts does not count."""
    return [x / y for x, y in zip(some, others)]


def say(s, digits):
    return f"{s['median']:.{digits}f} ({s['least']:.{digits}f}-{s['most']:.{digits}f})"


def table(r):
    print(f"{r['gpu'] or r['device']}, PyTorch {r['torch']}, {r['tokens']} tokens of {r['kv_bytes_per_token']} bytes, "
          f"files and drives in {r['where']}: medians (least-most)\n"
          f"{r['drives']} drives{', written ahead' if r['written_ahead'] else ''}; where they are memory a read is a "
          f"copy by {r['pollers']} pollers, of files by the threads below")
    for name, about in r["systems"].items():
        print(f"  {name:<14} {about}")
    print("\nTime to first token, ms")
    print(f"{'cached':>7}  {'':<14} {'runs':>4} {'ms':>24} {'of no cache':>20} {'of tuttifs':>20} {'of resident':>20}")
    if "none_ms" in r:
        print(f"{0:>6}%  {'none':<14} {r['none_ms']['runs']:>4} {say(r['none_ms'], 1):>24}")
    for case in r["cases"]:
        for name, s in case["systems"].items():
            print(f"{case['cached_percent']:>6}%  {name:<14} {s['ms']['runs']:>4} {say(s['ms'], 1):>24}"
                  + "".join(f" {say(s[k], 3) if k in s else '':>20}" for k in ("of_none", "of_tuttifs", "of_resident")))
    print(f"\nRates without compute, GB/s, {r['bandwidth_tokens']} tokens")
    print(f"{'':<16} {'store':>24} {'load':>24}")
    for name, verbs in r["rates"].items():
        print(f"  {name:<14} {say(verbs['store'], 2):>24} {say(verbs['load'], 2):>24}")
    print("states, logits and pool: equal to the resident run's, bit for bit, in every run")


def main():
    a = arguments()
    if not a.cpu:
        torch.cuda.set_device(a.device)
    tokens = a.tokens + a.runs * a.bandwidth_tokens
    bytes_ = tokens // a.block * (a.layers * kv_model.object_bytes(a) + 8192)
    files = sum((a.tokens + a.bandwidth_tokens) // a.block * a.layers * kv_model.object_bytes(a) for s in a.systems
                if s in ("vllm-fs", "lmcache-disk"))
    free, drives = shutil.disk_usage(a.where).free, bytes_ * 5 // 4 + a.drives * (64 << 20)
    if files + drives > free:
        raise SystemExit(f"{a.where} has {free >> 20} MiB free, {files + drives >> 20} are needed: fewer --tokens, "
                         "fewer --systems, or another --where")
    with torch.inference_mode(), tempfile.TemporaryDirectory(prefix="compare-", dir=a.where) as directory, \
            RamVolume(a.tuttifs, a.where, a.drives, drives // a.drives, a.pollers, ahead=a.ahead) as volume:
        comparison = Comparison(a)
        try:
            comparison.keep(volume.mount, directory)
            comparison.measure()
            done = report(a, comparison)
        finally:
            comparison.close()
    if a.json != "-":
        table(done)
    if a.json:
        with open(a.json, "w") if a.json != "-" else os.fdopen(os.dup(sys.stdout.fileno()), "w") as f:
            json.dump(done, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
