"""The measuring part of bubbles.py: prompts whose prefix is restored and whose new tokens are stored, by several
ways."""

import argparse
import dataclasses
import gc
import os
import statistics
import threading
import time
import typing

import torch

import bubble_report
import kv_model
from kv_model import Dram, Model, Store, chain, note, random_tokens, same_bits, synchronize, tuttifs
from ram_volume import RamVolume

SPARE_BLOCKS = 64      # of the pool, behind the longest prompt: what a backlog of stores is made of
CHECKED_TOKENS = 8192  # most new ones of a prompt whose stores are kept and read back
ISSUED_AT_ONCE = 4     # layers, so that no layer's kernels wait for the host
BACKLOG_FLYING = 6     # layers of it under way
RESTORES_FLYING = 3    # layers, where rates are measured without compute
BACKLOG_PAIRS = 5
BACKLOG_SECONDS = 0.6  # of one rate


class Way(typing.NamedTuple):
    scheduler: bool = False
    buffer: bool = False   # a store buffer; a scheduler needs one
    phases: bool = True    # the drives' read/write token
    polling: bool = False  # the session's kernels
    ahead: int = 0         # layers issued beyond the one that is waited for; 0: all, at once
    mount: bool = True     # otherwise copies from host memory


WAYS = {
    "tuttifs": Way(scheduler=True, buffer=True),
    "no-scheduler": Way(),
    "no-separation": Way(phases=False),
    "no-phases": Way(scheduler=True, buffer=True, phases=False),
    "buffer": Way(buffer=True, ahead=2),
    "by-hand": Way(ahead=2),
    "polling": Way(polling=True, ahead=2),
    "per-object": Way(mount=False),
}


class Features:
    """What the library and the command at hand have; older ones lack the scheduler."""

    def __init__(self, a):
        self.scheduler = hasattr(tuttifs.Session, "prefill")
        self.phases = bubble_report.has_phases(a.tuttifs)
        self.gpu = not a.cpu

    def lacking(self, way):
        """What keeps a way from being measured, or nothing."""
        if way.scheduler and not self.scheduler:
            return "this library has no scheduler"
        if not way.phases and not self.phases:
            return "this tuttifs has no -o phases"
        if not self.gpu and (way.polling or not way.mount):
            return "needs a GPU"
        return ""


class Probe:
    """How long a stream computes, and how long it stands still before each layer, by its own clock."""

    def __init__(self, model):
        self.cuda, layers = model.device.type == "cuda", model.layers
        if self.cuda:
            self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * layers + 2)]
        else:
            self.marks = [0.0] * (2 * layers + 2)

    def mark(self, i):
        if self.cuda:
            self.marks[i].record()
        else:
            self.marks[i] = time.perf_counter()

    def begin(self):
        self.mark(-2)

    def wait(self, layer, wait):
        """Calls wait, which makes the stream wait for the layer."""
        self.mark(2 * layer)
        wait(layer)
        self.mark(2 * layer + 1)

    def end(self):
        self.mark(-1)

    def between(self, i, j):
        x, y = self.marks[i], self.marks[j]
        return x.elapsed_time(y) if self.cuda else 1e3 * (y - x)

    def read(self):
        """Milliseconds of compute, and of each layer's wait. The device has ended."""
        bubbles = [self.between(i, i + 1) for i in range(0, len(self.marks) - 2, 2)]
        return self.between(-2, -1) - sum(bubbles), bubbles


class Resident:
    """The prefix is in the pool already, nothing is stored: what the ways are compared with."""

    def begin(self):
        pass

    def begin_piece(self, begin, tokens):
        pass

    def wait(self, layer):
        pass

    def after(self, layer):
        pass

    def end_pass(self):
        pass


