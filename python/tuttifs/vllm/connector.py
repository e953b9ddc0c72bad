"""`TuttifsConnector`: vLLM's side of the connector, as vLLM 0.32 calls it. What it does is in scheduler.py and
worker.py."""
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import vllm
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1, KVConnectorHandshakeMetadata,
                                                               KVConnectorMetadata, KVConnectorRole,
                                                               KVConnectorTransferResults, KVConnectorWorkerMetadata,
                                                               SupportsHMA)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ..errors import IdentityError, InvalidError
from .files import Group, choose_file_tokens
from .identity import GroupFacts, digest, facts_of, group_of, identity, objects, pool_name, scale_format, version
from .messages import PoolSpec, Report, Step
from .metrics import COUNTS
from .options import Options
from .scheduler import Removed, Scheduling
from .sleeping import follow
from .worker import Caches, Rank, Worker, blocks_first, check_staging

log = logging.getLogger("tuttifs.vllm")

VERSION = version(vllm.__version__)
WHERE = {"medium": MEDIUM_STORAGE, "ownership": "tuttifs"}  # of KV events


class Metadata(KVConnectorMetadata):
    def __init__(self, step: Step) -> None:
        self.step = step


class WorkerMetadata(KVConnectorWorkerMetadata):
    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.merge(other.report))


@dataclasses.dataclass
class Tensors(KVConnectorHandshakeMetadata):
    """What a rank's tensors are like, group by group: only workers know which backend lays them out."""

    layouts: List[str]
    dtypes: List[str]


