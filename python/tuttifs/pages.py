"""Pages of an engine's host memory as files: what the adapters share whose engines hand over whole pages and names.

A page is a file. It consists of parts, pieces of an engine's buffer, always of the same sizes in the same order. What a
mount does never raises here: a page that cannot be stored is not stored, one that cannot be loaded is a miss.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from .errors import AgainError, Error, IdentityError, InvalidError, NoSpaceError, PendingError, QuotaError
from .events import Events
from .layout import Object, extent
from .leases import Pinned, Status
from .store import Memory, Pool, contiguous_bytes
from .vllm.attachment import GONE, Attachment, Mounted, quietly
from .vllm.files import pieces

log = logging.getLogger("tuttifs")

_BUSY = (NoSpaceError, QuotaError, AgainError, PendingError)  # what a later attempt may not meet

# A lease of these is of a file that is stored, or will be: by this call or by another engine.
_GOOD = (Status.NEW, Status.JOINED, Status.EXISTS, Status.PENDING)


@dataclasses.dataclass(frozen=True)
class PageOptions:
    """What a user sets. A field without a default must be given."""

    path: str  # any path in the mount
    revision: str = ""  # which weights these are: text that changes with them
    weights_epoch: int = 0  # to be raised whenever weights change under the same revision (training)
    dtype: str = ""  # in which the model computes
    quantisation: str = ""  # of the weights, "none" for none
    scale_format: str = ""  # of a quantised cache, "none" for none
    computed: str = ""  # whatever else changes what is computed: overrides of the model's configuration, a draft model
    tenant: int = 0  # of all that the engine stores
    min_bytes: int = 0  # kept for each pool
    max_bytes: int = 0  # each pool's limit, 0 for the volume's
    retry_seconds: float = 5.0  # between attempts to open a mount again that was lost
    staging_bytes: int = 64 << 20  # memory for pages that are not moved in place
    lanes: int = 0  # as in Store.session
    depth: int = 0
    keep_bytes: int = 0  # likewise: memory for pages that the mount's admission policy declines

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str) -> "PageOptions":
        """Refuses names that it does not know, so that a misspelt one is not ignored."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InvalidError(f"{where} has no {', '.join(unknown)}; it knows {', '.join(sorted(known))}")
        if not given.get("path"):
            raise InvalidError(f'{where} needs "path", a path in the mount')
        for name, value in given.items():
            # With annotations as text, a default's type stands in for the field's.
            wanted: Any = str if name == "path" else type(known[name].default)
            if wanted is float and type(value) is int:
                continue
            if type(value) is not wanted:
                raise InvalidError(f"{where}: {name} is a {wanted.__name__}, not {value!r}")
            if not isinstance(value, str) and value < 0:
                raise InvalidError(f"{where}: {name} is negative")
        options = cls(**given)
        if options.tenant >= 1 << 32:
            raise InvalidError(f"{where}: tenant is a number below 2**32")
        return options


def restorable(stored: Sequence[bool], window: int) -> List[int]:
    """The lengths of prefixes whose last `window` pages are stored, or all where they have fewer."""
    lengths, run = [], 0
    for n, there in enumerate(stored, 1):
        run = run + 1 if there else 0
        if run >= min(window, n):
            lengths.append(n)
    return lengths


def refuse_unknown(texts: Mapping[str, Any], numbers: Mapping[str, int], where: str) -> None:
    """`IdentityError` names all that is not known of what an engine computes: a wrong hit would be wrong text."""
    unknown = [n for n, v in texts.items() if v is None or str(v).strip().lower() in ("", "auto", "unknown")]
    unknown += [n for n, v in numbers.items() if v < 1]
    if unknown:
        raise IdentityError(f"what the engine computes is not known in full: {', '.join(unknown)}. Say it in {where}")


class Region:
    """A contiguous buffer in host memory, which every session registers."""

    def __init__(self, array: Any) -> None:
        e = extent(array)
        self.array, self.address, self.bytes = array, e.address, contiguous_bytes(e)


class End(Mounted):
    """A session, with the pools and the memory that were asked for."""

    def __init__(self, options: PageOptions) -> None:
        self._lock = threading.Lock()
        self._pools: Dict[str, Pool] = {}
        self._memory: Dict[int, Memory] = {}
        super().__init__(options.path, lambda mount: mount.session(
            lanes=options.lanes, depth=options.depth, keep_bytes=options.keep_bytes))

    def pool(self, name: str, opened: Callable[[], Pool]) -> Pool:
        with self._lock:
            if name not in self._pools:
                self._pools[name] = opened()
            return self._pools[name]

    def memory(self, region: Region) -> Memory:
        with self._lock:
            if id(region) not in self._memory:
                self._memory[id(region)] = self.session.register_flat(region.array)
            return self._memory[id(region)]


def attach(options: PageOptions) -> "Attachment[End]":
    return Attachment(lambda: End(options), options.retry_seconds)