class Request:
    """One prompt over a mount: its prefix comes layer by layer, its new blocks go as they are computed."""

    def __init__(self, kv, way, cached, blocks):
        self.kv, self.way, self.cached, self.blocks = kv, way, cached, blocks
        self.number, self.keys = kv.next_request(), kv.next_keys(blocks - cached)
        self.transfers, self.stores, self.written = [], [], []
        self.old = kv.event()  # behind the pool's last reader
        self.stream = torch.cuda.current_stream() if self.old else None

    def begin(self):
        kv, begin = self.kv, time.perf_counter()
        self.pinned = kv.pin(self.number, self.cached)
        pinned = time.perf_counter()
        self.layers = kv.pool.retrieve(self.pinned, kv.memory, kv.table[:self.cached])
        self.host = {"pin": 1e3 * (pinned - begin), "trailers": 1e3 * (time.perf_counter() - pinned)}

    def issue(self, last):
        while len(self.transfers) <= min(last, self.kv.model.layers - 1):
            self.transfers.append(self.layers.begin(len(self.transfers), self.old))

    def begin_piece(self, begin, tokens):
        """The pass that computes tokens at positions from begin on."""
        if self.way.scheduler:
            self.kv.session.prefill(tokens, begin, self.kv.model.layers)
        self.piece = slice(begin // self.kv.model.block, (begin + tokens) // self.kv.model.block)
        if self.transfers:
            self.open_piece()
        else:
            self.issue(0)

    def open_piece(self):
        new = slice(self.piece.start - self.cached, self.piece.stop - self.cached)
        self.written.append(self.kv.pool.store(self.slots[new], self.kv.memory, self.kv.table[self.piece]))

    def wait(self, layer):
        if layer == 0:
            # What the GPU need not wait for is done beside the first layer's transfer, or beside its compute.
            if not self.way.ahead:
                self.issue(2)
            begin = time.perf_counter()
            self.slots = self.kv.pool.reserve(self.kv.keys[:self.cached] + self.keys, self.cached, self.number)
            self.open_piece()
            self.host["reserve"] = 1e3 * (time.perf_counter() - begin)
        self.transfers[layer].wait_on(self.stream)
        if self.way.ahead:
            self.issue(layer + self.way.ahead)

    def after(self, layer):
        if not self.way.ahead:
            self.issue(2 + ISSUED_AT_ONCE * (layer + 1))
        event = self.kv.event()
        self.stores.append(self.written[-1].begin(layer, event))
        if self.way.scheduler:
            self.kv.session.layer_done(layer, event)

    def end_pass(self):
        if self.way.scheduler:
            self.kv.session.end_pass()

    def end(self, commit):
        """Ends what is under way. The new blocks were written like any; without commit they are given up then, so
        that the volume stays as it is."""
        for transfer in self.transfers:
            transfer.wait()
        self.layers.check()
        self.layers.close()
        begin = time.perf_counter()
        for transfer in self.stores:
            transfer.wait()
        for layers in self.written:
            layers.finish()
            layers.close()
        self.host["drain"] = 1e3 * (time.perf_counter() - begin)
        if commit:
            self.slots.commit()
        else:
            self.slots.abort()
        self.pinned.release()


class Copies:
    """One prompt over host memory, a copy for each run of each block."""

    def __init__(self, dram, cached, blocks):
        self.dram, self.cached, self.blocks, self.host = dram, cached, blocks, {}

    def begin(self):
        self.before = self.dram.begin(self.cached)
        self.dram.begin_store(self.cached, self.blocks)

    def begin_piece(self, begin, tokens):
        pass

    def wait(self, layer):
        self.before(layer)

    def after(self, layer):
        event = torch.cuda.Event()
        event.record()
        self.dram.store(layer, event)

    def end_pass(self):
        pass

    def end(self, commit):
        self.dram.end()
        begin = time.perf_counter()
        self.dram.end_store()
        self.host["drain"] = 1e3 * (time.perf_counter() - begin)


class KV(Store):
    """The pool on a mount, with the session of a way."""

    def __init__(self, a, model, volume, way, blocks):
        super().__init__(a, model, volume.mount, polling=way.polling, **session_options(a, way))
        self.volume = volume
        self.requests, self.salt = 1, os.urandom(16)  # no other session has the same keys
        self.table = model.table.tolist()
        # Another session may have stored the prompt.
        if self.pool.peek(self.keys[:blocks]) != blocks:
            self.put(blocks)

    def next_request(self):
        self.requests += 1
        return self.requests

    def next_keys(self, n):
        """Keys that nobody has used."""
        return chain(self.salt + self.requests.to_bytes(8, "little"), n)

    def restore_rate(self, blocks, seconds):
        """Bytes a second of layers that are restored one behind the other, with no compute."""
        request = self.next_request()
        leases = self.pin(request, blocks)
        layers = self.pool.retrieve(leases, self.memory, self.table[:blocks])
        synchronize(self.model)
        flying, n, begin = [], 0, time.perf_counter()
        while not n or n % self.model.layers or time.perf_counter() - begin < seconds:
            flying.append(layers.begin(n % self.model.layers))
            n += 1
            if len(flying) == RESTORES_FLYING:
                flying.pop(0).wait()
        for transfer in flying:
            transfer.wait()
        rate = n * blocks * 2 * self.model.run_bytes() / (time.perf_counter() - begin)
        layers.check()
        layers.close()
        leases.release()
        return rate


def session_options(a, way):
    return {"store_bytes": a.store_mib << 20} if way.buffer else {}


class Backlog:
    """with Backlog(kv): stores of the spare blocks are always waiting to be written."""

    def __init__(self, kv):
        self.kv, self.stop, self.error = kv, threading.Event(), None
        self.thread = threading.Thread(target=self.work)

    def __enter__(self):
        kv = self.kv
        kv.next_request()
        self.slots = kv.pool.reserve(kv.next_keys(SPARE_BLOCKS))
        self.layers = kv.pool.store(self.slots, kv.memory, kv.table[-SPARE_BLOCKS:])
        self.thread.start()
        return self

    def work(self):
        flying, n = [], 0
        try:
            while not self.stop.is_set():
                flying.append(self.layers.begin(n % self.kv.model.layers))
                n += 1
                if len(flying) == BACKLOG_FLYING:
                    flying.pop(0).wait()
            for transfer in flying:
                transfer.wait()
        except tuttifs.Error as e:  # told when the backlog ends
            self.error = e

    def __exit__(self, kind, value, trace):
        self.stop.set()
        self.thread.join()
        if self.error and not kind:
            raise self.error
        self.layers.close()
        self.slots.abort()


class Bench:
    def __init__(self, a, report, save):
        self.a, self.report, self.save = a, report, save
        self.end = time.monotonic() + a.limit
        self.features = Features(a)
        note(f"weights and pool on {a.device} ...")
        # Model takes its pool's size from a.
        self.model = Model(model_arguments(a))
        for t in self.model.pool:
            t.normal_()
        self.whole = [t.clone() for t in self.model.pool]
        self.tokens = random_tokens(self.model, max(a.tokens))
        self.probe, self.wanted, self.dram = Probe(self.model), {}, None
        self.resident_ms = {}
        gc.collect()
        gc.disable()  # no pauses; what the cells leave behind is little

    def left(self):
        return self.end - time.monotonic()

    def reset(self, clear):
        for t, whole in zip(self.model.pool, self.whole):
            t.zero_() if clear else t.copy_(whole)

    def once(self, source, cached, blocks):
        """One time to first token. source() makes the request."""
        model, piece = self.model, self.a.piece
        tokens, position = self.tokens[:blocks * model.block], cached * model.block
        request = source()
        synchronize(model)
        begin = time.perf_counter()
        request.begin()
        states, before = [], lambda layer: self.probe.wait(layer, request.wait)
        while position < len(tokens):
            part = tokens[position:position + piece]
            request.begin_piece(position, len(part))
            if before:
                self.probe.begin()
            x, logits = model.forward(part, position, before, request.after)
            states.append(x)
            position, before = position + piece, None
        self.probe.end()
        int(logits.argmax())  # the first token, on the host
        seconds = time.perf_counter() - begin
        request.end_pass()
        synchronize(model)
        compute, bubbles = self.probe.read()
        return request, {"ttft": 1e3 * seconds, "compute": compute, "bubbles": bubbles}, (torch.cat(states), logits)

    def resident(self, cached, blocks):
        self.reset(clear=False)
        _, times, result = self.once(Resident, cached, blocks)
        if (cached, blocks) not in self.wanted:
            self.wanted[cached, blocks] = result
        self.resident_ms[cached, blocks] = times["ttft"]
        return times

    def restored(self, source, cached, blocks, kv=None, check=False):
        self.reset(clear=True)
        request, times, result = self.once(source, cached, blocks)
        request.end(check)
        times["host"] = request.host
        self.same(cached, result, self.wanted[cached, blocks])
        if check:
            self.check_stored(kv, request)
        return times

    def same(self, cached, result, wanted):
        """Raises where anything differs from the HBM-resident run by a bit."""
        model = self.model
        prefix = model.table_device[:cached]
        for layer, (t, whole) in enumerate(zip(model.pool, self.whole)):
            for i in (0, 1):
                got, want = (p.select(model.kv_axis, i).index_select(0, prefix) for p in (t, whole))
                if not same_bits(got, want):
                    raise SystemExit(f"layer {layer} was not restored as it was")
        for what, got, want in (("hidden states", result[0], wanted[0]), ("logits", result[1], wanted[1])):
            if not same_bits(got, want):
                raise SystemExit(f"{what} differ from those of the HBM-resident run")

    def check_stored(self, kv, request):
        """Raises unless the new blocks come back from the drives as they were computed."""
        model, number = self.model, kv.next_request()
        blocks = model.table_device[request.cached:request.blocks]
        computed = [t.index_select(1 - model.kv_axis, blocks) for t in model.pool]
        for t in model.pool:
            t.zero_()
        synchronize(model)
        leases = kv.pool.pin(kv.keys[:request.cached] + request.keys, number)
        if len(leases) != request.blocks:
            raise RuntimeError(f"{len(leases)} of {request.blocks} blocks found once the new ones were stored")
        with leases, kv.pool.retrieve(leases, kv.memory, kv.table[:request.blocks]) as layers:
            layers.move_all(model.layers)
        for layer, (t, want) in enumerate(zip(model.pool, computed)):
            if not same_bits(t.index_select(1 - model.kv_axis, blocks), want):
                raise SystemExit(f"layer {layer} of the new blocks was not stored as it was")

    def cell(self, plan, source, kv=None, check=False):
        """Runs of one way in turns with the HBM-resident one, and before each and behind the last one of the latter."""
        cached, blocks = plan["cached_tokens"] // self.a.block, plan["tokens"] // self.a.block
        guess = plan["new_tokens"] * (0.04 + 1.3e-6 * plan["tokens"])  # ms, roughly an H200's
        if self.left() < 5 * self.resident_ms.get((cached, blocks), guess) / 1e3 + 2:
            return False
        if (cached, blocks) not in self.wanted:
            self.resident(cached, blocks)
        mixed = bubble_report.mixed(kv.volume.stats()) if kv else None
        self.restored(source, cached, blocks, kv, check)  # warms up
        turns = [self.resident(cached, blocks)]
        most = max(2, min(self.a.runs, int(1e3 * self.a.seconds / (2 * turns[0]["ttft"]))))
        runs = []
        while len(runs) < most and self.left() > 2 * turns[0]["ttft"] / 1e3 + 2:
            runs.append(self.restored(source, cached, blocks))
            turns.append(self.resident(cached, blocks))
        if not runs:
            return False
        row = {**plan, **bubble_report.summary(runs, turns)}
        if kv:
            row["mixed_commands"] = bubble_report.since(bubble_report.mixed(kv.volume.stats()), mixed)
        self.report["cells"].append(row)
        note(bubble_report.line(self.report["cells"][-1]))
        return True

    def cells(self, plans, source, kv=None, check=True):
        for i, plan in enumerate(plans):
            first = check and kv is not None and i == 0 and plan["new_tokens"] <= CHECKED_TOKENS
            if not self.cell(plan, source(plan), kv, first):
                self.left_out(plan, "no time (--limit)")
            self.save()

    def left_out(self, plan, reason):
        self.report["left_out"].append({**plan, "reason": reason})

    def copies(self, plans):
        if self.dram is None:
            self.dram = Dram(self.model)
            self.reset(clear=False)
            self.dram.fill()
        self.cells(plans, lambda p: lambda: Copies(self.dram, p["cached_tokens"] // self.a.block,
                                                   p["tokens"] // self.a.block))

    def mounted(self, volume, name, plans):
        """A way's cells over a mount."""
        way = WAYS[name]
        options = bubble_report.mount_options(plans[0]["drives"], way.phases)
        if volume.options != options:
            volume.remount(options)
        most = max(p["tokens"] for p in plans) // self.a.block
        self.reset(clear=False)  # what KV stores
        kv = KV(self.a, self.model, volume, way, most)

        def source(plan):
            return lambda: Request(kv, way, plan["cached_tokens"] // self.a.block, plan["tokens"] // self.a.block)

        def with_stores(kind):
            return [p for p in plans if p["stores"] == kind]
        try:
            note(kv.session.describe())
            if with_stores("backlog"):
                self.backlog(kv, name, plans[0], most)
            self.cells(with_stores("own"), source, kv)
            if with_stores("backlog"):
                with Backlog(kv):
                    self.cells(with_stores("backlog"), source, kv, check=False)
            stats = volume.stats()
            self.report["sessions"].append({"drives": plans[0]["drives"], "way": name,
                                            "session": dataclasses.asdict(kv.session.stats()),
                                            "mount": {k: stats[k] for k in ("phases", "io", "drives") if k in stats}})
        finally:
            kv.close()

    def backlog(self, kv, name, plan, blocks):
        """Rates without compute: restores alone and during a backlog of stores, in turns, and stores alone."""
        alone, during, written, mixed = [], [], [], bubble_report.mixed(kv.volume.stats())

        def stored(during):
            """Bytes a second that drives were given to write meanwhile, and what during returns."""
            time.sleep(BACKLOG_SECONDS / 2)  # until what takes the stores in is full
            begin, before = time.perf_counter(), kv.volume.stats()["io"]["bytes_written"]
            result = during()
            after = kv.volume.stats()["io"]["bytes_written"]
            return (after - before) / (time.perf_counter() - begin), result
        kv.restore_rate(blocks, 0)  # warms up
        for _ in range(BACKLOG_PAIRS):
            if self.left() < 5 * BACKLOG_SECONDS + 5:
                break
            alone.append(kv.restore_rate(blocks, BACKLOG_SECONDS))
            with Backlog(kv):
                writes, reads = stored(lambda: kv.restore_rate(blocks, BACKLOG_SECONDS))
            during.append(reads)
            written.append(writes)
        if not during:
            self.left_out({"drives": plan["drives"], "way": name, "part": "backlog"}, "no time (--limit)")
            return
        with Backlog(kv):
            stores, _ = stored(lambda: time.sleep(BACKLOG_SECONDS))
        row = {"drives": plan["drives"], "way": name, "tokens": blocks * self.a.block, "pairs": len(during),
               "read_only_gb_per_second": statistics.median(alone) / 1e9,
               "read_gb_per_second": statistics.median(during) / 1e9,
               "write_gb_per_second": statistics.median(written) / 1e9, "write_only_gb_per_second": stores / 1e9,
               "ratio": statistics.median(x / y for x, y in zip(during, alone)),
               "mixed_commands": bubble_report.since(bubble_report.mixed(kv.volume.stats()), mixed)}
        self.report["backlog"].append(row)
        note(bubble_report.backlog_line(row))
        self.save()

    def volume(self, drives, plans):
        a = self.a
        # The longest prompt, the most new blocks of any, those that are stored for checking, and a backlog.
        new = max(p["new_tokens"] for p in plans)
        checked = {p["way"]: min(p["new_tokens"], CHECKED_TOKENS) for p in reversed(plans)}  # each way's first
        blocks = (max(p["tokens"] for p in plans) + new + sum(checked.values())) // a.block + SPARE_BLOCKS
        size = blocks * (a.layers * kv_model.object_bytes(a) + 8192)
        count = bubble_report.DRIVES[drives].count
        note(f"a volume of {count} drives, {size >> 20} MiB ...")
        return RamVolume(a.tuttifs, a.where, count, size * 5 // 4 // count + (64 << 20), a.pollers,
                         bubble_report.mount_options(drives, True))

    def link(self):
        """GB/s of large copies from pinned host memory."""
        if self.a.cpu:
            return None
        source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(256 << 20, dtype=torch.uint8, device=self.model.device)
        rates, marks = [], [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(12):
            marks[0].record()
            target.copy_(source, non_blocking=True)
            marks[1].record()
            marks[1].synchronize()
            rates.append(target.numel() / marks[0].elapsed_time(marks[1]) / 1e6)
        return statistics.median(rates[2:])

    def run(self):
        a, report = self.a, self.report
        report.update(gpu=None if a.cpu else torch.cuda.get_device_name(self.model.device), torch=torch.__version__,
                      link_gb_per_second=self.link(), object_bytes=2 * self.model.run_bytes())
        for drives, tokens, plans in bubble_report.stages(a):
            if self.left() < 10:
                for plan in plans:
                    self.left_out(plan, "no time (--limit)")
                self.save()
                continue
            note(f"drives {drives}, {tokens} tokens\n{bubble_report.HEAD}")
            self.stage(drives, tokens, plans)

    def stage(self, drives, tokens, plans):
        by_way = {}
        for plan in plans:
            by_way.setdefault(plan["way"], []).append(plan)
        for name in [n for n in by_way if self.features.lacking(WAYS[n])]:
            for plan in by_way.pop(name):
                self.left_out(plan, self.features.lacking(WAYS[plan["way"]]))
        on_mount = {name: p for name, p in by_way.items() if WAYS[name].mount}
        if on_mount:
            with self.volume(drives, [p for plans in on_mount.values() for p in plans]) as volume:
                for name, mine in on_mount.items():
                    self.attempt(mine, lambda: self.mounted(volume, name, mine))
        for name, mine in by_way.items():
            if not WAYS[name].mount:
                self.attempt(mine, lambda: self.copies(mine))

    def attempt(self, plans, f):
        """A way that fails is told, and the others have their turn. Wrong bytes end everything."""
        try:
            f()
        except (tuttifs.Error, RuntimeError, OSError) as e:
            text = f"{plans[0]['drives']}, {plans[0]['way']}: {type(e).__name__}: {e}"
            note(text)
            self.report["failures"].append(text)
        self.save()


def model_arguments(a):
    m = argparse.Namespace(**vars(a))
    m.tokens = max(a.tokens) + SPARE_BLOCKS * a.block
    return m


@torch.inference_mode()
def run(a, report, save):
    if not a.cpu:
        torch.cuda.set_device(a.device)
    bench = Bench(a, report, save)
    bench.run()
