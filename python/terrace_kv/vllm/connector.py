"""Terrace's store as a KV connector of vLLM. It also works on CPUs and on engines with several nodes, where vLLM has no tiers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from . import connector_metrics, versions
from .blocks import Blocks, Progress, Steps
from .lineage import Lineage
from .naming import connector_identity
from .scheduler_side import SchedulerSide
from .worker_side import WorkerSide

if TYPE_CHECKING:
    import torch

# The logger name that vLLM configures.
logger = logging.getLogger("vllm.terrace")


class TerraceConnector(KVConnectorBase_V1):
    """A KV connector that stores one object per block and rank. The scheduler side looks up blocks in the store and decides what
    to transfer; each worker transfers its own part. The store never accesses the engine's blocks: they are copied to and
    from staging memory of the worker.

    The connector does not declare support for the hybrid allocator, so vLLM gives it one group of layers with one block size.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        versions.check(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        settings = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        blocks = Blocks(vllm_config, kv_cache_config, settings)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(blocks, Lineage(connector_identity(vllm_config, settings)))
        else:
            self._worker = WorkerSide(blocks, vllm_config.parallel_config.rank)

    @property
    def requires_kv_delivery(self) -> bool:
        # Missing blocks are computed again.
        return False

    @property
    def _at_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM asks this of the scheduler's side"
        return self._scheduler

    @property
    def _at_worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM asks this of a worker's side"
        return self._worker

    # Called on the scheduler side.

    def on_new_request(self, request: Any) -> None:
        self._at_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._at_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._at_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._at_scheduler.next_step(scheduler_output)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._at_scheduler.bind_pool(gpu_block_pool)

    def reset_cache(self) -> bool:
        # Called when vLLM sleeps, pauses for other weights, or clears its caches.
        self._at_scheduler.reset()
        return True

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        assert meta is None or isinstance(meta, Progress)
        self._at_scheduler.ended(meta, connector_output.finished_sending or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._at_scheduler.finished(request, block_ids), None

    def has_pending_block_frees(self) -> bool:
        return self._at_scheduler.is_waiting_for_blocks()

    # Called on workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._at_worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Called before the step that may overwrite blocks, in every version and model runner.
        super().bind_connector_metadata(connector_metadata)
        self._at_worker.begin(self._steps())

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        self._at_worker.load(self._steps())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        return

    def wait_for_save(self) -> None:
        self._at_worker.save(self._steps())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self._at_worker.ended()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._at_worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._at_worker.progress(self._steps())

    def get_kv_connector_stats(self) -> Any:
        side = self._scheduler or self._worker
        return None if side is None else side.figures()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return connector_metrics.ConnectorStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Any:
        return connector_metrics.ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            try:
                if side is not None:
                    side.close()
            except Exception:
                # vLLM's own cleanup follows.
                logger.exception("the store was not closed")

    def _steps(self) -> Steps:
        steps = self._get_connector_metadata()
        assert isinstance(steps, Steps)
        return steps
