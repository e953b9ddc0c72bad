"""The scheduler's side: what of a prompt is stored, which blocks are loaded, and which files a step completes."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import logging
import os
import secrets
import time
from typing import Any, Callable, Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from .. import Events, Pool, Session
from ..errors import Error, InvalidError
from ..layout import Object
from ..leases import Pinned
from .attachment import GONE, Attachment, Mounted, quietly
from .files import (NULL_BLOCK, Chain, Group, blocks_of, complete, hit, keep_local, media_of, needed)
from .messages import Attached, Load, LoadPart, Pass, PoolSpec, Report, Step, Store, StorePart, Weighed
from .metrics import Counts
from .options import Options, tenant_of

log = logging.getLogger("tuttifs.vllm")

# The scheduler moves no KV itself: the least that a session takes.
SESSION: Dict[str, Any] = {"lanes": 1, "depth": 64, "dma_bytes": 2 << 20, "bounce_bytes": 1 << 20}
PEEK_SECONDS = 0.2  # that an answer about a waiting request is good for
EVENTS_SECONDS = 0.2  # between questions of what has become of files
ANNOUNCED_MAX = 1 << 16  # files whose eviction can be reported


class End(Mounted):
    """A session, and the pools that are opened in it."""

    pools: List[Pool]
    events: List[Events]  # of the pools
    token: bytes

    def __init__(self, options: Options, specs: Sequence[PoolSpec]) -> None:
        def fill(session: Session) -> None:
            self.pools = [open_pool(session, s, options) for s in specs]
            self.events = [pool.events() for pool in self.pools]
            self.token = session.token
        super().__init__(options.path, lambda mount: mount.session(**SESSION), fill)


def open_pool(session: Session, spec: PoolSpec, options: Options) -> Pool:
    trailing = spec.group.trailing(int(spec.identity["file_tokens"]))
    return session.pool(spec.name, spec.identity, [Object(layer, rank, (size,)) for layer, rank, size in spec.objects],
                        family=spec.family or None, min_bytes=options.min_bytes, max_bytes=options.max_bytes,
                        trailing_hit=trailing if spec.family else 0)


@dataclasses.dataclass
class Tracked:
    """A request that the engine has."""

    request: Any
    chain: Optional[Chain]  # None: nothing of it is looked up or stored
    begun: int = 0  # leading files that are stored, or being stored, or were never to be
    found: int = 0  # the last answer about it
    asked: float = 0.0  # when that was, 0 for never
    local: int = 0  # tokens that the engine had itself then
    failed: bool = False  # a load failed: it computes from then on
    weighed: bool = False  # the ranks were asked whether a load is worth it
    worth: Optional[bool] = None  # and have said so


class Stored(NamedTuple):
    """For an event: files that became visible."""

    group: Group
    keys: List[bytes]
    parent: Optional[bytes]
    tokens: List[int]


class Removed(NamedTuple):
    group: Group
    keys: List[bytes]


class Scheduling:
    """The connector's logic beside vLLM's scheduler. It keeps to one thread, the scheduler's."""

    def __init__(self, options: Options, file_tokens: int, specs: Sequence[PoolSpec], telling: bool = True) -> None:
        """telling: events are wanted."""
        self.options, self.file_tokens, self.specs, self.telling = options, file_tokens, tuple(specs), telling
        self.groups = [s.group for s in specs]
        self.attachment: Attachment[End] = Attachment(lambda: End(options, specs), options.retry_seconds)
        self.counts = Counts()
        self._tracked: Dict[str, Tracked] = {}
        self._numbers = itertools.count(secrets.randbits(48) << 14)  # of pins and reservations, one session's
        self._loads: List[Load] = []
        # Ranks know how fast loads are when their steps wait for them, or from a table.
        self._weighs = options.scheduler and bool(options.layerwise or options.slack_table)
        self._weigh: List[Weighed] = []
        self._pins: Dict[str, List[Pinned]] = {}  # by request
        self._steps: Deque[Tuple[int, List[str]]] = collections.deque()  # loads that end with their step
        self._stores: Dict[int, Store] = {}  # under way
        self._step, self._settled = 0, 0
        self._told: Optional[bytes] = None  # the session that the ranks know of
        self._lacking = b""  # the session that not all of them have, as they said last
        self._announced: "collections.OrderedDict[Tuple[int, bytes], bool]" = collections.OrderedDict()
        self._events: List[Any] = []
        self._early: Set[Tuple[int, bytes]] = set()  # gone, perhaps before they are announced
        self._heard_of = self.attachment.get()  # whose events are polled
        self._poll_at = 0.0
        self._adapters: Dict[Tuple[str, str, int], Adapter] = {}
        self._stopped = False

    # What is stored

    def matched(self, request: Any, local_tokens: int) -> Optional[int]:
        """How many tokens behind the local ones are to be loaded. None: the ranks are being asked, a step on it is
        known."""
        t = self.track(request)
        end = self.attachment.get()
        if t.chain is None or t.failed or self._stopped or end is None:
            return 0
        now = time.monotonic()
        if not t.asked or now - t.asked > PEEK_SECONDS:
            # The last token is computed in any case: its output is wanted.
            tokens = request.all_token_ids
            chain = t.chain.upto(tokens, (len(tokens) - 1) // self.file_tokens)
            try:
                t.found = hit(self.groups, self.file_tokens, chain, lambda g, keys: self._peek(end, t, g, keys))
            except Error as e:
                self._trouble(end, e)
                return 0
            t.asked = now
        if end.token == self._lacking:
            return 0
        t.local = local_tokens
        n = max(0, t.found * self.file_tokens - local_tokens)
        return self._weighed(t, n) if n and self._weighs else n

    def _weighed(self, t: Tracked, n: int) -> Optional[int]:
        """What of n tokens is to be loaded: all, or none where computing them again is faster."""
        if not t.weighed:
            t.weighed = True
            self._weigh.append(Weighed(t.request.request_id, n, len(t.request.all_token_ids) - t.local - n))
        return None if t.worth is None else n if t.worth else 0

    def _peek(self, end: End, t: Tracked, group: Group, keys: Sequence[bytes]) -> int:
        assert t.chain is not None
        place = self.groups.index(group)
        n = end.pools[place].peek(keys, t.chain.tenant)
        if n < len(keys):
            self._gone(place, keys[n])
        return n

    def _gone(self, place: int, key: bytes) -> None:
        """Tells that a file is not there any more, if it was told that it is."""
        if self._announced.pop((place, key), False):
            self._events.append(Removed(self.groups[place], [key]))

    def _poll(self, at_once: bool = False) -> None:
        """Tells what of the announced files was evicted, removed or found damaged, whoever did that."""
        end, now = self.attachment.get(), time.monotonic()
        if end is not self._heard_of:  # whatever happened in between, nobody knows
            self._heard_of = end
            self._forget(range(len(self.groups)))
        if end is None or now < self._poll_at and not at_once:
            return
        self._poll_at = now + EVENTS_SECONDS
        try:
            for place, events in enumerate(end.events):
                lost = events.lost
                for e in events.poll():
                    if e.removed and (place, e.key) in self._announced:
                        self._gone(place, e.key)
                    elif e.removed and self._stores:
                        self._early.add((place, e.key))
                    else:
                        self._early.discard((place, e.key))
                if events.lost != lost:
                    self._forget([place])
        except Error as e:
            self._trouble(end, e)

    def _forget(self, places: Sequence[int]) -> None:
        """Tells that files are gone of which nobody knows: who keeps an index of them asks again."""
        for place, key in [k for k in self._announced if k[0] in places]:
            self._gone(place, key)

    def track(self, request: Any) -> Tracked:
        """Follows a request from its first scheduling on, so that it is stored."""
        t = self._tracked.get(request.request_id)
        if t is None:
            t = self._tracked[request.request_id] = Tracked(request, self._chain(request))
        return t

    def _chain(self, request: Any) -> Optional[Chain]:
        """How a request's keys begin; None where what it is computed from is not known in full."""
        if getattr(request, "prompt_embeds", None) is not None:
            return None  # embeddings of the user's in place of tokens, without a digest
        try:
            adapter = self._adapter(request.lora_request)
            if adapter is None:
                return None
            return Chain(self.file_tokens, tenant_of(request.kv_transfer_params, self.options.tenant), adapter,
                         (request.cache_salt or "").encode(), media_of(request.mm_features))
        except InvalidError as e:
            log.warning("tuttifs: request %s is not cached: %s", request.request_id, e)
            return None

    def _adapter(self, lora: Any) -> Optional[bytes]:
        """A LoRA adapter's weights by their digest; b"" without one, None where they are not known: they cannot be
        read, or may have been loaded before or after their files were changed."""
        if lora is None:
            return b""
        path, key = str(lora.lora_path), (str(lora.lora_name), str(lora.lora_path), int(lora.lora_int_id))
        if key not in self._adapters:
            self._adapters[key] = Adapter(state_of_files(path), digest_of_files(path))
            if self._adapters[key].digest is None:
                log.warning("tuttifs: requests of the adapter %s are not cached: no files are in %s", *key[:2])
        known = self._adapters[key]
        if known.digest is not None and (lora.load_inplace or state_of_files(path) != known.files):
            self._adapters[key] = known._replace(digest=None)
            log.warning("tuttifs: requests of the adapter %s are not cached any more: its files in %s have changed, or "
                        "it is loaded in place. Load it under another name instead", *key[:2])
        return self._adapters[key].digest

    # Loads

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Blocks were given to what `matched` promised: pins it, and plans the load. With 0 tokens nothing is
        loaded."""
        if external_tokens <= 0:
            return
        t = self.track(request)
        assert t.chain is not None
        files = (t.local + external_tokens) // self.file_tokens
        chain = t.chain.upto(request.all_token_ids, files)
        end = self.attachment.get()
        parts, pins = [], []
        for place, g in enumerate(self.groups):
            first = max(needed(g, self.file_tokens, files), t.local // self.file_tokens)
            keys = chain[first:]
            if not keys:
                continue
            number, pinned = next(self._numbers), 0
            if end is not None:
                try:
                    pin = end.pools[place].pin(keys, number, t.chain.tenant)
                    pinned = len(pin)
                    pins.append(pin)
                except Error as e:
                    self._trouble(end, e)
            blocks = blocks_of(g, self.file_tokens, tables[g.index], first, files)
            keep_local(g, self.file_tokens, blocks, first, t.local)
            parts.append(LoadPart(place, number, pinned, first, keys, blocks))
        self._pins.setdefault(request.request_id, []).extend(pins)
        self._loads.append(Load(request.request_id, t.chain.tenant, parts, self.options.layerwise))
        t.begun = max(t.begun, files)
        t.asked, t.weighed, t.worth = 0.0, False, None
        self.counts.add("hit_tokens", external_tokens)

    def _release(self, request: str) -> None:
        for pin in self._pins.pop(request, ()):
            quietly(pin.release)

    # Stores

    def step(self, scheduled: Dict[str, int], tables: Callable[[str], Optional[Sequence[Sequence[int]]]],
             storing: bool = True) -> Step:
        """A step's work. scheduled: the tokens that it computes, by request."""
        self._step += 1
        end = self.attachment.get()
        stores = []
        if end is not None and storing and not self._stopped and end.token != self._lacking:
            for request, tokens in scheduled.items():
                store = self._store(request, tokens, tables)
                if store is not None:
                    stores.append(store)
                    self._stores[store.number] = store
        token, attached = None if end is None else end.token, None
        if token is not None and token != self._told:
            attached, self._told = Attached(token, self.file_tokens, self.specs), token
        loads, self._loads = self._loads, []
        weigh, self._weigh = self._weigh, []
        self._steps.append((self._step, [load.request for load in loads if load.wait]))
        return Step(self._step, self._settled, token, attached, loads, stores, self._computes(scheduled), weigh)

    def _computes(self, scheduled: Dict[str, int]) -> Optional[Pass]:
        """What a step computes; None for nothing."""
        known = [(self._tracked[r].request, n) for r, n in scheduled.items() if r in self._tracked]
        if not known:
            return None
        return Pass(sum(n for _, n in known), sum(r.num_computed_tokens for r, _ in known),
                    all(n == 1 or r.num_computed_tokens >= r.num_prompt_tokens for r, n in known))

    def _store(self, request: str, tokens: int,
               tables: Callable[[str], Optional[Sequence[Sequence[int]]]]) -> Optional[Store]:
        t = self._tracked.get(request)
        if t is None or t.chain is None:
            return None
        known = t.request.all_token_ids
        files = complete(len(known), t.request.num_computed_tokens + tokens, self.file_tokens)
        if files <= t.begun:
            return None
        if not t.begun:
            t.begun = min(t.found, files)  # what was found and not loaded, because the engine had it
        table = tables(request)
        if files <= t.begun or table is None:
            return None
        chain = t.chain.upto(known, files)
        parts = []
        for place, g in enumerate(self.groups):
            first = t.begun
            blocks = blocks_of(g, self.file_tokens, table[g.index], first, files)
            while blocks and any(NULL_BLOCK in b for b in blocks):  # a window has passed already
                first, blocks = first + 1, blocks[1:]
            if blocks:
                parts.append(StorePart(place, next(self._numbers), first, list(chain), blocks))
        t.begun = files
        return Store(next(self._numbers), request, t.chain.tenant, parts) if parts else None

    # What the workers say

    def heard(self, report: Optional[Report], received: Iterable[str]) -> None:
        """One step's outcome for all ranks."""
        for request in received:
            self._release(request)
        if report is None:
            return
        self._settled, self._lacking = max(self._settled, report.step), report.lacks
        while self._steps and self._steps[0][0] <= report.step:
            for request in self._steps.popleft()[1]:
                self._release(request)
        for request, first in report.failed.items():
            t = self._tracked.get(request)
            if t is not None and t.chain is not None:
                t.failed, t.begun, t.found = True, min(t.begun, first), 0
                for place in range(len(self.groups)):
                    self._gone(place, t.chain.keys[first])
        for request, worth in report.worth.items():
            t = self._tracked.get(request)
            if t is not None and t.weighed and t.worth is None:
                t.worth = worth
                if not worth:
                    self.counts.add("refused_tokens", max(0, t.found * self.file_tokens - t.local))
        if report.stores and self.telling:
            self._poll(at_once=True)  # what is announced may be gone already
        for number, new in report.stores.items():
            store = self._stores.pop(number, None)  # every rank reports it, in its own time
            if store is not None and self.telling:
                self._announce(store, new)
        if not self._stores:
            self._early.clear()

    def _announce(self, store: Store, new: Dict[int, List[int]]) -> None:
        for part in store.parts:
            files = new.get(part.group, [])
            t = self._tracked.get(store.request)
            tokens = t.request.all_token_ids if t is not None else []
            n = self.file_tokens
            for i in files:
                if (part.group, part.keys[i]) in self._early:
                    continue
                self._announced[(part.group, part.keys[i])] = True
                self._events.append(Stored(self.groups[part.group], [part.keys[i]], part.keys[i - 1] if i else None,
                                           list(tokens[i * n:(i + 1) * n])))
        while len(self._announced) > ANNOUNCED_MAX:
            self._announced.popitem(last=False)

    def take_events(self) -> List[Any]:
        """What became of files since the last call: `Stored` and `Removed`."""
        if self.telling:
            self._poll()
        events, self._events = self._events, []
        return events

    def finished(self, request: str) -> None:
        """The engine is done with a request. Its blocks may go: what is stored of it was gathered within its steps."""
        self._tracked.pop(request, None)

    def reset(self) -> None:
        """The engine forgets its cache, as where it sleeps. Unless the user says otherwise the weights may be others
        from now on: nothing that is stored may be used, or added to."""
        if self.options.fixed_weights:
            return
        if not self._stopped:
            log.warning("tuttifs: the cache was reset, as by sleep, and is not used any more: if the weights are "
                        "others, start the engine again with another weights_epoch; if they never change, set "
                        "fixed_weights")
        self._stopped = True

    def _trouble(self, end: End, e: Error) -> None:
        self.counts.add("lookup_errors", 1)
        if isinstance(e, GONE):
            for request in list(self._pins):
                self._pins.pop(request)
            self.attachment.lost(end, e)
        else:
            log.warning("tuttifs: %s", e)

    def close(self) -> None:
        for request in list(self._pins):
            self._release(request)
        self.attachment.close()


class Adapter(NamedTuple):
    """A LoRA adapter as it was first seen."""

    files: List[Tuple[str, int, int, int]]
    digest: Optional[bytes]


def state_of_files(path: str) -> List[Tuple[str, int, int, int]]:
    """Names, sizes, numbers and times of change of all files in a directory; empty where it cannot be read. The times
    are those that nobody can set: a copy may keep the others, and adapters of one shape have one size."""
    try:
        with os.scandir(path) as entries:
            files = [(e.name, e.stat()) for e in entries if e.is_file()]
        return sorted((name, s.st_size, s.st_ino, s.st_ctime_ns) for name, s in files)
    except OSError:
        return []


def digest_of_files(path: str) -> Optional[bytes]:
    """The SHA-256 of all files in a directory, of their names and contents; None where there are none."""
    whole = hashlib.sha256()
    try:
        names = sorted(n for n in os.listdir(path) if os.path.isfile(os.path.join(path, n)))
        for name in names:
            content = hashlib.sha256()
            with open(os.path.join(path, name), "rb") as f:
                while piece := f.read(1 << 20):
                    content.update(piece)
            whole.update(len(os.fsencode(name)).to_bytes(8, "little") + os.fsencode(name) + content.digest())
    except OSError:
        return None
    return whole.digest() if names else None
