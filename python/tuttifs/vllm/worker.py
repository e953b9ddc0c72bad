"""One rank's side: bytes between the engine's blocks and files. It needs PyTorch, and nothing of vLLM.

Blocks are gathered into staging memory within the step that filled them, on the stream that computes, so the engine
may do with them what it likes afterwards; threads move the staging memory to files and back. What was loaded is copied
from staging memory to blocks only where it is wanted: a file's first blocks may be others' already.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import threading
import time
from typing import Any, Deque, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from .. import Memory, Pool, Session, Store as Mount
from ..errors import AgainError, Error, InvalidError, NoMemoryError, NoSpaceError, QuotaError
from ..layers import Layers, Transfer
from ..leases import Leases, Pinned, Reservation, Status
from .attachment import GONE, Mounted, quietly
from .files import NULL_BLOCK, Group, pieces
from .messages import Attached, Load, LoadPart, Report, Step, Store, StorePart, Weighed
from .metrics import Counts
from .options import Options
from .scheduler import open_pool
from .sharing import Follower, Leader

log = logging.getLogger("tuttifs.vllm")

UNIT = 4096  # that objects begin at in staging memory
LIBRARY_BYTES = 256 << 20  # of device memory, that a session with a GPU stages loads in
SHARED_BOUNCE = 64 << 20  # where all loads are by bounce cells
BOUNCE = 4 << 20  # for trailers: all else is in memory that controllers reach
RING = 10 << 20  # for what the session keeps of its memory: trailers on their way, and PRP lists
PAUSE_SECONDS = 300.0  # the longest between attempts to join one session
TOKENS_MAX = 1 << 24  # that its scheduler takes a pass to have
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # copies need not know what they copy


def blocks_first(cache: Any, blocks: int) -> Any:
    """A layer's tensor with the engine's blocks as its first axis, whatever its strides, as integers of the same
    size."""
    if cache.shape[0] % blocks:
        raise InvalidError(f"a tensor of shape {tuple(cache.shape)} for {blocks} blocks")
    if cache.shape[0] != blocks:  # the kernel's blocks are parts of the engine's
        cache = cache.unflatten(0, (blocks, cache.shape[0] // blocks))
    return cache.view(SAME_SIZE[cache.element_size()])


class Caches:
    """A rank's tensors, group by group."""

    def __init__(self, groups: Sequence[Group], blocks: int, caches: Mapping[str, Any]) -> None:
        self.groups = groups
        self.layers = [[blocks_first(caches[name], blocks) for name in g.layers] for g in groups]
        self.place = {name: (i, j) for i, g in enumerate(groups) for j, name in enumerate(g.layers)}
        for g, layers in zip(groups, self.layers):
            for name, tensor, size in zip(g.layers, layers, g.block_bytes):
                have = tensor[0].numel() * tensor.element_size()
                if have != size:
                    raise InvalidError(f"{name}: a block has {have} bytes, its specification says {size}")
        self.device = next(iter(caches.values())).device


class Slots:
    """Places for files in one half of the staging memory. In a slot layers begin at whole units, and objects of a layer
    follow each other."""

    def __init__(self, half: Any, first: int, slot: int) -> None:
        self.count = len(half) // slot
        self._table = half[:self.count * slot].view(self.count, slot)
        self._first, self._slot = first, slot  # in the registered memory
        self._free = list(range(self.count))
        self._changed = threading.Condition()
        self._open = True

    def take(self, most: int) -> List[int]:
        """1 to `most` slots, waited for; none when the memory is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self._open)
            if not self._open:
                return []
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._free += slots
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def offsets(self, shape: "Shape", layer: int, slots: Sequence[int]) -> List[int]:
        """Where a layer's objects of some slots begin in the registered memory."""
        return [self._first + s * self._slot + shape.offsets[layer] + o for s in slots for o in shape.objects[layer]]

    def layer(self, shape: "Shape", layer: int, cache: Any) -> Any:
        """A layer of all slots, as blocks like those of the engine's cache: [slots, blocks of a file, ...]."""
        at = shape.offsets[layer]
        return self._table[:, at:at + shape.sizes[layer]].view(cache.dtype).view(-1, shape.blocks, *cache.shape[1:])


