"""A tier below vLLM's own host memory: for engines whose KV reaches the host by vLLM's offloading, where the connector
has no way to the device.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 10737418240, "secondary_tiers": [{"type": "TuttifsTier", "module_path": "tuttifs.vllm.tier",
        "path": "/mnt/kv", "revision": "...", "dtype": "bfloat16", "quantisation": "none", "scale_format": "none"}]}

vLLM's keys are used: its `prefix_caching_hash_algo` must be sha256 or sha256_cbor. Of an adapter they hold the name
and the path only.
"""
# mypy: disable-error-code="import-not-found, misc, no-any-return, untyped-decorator"

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import logging
import threading
import time
from typing import Any, ClassVar, Deque, Dict, Iterable, List, Optional, Sequence

import vllm
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from .. import Events, Memory, Pool, Session
from ..errors import AgainError, Error, IdentityError, NoSpaceError, QuotaError
from ..layout import Object
from .attachment import GONE, Attachment, Mounted
from .files import pieces
from .identity import digest, pool_name, version

log = logging.getLogger("tuttifs.vllm")

HEAR_SECONDS = 0.2  # between looks for what has been evicted


def identity(config: Any, chunk_bytes: int, revision: str, weights_epoch: int, dtype: str, quantisation: str,
             scale_format: str, computed: str) -> Dict[str, Any]:
    """What vLLM tells an offloading tier about itself, and what it does not, which the user says."""
    cache = config.model.dtype  # and not the one in which the model computes
    texts = {"model": config.model.name, "revision": revision, "dtype": dtype, "the cache's dtype": cache,
             "quantisation": quantisation, "scale_format": scale_format}
    unknown = [n for n, v in texts.items() if str(v).strip().lower() in ("", "auto", "unknown", "none")
               and not (n in ("quantisation", "scale_format") and v == "none")]
    if unknown:
        raise IdentityError(f"the tier's configuration must say {', '.join(unknown)}")
    p = config.parallel
    groups = [[g.tokens_per_block, g.layer_names, g.group_id] for g in config.groups]
    tokens = config.groups[0].tokens_per_block
    return {"model": str(config.model.name), "revision": f"{revision}, computed {digest(computed)}",
            "weights_epoch": weights_epoch, "dtype": f"{dtype}, cache {cache}", "quantisation": quantisation,
            "scale_format": scale_format, "page_bytes": chunk_bytes,
            "layout": f"{version(vllm.__version__)}, {config.kv_cache_layout}, canonical {config.canonical_layout}, "
                      f"replicated {config.replicated_layout}",
            "block_tokens": tokens, "file_tokens": tokens * config.cache.blocks_per_chunk, "tp": p.tp_size,
            "pp": p.pp_size, "cp": p.pcp_size * p.dcp_size,
            "group": f"chunks of all ranks, {digest([groups, p.world_size])}"}


class End(Mounted):
    """A session with the primary tier's memory registered."""

    pool: Pool
    events: Events
    memory: Memory

    def __init__(self, path: str, fields: Dict[str, Any], sizes: Sequence[int], view: memoryview) -> None:
        def fill(session: Session) -> None:
            self.pool = session.pool(pool_name(fields), fields, [Object(0, 0, (n,)) for n in sizes])
            self.events = self.pool.events()
            self.memory = session.register_flat(view)
        super().__init__(path, lambda mount: mount.session(), fill)


class Lookups(AsyncLookupManager):
    """Asks the mount in a thread of its own, a step's keys at a time."""

    def __init__(self, tier: "TuttifsTier") -> None:
        self._tier = tier
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: List[Any], req_context: Any) -> Iterable[bool]:
        return self._tier.present([named(k) for k in keys])


