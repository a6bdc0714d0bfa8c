"""The connector in a worker's process: blocks to and from the store."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .._native import ConfigError
from ..transfers import Completed, Transfers
from . import connector_metrics
from .blocks import Blocks, Steps, keys_of

# Under the name that vLLM shows what is logged of.
logger = logging.getLogger("vllm.terrace")

# How long the end of an engine may wait for what is being stored.
_PATIENCE_S = 30.0


class _Moving(NamedTuple):
    request: str | None
    """Whose blocks are loaded; None if they are saved."""
    pages: list[int]
    block_ids: list[int]


@dataclass
class _Load:
    """What a request still waits for."""

    waiting: list[tuple[bytes, int]]
    under_way: int = 0


@dataclass
class _Pool:
    """Pages of the staging memory that nobody uses."""

    free: list[int]
    skipped: int = field(default=0)

    def take(self, wanted: int) -> list[int]:
        count = min(wanted, len(self.free))
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken


class WorkerSide:
    """Blocks pass through staging memory: the store is lent nothing of the engine's, and the engine's blocks are free
    as soon as they were copied. Half of it is for loads, so that saves never keep a request waiting."""

    def __init__(self, blocks: Blocks, rank: int) -> None:
        self._blocks, self._rank = blocks, rank
        self._shared = blocks.open()
        self._transfers = Transfers(self._shared.store, blocks.namespace)
        self._figures = connector_metrics.ConnectorFigures(f"worker {rank}")
        half = blocks.staging_pages // 2
        self._for_loads = _Pool(list(range(half)))
        self._for_saves = _Pool(list(range(half, 2 * half)))
        self._half = half
        self._moving: dict[int, _Moving] = {}
        self._loads: dict[str, _Load] = {}
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._layers: list[tuple[torch.Tensor, int, int]] = []
        self._is_on_gpu = False
        logger.info("Terrace stores KV in %s", blocks)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes note of where the engine's blocks are."""
        at = 0
        for tensor in kv_caches.values():
            size = tensor[0].numel() * tensor.element_size()
            self._layers.append((tensor, at, size))
            at += size
        if at != self._blocks.bytes:
            raise ConfigError(
                f"a block has {at} bytes, but the engine's configuration says {self._blocks.bytes}: TerraceConnector does "
                "not support this layout; use the tier, and please report it"
            )
        self._is_on_gpu = any(tensor.is_cuda for tensor in kv_caches.values())
        pages = 2 * self._half
        self._staging = torch.zeros((pages, at), dtype=torch.uint8, pin_memory=self._is_on_gpu)
        self._region = self._transfers.register(self._staging, at)

    def load(self, steps: Steps) -> None:
        """Begins to load blocks; waits for them unless requests wait beside steps."""
        for name, pairs in steps.loads.items():
            self._loads[name] = _Load(list(pairs))
        self._begin_loads()
        if not self._blocks.is_async:
            while self._loads:
                self._transfers.wait_idle()
                self._take_ended()
            self._received.clear()

    def save(self, steps: Steps) -> None:
        """Copies whole blocks, and has the copies stored. Where there is no memory for copies they are left out: the
        next who computes them saves them."""
        self._take_ended()
        pages = self._for_saves.take(len(steps.saves))
        left_out = len(steps.saves) - len(pages)
        if left_out:
            self._for_saves.skipped += left_out
            logger.debug("%d blocks were not saved: the store is slower than the engine (see the setting staging)", left_out)
        saves = steps.saves[: len(pages)]
        if not saves:
            return
        block_ids = [block for _, block in saves]
        self._copy(block_ids, pages, to_staging=True)
        keys = keys_of((one for one, _ in saves), self._rank)
        job = self._transfers.submit_put(keys, self._region.pages(pages))
        self._moving[job] = _Moving(None, pages, block_ids)

    def received(self) -> set[str]:
        """The requests whose blocks have come, or are known not to come."""
        self._take_ended()
        received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Blocks that did not come."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def figures(self) -> Any:
        """What has come since the last time."""
        return self._figures.take(self._transfers, self._shared.store, skipped=self._for_saves.skipped)

    def close(self) -> None:
        """Waits for what is being stored."""
        if not self._transfers.wait_idle(_PATIENCE_S):
            # The staging memory is kept by the jobs that still use it.
            logger.warning("the store has not finished its transfers within %.0f s and is abandoned", _PATIENCE_S)
            return
        self._transfers.close()
        self._shared.close()

    def _begin_loads(self) -> None:
        for name, load in self._loads.items():
            pages = self._for_loads.take(len(load.waiting))
            if not pages:
                continue
            pairs, load.waiting = load.waiting[: len(pages)], load.waiting[len(pages) :]
            keys = keys_of((one for one, _ in pairs), self._rank)
            job = self._transfers.submit_get(keys, self._region.pages(pages))
            self._moving[job] = _Moving(name, pages, [block for _, block in pairs])
            load.under_way += 1

    def _take_ended(self) -> None:
        for completed in self._transfers.drain():
            self._figures.note(completed)
            moving = self._moving.pop(completed.job)
            if moving.request is None:
                self._saved(moving, completed)
            else:
                self._loaded(moving.request, moving, completed)
        self._begin_loads()

    def _saved(self, moving: _Moving, completed: Completed) -> None:
        self._for_saves.free += moving.pages
        if not completed.all_ok:
            logger.warning("%d of %d blocks were not saved: %s", completed.ok.count(False), len(moving.pages), completed.error)

    def _loaded(self, name: str, moving: _Moving, completed: Completed) -> None:
        came = [at for at, ok in enumerate(completed.ok) if ok]
        if came:
            self._copy([moving.block_ids[at] for at in came], [moving.pages[at] for at in came], to_staging=False)
        if len(came) < len(moving.pages):
            lost = [block for at, block in enumerate(moving.block_ids) if not completed.ok[at]]
            self._failed_blocks.update(lost)
            logger.warning("%d of %d blocks could not be loaded: %s", len(lost), len(moving.pages),
                           completed.error or "they are gone")
        self._for_loads.free += moving.pages
        load = self._loads[name]
        load.under_way -= 1
        if not load.under_way and not load.waiting:
            del self._loads[name]
            self._received.add(name)

    def _copy(self, block_ids: list[int], pages: list[int], *, to_staging: bool) -> None:
        """Between the engine's blocks and pages; what an object holds is in the order of the tensors' shape, however
        they lie in memory."""
        rows = torch.tensor(pages)
        for tensor, at, size in self._layers:
            blocks = torch.tensor(block_ids, device=tensor.device)
            if to_staging:
                gathered = tensor.index_select(0, blocks).reshape(len(pages), -1).view(torch.uint8)
                self._staging[rows, at : at + size] = gathered.to("cpu")
            else:
                came = self._staging[rows, at : at + size].view(tensor.dtype).reshape(-1, *tensor.shape[1:])
                tensor.index_copy_(0, blocks, came.to(tensor.device))
        if self._is_on_gpu:
            torch.cuda.current_stream().synchronize()