class Pages:
    """The pages of one kind: all of one identity and of the same parts."""

    def __init__(self, attachment: "Attachment[End]", options: PageOptions, name: str, fields: Mapping[str, Any],
                 parts: Sequence[int]) -> None:
        """parts: bytes of each. Raises what is wrong with the identity or the pool, but not that the mount is gone."""
        self.name, self.parts, self.bytes = name, tuple(parts), sum(parts)
        self._attachment, self._options, self._fields = attachment, options, dict(fields)
        self._events: Optional[Events] = None
        sizes = [pieces(p) for p in self.parts]
        self._objects = [Object(0, 0, (n,)) for p in sizes for n in p]
        self._starts: List[Tuple[int, ...]] = [tuple(sum(p[:i]) for i in range(len(p))) for p in sizes]
        end = attachment.get()
        if end is not None:
            try:
                self._pool(end)
            except GONE as e:
                attachment.lost(end, e)

    def _pool(self, end: End) -> Pool:
        o = self._options
        return end.pool(self.name, lambda: end.session.pool(self.name, self._fields, self._objects,
                                                            min_bytes=o.min_bytes, max_bytes=o.max_bytes))

    def _try(self, what: Callable[[End, Pool], Any], otherwise: Any) -> Any:
        end = self._attachment.get()
        if end is None:
            return otherwise
        try:
            return what(end, self._pool(end))
        except Error as e:
            log.log(logging.INFO if isinstance(e, _BUSY) else logging.WARNING, "tuttifs: %s", e)
            if isinstance(e, GONE):
                self._attachment.lost(end, e)
            return otherwise

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are stored."""
        n: int = self._try(lambda end, pool: pool.peek(keys, self._options.tenant), 0)
        return n

    def present(self, keys: Sequence[bytes]) -> List[bool]:
        """Which keys are stored."""
        found: List[bool] = self._try(lambda end, pool: pool.present(keys, self._options.tenant), [False] * len(keys))
        return found

    def _offsets(self, region: Region, addresses: Sequence[Sequence[int]]) -> List[int]:
        offsets = []
        for parts in addresses:
            if len(parts) != len(self.parts):
                raise InvalidError(f"a page of {len(parts)} parts: this kind's have {len(self.parts)}")
            for address, size, starts in zip(parts, self.parts, self._starts):
                at = address - region.address
                if at < 0 or at + size > region.bytes:
                    raise InvalidError("a page lies outside of the memory that was registered for it")
                offsets += [at + s for s in starts]
        return offsets

    def store(self, keys: Sequence[bytes], region: Region, addresses: Sequence[Sequence[int]],
              before: Optional[Sequence[bytes]] = ()) -> List[bool]:
        """Stores what is not stored yet, and waits until it is durable. Which pages are there then, or on their way.

        before: the keys of the pages before these in the prompt, from its start. They say what to evict first. None
            where these pages are not of one prompt, or not in its order.
        """
        def put(end: End, pool: Pool) -> List[bool]:
            earlier = before or ()
            reserve = functools.partial(pool.reserve, [*earlier, *keys], len(earlier), tenant=self._options.tenant,
                                        chained=before is not None)
            try:
                reservation = reserve()
            except _BUSY:
                reservation = reserve(partial=True)
            with reservation:
                good = [lease.status in _GOOD for lease in reservation]
                if any(lease.status.to_be_written for lease in reservation):
                    with pool.store(reservation) as layers:
                        places = [addresses[i] for i in layers.slots]
                        layers.begin_at(0, end.memory(region), self._offsets(region, places))
                        layers.wait()
                        layers.check()
                        layers.finish()
                    reservation.commit()
            return good + [False] * (len(keys) - len(good))
        done: List[bool] = self._try(put, [False] * len(keys)) if keys else []
        return done

    def load(self, keys: Sequence[bytes], region: Region, addresses: Sequence[Sequence[int]]) -> List[bool]:
        """Loads the leading pages that are stored. Which are whole; memory of the others may have changed."""
        def get(end: End, pool: Pool) -> List[bool]:
            good = [False] * len(keys)
            with pool.pin(keys, tenant=self._options.tenant) as leases:
                if len(leases):
                    with pool.retrieve(leases) as layers:
                        layers.begin_at(0, end.memory(region), self._offsets(region, addresses[:len(leases)]))
                        layers.wait()
                        failed = layers.failed()
                    for i, e in failed.items():
                        log.warning("tuttifs: a page is lost: %s", e)
                        pool.report_bad(leases[i])
                    good[:len(leases)] = [i not in failed for i in range(len(leases))]
            return good
        done: List[bool] = self._try(get, [False] * len(keys)) if keys else []
        return done

    def hold(self, keys: Sequence[bytes]) -> List[Tuple[int, Pinned]]:
        """Pins the pages that are stored, until they are released: for each run of them the first's number, and its
        pin. A run that is partly in the session's own memory (`keep_bytes`) may take several pins."""
        held: List[Tuple[int, Pinned]] = []

        def pin(end: End, pool: Pool) -> None:
            there, at = pool.present(keys, self._options.tenant), 0
            while True in there[at:]:
                at = there.index(True, at)
                n = (there[at:] + [False]).index(False)
                pinned = pool.pin(keys[at:at + n], tenant=self._options.tenant)
                if len(pinned):
                    held.append((at, pinned))
                at += max(1, len(pinned))  # none: it has gone meanwhile
        self._try(pin, None)
        return held

    def gone(self) -> Optional[List[bytes]]:
        """Which pages have gone since the call before. None where that is not known: at first, and where the mount was
        lost, or too much has happened. For one thread at a time."""
        def look(end: End, pool: Pool) -> Optional[List[bytes]]:
            if self._events is None or self._events.pool is not pool:
                self._events = pool.events()
                return None
            lost, last = self._events.lost, {e.key: e.removed for e in self._events.poll()}
            return [k for k, removed in last.items() if removed] if self._events.lost == lost else None
        return self._try(look, [])  # type: ignore[no-any-return]

    def remove(self, keys: Sequence[bytes]) -> int:
        """Removes files, for all engines of the pool. How many there were."""
        directory = os.path.join(_root(self._options.path), self.name, "blocks")
        return sum(_unlink(os.path.join(directory, k.hex()[:2], k.hex())) for k in keys)

    def clear(self) -> int:
        """Removes all files, for all engines of the pool."""
        directory, count = os.path.join(_root(self._options.path), self.name, "blocks"), 0
        try:
            for sub in os.scandir(directory):
                count += sum(_unlink(f.path) for f in os.scandir(sub.path))
        except OSError as e:
            log.warning("tuttifs: %s", e)
        return count


