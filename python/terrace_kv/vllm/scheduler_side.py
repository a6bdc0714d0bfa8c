"""The connector in the scheduler's process: lookups of blocks in the store, and work for the
workers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..transfers import Transfers
from . import connector_metrics
from .blocks import Blocks, Progress, Run, Steps
from .lineage import Lineage

# Delay before a request saves again blocks that could not be saved. Without it, it would copy its
# whole prompt in every step while the store is unreachable.
RETRY_INTERVAL_S = 5.0
# Longest time that running requests wait for blocks of ended ones that are still to be copied.
SHORTAGE_PATIENCE_S = 0.1
# Share of the engine's blocks that several ended requests may keep until they are copied: the cost
# of a store that is slower than the engine.
KEPT_SHARE_MAX = 0.125
# Number of unsaved blocks that are remembered until a request finds them in the engine's own cache.
UNSAVED_MAX = 1 << 16


@dataclass
class _Request:
    request: Any
    question: int | None = None
    """The lookup job."""
    asked: tuple[int, int] = (0, 0)
    """First and last block of the lookup."""
    answer: int | None = None
    """Number of leading blocks found."""
    first: int = 0
    """First block to load."""
    is_new: bool = True
    """Whether no step has computed any of it."""
    saved: int = 0
    """Number of leading blocks that need not be sent to workers."""
    parts: int = 0
    """Parts of blocks that were sent to workers and not copied yet."""
    dropped: int = 0
    """Number of these that were abandoned."""
    oldest: tuple[int, int] | None = None
    """Lower bound of the other blocks' numbers, and the place of that block."""
    retry_at: float = 0.0
    """Time at which blocks that could not be saved are sent again."""
    is_stale: bool = False
    """Whether the caches were reset since it was admitted: its blocks may be of two lineages, and
    are not saved."""

    def drop(self) -> None:
        """Abandons the parts sent to workers."""
        self.dropped = self.parts
        if self.oldest is not None:
            self.saved = min(self.saved, self.oldest[0])
            self.oldest = None

    def copied(self, parts: int) -> None:
        """Records copied parts."""
        self.parts -= parts
        self.dropped = max(0, self.dropped - parts)
        if not self.parts:
            self.oldest = None


@dataclass
class _Leaving:
    blocks: int
    """State of an ended request whose blocks vLLM keeps."""
    parts: int
    """Parts of blocks that workers have not copied yet."""


@dataclass
class _State:
    requests: dict[str, _Request] = field(default_factory=dict)
    questions: dict[int, str] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)
    leaving: dict[str, _Leaving] = field(default_factory=dict)
    """Requests that have ended and whose blocks vLLM keeps."""
    unsaved: dict[bytes, None] = field(default_factory=dict)
    """Unsaved blocks, the oldest first."""