class Stats(KVConnectorStats):
    """The counts of metrics.py, summed over ranks and steps."""

    def reset(self) -> None:
        self.data: Dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> Dict[str, Any]:
        return {f"tuttifs {name.replace('_', ' ')}": round(value, 3) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """vllm:tuttifs_* counters, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: List[str],
                 per_engine_labelvalues: Dict[int, List[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, what in COUNTS.items():
            counter = self._counter_cls(name=f"vllm:tuttifs_{name}", documentation=what + ".", labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values)
                                    for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: Dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)


class TuttifsConnector(KVConnectorBase_V1, SupportsHMA):
    """Restores prefixes from a tuttifs mount and stores them there. See docs/engines.md."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = Options.parse(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidError('set "kv_load_failure_policy": "recompute": a file that cannot be read would fail its '
                               "request")
        if vllm_config.model_config.enable_sleep_mode and vllm_config.model_config.sleep_mode_backend != "cumem":
            raise InvalidError("of vLLM's ways to sleep the connector knows cumem: set --sleep-mode-backend cumem")
        if any(not g.enable_kv_transfer or g.host_resident for g in kv_cache_config.kv_cache_groups):
            raise IdentityError("groups of layers whose KV is on the host, or not to be transferred, cannot be stored")
        described = [group_of(i, g.layer_names, g.kv_cache_spec) for i, g in enumerate(kv_cache_config.kv_cache_groups)]
        self._groups: List[Group] = [g for g, _ in described]
        self._kinds = [kind for _, kind in described]
        self._file_tokens = choose_file_tokens(self._groups, self._options.file_tokens)
        check_staging(self._options, self._groups, self._file_tokens)
        if self._options.layerwise and len(self._groups) > 1:
            raise InvalidError("layerwise goes with models whose layers share one block table: in this one vLLM could "
                               "not be told which blocks failed")
        self._stores = transfer.is_kv_producer
        self._loads = transfer.is_kv_consumer
        # Ranks that hold the same KV (MLA) have one copy of it, written by the first of them.
        self._replicas = kv_cache_config.kv_tp_replicas
        self._scheduling: Optional[Scheduling] = None
        self._worker: Optional[Worker] = None
        self._tensors: Optional[Tensors] = None
        self._bad_blocks: Set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is dropped is a miss later

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", False))

    # Both sides

    def shutdown(self) -> None:
        worker, scheduling, self._worker, self._scheduling = self._worker, self._scheduling, None, None
        if worker is not None:
            worker.close()
        if scheduling is not None:
            scheduling.close()

    def get_kv_connector_stats(self) -> Optional[KVConnectorStats]:
        side = self._worker or self._scheduling
        data = side.counts.take() if side is not None else {}
        return Stats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[Dict[str, Any]] = None) -> KVConnectorStats:
        return Stats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: List[str],
                           per_engine_labelvalues: Dict[int, List[object]]) -> KVConnectorPromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The worker's side

    def register_kv_caches(self, kv_caches: Dict[str, Any]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        rank = get_tensor_model_parallel_rank()
        blocks = self._kv_cache_config.num_blocks
        caches = Caches(self._groups, blocks, kv_caches)
        if self._worker is not None:
            self._worker.close()
        self._worker = Worker(self._options, caches,
                              Rank(rank // self._replicas, rank % self._replicas, self._replicas))
        if self._vllm_config.model_config.enable_sleep_mode:
            from vllm.device_allocator import get_mem_allocator_instance
            follow(get_mem_allocator_instance(), self._worker)
        layers = self._vllm_config.compilation_config.static_forward_context
        self._tensors = Tensors([self._layout(g, kv_caches, blocks, layers) for g in self._groups],
                                [_alike([str(kv_caches[n].dtype).replace("torch.", "") for n in g.layers])
                                 for g in self._groups])

    def _layout(self, group: Group, caches: Dict[str, Any], blocks: int, layers: Dict[str, Any]) -> str:
        """The order of bytes in a block, as the attention backend has it: its name, and a block's axes. What they mean
        is vLLM's, so its version is in it."""
        each = []
        for name in group.layers:
            layer = layers[name]
            backend = layer.get_attn_backend().get_name()
            isa = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
            shape = "x".join(str(n) for n in blocks_first(caches[name], blocks).shape[1:])
            each.append(f"{VERSION} {backend}{'/' + str(isa) if isa else ''} {shape}")
        return _alike(each)

    def get_handshake_metadata(self) -> Optional[KVConnectorHandshakeMetadata]:
        return self._tensors

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        return metadata.step

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(self._step())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Says that the layer is computed. What a step stores is gathered in `wait_for_save`, when all of the step's
        loads are known."""
        if self._worker is not None:
            self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.gather(self._step())

    def get_transfer_results(self, finished_req_ids: Set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed, bad = self._worker.finished_loads()
        self._bad_blocks = bad if len(self._groups) == 1 else set()
        # With several groups numbers of blocks say nothing: whole requests are computed again.
        return KVConnectorTransferResults(finished_recving=ended,
                                          failed_recving=failed & ended if len(self._groups) > 1 else set())

    def get_block_ids_with_load_errors(self) -> Set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> Optional[KVConnectorWorkerMetadata]:
        return WorkerMetadata(self._worker.report()) if self._worker is not None else None

    # The scheduler's side

    def set_xfer_handshake_metadata(self, metadata: Dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The workers have their tensors: the identity is complete, and the pools are opened."""
        ranks = list(metadata.values())
        if any(r != ranks[0] for r in ranks):
            raise IdentityError(f"the ranks' tensors differ: {ranks}")
        tensors = ranks[0]
        assert isinstance(tensors, Tensors)
        facts = facts_of(self._vllm_config, self._options, self._file_tokens)
        specs = self._kv_cache_config.kv_cache_groups
        fields = [identity(facts, GroupFacts(g, kind, layout, dtype, scale_format(s.kv_cache_spec)))
                  for g, kind, layout, dtype, s in zip(self._groups, self._kinds, tensors.layouts, tensors.dtypes,
                                                       specs)]
        family = f"vllm-{digest(fields)[:16]}" if len(fields) > 1 else ""
        pools = [PoolSpec(g, pool_name(f), f, family,
                          tuple(objects(g, self._file_tokens, facts.tp // self._replicas)))
                 for g, f in zip(self._groups, fields)]
        told = self._vllm_config.kv_events_config
        self._scheduling = Scheduling(self._options, self._file_tokens, pools,
                                      told is not None and told.enable_kv_cache_events)
        log.warning("tuttifs: %s: files of %d tokens, %d bytes for each rank, in %s", self._options.path,
                    self._file_tokens,
                    sum(g.file_bytes(self._file_tokens) for g in self._groups), ", ".join(p.name for p in pools))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Tuple[Optional[int], bool]:
        if self._scheduling is None:
            return 0, False
        if not self._loads:
            self._scheduling.track(request)
            return 0, False
        n = self._scheduling.matched(request, num_computed_tokens)
        return n, bool(n) and not self._options.layerwise

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduling is not None:
            self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduling is None:
            return Metadata(Step(0, 0, None, None, [], []))
        tables = scheduler_output.kv_connector_block_state.get_block_ids
        return Metadata(self._scheduling.step(scheduler_output.num_scheduled_tokens, tables, self._stores))

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduling is not None:
            meta = connector_output.kv_connector_worker_meta
            self._scheduling.heard(meta.report if meta is not None else None, connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: List[int]) -> Tuple[bool, Optional[Dict[str, Any]]]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any,
                                    block_ids: Tuple[List[int], ...]) -> Tuple[bool, Optional[Dict[str, Any]]]:
        if self._scheduling is not None:
            self._scheduling.finished(request.request_id)
        return False, None

    def take_events(self) -> Iterable[Any]:
        events = self._scheduling.take_events() if self._scheduling is not None else []
        return [BlockRemoved(block_hashes=e.keys, group_idx=e.group.index, **WHERE) if isinstance(e, Removed) else
                BlockStored(block_hashes=e.keys, parent_block_hash=e.parent, token_ids=e.tokens, lora_id=None,
                            lora_name=None,
                            block_size=self._file_tokens, group_idx=e.group.index, **WHERE) for e in events]

    def reset_cache(self) -> Optional[bool]:
        if self._scheduling is not None:
            self._scheduling.reset()
        return True


def _alike(each: List[str]) -> str:
    """What all layers say, or a digest of what they say one by one."""
    return each[0] if len(set(each)) == 1 else f"mixed {digest(each)}"