class Holds:
    """Pins of pages that an engine ends page by page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Dict[bytes, List[_Hold]] = {}

    def add(self, pages: Pages, keys: Sequence[bytes]) -> List[bool]:
        """Pins the pages that are stored. Which those are."""
        held = [False] * len(keys)
        for first, pinned in pages.hold(keys):
            hold, end = _Hold(pinned, len(pinned)), first + len(pinned)
            held[first:end] = [True] * len(pinned)
            with self._lock:
                for k in keys[first:end]:
                    self._held.setdefault(k, []).append(hold)
        return held

    def end(self, key: bytes) -> bool:
        """Ends one pin of a page, whichever call made it; False where there is none."""
        with self._lock:
            holds = self._held.get(key)
            if not holds:
                return False
            hold = holds.pop()
            if not holds:
                del self._held[key]
            hold.left -= 1
            last = hold.left == 0
        if last:
            quietly(hold.pinned.release)
        return True

    def close(self) -> None:
        """Ends all pins."""
        with self._lock:
            held, self._held = self._held, {}
        for pinned in {id(h): h.pinned for holds in held.values() for h in holds}.values():
            quietly(pinned.release)


@dataclasses.dataclass
class _Hold:
    """A pin of several pages, and how many of them have not been ended."""

    pinned: Pinned
    left: int


def _root(path: str) -> str:
    """The mount that a path is in."""
    path = os.path.abspath(path)
    while not os.path.ismount(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
        return True
    except OSError as e:
        if not isinstance(e, FileNotFoundError):
            log.warning("tuttifs: %s", e)
        return False


class Staging:
    """Memory for pages that an engine keeps in a form of its own, one thread's at a time."""

    def __init__(self, pages: Pages, limit: int, allocate: Callable[[int], Any]) -> None:
        self.pages, self.count = pages, max(1, limit // pages.bytes)
        self.lock = threading.Lock()
        self._allocate = allocate
        self._region: Optional[Region] = None
        self._steps = [sum(pages.parts[:i]) for i in range(len(pages.parts))]

    @property
    def region(self) -> Region:
        """It is allocated when it is first used."""
        if self._region is None:
            self._region = Region(self._allocate(self.count * self.pages.bytes))
        return self._region

    def addresses(self, n: int) -> List[List[int]]:
        """Of the parts of n pages, one page behind the other."""
        return [[self.region.address + i * self.pages.bytes + s for s in self._steps] for i in range(n)]

    def store(self, keys: Sequence[bytes], fill: Callable[[int, Any], None],
              before: Optional[Sequence[bytes]] = ()) -> List[bool]:
        """Stores pages that fill(number, memory of one page) writes."""
        good: List[bool] = []
        with self.lock:
            for first in range(0, len(keys), self.count):
                some = keys[first:first + self.count]
                for i in range(len(some)):
                    fill(first + i, self._page(i))
                earlier = None if before is None else [*before, *keys[:first]]
                good += self.pages.store(some, self.region, self.addresses(len(some)), earlier)
        return good

    def load(self, keys: Sequence[bytes], take: Callable[[int, Any], None]) -> List[bool]:
        """Loads leading pages, which take(number, memory of one page) reads."""
        good: List[bool] = []
        with self.lock:
            for first in range(0, len(keys), self.count):
                some = keys[first:first + self.count]
                found = self.pages.load(some, self.region, self.addresses(len(some)))
                for i, whole in enumerate(found):
                    if whole:
                        take(first + i, self._page(i))
                good += found
                if not all(found):
                    break
        return good + [False] * (len(keys) - len(good))

    def _page(self, i: int) -> Any:
        n = self.pages.bytes
        return self.region.array[i * n:(i + 1) * n]