class Shape(NamedTuple):
    """A group's file in a slot."""

    offsets: Tuple[int, ...]  # of the layers
    sizes: Tuple[int, ...]
    objects: Tuple[Tuple[int, ...], ...]  # each layer's objects: where they begin behind the layer's offset
    slot_bytes: int
    blocks: int  # of the engine, in a file

    @classmethod
    def of(cls, group: Group, file_tokens: int) -> "Shape":
        n = file_tokens // group.block_tokens
        offsets, objects, at = [], [], 0
        for b in group.block_bytes:
            offsets.append(at)
            starts, inner = [], 0
            for size in pieces(b * n):
                starts.append(inner)
                inner += size
            objects.append(tuple(starts))
            at += -(-b * n // UNIT) * UNIT
        return cls(tuple(offsets), tuple(b * n for b in group.block_bytes), tuple(objects), at, n)


def copy_blocks(targets: List[Any], sources: List[Any]) -> None:
    """Copies blocks in host memory, block by block, by the call that PyTorch's optimizers use. Indices would have every
    number copied by itself, and twice: at less than half of memory's speed from blocks of 18 KiB on; below, their lists
    cost as much. In one call, or this thread would stand in line for Python's lock after each block."""
    torch._foreach_copy_(targets, sources)


def check_staging(options: Options, groups: Sequence[Group], file_tokens: int) -> None:
    """Refuses staging memory that does not hold a file each way."""
    slot = max(Shape.of(g, file_tokens).slot_bytes for g in groups)
    if options.staging_bytes < 2 * slot:
        raise InvalidError(f"staging_bytes is {options.staging_bytes}: a file takes {slot} bytes, twice that is needed")


class Rank(NamedTuple):
    """Which part of the KV a worker has, and who has it as well."""

    number: int  # of those whose parts differ
    replica: int = 0  # of the same part. The first stores it
    replicas: int = 1


class Terms(NamedTuple):
    """What a rank is a member of a session with."""

    leads: bool
    loads: int  # bytes of staging memory
    stores: int
    options: Dict[str, Any]  # of the session

    @classmethod
    def of(cls, options: Options, device: Any, rank: Rank) -> "Terms":
        # Who leads loads elsewhere, and who follows stores nothing.
        leads, half = rank.replicas > 1 and not rank.replica, options.staging_bytes // 2
        loads, stores = 0 if leads else half, 0 if rank.replica else half
        session: Dict[str, Any] = {
            "lanes": options.lanes, "depth": options.depth, "store_bytes": options.store_bytes,
            "slack_table": options.slack_table, "no_scheduler": not options.scheduler,
            "any_slack_table": bool(options.slack_table and options.any_slack_table)}
        if device.type == "cpu":
            bounce = SHARED_BOUNCE if leads else BOUNCE
            session.update(dma_bytes=loads + stores + options.store_bytes + bounce + RING, bounce_bytes=bounce)
        return cls(leads, loads, stores, session)


class End(Mounted):
    """This rank's membership in the scheduler's session, with the staging memory that comes with it.

    Where ranks hold the same KV the first of them loads into memory that all map (sharing.py), by the CPU: from there
    every rank copies to its own device.
    """

    memory: Memory
    pools: List[Pool]
    loads: Slots
    stores: Slots
    text: str

    def __init__(self, options: Options, attached: Attached, device: Any, rank: Rank) -> None:
        self.token = attached.token
        self.shapes = [Shape.of(s.group, attached.file_tokens) for s in attached.pools]
        slot, terms = max(s.slot_bytes for s in self.shapes), Terms.of(options, device, rank)
        loads, stores, cpu = terms.loads, terms.stores, device.type == "cpu"
        self.leader: Optional[Leader] = None
        self.follower: Optional[Follower] = None
        self._slot = slot

        def join(mount: Mount) -> Session:
            return mount.join(attached.token, device, **terms.options)

        def fill(session: Session) -> None:
            if cpu:
                whole = torch.frombuffer(session.dma(), dtype=torch.uint8)[:loads + stores]
                if len(whole) < loads + stores:
                    raise InvalidError(f"the session has {len(whole)} bytes for staging memory of {loads + stores}")
            else:
                whole = torch.empty(loads + stores, dtype=torch.uint8, device=device)
            self.memory = session.register_flat(whole, padded=cpu)
            self.pools = [open_pool(session, s, options) for s in attached.pools]
            self.loads, self.stores = Slots(whole[:loads], 0, slot), Slots(whole[loads:], loads, slot)
            self.load_memory, self.load_pools = self.memory, self.pools
            self.text = session.describe()
        super().__init__(options.path, join, fill)
        try:
            if rank.replica:
                self.follower = Follower(attached.token, rank.number)
            elif terms.leads:
                self._lead(options, attached, rank, options.staging_bytes // 2, cpu)
        except BaseException:
            self.close()
            raise

    def _lead(self, options: Options, attached: Attached, rank: Rank, size: int, cpu: bool) -> None:
        """Loads go to shared memory: where this membership's executor is a GPU, by another one."""
        self.leader = Leader(attached.token, rank.number, rank.replicas - 1, size)
        reader = self.session
        if not cpu:
            reader = self.reader = self.mount.join(attached.token, lanes=options.lanes, depth=options.depth,
                                                   dma_bytes=SHARED_BOUNCE + RING, bounce_bytes=SHARED_BOUNCE)
            self.load_pools = [open_pool(reader, s, options) for s in attached.pools]
        shared = torch.frombuffer(self.leader.memory, dtype=torch.uint8)
        self.load_memory = reader.register_flat(shared)
        self.loads = Slots(shared, 0, self._slot)

    def find(self) -> None:
        """Finds the ranks that hold the same KV: the first thing that the loader does."""
        if self.leader is not None:
            self.leader.find()
        if self.follower is not None:
            if self.follower.find():
                self.shared = Slots(torch.frombuffer(self.follower.memory, dtype=torch.uint8), 0, self._slot)
            else:
                self.follower = None

    def close(self) -> None:
        for slots in (getattr(self, "loads", None), getattr(self, "stores", None)):
            if slots is not None:
                slots.end()
        for share in (self.leader, self.follower):
            if share is not None:
                share.close()
        if hasattr(self, "reader"):
            quietly(self.reader.close)
        super().close()


class Progress:
    """A load that a step waits for, layer by layer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copied: Dict[Tuple[int, int], Any] = {}  # the copies' events, None on a CPU
        self._over = False

    def done(self, group: int, layer: int, copied: Any) -> None:
        with self._changed:
            self._copied[group, layer] = copied
            self._changed.notify_all()

    def over(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, group: int, layer: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or (group, layer) in self._copied)
            copied = self._copied.get((group, layer))
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)


class Indices(NamedTuple):
    """For copies by a GPU."""

    slots: Any  # where the slots are; the others on the device
    rows: Any  # of the blocks in these slots; None for all
    places: Any


class Wanted(NamedTuple):
    """Which blocks of a batch are copied to where."""

    places: List[int]  # the engine's blocks
    sources: List[Tuple[int, int]]  # each one's slot, and its number there
    indices: Optional[Indices]  # None on a CPU


class Outcome(NamedTuple):
    """What came of a load."""

    load: Load
    bad_blocks: Set[int]
    first_failed: int  # file, -1 for none
    alone: bool = False  # of ranks with the same KV some may not have it: what they all compute then may be wrong


class Gathered(NamedTuple):
    """Some files of a store in staging memory."""

    store: Store
    part: int
    first: int  # in the part
    slots: List[int]
    event: Any
    last: bool  # of the part


class Worker:
    """Loads and stores of one rank. Its methods are called by the thread that runs the model."""

    def __init__(self, options: Options, caches: Caches, rank: Rank) -> None:
        self.options, self.caches, self.rank = options, caches, rank
        self.counts = Counts()
        self._cuda = caches.device.type == "cuda"
        self._stream = torch.cuda.Stream(caches.device) if self._cuda else None
        self._lock = threading.Lock()
        self._end: Optional[End] = None
        self._attached: Optional[Attached] = None  # what the scheduler has told of its session
        self._lost = b""  # the token of a session that could not be joined, or is no more
        self._join_at, self._pause = 0.0, options.retry_seconds  # when it is tried again, and what the next pause is
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "tuttifs-load")
        self._storer = concurrent.futures.ThreadPoolExecutor(1, "tuttifs-store")
        self._outcomes: Deque[Outcome] = collections.deque()
        self._report = Report()
        self._reservation: Optional[Reservation] = None  # of the part that is being written: the storer's, as the next
        self._new: Dict[int, List[int]] = {}  # files of the store that is being written, by group
        self._waiting: List[Tuple[Progress, "concurrent.futures.Future[Outcome]"]] = []
        self._number = 0  # of the step
        self._tainted = 0  # the last step of which a load failed that it waited for
        self._warned = False  # that steps which load store nothing
        self._loading = 0  # loads under way
        self._telling: Optional[End] = None  # whose scheduler is told of the layers of this step
        self._layers = max(len(g.layers) for g in caches.groups)
        self._asleep = self._closed = False  # the engine's blocks have no memory, or will not be used again
        self._check_memory()
        self._check_options()

    def _check_memory(self) -> None:
        """Refuses a GPU whose memory is all taken: vLLM had measured it before anybody knew of this rank's share."""
        if not self._cuda:
            return
        free, _ = torch.cuda.mem_get_info(self.caches.device)
        needed = self.options.staging_bytes + LIBRARY_BYTES
        log.warning("tuttifs: %d MiB of device memory beside vLLM's, of %d MiB that are free", needed >> 20, free >> 20)
        if free < needed:
            raise NoMemoryError(f"the connector needs {needed >> 20} MiB of device memory, {free >> 20} MiB are free: "
                                "lower gpu_memory_utilization, or staging_bytes")

    def _check_options(self) -> None:
        """Refuses options that the mount does not take, by a session of this rank's own: the scheduler's begins with
        the first step, and would go on without."""
        terms = Terms.of(self.options, self.caches.device, self.rank)
        try:
            Mounted(self.options.path, lambda mount: mount.session(self.caches.device, **terms.options)).close()
        except GONE as e:  # the scheduler says so, or goes on without
            log.warning("tuttifs: options could not be checked: %s", e)

    # The session

    def _attach(self, step: Step) -> Optional[End]:
        """The end of the scheduler's session, joined if it is a new one."""
        with self._lock:
            attached = self._attached = step.attached or self._attached
            if step.token is None or attached is None:
                return None
            if step.token == self._lost and time.monotonic() < self._join_at:
                return None
            if self._asleep or self._closed:
                return None
            if self._end is not None and self._end.token == step.token:
                return self._end
            old, self._end = self._end, None
            if old is not None:
                old.close()
            try:
                self._end = End(self.options, attached, self.caches.device, self.rank)
                self._lost, self._pause = b"", self.options.retry_seconds
                self._loader.submit(self._end.find)
                log.info("tuttifs: %s; %d bytes of staging memory", self._end.text, self.options.staging_bytes)
            except (Error, OSError, torch.OutOfMemoryError) as e:
                self._lose(attached.token)
                log.warning("tuttifs: this rank cannot join the session: %s", e)
            return self._end

    def _trouble(self, end: End, e: Exception) -> None:
        log.warning("tuttifs: %s", e)
        if isinstance(e, GONE):
            with self._lock:
                if self._end is not end:
                    return
                self._end = None
                self._lose(end.token)
            end.close()

    def _lose(self, token: bytes) -> None:
        """Goes on without a session for a while, for longer the more often: to join takes a step's time."""
        self._lost, self._join_at = token, time.monotonic() + self._pause
        self._pause = max(self._pause, min(2 * self._pause, PAUSE_SECONDS))

    # A step, in the order of vLLM's calls

    def begin(self, step: Step) -> None:
        """The step is about to compute."""
        self._number = step.number
        end = self._attach(step)
        if end is None and step.token == self._lost:
            self._report.lacks = self._lost
        for w in step.weigh:
            self._report.worth[w.request] = self._worth(end, w)
        self._telling = None
        if end is not None and self.options.scheduler:
            try:
                self._tell(end, step)
            except Error as e:
                self._trouble(end, e)

    def _tell(self, end: End, step: Step) -> None:
        """Tells the session's scheduler what the step computes.

        Where steps wait for loads, their layers are a pass that the loads are for. Loads that no step waits for are
        beside compute, as the scheduler takes what is read beside decode steps: they are to disturb it little, and if
        they are late nothing stands. A step without any is a pass, from which the scheduler learns.
        """
        c = step.computes
        if c is None:
            end.session.end_pass()
        elif c.decode or not self.options.layerwise and (step.loads or self._loading):
            end.session.decode_step(min(c.input + c.prefix, TOKENS_MAX))
        else:
            end.session.prefill(min(c.input, TOKENS_MAX), min(c.prefix, TOKENS_MAX), self._layers)
            self._telling = end

    def _worth(self, end: Optional[End], w: Weighed) -> bool:
        """Whether to load is faster than to compute, as far as this rank's scheduler knows."""
        if end is None:
            return True
        try:
            return end.session.offer(max(1, min(w.input, TOKENS_MAX)), min(w.cached, TOKENS_MAX), self._layers).load
        except Error as e:
            self._trouble(end, e)
            return True

    def layer_done(self, name: str) -> None:
        """A layer is computed, or will be when what was enqueued so far is done."""
        if self.options.layerwise and name in self.caches.place:
            self._done(self.caches.place[name][1])

    def _done(self, layer: int) -> None:
        end = self._telling
        if end is not None:
            try:
                end.session.layer_done(layer, self._record())
            except Error as e:
                self._telling = None
                self._trouble(end, e)

    def start_loads(self, step: Step) -> None:
        end = self._attach(step)
        behind = self._record() if step.loads else None  # what may still read or zero the blocks
        for load in step.loads:
            progress = Progress() if load.wait else None
            with self._lock:
                self._loading += 1
            done = self._loader.submit(self._load, end, load, progress, behind, time.monotonic())
            if progress is not None:
                self._waiting.append((progress, done))

    def wait_for_layer(self, name: str) -> None:
        if self._waiting and name in self.caches.place:
            for progress, _ in self._waiting:
                progress.wait(*self.caches.place[name])

    def gather(self, step: Step) -> None:
        """Takes what the step's stores need out of the blocks. A step of which a load failed stores nothing."""
        self._done(self._layers - 1)
        self._verify()
        end = self._attach(step) if step.stores else None
        for store in step.stores:
            if self.rank.replica:
                continue  # another rank says what becomes of it
            if end is None:
                self._settle(store.number)
            elif step.settled < self._tainted:
                # Planned by a scheduler that did not know of the failure yet.
                self.counts.add("tainted_files", sum(len(p.blocks) for p in store.parts))
                self._storer.submit(self._give_up, end, store)
            else:
                self._gather(end, store)
        self._report.step = step.number

    def _verify(self) -> None:
        """Waits for the loads that the step waits for: only then is it known whether what its layers read was whole."""
        for _, done in self._waiting:
            outcome = done.result()
            if outcome.first_failed >= 0 or outcome.alone:
                self._tainted = self._number
            if outcome.alone and not self._warned:
                self._warned = True
                log.warning("tuttifs: steps that load store nothing: not all ranks with this one's KV read with it, "
                            "and it cannot know whether they have theirs. Set layerwise to false, or have them on one "
                            "host")
        self._waiting.clear()

    def finished_loads(self) -> Tuple[Set[str], Set[str], Set[int]]:
        """Requests whose loads ended since the last call, those of them that failed, and the blocks that did. With
        speculative decoding vLLM asks before `gather`, and takes the step's tokens for good if nothing failed."""
        self._verify()
        ended, failed, bad = set(), set(), set()
        while self._outcomes:
            o = self._outcomes.popleft()
            if not o.load.wait:
                ended.add(o.load.request)
            if o.first_failed >= 0:
                failed.add(o.load.request)
                self._report.failed[o.load.request] = o.first_failed
            bad |= o.bad_blocks
        return ended, failed, bad

    def report(self) -> Report:
        with self._lock:
            report, self._report = self._report, Report(self._report.step)
        return report

    def close(self) -> None:
        """Waits for what is on its way, within bounds, and leaves the session."""
        with self._lock:
            self._closed = True
        limit = threading.Timer(self.options.shutdown_seconds, self._leave)
        limit.daemon = True
        limit.start()
        self._loader.shutdown()
        self._storer.shutdown()
        limit.cancel()
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end.close()

    # Sleep

    def suspend(self) -> None:
        """The memory of the engine's blocks goes away. What is on its way to or from them is waited for, this rank
        leaves the session and gives its own memory back; until `resume` loads fail, and nothing is stored."""
        with self._lock:
            self._asleep = True
            if self._closed:
                return
        limit = threading.Timer(self.options.shutdown_seconds, self._leave)
        limit.daemon = True
        limit.start()
        for thread in (self._loader, self._storer):
            thread.submit(lambda: None).result()
        limit.cancel()
        self._leave()

    def resume(self) -> None:
        """There is memory behind the engine's blocks again. The next step joins the session anew."""
        with self._lock:
            self._asleep = False

    # Loads: in the loader's thread

    def _load(self, end: Optional[End], load: Load, progress: Optional[Progress], behind: Any, begun: float) -> Outcome:
        """A load, which has an outcome whatever happens: requests and steps wait for it."""
        try:
            outcome = self._load_parts(end, load, progress, behind)
        except Exception:
            log.exception("tuttifs: a load failed")
            bad = {b for part in load.parts for file in part.blocks for b in file if b != NULL_BLOCK}
            outcome = Outcome(load, bad, min((part.first for part in load.parts), default=0))
        self.counts.add("load_seconds", time.monotonic() - begun)
        with self._lock:
            self._loading -= 1
        self._outcomes.append(outcome)
        if progress is not None:
            progress.over()
        return outcome

    def _load_parts(self, end: Optional[End], load: Load, progress: Optional[Progress], behind: Any) -> Outcome:
        if self._stream is not None:
            self._stream.wait_event(behind)
        bad: Set[int] = set()
        first_failed = -1
        for part in load.parts:
            failed = self._try_part(end, load, part, progress) if end is not None else set(range(len(part.keys)))
            if failed:
                first = part.first + min(failed)
                first_failed = first if first_failed < 0 else min(first_failed, first)
                self._zero(part, failed)
                bad |= {b for i in failed for b in part.blocks[i] if b != NULL_BLOCK}
            self.counts.add("failed_files", len(failed))
            self.counts.add("loaded_files", len(part.keys) - len(failed))
            self.counts.add("loaded_bytes", (len(part.keys) - len(failed)) * self._file_bytes(part))
        alone = end is not None and end.leader is not None and not end.leader.complete()
        return Outcome(load, bad, first_failed, alone)

    def _try_part(self, end: End, load: Load, part: LoadPart, progress: Optional[Progress]) -> Set[int]:
        try:
            return self._load_part(end, load, part, progress)
        except Error as e:
            self._trouble(end, e)
        except Exception:
            log.exception("tuttifs: a load failed")
        return set(range(len(part.keys)))

    def _file_bytes(self, part: LoadPart) -> int:
        return sum(self.caches.groups[part.group].block_bytes) * len(part.blocks[0])

    def _load_part(self, end: End, load: Load, part: LoadPart, progress: Optional[Progress]) -> Set[int]:
        """Loads one group's files and returns which of them failed. Every file's layers were verified then."""
        failed = set(range(part.pinned, len(part.keys)))
        if not part.pinned:
            return failed
        if end.follower is not None:
            return failed | self._copy_part(end, end.follower, part, progress)
        pool, leader, complete = end.load_pools[part.group], end.leader, False
        slots: List[int] = []
        try:
            leases = pool.pin(part.keys, part.pin, load.tenant)
            failed |= set(range(len(leases), part.pinned))
            slots = end.loads.take(len(leases)) if len(leases) else []
            if not slots:
                return set(range(len(part.keys)))
            if leader is not None:
                leader.begin(part.pin, len(leases), slots)
            bounds = [(at, min(at + len(slots), len(leases))) for at in range(0, len(leases), len(slots))]
            with contextlib.ExitStack() as opened:
                failed |= self._flow(end, pool, leases, part, slots, bounds, progress, opened)
            complete = True
            self._report_bad(pool, leases, failed)
        finally:
            if self._stream is not None:
                self._stream.synchronize()
            if leader is not None:
                leader.copied()
                if not complete:
                    leader.lost(part.pin)
            end.loads.give(slots)  # the pin is the scheduler's to release, which ends it for all ranks
        return failed

    def _flow(self, end: End, pool: Pool, leases: Pinned, part: LoadPart, slots: List[int],
              bounds: List[Tuple[int, int]], progress: Optional[Progress], opened: contextlib.ExitStack) -> Set[int]:
        """Batch by batch through the slots: a layer's place is filled anew as soon as it was copied from."""
        shape, failed = end.shapes[part.group], set()
        layers = range(len(shape.sizes))

        def batch(k: int) -> Layers:
            return opened.enter_context(pool.retrieve(leases[slice(*bounds[k])], rank=self.rank.number))

        def begin(moved: Layers, k: int, layer: int, after: Any) -> Transfer:
            taken = slots[:bounds[k][1] - bounds[k][0]]
            return moved.begin_at(layer, end.load_memory, end.loads.offsets(shape, layer, taken), after=after)

        moved = batch(0)
        transfers = [begin(moved, 0, layer, None) for layer in layers]
        for k, (first, last) in enumerate(bounds):
            following = batch(k + 1) if k + 1 < len(bounds) else None
            wanted = self._wanted(part, shape, slots, first, last, end.leader is not None)
            ahead: List[Transfer] = []
            for layer in layers:
                transfers[layer].wait_on(self._stream)
                if end.leader is not None:
                    end.leader.layer()
                copied = self._scatter(end.loads, shape, part.group, layer, wanted)
                if following is not None:
                    if end.leader is not None:
                        self._leave_to_others(end.leader, copied)
                        copied = None
                    ahead.append(begin(following, k + 1, layer, copied))
                elif progress is not None:
                    progress.done(part.group, layer, copied)
            moved.wait()
            bad = moved.failed()
            failed |= {first + i for i in bad}
            if end.leader is not None:
                end.leader.batch(list(bad))
            moved.close()
            if following is not None:
                moved, transfers = following, ahead
        return failed

    def _leave_to_others(self, leader: Leader, copied: Any) -> None:
        """Waits until a layer's place is nobody's any more: this rank's copy has no event there, nor have others."""
        if copied is not None:
            copied.synchronize()
        leader.copied()

    def _copy_part(self, end: End, follower: Follower, part: LoadPart, progress: Optional[Progress]) -> Set[int]:
        """`_load_part` of what another rank reads."""
        failed, shape = set(range(part.pinned)), end.shapes[part.group]
        try:
            coming = follower.begin(part.pin)
            if coming is None:
                return failed
            slots, whole = coming.slots, set(range(coming.files))
            for first in range(0, coming.files, len(slots)):
                last = min(first + len(slots), coming.files)
                wanted = self._wanted(part, shape, slots, first, last, True)
                for layer in range(len(shape.sizes)):
                    if not follower.layer():
                        return failed
                    copied = self._scatter(end.shared, shape, part.group, layer, wanted)
                    if copied is not None:
                        copied.synchronize()
                    follower.copied()
                    if last == coming.files and progress is not None:
                        progress.done(part.group, layer, copied)
                bad = follower.batch()
                if bad is None:
                    return failed
                whole -= {first + i for i in bad}
            return failed - whole
        except Exception as e:
            follower.close()  # which tells the leader that this rank does not have it
            end.follower = None
            if not isinstance(e, OSError):
                raise
            log.warning("tuttifs: this rank reads for itself from now on: %s", e)
            return failed

    def _wanted(self, part: LoadPart, shape: Shape, slots: Sequence[int], first: int, last: int,
                shared: bool) -> Wanted:
        """Which of the blocks in slots go where. Shared slots are in host memory."""
        places, sources, rows = [], [], []
        for k, file in enumerate(part.blocks[first:last]):
            for j, block in enumerate(file):
                if block != NULL_BLOCK:
                    places.append(block)
                    sources.append((slots[k], j))
                    rows.append(k * shape.blocks + j)
        if not self._cuda:
            return Wanted(places, sources, None)
        with self._on(self._stream):
            device = torch.device("cpu") if shared else self.caches.device
            numbers = torch.tensor(slots[:last - first], dtype=torch.int64, device=device)
            some = None if len(rows) == (last - first) * shape.blocks else self._index(rows)
            return Wanted(places, sources, Indices(numbers, some, self._index(places)))

    def _scatter(self, slots: Slots, shape: Shape, group: int, layer: int, wanted: Wanted) -> Any:
        """Copies a layer to the blocks where it is wanted. Returns the copy's event on a GPU."""
        if not wanted.places:
            return None
        cache = self.caches.layers[group][layer]
        staged, at = slots.layer(shape, layer, cache), wanted.indices
        if at is None:
            copy_blocks([cache[b] for b in wanted.places], [staged[source] for source in wanted.sources])
            return None
        with self._on(self._stream):
            blocks = staged[at.slots].to(cache.device).flatten(0, 1)
            cache[at.places] = blocks if at.rows is None else blocks[at.rows]
            return self._record()

    def _zero(self, part: LoadPart, failed: Set[int]) -> None:
        """What could not be loaded reads as zeros, in all layers."""
        blocks = [b for i in sorted(failed) for b in part.blocks[i] if b != NULL_BLOCK]
        if not blocks or self._asleep:
            return
        with self._on(self._stream):
            places = self._index(blocks)
            for cache in self.caches.layers[part.group]:
                cache[places] = 0
        if self._stream is not None:
            self._stream.synchronize()

    def _report_bad(self, pool: Pool, leases: Pinned, failed: Set[int]) -> None:
        """Has the daemon look at pinned files that failed: it evicts those that are damaged."""
        for i in sorted(failed):
            if i < len(leases):
                try:
                    pool.report_bad(leases[i])
                except GONE:
                    raise
                except Error as e:
                    log.warning("tuttifs: a file that failed could not be reported: %s", e)

    # Stores: gathered in the model's thread, written in the storer's

    def _gather(self, end: End, store: Store) -> None:
        for number, part in enumerate(store.parts):
            at = 0
            while at < len(part.blocks):
                begun = time.monotonic()
                slots = end.stores.take(len(part.blocks) - at)
                self.counts.add("store_wait_seconds", time.monotonic() - begun)
                if not slots:  # the session has ended meanwhile
                    self._settle(store.number)
                    return
                blocks, shape = [b for file in part.blocks[at:at + len(slots)] for b in file], end.shapes[part.group]
                places, taken = (self._index(blocks), self._index(slots)) if self._cuda else (None, None)
                for layer, cache in enumerate(self.caches.layers[part.group]):
                    staged = end.stores.layer(shape, layer, cache)
                    if places is None:
                        copy_blocks([staged[s, j] for s in slots for j in range(shape.blocks)],
                                    [cache[b] for b in blocks])
                    else:
                        staged[taken] = cache[places].unflatten(0, (len(slots), shape.blocks))
                event = self._record()
                last = at + len(slots) == len(part.blocks)
                self._storer.submit(self._write, end, Gathered(store, number, at, slots, event, last))
                at += len(slots)

    def _write(self, end: End, g: Gathered) -> None:
        """Writes some files of a part. The first reserves them all, the last commits them."""
        part = g.store.parts[g.part]
        try:
            if g.first == 0:
                self._reserve(end, g.store, part)
            if self._reservation is not None:
                self._write_files(end, self._reservation, part, g)
                if g.last:
                    self._commit(g.store, part)
        except Error as e:
            self._end_reservation()
            self.counts.add("unstored_files", len(part.blocks))
            self._trouble(end, e)
        except Exception:
            self._end_reservation()
            log.exception("tuttifs: a store failed")
        finally:
            end.stores.give(g.slots)
            if g.last and g.part == len(g.store.parts) - 1:
                new, self._new = self._new, {}
                self._settle(g.store.number, new)

    def _reserve(self, end: End, store: Store, part: StorePart) -> None:
        self._end_reservation()
        self._reservation = self._reserved(end, store, part)
        n = collections.Counter(lease.status for lease in self._reservation)
        self.counts.add("existing_files", n[Status.EXISTS] + n[Status.PENDING])
        self.counts.add("declined_files", n[Status.DECLINED])
        self.counts.add("unstored_files", len(part.blocks) - len(self._reservation))

    def _reserved(self, end: End, store: Store, part: StorePart) -> Reservation:
        """All of a part's files, which waits for space if it must, or what fits. Ranks join each other's reservation,
        and one that asks for all is refused where another had to take less."""
        pool = end.pools[part.group]
        try:
            return pool.reserve(part.keys, part.first, part.reserve, store.tenant)
        except (NoSpaceError, QuotaError, AgainError, InvalidError):
            return pool.reserve(part.keys, part.first, part.reserve, store.tenant, partial=True)

    def _write_files(self, end: End, reservation: Reservation, part: StorePart, g: Gathered) -> None:
        files: Leases = reservation[g.first:min(g.first + len(g.slots), len(reservation))]
        if not any(lease.status.to_be_written for lease in files):
            return
        shape = end.shapes[part.group]
        with end.pools[part.group].store(files, rank=self.rank.number) as batch:
            for layer in range(len(shape.sizes)):
                batch.begin_at(layer, end.memory, end.stores.offsets(shape, layer, [g.slots[i] for i in batch.slots]),
                               after=g.event)
            batch.wait()
            end.stores.give(g.slots)  # with a store buffer, long before the drives have it
            g.slots.clear()
            batch.finish()

    def _commit(self, store: Store, part: StorePart) -> None:
        reservation = self._reservation
        assert reservation is not None
        new = [part.first + i for i, lease in enumerate(reservation) if lease.status.to_be_written]
        self._reservation = None
        if not new:
            quietly(reservation.abort)  # or another rank has, which has nothing to write either
            return
        reservation.commit((self.rank.number,))
        self.counts.add("stored_files", len(new))
        size = sum(self.caches.groups[part.group].block_bytes) * len(part.blocks[0])
        self.counts.add("stored_bytes", len(new) * size)
        self._new[part.group] = new

    def _give_up(self, end: End, store: Store) -> None:
        """Gives up a store of which other ranks may have their part ready, or begin it later: none of it becomes
        visible."""
        for part in store.parts:
            try:
                self._reservation = self._reserved(end, store, part)
                self._end_reservation()
            except Error as e:
                self._trouble(end, e)
        self._settle(store.number)

    def _end_reservation(self) -> None:
        """Commits what was not written, which gives it up. To abort it would be final only for ranks that have joined:
        one that comes later would wait for this one."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            if any(lease.status.to_be_written for lease in reservation):
                quietly(lambda: reservation.commit((self.rank.number,)))
            else:
                quietly(reservation.abort)

    def _settle(self, number: int, new: Optional[Dict[int, List[int]]] = None) -> None:
        with self._lock:
            self._report.stores[number] = new or {}

    # The GPU's streams

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
        else:
            with torch.cuda.stream(stream):
                yield

    def _index(self, numbers: Sequence[int]) -> Any:
        return torch.tensor(numbers, dtype=torch.int64, device=self.caches.device)

    def _record(self) -> Any:
        """An event behind what was enqueued on the current stream; None on a CPU, where all is done."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
