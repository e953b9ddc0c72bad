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
from typing import Any, Callable, Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from .. import Pool, Session
from ..errors import Error, InvalidError
from ..layout import Object
from ..leases import Pinned
from .attachment import GONE, Attachment, Mounted, quietly
from .files import (NULL_BLOCK, Chain, Group, blocks_of, complete, hit, keep_local, media_of, needed)
from .messages import Attached, Load, LoadPart, PoolSpec, Report, Step, Store, StorePart
from .metrics import Counts
from .options import Options, tenant_of

log = logging.getLogger("tuttifs.vllm")

# The scheduler moves no KV itself: the least that a session takes.
SESSION: Dict[str, Any] = {"lanes": 1, "depth": 64, "dma_bytes": 2 << 20, "bounce_bytes": 1 << 20}
PEEK_SECONDS = 0.2  # that an answer about a waiting request is good for
ANNOUNCED_MAX = 1 << 16  # files whose eviction can be reported


class End(Mounted):
    """A session, and the pools that are opened in it."""

    pools: List[Pool]
    token: bytes

    def __init__(self, options: Options, specs: Sequence[PoolSpec]) -> None:
        def fill(session: Session) -> None:
            self.pools = [open_pool(session, s, options) for s in specs]
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

    def __init__(self, options: Options, file_tokens: int, specs: Sequence[PoolSpec]) -> None:
        self.options, self.file_tokens, self.specs = options, file_tokens, tuple(specs)
        self.groups = [s.group for s in specs]
        self.attachment: Attachment[End] = Attachment(lambda: End(options, specs), options.retry_seconds)
        self.counts = Counts()
        self._tracked: Dict[str, Tracked] = {}
        self._numbers = itertools.count(secrets.randbits(48) << 14)  # of pins and reservations, one session's
        self._loads: List[Load] = []
        self._pins: Dict[str, List[Pinned]] = {}  # by request
        self._steps: Deque[Tuple[int, List[str]]] = collections.deque()  # loads that end with their step
        self._stores: Dict[int, Store] = {}  # under way
        self._step, self._settled = 0, 0
        self._told: Optional[bytes] = None  # the session that the ranks know of
        self._announced: "collections.OrderedDict[Tuple[int, bytes], bool]" = collections.OrderedDict()
        self._events: List[Any] = []
        self._adapters: Dict[Tuple[str, str], Optional[bytes]] = {}
        self._stopped = False

    # What is stored

    def matched(self, request: Any, local_tokens: int) -> int:
        """How many tokens behind the local ones can be loaded."""
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
        t.local = local_tokens
        return max(0, t.found * self.file_tokens - local_tokens)

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
        """A LoRA adapter's weights by their digest; b"" without one, None where the weights cannot be read."""
        if lora is None:
            return b""
        name = (str(lora.lora_name), str(lora.lora_path))
        if name not in self._adapters:
            self._adapters[name] = digest_of_files(name[1])
            if self._adapters[name] is None:
                log.warning("tuttifs: requests of the adapter %s are not cached: no files are in %s", *name)
        return self._adapters[name]

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
        t.asked = 0.0
        self.counts.add("hit_tokens", external_tokens)

    def _release(self, request: str) -> None:
        for pin in self._pins.pop(request, ()):
            quietly(pin.release)

    # Stores

    def step(self, scheduled: Dict[str, int], tables: Callable[[str], Optional[Sequence[Sequence[int]]]]) -> Step:
        """A step's work. scheduled: the tokens that it computes, by request."""
        self._step += 1
        end = self.attachment.get()
        stores = []
        if end is not None and not self._stopped:
            for request, tokens in scheduled.items():
                store = self._store(request, tokens, tables)
                if store is not None:
                    stores.append(store)
                    self._stores[store.number] = store
        token, attached = None if end is None else end.token, None
        if token is not None and token != self._told:
            attached, self._told = Attached(token, self.file_tokens, self.specs), token
        loads, self._loads = self._loads, []
        self._steps.append((self._step, [load.request for load in loads if load.wait]))
        return Step(self._step, self._settled, token, attached, loads, stores)

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
        self._settled = max(self._settled, report.step)
        while self._steps and self._steps[0][0] <= report.step:
            for request in self._steps.popleft()[1]:
                self._release(request)
        for request, first in report.failed.items():
            t = self._tracked.get(request)
            if t is not None and t.chain is not None:
                t.failed, t.begun, t.found = True, min(t.begun, first), 0
                for place in range(len(self.groups)):
                    self._gone(place, t.chain.keys[first])
        for number, new in report.stores.items():
            store = self._stores.pop(number, None)  # every rank reports it, in its own time
            if store is not None:
                self._announce(store, new)

    def _announce(self, store: Store, new: Dict[int, List[int]]) -> None:
        for part in store.parts:
            files = new.get(part.group, [])
            t = self._tracked.get(store.request)
            tokens = t.request.all_token_ids if t is not None else []
            n = self.file_tokens
            for i in files:
                self._announced[(part.group, part.keys[i])] = True
                self._events.append(Stored(self.groups[part.group], [part.keys[i]], part.keys[i - 1] if i else None,
                                           list(tokens[i * n:(i + 1) * n])))
        while len(self._announced) > ANNOUNCED_MAX:
            self._announced.popitem(last=False)

    def take_events(self) -> List[Any]:
        events, self._events = self._events, []
        return events

    def finished(self, request: str) -> None:
        """The engine is done with a request. Its blocks may go: what is stored of it was gathered within its steps."""
        self._tracked.pop(request, None)

    def stop(self) -> None:
        """The weights are others from now on: nothing that is stored may be used, or added to."""
        if not self._stopped:
            log.warning("tuttifs: the cache was reset, and is not used any more: start the engine again with another "
                        "weights_epoch to use it with the new weights")
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
