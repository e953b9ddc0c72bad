"""What vLLM's tiers and LMCache's connector lack for a cache in the host's own memory, for compare_engines.py: they
copy from and to GPUs only. All else of them is theirs. Copies are made in the engine's thread, of whole pages, so they
take what memory takes."""

import sys

import torch
import vllm.triton_utils.dispatcher
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


def rebind_kernels(overrides, rebind=vllm.triton_utils.dispatcher._rebind_kernels):
    """vLLM looks at all that modules hold, and llvmlite, which LMCache imports, holds what answers to every name."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
    try:
        rebind(overrides)
    finally:
        sys.modules.update(hidden)


vllm.triton_utils.dispatcher._rebind_kernels = rebind_kernels


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiers over a cache in the host's memory."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(engine_id=self._engine_id, num_chunks=self.num_chunks,
                                         rank=self.config.parallel.rank, kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                                         cpu_page_size=self.cpu_page_size_per_worker)
            self._worker = CpuWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class CpuWorker(OffloadingWorker):
    """Copies blocks between vLLM's cache and its host region, in which a chunk is one block."""

    def __init__(self, kv_caches, region, blocks_per_chunk):
        if blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
            raise ValueError("chunks of one block, of models whose layers are all alike")
        self.region = region
        self.pairs = []
        for t in kv_caches.tensors:
            cache = t.tensor.view(torch.int8).view(-1, t.page_size_bytes)
            self.pairs.append((cache, region.create_next_worker_view(t.page_size_bytes)))
        self.finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self.move(job_id, src_spec.block_ids, dst_spec.block_ids, lambda cache, host: (host, cache))

    def submit_load(self, job_id, src_spec, dst_spec):
        return self.move(job_id, src_spec.block_ids, dst_spec.block_ids, lambda cache, host: (cache, host))

    def move(self, job_id, sources, targets, order):
        for cache, host in self.pairs:
            target, source = order(cache, host)
            for i, j in zip(sources.tolist(), targets.tolist(), strict=True):
                target[j].copy_(source[i])
        bytes_ = len(sources) * sum(cache.shape[1] for cache, _ in self.pairs)
        self.finished.append(TransferResult(job_id=job_id, success=True, transfer_size=bytes_, transfer_time=None))
        return True

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        pass  # a job is done when it is submitted

    def shutdown(self):
        self.pairs.clear()
        self.region.cleanup()


class LMCacheCpuConnector(LMCacheConnectorV1):
    """LMCache's connector, with copies for a cache in the host's memory."""

    def __init__(self, *args, **kwargs):
        import lmcache.v1.gpu_connector as made
        made.CreateGPUConnector = lambda config, metadata, engine, layout_hints=None: CpuCopies(metadata)
        super().__init__(*args, **kwargs)


class CpuCopies(GPUConnectorInterface):
    """Between vLLM's pages and LMCache's chunks of whole blocks. What a chunk holds is nothing to LMCache but bytes, so
    they are pages, layer by layer, as they are in the cache: the fastest copy there is."""

    def __init__(self, metadata):
        self.layers, _, _, heads, head = metadata.kv_shape
        self.width = heads * head

    def get_shape(self, num_tokens):
        return torch.Size([2, self.layers, num_tokens, self.width])

    def pages(self, memory_obj, start, end, kvcaches, slot_mapping, skipped):
        """Pairs of a page in the cache and one in the chunk, of tokens start to end - 1."""
        size = kvcaches[0][0].numel() // (2 * self.width)  # tokens of a block
        chunk = memory_obj.tensor.reshape(len(kvcaches), -1, *kvcaches[0].shape[1:])
        slots = slot_mapping[start:end:size].tolist()
        if (end - start) % size or skipped % size or any(s % size for s in slots[skipped // size:]):
            raise ValueError("chunks of whole blocks only")
        for cache, kept in zip(kvcaches, chunk, strict=True):
            for i in range(skipped // size, len(slots)):
                yield cache[slots[i] // size], kept[i]

    def from_gpu(self, memory_obj, start, end, *, kvcaches, slot_mapping, **_):
        for page, kept in self.pages(memory_obj, start, end, kvcaches, slot_mapping, 0):
            kept.copy_(page)

    def to_gpu(self, memory_obj, start, end, *, kvcaches, slot_mapping, vllm_cached_tokens=0, **_):
        skipped = min(end - start, max(0, vllm_cached_tokens - start))
        for page, kept in self.pages(memory_obj, start, end, kvcaches, slot_mapping, skipped):
            page.copy_(kept)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)
