"""A worker's thread that moves blocks between the engine and the store, so that no step waits for it."""

from __future__ import annotations

import bisect
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

import torch

from ..transfers import Completed, Region, Transfers
from .blocks import Run, keys_of
from .copies import Copies, Device, Event

# The logger name that vLLM configures.
logger = logging.getLogger("vllm.terrace")

# Interval at which pending stream events are queried: they wake no thread.
QUERY_INTERVAL_MS = 1
# Copies of one direction in a stream at a time: enough to keep it busy, and few to wait for.
COPIES_IN_FLIGHT_MAX = 2


class _Block(NamedTuple):
    """A block of a request: its number in it, its name, and its place."""

    request: str
    number: int
    hash: bytes
    block: int


class _Batch(NamedTuple):
    """Blocks, and the pages of staging memory that they pass through."""

    blocks: list[_Block]
    pages: list[int]
    after: Event
    """For saves, the event after which the blocks are written; for loads, after which they may be
    overwritten."""


@dataclass
class _Load:
    """Pending loads of a request."""

    blocks: list[_Block]
    after: Event
    waiting: deque[_Block]
    """Blocks that no job loads yet."""
    under_way: int = 0


@dataclass
class Outcome:
    """Events since the last call."""

    received: set[str] = field(default_factory=set)
    """Requests whose blocks are loaded or have failed."""
    lost: set[int] = field(default_factory=set)
    """Places of blocks that failed to load."""
    sent: set[str] = field(default_factory=set)
    """Ended requests whose blocks may be overwritten."""
    over: dict[str, int] = field(default_factory=dict)
    """By request: blocks to save that may be overwritten."""
    missing: dict[str, int] = field(default_factory=dict)
    """By request: the number of the first block that could not be loaded."""
    failed: dict[str, int] = field(default_factory=dict)
    """By request: the number of the first block that could not be saved."""
    unsaved: list[bytes] = field(default_factory=list)
    """Names of blocks that could not be saved."""


class _Pool:
    """Free pages of staging memory, in order, so that neighbours are copied together."""

    def __init__(self, pages: Iterable[int]) -> None:
        self._free = list(pages)

    def take(self, wanted: int) -> list[int]:
        taken = self._free[:wanted]
        del self._free[:wanted]
        return taken

    def give(self, pages: Iterable[int]) -> None:
        for page in pages:
            bisect.insort(self._free, page)


