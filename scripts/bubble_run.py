"""The measuring part of bubbles.py: prompts whose prefix is restored and whose new tokens are stored, by several
ways."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import os
import statistics
import threading
import time
import typing

import bubble_report
from kv_store import Store, chain, note, tuttifs
from ram_volume import OutOfTime, RamVolume

SPARE_BLOCKS = 64      # of the pool, behind the longest prompt: what a backlog of stores is made of
CHECKED_TOKENS = 8192  # most new ones of a prompt whose stores are kept and read back
ISSUED_AT_ONCE = 4     # layers, so that no layer's kernels wait for the host
BACKLOG_FLYING = 6     # layers of it under way
RESTORES_FLYING = 3    # layers, where rates are measured without compute
BACKLOG_PAIRS = 5
SETTING_UP = 3         # seconds that a way takes before its first prompt, whatever it stores


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
    """What the command and the machine at hand have."""

    def __init__(self, a, gpu):
        self.phases = bubble_report.has_phases(a.tuttifs)
        self.gpu = gpu

    def lacking(self, way):
        """What keeps a way from being measured, or nothing."""
        if not way.phases and not self.phases:
            return "this tuttifs has no -o phases"
        if not self.gpu and (way.polling or not way.mount):
            return "needs a GPU"
        return ""


class HostTimer:
    """Points in time of this thread."""

    def __init__(self, n):
        self.times = [0.0] * n

    def mark(self, i):
        self.times[i] = time.perf_counter()

    def between(self, i, j):
        return 1e3 * (self.times[j] - self.times[i])


class Probe:
    """How long what computes does so, and how long it stands still before each layer."""

    def __init__(self, subject):
        self.layers = subject.model.layers
        n = 2 * self.layers + 2
        self.timer = subject.timer(n) or HostTimer(n)

    def begin(self):
        self.timer.mark(2 * self.layers)

    def wait(self, layer, wait):
        """Calls wait, which has compute wait for the layer."""
        self.timer.mark(2 * layer)
        wait(layer)
        self.timer.mark(2 * layer + 1)

    def end(self):
        self.timer.mark(2 * self.layers + 1)

    def read(self):
        """Milliseconds of compute, and of each layer's wait. All is computed."""
        bubbles = [self.timer.between(2 * layer, 2 * layer + 1) for layer in range(self.layers)]
        return self.timer.between(2 * self.layers, 2 * self.layers + 1) - sum(bubbles), bubbles


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
        self.counted = kv.session.scheduler_stats().bubble_ns
        self.stream = kv.subject.stream()

    def begin(self):
        kv, begin = self.kv, time.perf_counter()
        self.leases = kv.pin(self.number, self.cached)
        pinned = time.perf_counter()
        self.layers = kv.pool.retrieve(self.leases, kv.memory, kv.model.places[:self.cached])
        self.host = {"pin": 1e3 * (pinned - begin), "trailers": 1e3 * (time.perf_counter() - pinned)}

    def reserve(self):
        begin = time.perf_counter()
        slots = self.kv.pool.reserve(self.kv.keys[:self.cached] + self.keys, self.cached, self.number)
        self.host["reserve"] = 1e3 * (time.perf_counter() - begin)
        return slots

    def issue(self, last):
        while len(self.transfers) <= min(last, self.kv.model.layers - 1):
            self.transfers.append(self.layers.begin(len(self.transfers), self.old))

    def begin_piece(self, begin, tokens):
        """The pass that computes tokens at positions from begin on."""
        first = not self.transfers
        if first:
            self.issue(0)  # before anything else: what is not on its way is waited for
            self.reserving = self.kv.beside.submit(self.reserve)
        if self.way.scheduler:
            self.kv.session.prefill(tokens, begin, self.kv.model.layers)
        self.piece = slice(begin // self.kv.model.block, (begin + tokens) // self.kv.model.block)
        if not first:
            self.open_piece()

    def open_piece(self):
        new = slice(self.piece.start - self.cached, self.piece.stop - self.cached)
        self.written.append(self.kv.pool.store(self.slots[new], self.kv.memory, self.kv.model.places[self.piece]))

    def wait(self, layer):
        if layer == 0 and not self.way.ahead:
            self.issue(2)  # the others behind the first layer's compute, which need not wait for the host
        self.transfers[layer].wait_on(self.stream)
        if self.way.ahead:
            self.issue(layer + self.way.ahead)

    def after(self, layer):
        if not self.way.ahead:
            self.issue(2 + ISSUED_AT_ONCE * (layer + 1))
        if not self.written:
            self.slots = self.reserving.result()
            self.open_piece()
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
        self.host["counted"] = (self.kv.session.scheduler_stats().bubble_ns - self.counted) / 1e6
        if commit:
            self.slots.commit()
        else:
            self.slots.abort()
        self.leases.release()


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
        self.dram.store(layer, self.dram.model.event())

    def end_pass(self):
        pass

    def end(self, commit):
        self.dram.end()
        begin = time.perf_counter()
        self.dram.end_store()
        self.host["drain"] = 1e3 * (time.perf_counter() - begin)
        self.dram.fill(self.cached, self.blocks)  # what another prompt restores is not what this one computed


class KV(Store):
    """The pool on a mount, with the session of a way."""

    def __init__(self, a, subject, volume, way, blocks):
        super().__init__(a, subject.model, volume.mount, polling=way.polling, **session_options(a, way))
        self.subject, self.volume = subject, volume
        self.requests, self.salt = 1, os.urandom(16)  # no other session has the same keys
        # An engine's scheduler works beside its worker: space may have to be freed for a reservation, which takes
        # milliseconds.
        self.beside = concurrent.futures.ThreadPoolExecutor(1)
        self.beside.submit(int).result()  # its thread is there
        # Another session may have stored the prompt.
        if self.pool.peek(self.keys[:blocks]) != blocks:
            self.put(blocks)

    def close(self):
        self.beside.shutdown()
        super().close()

    def next_request(self):
        self.requests += 1
        return self.requests

    def next_keys(self, n):
        """Keys that nobody has used."""
        return chain(self.salt + self.requests.to_bytes(8, "little"), n)

    def restore_rate(self, blocks, seconds):
        """Bytes a second of layers that are restored one behind the other, with no compute."""
        leases = self.pin(self.next_request(), blocks)
        layers = self.pool.retrieve(leases, self.memory, self.model.places[:blocks])
        self.model.synchronize()
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
    options = {} if way.scheduler else {"no_scheduler": True}
    if way.scheduler and a.slack_table:
        # Of all ways and volumes, whatever drives it is of: what differs is in the session's description.
        options["slack_table"], options["any_slack_table"] = a.slack_table, True
    return {**options, "store_bytes": a.store_mib << 20} if way.buffer else options


class Backlog:
    """with Backlog(kv): stores of the spare blocks are always waiting to be written."""

    def __init__(self, kv):
        self.kv, self.stop, self.error = kv, threading.Event(), None
        self.thread = threading.Thread(target=self.work)

    def __enter__(self):
        kv = self.kv
        kv.next_request()
        self.slots = kv.pool.reserve(kv.next_keys(SPARE_BLOCKS))
        self.layers = kv.pool.store(self.slots, kv.memory, kv.model.places[-SPARE_BLOCKS:])
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
    def __init__(self, a, report, save, subject):
        self.a, self.report, self.save = a, report, save
        self.end = a.started + a.limit
        note(f"weights and pool on {a.device} ...")
        self.subject = subject(a, max(a.tokens) // a.block + SPARE_BLOCKS)
        self.model = self.subject.model
        self.features = Features(a, str(self.model.device) != "cpu")
        self.probe, self.dram = Probe(self.subject), None
        self.wanted, self.resident_ms = {}, {}  # by blocks cached, and in all
        gc.collect()
        gc.disable()  # no pauses; what the cells leave behind is little

    def left(self):
        return self.end - time.monotonic()

    def once(self, source, cached, blocks):
        """One time to first token. source() makes the request."""
        block, subject = self.a.block, self.subject
        request = source()
        self.model.synchronize()
        begin = time.perf_counter()
        request.begin()
        parts, before = [], lambda layer: self.probe.wait(layer, request.wait)
        for position in range(cached * block, blocks * block, self.a.piece):
            end = min(position + self.a.piece, blocks * block)
            request.begin_piece(position, end - position)
            if before:
                self.probe.begin()
            parts.append(subject.forward(position, end, before, request.after))
            before = None
        self.probe.end()
        subject.first_token(parts[-1])
        seconds = time.perf_counter() - begin
        request.end_pass()
        self.model.synchronize()
        compute, bubbles = self.probe.read()
        return request, {"ttft": 1e3 * seconds, "compute": compute, "bubbles": bubbles}, parts

    def resident(self, cached, blocks):
        self.subject.reset(clear=False)
        _, times, result = self.once(Resident, cached, blocks)
        if (cached, blocks) not in self.wanted:
            self.wanted[cached, blocks] = result
        self.resident_ms[cached, blocks] = times["ttft"]
        return times

    def restored(self, source, cached, blocks, kv=None, check=False, backlog=False):
        self.subject.reset(clear=True)
        with Backlog(kv) if backlog else contextlib.nullcontext():
            if backlog:
                time.sleep(self.a.backlog_seconds / 2)  # until what takes the stores in is full
            request, times, result = self.once(source, cached, blocks)
        request.end(check)
        times["host"] = request.host
        self.subject.same(cached, result, self.wanted[cached, blocks])
        if check:
            self.check_stored(kv, request)
        return times

    def check_stored(self, kv, request):
        """Raises unless the new blocks come back from the drives as they were computed."""
        number, computed = kv.next_request(), self.subject.take(request.cached, request.blocks)
        self.subject.reset(clear=True)
        self.model.synchronize()
        leases = kv.pool.pin(kv.keys[:request.cached] + request.keys, number)
        if len(leases) != request.blocks:
            raise RuntimeError(f"{len(leases)} of {request.blocks} blocks found once the new ones were stored")
        with leases, kv.pool.retrieve(leases, kv.memory, kv.model.places[:request.blocks]) as layers:
            layers.move_all(self.model.layers)
        if not self.subject.is_taken(request.cached, request.blocks, computed):
            raise SystemExit("the new blocks were not stored as they were")

    def cell(self, plan, source, kv, check):
        """Runs of one way in turns with the HBM-resident one, and before each and behind the last one of the latter."""
        cached, blocks = plan["cached_tokens"] // self.a.block, plan["tokens"] // self.a.block
        backlog = plan["stores"] == "backlog"
        guess = plan["new_tokens"] * (0.04 + 1.3e-6 * plan["tokens"])  # ms, roughly an H200's
        if self.left() < 5 * self.resident_ms.get((cached, blocks), guess) / 1e3 + 2:
            return False
        if (cached, blocks) not in self.wanted:
            self.resident(cached, blocks)
        mixed = bubble_report.mixed(kv.volume.stats()) if kv else None
        self.restored(source, cached, blocks, kv, check, backlog)  # warms up
        turns = [self.resident(cached, blocks)]
        most = max(2, min(self.a.runs, int(1e3 * self.a.seconds / (2 * turns[0]["ttft"]))))
        runs = []
        while len(runs) < most and self.left() > 2 * turns[0]["ttft"] / 1e3 + 2:
            runs.append(self.restored(source, cached, blocks, kv, backlog=backlog))
            turns.append(self.resident(cached, blocks))
        if not runs:
            return False
        row = {**plan, **bubble_report.summary(runs, turns)}
        if kv:
            row["mixed_commands"] = bubble_report.since(bubble_report.mixed(kv.volume.stats()), mixed)
        self.report["cells"].append(row)
        note(bubble_report.line(self.report["cells"][-1]))
        return True

    def cells(self, plans, source, kv=None):
        for i, plan in enumerate(plans):
            check = kv is not None and i == 0 and plan["new_tokens"] <= CHECKED_TOKENS
            if not self.cell(plan, source(plan), kv, check):
                self.left_out(plan, "no time (--limit)")
            self.save()

    def left_out(self, plan, reason):
        self.report["left_out"].append({**plan, "reason": reason})

    def copies(self, plans):
        if self.dram is None:
            self.dram = self.subject.host_memory()
        self.cells(plans, lambda p: lambda: Copies(self.dram, p["cached_tokens"] // self.a.block,
                                                   p["tokens"] // self.a.block))

    def mounted(self, volume, name, plans):
        """A way's cells over a mount."""
        way = WAYS[name]
        options = bubble_report.mount_options(plans[0]["drives"], way.phases)
        if volume.options != options:
            volume.remount(options)
        most = max(p["tokens"] for p in plans) // self.a.block
        if self.left() < most * self.block_bytes() * volume.filling + SETTING_UP:  # storing takes no less
            raise OutOfTime("storing the prompt")
        self.subject.reset(clear=False)  # what KV stores
        kv = KV(self.a, self.subject, volume, way, most)

        def source(plan):
            return lambda: Request(kv, way, plan["cached_tokens"] // self.a.block, plan["tokens"] // self.a.block)

        try:
            note(kv.session.describe())
            if any(p["stores"] == "backlog" for p in plans):
                self.backlog(kv, name, plans[0], most)
            self.cells(plans, source, kv)
            stats = volume.stats()
            session = kv.session
            self.report["sessions"].append({
                "drives": plans[0]["drives"], "tokens": plans[0]["tokens"], "way": name,
                "session": dataclasses.asdict(session.stats()), "store": dataclasses.asdict(session.store_stats()),
                "scheduler": dataclasses.asdict(session.scheduler_stats()) if way.scheduler else None,
                "mount": {k: stats[k] for k in ("phases", "io", "drives") if k in stats}})
        finally:
            kv.close()

    def backlog(self, kv, name, plan, blocks):
        """Rates without compute: restores alone and during a backlog of stores, in turns, and stores alone."""
        alone, during, written, mixed = [], [], [], bubble_report.mixed(kv.volume.stats())

        def stored(during):
            """Bytes a second that drives were given to write meanwhile, and what during returns."""
            time.sleep(self.a.backlog_seconds / 2)  # until what takes the stores in is full
            begin, before = time.perf_counter(), kv.volume.stats()["io"]["bytes_written"]
            result = during()
            after = kv.volume.stats()["io"]["bytes_written"]
            return (after - before) / (time.perf_counter() - begin), result
        kv.restore_rate(blocks, 0)  # warms up
        for _ in range(BACKLOG_PAIRS):
            if self.left() < 5 * self.a.backlog_seconds + 5:
                break
            alone.append(kv.restore_rate(blocks, self.a.backlog_seconds))
            with Backlog(kv):
                writes, reads = stored(lambda: kv.restore_rate(blocks, self.a.backlog_seconds))
            during.append(reads)
            written.append(writes)
        if not during:
            self.left_out({"drives": plan["drives"], "way": name, "part": "backlog"}, "no time (--limit)")
            return
        with Backlog(kv):
            stores, _ = stored(lambda: time.sleep(self.a.backlog_seconds))
        row = {"drives": plan["drives"], "way": name, "tokens": blocks * self.a.block, "pairs": len(during),
               "read_only_gb_per_second": statistics.median(alone) / 1e9,
               "read_gb_per_second": statistics.median(during) / 1e9,
               "write_gb_per_second": statistics.median(written) / 1e9, "write_only_gb_per_second": stores / 1e9,
               "ratio": statistics.median(x / y for x, y in zip(during, alone)),
               "mixed_commands": bubble_report.since(bubble_report.mixed(kv.volume.stats()), mixed)}
        self.report["backlog"].append(row)
        note(bubble_report.backlog_line(row))
        self.save()

    def block_bytes(self):
        return self.a.layers * 2 * self.model.run_bytes() + 8192

    def volume(self, drives, plans):
        a = self.a
        # The longest prompt, the most new blocks of any, those that are stored for checking, and a backlog.
        new = max(p["new_tokens"] for p in plans)
        first = {p["way"]: p["new_tokens"] for p in reversed(plans)}
        checked = sum(n for n in first.values() if n <= CHECKED_TOKENS)
        blocks = (max(p["tokens"] for p in plans) + new + checked) // a.block + SPARE_BLOCKS
        size = blocks * self.block_bytes()
        count = bubble_report.DRIVES[drives].count
        note(f"a volume of {count} drives, {size >> 20} MiB ...")
        return RamVolume(a.tuttifs, a.where, count, size * 5 // 4 // count + (64 << 20), a.pollers,
                         bubble_report.mount_options(drives, True), end=self.end)

    def run(self):
        a, report = self.a, self.report
        report.update(self.subject.about, link_gb_per_second=self.subject.link(),
                      object_bytes=2 * self.model.run_bytes())
        for drives, tokens, plans in bubble_report.stages(a):
            note(f"drives {drives}, {tokens} tokens\n{bubble_report.HEAD}")
            self.bounded(plans, lambda: self.stage(drives, tokens, plans))

    def bounded(self, plans, f):
        """Does something with plans; those that --limit leaves no time for are left out."""
        try:
            if self.left() < SETTING_UP:
                raise OutOfTime("beginning")
            f()
        except OutOfTime as e:
            note(f"no time (--limit) for {e}")
            done = self.report["cells"] + self.report["left_out"]
            for plan in plans:
                if not any(plan.items() <= row.items() for row in done):
                    self.left_out(plan, "no time (--limit)")
        self.save()

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
            self.bounded(plans, f)
        except (tuttifs.Error, RuntimeError, OSError) as e:
            text = f"{plans[0]['drives']}, {plans[0]['way']}: {type(e).__name__}: {e}"
            note(text)
            self.report["failures"].append(text)
            self.save()


def run(a, report, save):
    if a.device == "none":
        import bubble_sleep as subjects
    else:
        import bubble_torch as subjects
    subjects.run(lambda subject: Bench(a, report, save, subject).run())