class SchedulerSide:
    """No method blocks: a request with a lookup in flight is tried again in the next step.

    Blocks are sent to workers when they are complete. Until all workers have copied them, their
    memory must not be given to another request: vLLM keeps the blocks of an ended request on
    request, and workers learn of all other blocks before the step that may overwrite them.
    """

    def __init__(self, blocks: Blocks, lineage: Lineage) -> None:
        self._blocks = blocks
        self._lineage = lineage
        self._shared = blocks.open()
        self._transfers = Transfers(self._shared.store, blocks.namespace)
        self._figures = connector_metrics.ConnectorFigures("scheduler")
        self._state = _State()
        self._pool: Any = None
        # Step numbers: the last one, the last one that loads, and the last one known to have ended.
        self._number = self._loading = self._ended = 0
        self._skipped = 0
        self._short_since: float | None = None

    def bind_pool(self, pool: Any) -> None:
        """Sets the engine's own prefix cache."""
        self._pool = pool
        self._lineage.watch(pool)

    def reset(self) -> None:
        """Called when the engine sleeps or may have new weights. Earlier KV is no longer found, and
        blocks that requests have computed so far are not saved. Blocks already sent to workers
        keep their names."""
        self._lineage.reset()
        self._state.unsaved.clear()
        for known in self._state.requests.values():
            known.question = known.answer = None
            known.asked = (0, 0)
            known.saved = 0
            known.is_new = known.is_stale = True

    def on_new_request(self, request: Any) -> None:
        """Looks the request up at once, before the scheduler considers it. Blocks that the engine
        has itself are not read into memory, but protected from eviction."""
        self._reset_with_engine()
        known = self._state.requests.setdefault(request.request_id, _Request(request))
        if request.skip_reading_prefix_cache:
            return
        in_engine = self._in_engine(request)
        if in_engine:
            self._transfers.touch(self._lineage.names(request.block_hashes[:in_engine]), parts=self._blocks.ranks)
        self._ask(known, in_engine)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """The number of tokens in the store behind the computed ones, and whether they are loaded
        asynchronously; None while the lookup is in flight."""
        self._reset_with_engine()
        self._take_answers()
        known = self._state.requests.setdefault(request.request_id, _Request(request))
        # It starts at its first token.
        known.is_stale = False
        # Some requests need results that only computing gives: logprobs of the prompt, states of
        # all tokens.
        if request.skip_reading_prefix_cache:
            return 0, False
        first = computed // self._blocks.tokens
        limit = self._limit(request)
        if first >= limit:
            return 0, False
        if known.question is not None:
            return None, False
        begin, end = known.asked
        if known.answer is None or first < begin or limit > end:
            self._ask(known, first)
            return (None, False) if known.question is not None else (0, False)
        there = max(0, begin + known.answer - first)
        known.first = first
        tokens = there * self._blocks.tokens
        return tokens, bool(tokens) and self._blocks.is_async

    def allocated(self, request: Any, block_ids: list[int], external: int) -> None:
        """Schedules loads. The second call for an asynchronous load passes 0."""
        known = self._state.requests[request.request_id]
        count = external // self._blocks.tokens
        first, end = known.first, known.first + count
        if count:
            names = self._lineage.names(request.block_hashes[first:end])
            run = Run(request.request_id, first, names, block_ids[first:end])
            self._state.steps.loads.append(run)
            known.saved = max(known.saved, end)
        # Looked up again later: the request may be preempted and return.
        known.answer = None

    def next_step(self, scheduled: Any) -> Steps:
        """The work of the workers in a step."""
        self._reset_with_engine()
        steps, self._state.steps = self._state.steps, Steps()
        self._number += 1
        steps.number = self._number
        if steps.loads:
            self._loading = self._number
        for name in scheduled.preempted_req_ids or ():
            # Even if it has ended since: its blocks are already reused.
            steps.abandoned.add(name)
            if name in self._state.requests:
                self._state.requests[name].drop()
        cached = scheduled.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        now = time.monotonic()
        for name, tokens in scheduled.num_scheduled_tokens.items():
            known = self._state.requests.get(name)
            if known is None:
                continue
            whole = min((computed[name] + tokens) // self._blocks.tokens, len(known.request.block_hashes))
            is_new, known.is_new = known.is_new, False
            if is_new:
                # Blocks that were cached on arrival were sent by the requests that computed them.
                known.saved = max(known.saved, computed[name] // self._blocks.tokens)
            may_have_moved = self._blocks.is_windowed and known.oldest is not None
            if not (may_have_moved or self._has_to_save(known, whole, now) or (is_new and self._state.unsaved)):
                continue
            # Present while the request lives.
            ids = scheduled.kv_connector_block_state.get_block_ids(name)[0]
            if known.oldest is not None and ids[known.oldest[0]] != known.oldest[1]:
                # The block is outside of the attention window.
                steps.abandoned.add(name)
                known.drop()
            if is_new:
                self._save_again(steps, known, ids)
            if self._has_to_save(known, whole, now):
                self._save(steps, known, whole, ids)
        return steps

    def ended(self, progress: Progress | None, left: Iterable[str]) -> None:
        """Records the progress of all workers, and the ended requests whose blocks vLLM no longer
        keeps."""
        state = self._state
        for name in left:
            state.leaving.pop(name, None)
        if progress is None:
            return
        self._ended = max(self._ended, progress.step)
        for name, parts in progress.over.items():
            if name in state.requests:
                state.requests[name].copied(parts)
            elif name in state.leaving:
                state.leaving[name].parts -= parts
        for name, block in progress.missing.items():
            if name in state.requests:
                state.requests[name].saved = min(state.requests[name].saved, block)
        for name, block in progress.failed.items():
            if name in state.requests:
                state.requests[name].saved = min(state.requests[name].saved, block)
                state.requests[name].retry_at = time.monotonic() + RETRY_INTERVAL_S
        self._not_saved(progress.unsaved)

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """Removes a request. Returns whether vLLM must keep its blocks until workers have copied
        them."""
        name, steps = request.request_id, self._state.steps
        known = self._state.requests.pop(name, None)
        if known is None:
            return False
        # vLLM does not count blocks computed from failed loads.
        whole = min(request.num_computed_tokens // self._blocks.tokens, len(request.block_hashes), len(block_ids))
        if not known.is_new:
            if self._has_to_save(known, whole, time.monotonic()):
                self._save(steps, known, whole, block_ids)
            self._skip(request, known.saved, whole)
        if known.parts == known.dropped:
            return False
        kept = sum(each.blocks for each in self._state.leaving.values())
        if kept and kept + len(block_ids) > KEPT_SHARE_MAX * self._blocks.in_engine:
            self._skip(request, known.oldest[0] if known.oldest else known.saved, known.saved)
            steps.saves = [run for run in steps.saves if run.request != name]
            steps.abandoned.add(name)
            return False
        self._state.leaving[name] = _Leaving(len(block_ids), known.parts - known.dropped)
        steps.leaving.add(name)
        return True

    def is_waiting_for_blocks(self) -> bool:
        """Whether blocks of ended requests become free soon, so that no running request must be
        preempted. Called on a shortage: saves that take too long are then abandoned."""
        leaving = self._state.leaving
        now = time.monotonic()
        if not leaving:
            self._short_since = None
            return False
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since > SHORTAGE_PATIENCE_S:
            self._state.steps.abandoned.update(leaving)
            self._skipped += sum(-(-each.parts // self._blocks.ranks) for each in leaving.values())
            for each in leaving.values():
                each.parts = 0
        return True

    def figures(self) -> Any:
        """The figures since the last call."""
        return self._figures.take(self._transfers, self._shared.store, skipped=self._skipped)

    def close(self) -> None:
        """Drops lookups in flight."""
        self._transfers.wait_idle(10.0)
        self._transfers.close()
        self._shared.close()

    def _may_save(self) -> bool:
        """Whether blocks may be sent: a step that waits for its loads computes from whatever
        arrived, so its blocks are sent after all ranks have reported success."""
        return self._blocks.is_async or self._loading <= self._ended

    def _has_to_save(self, known: _Request, whole: int, now: float) -> bool:
        return known.saved < whole and not known.is_stale and now >= known.retry_at and self._may_save()

    def _save(self, steps: Steps, known: _Request, whole: int, ids: list[int]) -> None:
        """Sends the blocks up to ``whole`` that were not sent yet."""
        self._hand_over(steps, known, known.saved, whole, ids)
        known.saved = whole

    def _save_again(self, steps: Steps, known: _Request, ids: list[int]) -> None:
        """Sends blocks that the engine has cached and that were not saved."""
        if not self._state.unsaved or known.is_stale or not self._may_save():
            return
        for at, name in enumerate(self._lineage.names(known.request.block_hashes[: known.saved])):
            if name in self._state.unsaved:
                self._hand_over(steps, known, at, at + 1, ids)

    def _hand_over(self, steps: Steps, known: _Request, first: int, end: int, ids: list[int]) -> None:
        names = self._lineage.names(known.request.block_hashes[first:end])
        steps.saves.append(Run(known.request.request_id, first, names, ids[first:end]))
        known.parts += len(names) * self._blocks.ranks
        if known.oldest is None or first < known.oldest[0]:
            known.oldest = first, ids[first]
        for name in names:
            self._state.unsaved.pop(name, None)

    def _skip(self, request: Any, first: int, end: int) -> None:
        if first < end:
            self._skipped += end - first
            self._not_saved(self._lineage.names(request.block_hashes[first:end]))

    def _not_saved(self, names: Collection[bytes]) -> None:
        unsaved = self._state.unsaved
        for name in names:
            unsaved[name] = None
        while len(unsaved) > UNSAVED_MAX:
            del unsaved[next(iter(unsaved))]

    def _reset_with_engine(self) -> None:
        if self._lineage.was_reset():
            self.reset()

    def _limit(self, request: Any) -> int:
        """The largest number of tokens to load: at least one must be computed to choose the next
        one."""
        before_last: int = (request.num_tokens - 1) // self._blocks.tokens
        return min(before_last, len(request.block_hashes))

    def _in_engine(self, request: Any) -> int:
        """The number of blocks that the engine has itself, by bisection: vLLM evicts the last
        blocks of a prefix first."""
        if self._pool is None:
            return 0
        low, high = 0, self._limit(request)
        while low < high:
            middle = (low + high) // 2
            if self._pool.get_cached_block(request.block_hashes[middle], [0]) is None:
                high = middle
            else:
                low = middle + 1
        return low

    def _ask(self, known: _Request, first: int) -> None:
        limit = self._limit(known.request)
        if first >= limit:
            return
        names = self._lineage.names(known.request.block_hashes[first:limit])
        # A block exists if the parts of all ranks do.
        known.question = self._transfers.submit_exists(names, prefetch_to_memory=True, parts=self._blocks.ranks)
        known.asked, known.answer = (first, limit), None
        self._state.questions[known.question] = known.request.request_id

    def _take_answers(self) -> None:
        for completed in self._transfers.drain():
            self._figures.note(completed)
            known = self._state.requests.get(self._state.questions.pop(completed.job))
            if known is None or known.question != completed.job:
                continue
            known.question = None
            known.answer = next((at for at, there in enumerate(completed.ok) if not there), len(completed.codes))