class Mover:
    """Moves blocks. Its queues are no longer than the engine has blocks: the engine keeps those
    that are queued.

    Staging memory is divided into halves, so that saves do not delay loads. A page is used again
    only when its copy and its job have ended. Methods without underscore are for the engine's
    thread, and do not wait for copies.
    """

    def __init__(
        self,
        transfers: Transfers,
        rank: int,
        region: Region,
        device: Device,
        saving: Copies,
        loading: Copies,
        note: Callable[[Completed], None],
    ) -> None:
        self._transfers, self._rank, self._region = transfers, rank, region
        self._device, self._saving, self._loading, self._note = device, saving, loading, note
        pages = region.bytes // region.page_bytes
        self._for_loads, self._for_saves = _Pool(range(pages // 2)), _Pool(range(pages // 2, pages))
        # Requests of the engine's thread, in order.
        self._inbox: deque[Callable[[], None]] = deque()
        # Guards all following fields, up to the outcome.
        self._turn = threading.Lock()
        self._saves: deque[tuple[_Block, Event]] = deque()
        self._loads: dict[str, _Load] = {}
        self._loaded: deque[_Batch] = deque()
        self._copying: dict[bool, deque[tuple[Event, _Batch]]] = {True: deque(), False: deque()}
        self._jobs: dict[int, _Batch] = {}
        self._unsaved: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._is_broken = False
        self._told = threading.Condition()
        self._outcome = Outcome()
        self._is_closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="terrace-mover", daemon=True)
        self._thread.start()

    def save(self, runs: list[Run], leaving: set[str]) -> None:
        """Saves blocks as soon as the work queued on the current stream has ended, and reports
        leaving requests when their blocks may be overwritten."""
        if not runs and not leaving:
            return
        after = self._device.mark()

        def take() -> None:
            for run in runs:
                self._saves.extend((block, after) for block in _blocks(run))
                self._unsaved[run.request] = self._unsaved.get(run.request, 0) + len(run.blocks)
            self._leaving |= leaving

        self._tell(take)

    def load(self, runs: list[Run]) -> None:
        """Loads blocks, and writes to them when the work queued on the current stream has ended."""
        if not runs:
            return
        after = self._device.mark()

        def take() -> None:
            for run in runs:
                blocks = _blocks(run)
                self._loads[run.request] = _Load(blocks, after, deque(blocks))

        self._tell(take)

    def wait_for_loads(self, names: set[str]) -> None:
        """Waits until the loads of these requests have ended, which is bounded by the store's
        deadlines."""
        with self._told:
            self._told.wait_for(lambda: names <= self._outcome.received)
            self._outcome.received -= names

    def abandon(self, names: set[str]) -> None:
        """Stops reading blocks of these requests: blocks that were not copied are not saved, and
        the current stream waits for copies in flight."""
        with self._turn:
            self._take_inbox()
            dropped = [block for block, _ in self._saves if block.request in names]
            self._saves = deque((block, after) for block, after in self._saves if block.request not in names)
            for event, batch in self._copying[True]:
                if any(block.request in names for block in batch.blocks):
                    self._device.hold(event)
            self._over(dropped)
        self._wake_up()

    def take_outcome(self) -> Outcome:
        """The events since the last call."""
        with self._told:
            outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def close(self, patience_s: float) -> bool:
        """Waits for work in flight, and ends the thread. Returns whether everything has ended in
        time."""
        until = time.monotonic() + patience_s
        while not self._is_idle() and time.monotonic() < until:
            time.sleep(0.005)
        is_idle = self._is_idle()
        self._is_closing = True
        self._wake_up()
        self._thread.join(5.0)
        if not self._thread.is_alive():
            os.close(self._wake)
        return is_idle

    def _is_idle(self) -> bool:
        with self._turn:
            moving = self._saves or self._loads or self._copying[True] or self._jobs
            return not self._inbox and (self._is_broken or not moving)

    def _tell(self, take: Callable[[], None]) -> None:
        self._inbox.append(take)
        self._wake_up()

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        changes = select.poll()
        changes.register(self._wake, select.POLLIN)
        changes.register(self._transfers.event_fd(), select.POLLIN)
        self._device.enter()
        # Engines create their tensors in this mode, and then only code in this mode may change
        # them.
        with torch.inference_mode():
            while not self._is_closing:
                awaits_event = self._advance()
                changes.poll(QUERY_INTERVAL_MS if awaits_event else None)
                try:
                    os.eventfd_read(self._wake)
                except BlockingIOError:
                    pass

    def _advance(self) -> bool:
        """Does all work that is possible at once. Returns whether a stream event is pending."""
        with self._turn:
            self._take_inbox()
            try:
                if not self._is_broken:
                    self._take_jobs()
                    self._take_copied()
                    self._begin_loads()
                    self._begin_copies()
                    is_copying = self._loaded or self._copying[True] or self._copying[False]
                    return bool(is_copying or (self._saves and not self._saves[0][1].query()))
            except Exception:
                logger.exception("moving KV blocks has failed; nothing is saved or loaded any more")
                self._is_broken = True
            self._give_up()
            return False

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._let_go()

    def _take_jobs(self) -> None:
        for completed in self._transfers.drain():
            self._note(completed)
            batch = self._jobs.pop(completed.job)
            if completed.kind == "put":
                self._saved(batch, completed)
            else:
                self._got(batch, completed)

    def _saved(self, batch: _Batch, completed: Completed) -> None:
        self._for_saves.give(batch.pages)
        if not completed.all_ok:
            lost = [block for block, ok in zip(batch.blocks, completed.ok) if not ok]
            logger.warning("%d of %d blocks were not saved: %s", len(lost), len(batch.blocks), completed.error)
            self._failed(lost)

    def _got(self, batch: _Batch, completed: Completed) -> None:
        came, pages, lost = [], [], []
        for block, page, ok in zip(batch.blocks, batch.pages, completed.ok):
            if ok:
                came.append(block)
                pages.append(page)
            else:
                lost.append(block)
                self._for_loads.give([page])
        if came:
            self._loaded.append(_Batch(came, pages, batch.after))
        if lost:
            logger.warning(
                "%d of %d blocks could not be loaded: %s", len(lost), len(batch.blocks), completed.error or "they are gone"
            )
            self._lost(lost)

    def _lost(self, blocks: list[_Block]) -> None:
        """Fails blocks, and those behind them, which would be computed again anyway."""
        with self._told:
            for block in blocks:
                _lower(self._outcome.missing, block)
                self._outcome.lost.add(block.block)
        for block in blocks:
            self._loads[block.request].waiting.clear()
        self._arrived(blocks)

    def _arrived(self, blocks: list[_Block]) -> None:
        for block in blocks:
            load = self._loads[block.request]
            load.under_way -= 1
            if not load.under_way and not load.waiting:
                del self._loads[block.request]
                with self._told:
                    self._outcome.received.add(block.request)
                    self._told.notify_all()

    def _take_copied(self) -> None:
        copying = self._copying[True]
        while copying and copying[0][0].query():
            batch = copying[0][1]
            keys = keys_of((block.hash for block in batch.blocks), self._rank)
            self._jobs[self._transfers.submit_put(keys, self._region.pages(batch.pages))] = batch
            copying.popleft()
            self._over(batch.blocks)
        copying = self._copying[False]
        while copying and copying[0][0].query():
            _, batch = copying.popleft()
            self._for_loads.give(batch.pages)
            self._arrived(batch.blocks)

    def _begin_loads(self) -> None:
        for load in self._loads.values():
            while load.waiting:
                pages = self._for_loads.take(min(len(load.waiting), self._loading.blocks_max))
                if not pages:
                    return
                blocks = [load.waiting.popleft() for _ in pages]
                load.under_way += len(blocks)
                keys = keys_of((block.hash for block in blocks), self._rank)
                job = self._transfers.submit_get(keys, self._region.pages(pages))
                self._jobs[job] = _Batch(blocks, pages, load.after)

    def _begin_copies(self) -> None:
        # A copy is queued only when it can start: the queue of a waiting stream fills up, and then
        # queueing blocks.
        copying = self._copying[False]
        while self._loaded and len(copying) < COPIES_IN_FLIGHT_MAX and self._loaded[0].after.query():
            batch = self._loaded.popleft()
            where = [block.block for block in batch.blocks]
            copying.append((self._loading.to_blocks(batch.pages, where, batch.after), batch))
        copying = self._copying[True]
        while self._saves and len(copying) < COPIES_IN_FLIGHT_MAX and self._saves[0][1].query():
            after = self._saves[0][1]
            of_step = takewhile(lambda save: save[1] is after, self._saves)
            wanted = [block for block, _ in islice(of_step, self._saving.blocks_max)]
            pages = self._for_saves.take(len(wanted))
            if not pages:
                return
            batch = _Batch(wanted[: len(pages)], pages, after)
            where = [block.block for block in batch.blocks]
            copying.append((self._saving.to_staging(where, pages, after), batch))
            for _ in pages:
                self._saves.popleft()

    def _over(self, blocks: Iterable[_Block]) -> None:
        """Marks these blocks as no longer read."""
        with self._told:
            for block in blocks:
                self._outcome.over[block.request] = self._outcome.over.get(block.request, 0) + 1
                self._unsaved[block.request] -= 1
                if not self._unsaved[block.request]:
                    del self._unsaved[block.request]
        self._let_go()

    def _let_go(self) -> None:
        gone = {name for name in self._leaving if name not in self._unsaved}
        if gone:
            self._leaving -= gone
            with self._told:
                self._outcome.sent |= gone

    def _failed(self, blocks: Iterable[_Block]) -> None:
        """Records blocks that could not be saved."""
        with self._told:
            for block in blocks:
                _lower(self._outcome.failed, block)
                self._outcome.unsaved.append(block.hash)

    def _give_up(self) -> None:
        """Fails all work: a request must not wait for ever."""
        saves = [block for block, _ in self._saves]
        saves += [block for _, batch in self._copying[True] for block in batch.blocks]
        self._saves.clear()
        self._copying[True].clear()
        self._over(saves)
        self._failed(saves)
        with self._told:
            for name, load in self._loads.items():
                for block in load.blocks:
                    _lower(self._outcome.missing, block)
                    self._outcome.lost.add(block.block)
                self._outcome.received.add(name)
            self._told.notify_all()
        self._loads.clear()


def _blocks(run: Run) -> list[_Block]:
    return [
        _Block(run.request, run.first + at, name, block)
        for at, (name, block) in enumerate(zip(run.hashes, run.blocks))
    ]


def _lower(first: dict[str, int], block: _Block) -> None:
    first[block.request] = min(first.get(block.request, block.number), block.number)
