"""The connector in a worker's process: blocks to and from the store."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .._native import ConfigError
from ..transfers import Transfers
from . import connector_metrics
from .blocks import Blocks, Progress, Steps
from .copies import Copies, Device, Layers, device_of
from .mover import Mover, Outcome

# Under the name that vLLM shows what is logged of.
logger = logging.getLogger("vllm.terrace")

# How long the end of an engine may wait for what is being stored.
_PATIENCE_S = 30.0


class WorkerSide:
    """Blocks pass through staging memory: the store is lent nothing of the engine's, and the engine's blocks are free
    as soon as they were copied."""

    def __init__(self, blocks: Blocks, rank: int, on: Callable[[torch.Tensor], Device] = device_of) -> None:
        self._blocks, self._rank, self._on = blocks, rank, on
        self._shared = blocks.open()
        self._transfers = Transfers(self._shared.store, blocks.namespace)
        self._figures = connector_metrics.ConnectorFigures(f"worker {rank}")
        self._mover: Mover | None = None
        self._outcome = Outcome()
        logger.info("Terrace stores KV in %s", blocks)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes note of where the engine's blocks are, and begins to move blocks."""
        layers = Layers(list(kv_caches.values()))
        size = layers.block_bytes
        if size != self._blocks.bytes:
            raise ConfigError(
                f"a block has {size} bytes, but the engine's configuration says {self._blocks.bytes}: TerraceConnector "
                "does not support this layout; use the tier, and please report it"
            )
        pages = self._blocks.staging_pages // 2 * 2
        self._staging = torch.zeros((pages, size), dtype=torch.uint8, pin_memory=layers.device.type != "cpu")
        region = self._transfers.register(self._staging, size)
        device = self._on(next(iter(kv_caches.values())))
        saving, loading = (Copies(layers, self._staging, device.stream()) for _ in range(2))
        self._mover = Mover(self._transfers, self._rank, region, device, saving, loading, self._figures.note)

    def begin(self, steps: Steps) -> None:
        """Called before a step writes to any block."""
        if steps.abandoned and self._mover is not None:
            self._mover.abandon(steps.abandoned)

    def load(self, steps: Steps) -> None:
        """Begins to load blocks; waits for them unless requests wait beside steps."""
        if not steps.loads:
            return
        assert self._mover is not None, "vLLM registers its blocks first"
        self._mover.load(steps.loads)
        if not self._blocks.is_async:
            self._mover.wait_for_loads({run.request for run in steps.loads})

    def save(self, steps: Steps) -> None:
        """Has blocks saved when the step that is queued has written them."""
        if self._mover is not None:
            self._mover.save(steps.saves, steps.leaving)

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks vLLM need not keep any more, and those whose blocks have come or are known not to come."""
        if self._mover is not None:
            self._outcome = self._mover.take_outcome()
        return self._outcome.sent, self._outcome.received

    def failed_blocks(self) -> set[int]:
        """Blocks that did not come, up to the last call of :meth:`ended`."""
        return self._outcome.lost

    def progress(self, steps: Steps) -> Progress | None:
        """What the scheduler is to know of, up to the last call of :meth:`ended`."""
        of = self._outcome
        if self._blocks.is_async and not (of.over or of.missing or of.failed):
            return None
        return Progress(steps.number, of.over, of.missing, of.failed, of.unsaved)

    def figures(self) -> connector_metrics.ConnectorStats | None:
        """What has come since the last time."""
        return self._figures.take(self._transfers, self._shared.store)

    def close(self) -> None:
        """Waits for what is being stored."""
        if self._mover is not None and not self._mover.close(_PATIENCE_S):
            # The staging memory is kept by the jobs that still use it.
            logger.warning("the store has not finished its transfers within %.0f s and is abandoned", _PATIENCE_S)
            return
        self._transfers.close()
        self._shared.close()
