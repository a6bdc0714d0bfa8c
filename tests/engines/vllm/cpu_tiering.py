"""vLLM's tiers on a machine without a GPU, where its offloading connector refuses to work: the same
specification and managers, with a worker that copies between two places of host memory. Also
faulty tiers."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from terrace_kv.vllm import TerraceConnector, TerraceTier
from terrace_kv.vllm.copies import Copies, Event


class CopyingWorker(OffloadingWorker):
    """Copies blocks synchronously."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._places = [
            (cache.tensor.view(-1, cache.page_size_bytes), region.create_next_worker_view(cache.page_size_bytes))
            for cache in kv_caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for engine, host in self._places:
                host[chunk].copy_(engine[block])
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for chunk, block in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for engine, host in self._places:
                engine[block].copy_(host[chunk])
        return self._end(job_id)

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._places = []
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """One block per chunk, one group of layers."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1 and len(kv_caches.group_data_refs) == 1
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker


class ZeroingTier(TerraceTier):
    """Stores zeros under right names and checksums: an engine that reads them gives wrong
    answers."""

    def submit_store(self, job_metadata: Any) -> None:
        rows = np.frombuffer(self._primary_kv_view, np.uint8).reshape(self._primary_kv_view.shape)
        rows[job_metadata.chunk_ids] = 0
        super().submit_store(job_metadata)


class ClaimingTier(TerraceTier):
    """Reports every chunk as present, until a load of it was attempted."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._tried: set[bytes] = set()
        self.lookup = self._claim

    def _claim(self, key: Any, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        is_claimed = found is LookupResult.MISS and key not in self._tried
        return LookupResult.HIT if is_claimed else found

    def submit_load(self, job_metadata: Any) -> None:
        self._tried.update(job_metadata.keys)
        super().submit_load(job_metadata)


class _ZeroingCopies(Copies):
    def to_staging(self, blocks: list[int], pages: list[int], after: Event) -> Event:
        event = super().to_staging(blocks, pages, after)
        self._staging[pages] = 0
        return event


class ZeroingConnector(TerraceConnector):
    """The connector's counterpart of :class:`ZeroingTier`."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None and self._worker._mover is not None
        self._worker._mover._saving.__class__ = _ZeroingCopies