class TuttifsTier(SecondaryTierManager):
    """Keeps chunks of vLLM's host cache on a mount, each as a file."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, path: str, revision: str,
                 dtype: str, quantisation: str, scale_format: str, computed: str = "", weights_epoch: int = 0,
                 fixed_weights: bool = False, retry_seconds: float = 5.0, backpressure_detector: Any = None) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        fields = identity(offloading_spec.config, self.block_size_bytes, revision, weights_epoch, dtype, quantisation,
                          scale_format, computed)
        self._fixed_weights, self._stopped = fixed_weights, False
        sizes = pieces(self.block_size_bytes)
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        view = primary_kv_view.cast("B")
        self._attachment: Attachment[End] = Attachment(lambda: End(path, fields, sizes, view), retry_seconds)
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "tuttifs-load")
        self._storer = concurrent.futures.ThreadPoolExecutor(1, "tuttifs-store")
        self._running: List["concurrent.futures.Future[None]"] = []
        self._results: Deque[JobResult] = collections.deque()
        self._missing: Deque[Any] = collections.deque()  # sets of keys that were found, and could not be loaded
        self._events: Deque[OffloadingEvent] = collections.deque()
        self._tells = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._telling = threading.Lock()
        self._told: Dict[bytes, Any] = {}  # vLLM's keys of the files that it was told to be stored, by theirs
        self._heard, self._hear_at = self._attachment.get(), 0.0
        self._lookups = Lookups(self)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if self._stopped:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def present(self, keys: Sequence[bytes]) -> List[bool]:
        """Which keys are stored."""
        end = self._attachment.get()
        try:
            if end is not None:
                return end.pool.present(keys)
        except Error as e:
            self._trouble(end, e)
        return [False] * len(keys)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._storer, job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loader, job_metadata, self._load)

    def _submit(self, executor: concurrent.futures.ThreadPoolExecutor, job: TransferJob, work: Any) -> None:
        self._running = [f for f in self._running if not f.done()]
        self._running.append(executor.submit(self._run, job, work))

    def _run(self, job: TransferJob, work: Any) -> None:
        begun = time.monotonic()
        keys, done = list(job.keys), 0
        end = None if self._stopped else self._attachment.get()
        good: List[Any] = []
        try:
            if end is not None:
                good = work(end, keys, [int(i) for i in job.chunk_ids])
                done = len(good) * self.block_size_bytes
        except Error as e:
            self._trouble(end, e)
        except Exception:
            log.exception("tuttifs: a job of the tier failed")
        if job.is_promotion and len(good) < len(keys):  # whatever the reason: what is found again would be tried again
            self._missing.append(set(keys) - set(good))
        self._results.append(JobResult(job.job_id, len(good) == len(keys), tuple(good) or None,
                                       time.monotonic() - begun,
                                       done))

    def _offsets(self, chunks: Sequence[int]) -> List[int]:
        return [c * self.block_size_bytes + start for c in chunks for start in self._starts]

    def _store(self, end: End, keys: List[Any], chunks: List[int]) -> List[Any]:
        """Stores what is not stored yet, and returns what is there afterwards."""
        names = [named(k) for k in keys]
        try:
            reservation = end.pool.reserve(names)
        except (NoSpaceError, QuotaError, AgainError):
            reservation = end.pool.reserve(names, partial=True)
        with reservation:
            if any(lease.status.to_be_written for lease in reservation):
                with end.pool.store(reservation) as layers:
                    layers.begin_at(0, end.memory, self._offsets([chunks[i] for i in layers.slots]))
                    layers.wait()
                    layers.finish()
                reservation.commit()
        with self._telling:  # so that nobody hears of an eviction before it is told that the file is stored
            there = self.present(names)
            good = {n: k for n, k, found in zip(names, keys, there) if found}
            if good and self._tells:
                self._told.update(good)
                self._events.append(OffloadingEvent(keys=list(good.values()), medium=self.medium, removed=False))
        return list(good.values())

    def _hear(self) -> None:
        """Tells what has been evicted or removed of what was told to be stored, whoever did it."""
        end = self._attachment.get()
        if end is None or not self._told or time.monotonic() < self._hear_at or not self._telling.acquire(blocking=False):
            return
        try:
            self._hear_at = time.monotonic() + HEAR_SECONDS
            lost = end.events.lost
            last = {e.key: e.removed for e in end.events.poll()}
            gone = [k for k, removed in last.items() if removed]
            if end is not self._heard or end.events.lost != lost:  # a new session, or too much to be told
                self._heard, names = end, list(self._told)
                gone = [n for n, there in zip(names, end.pool.present(names)) if not there]
            keys = [self._told.pop(n) for n in gone if n in self._told]
            if keys:
                self._events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=True))
        except Error as e:
            self._trouble(end, e)
        finally:
            self._telling.release()

    def _load(self, end: End, keys: List[Any], chunks: List[int]) -> List[Any]:
        """Loads the leading chunks that are there, and returns those of them that are whole."""
        good: List[Any] = []
        with end.pool.pin([named(k) for k in keys]) as leases:
            if len(leases):
                with end.pool.retrieve(leases) as layers:
                    layers.begin_at(0, end.memory, self._offsets(chunks[:len(leases)]))
                    layers.wait()
                    failed = layers.failed()
                for i in failed:
                    end.pool.report_bad(leases[i])
                good = [keys[i] for i in range(len(leases)) if i not in failed]
        return good

    def get_finished_jobs(self) -> Iterable[JobResult]:
        found = []
        while self._results:
            found.append(self._results.popleft())
        while self._missing:  # of every result that was found at least
            self._lookups.mark_miss(self._missing.popleft())
        return found

    def has_pending_work(self) -> bool:
        return any(not f.done() for f in self._running) or bool(self._results)

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._hear()
        while self._events:
            yield self._events.popleft()

    def drain_jobs(self) -> None:
        """vLLM forgets its cache, as where it sleeps. Unless the user says otherwise the weights may be others from now
        on: nothing that is stored may be used, or added to."""
        concurrent.futures.wait(self._running)
        if not self._fixed_weights and not self._stopped:
            log.warning("tuttifs: the cache was reset, as by sleep, and the tier is not used any more: if the weights "
                        "are others, start the engine again with another weights_epoch; if they never change, set "
                        "fixed_weights")
            self._stopped = True

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._loader.shutdown()
        self._storer.shutdown()
        self._attachment.close()

    def _trouble(self, end: Any, e: Error) -> None:
        log.warning("tuttifs: %s", e)
        if isinstance(e, GONE):
            self._attachment.lost(end, e)


def named(key: Any) -> bytes:
    """A file's key for vLLM's, which is a hash and a group's number."""
    return hashlib.sha256(b"tuttifs vllm chunk 1" + bytes(key)).digest()
