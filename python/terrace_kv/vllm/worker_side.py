"""The connector in a worker's process: moves blocks to and from the store."""

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

# The logger name that vLLM configures.
logger = logging.getLogger("vllm.terrace")

# Longest wait for saves in flight at the end of an engine.
_PATIENCE_S = 30.0


class WorkerSide:
    """Blocks pass through staging memory: the store does not access the engine's memory, and the
    engine's blocks are free as soon as they are copied."""

    def __init__(self, blocks: Blocks, rank: int, on: Callable[[torch.Tensor], Device] = device_of) -> None:
        self._blocks, self._rank, self._on = blocks, rank, on
        self._shared = blocks.open()
        self._transfers = Transfers(self._shared.store, blocks.namespace)
        self._figures = connector_metrics.ConnectorFigures(f"worker {rank}")
        self._mover: Mover | None = None
        self._outcome = Outcome()
        logger.info("Terrace stores KV in %s", blocks)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Records the places of the engine's blocks, and starts the mover."""
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
        """Starts loads; waits for them unless requests wait asynchronously."""
        if not steps.loads:
            return
        assert self._mover is not None, "vLLM registers its blocks first"
        self._mover.load(steps.loads)
        if not self._blocks.is_async:
            self._mover.wait_for_loads({run.request for run in steps.loads})

    def save(self, steps: Steps) -> None:
        """Schedules saves behind the step that writes the blocks."""
        if self._mover is not None:
            self._mover.save(steps.saves, steps.leaving)

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks vLLM need not keep any more, and those whose blocks have arrived or
        failed."""
        if self._mover is not None:
            self._outcome = self._mover.take_outcome()
        return self._outcome.sent, self._outcome.received

    def failed_blocks(self) -> set[int]:
        """Blocks that failed to load, up to the last call of :meth:`ended`."""
        return self._outcome.lost

    def progress(self, steps: Steps) -> Progress | None:
        """The report to the scheduler, up to the last call of :meth:`ended`."""
        of = self._outcome
        if self._blocks.is_async and not (of.over or of.missing or of.failed):
            return None
        return Progress(steps.number, of.over, of.missing, of.failed, of.unsaved)

    def figures(self) -> connector_metrics.ConnectorStats | None:
        """The figures since the last call."""
        return self._figures.take(self._transfers, self._shared.store)

    def close(self) -> None:
        """Waits for saves in flight."""
        if self._mover is not None and not self._mover.close(_PATIENCE_S):
            # Jobs that still use the staging memory keep it alive.
            logger.warning("the store has not finished its transfers within %.0f s and is abandoned", _PATIENCE_S)
            return
        self._transfers.close()
        self._shared.close()
