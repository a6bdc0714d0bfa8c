"""The connector in the scheduler's process: which blocks the store has, and what workers are to move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..transfers import Transfers
from . import connector_metrics
from .blocks import Blocks, Steps, keys_of


@dataclass
class _Request:
    request: Any
    question: int | None = None
    """The job that asks the store."""
    asked: tuple[int, int] = (0, 0)
    """From which block to which it asks."""
    answer: int | None = None
    """How many of them are there."""
    first: int = 0
    """The first block that is to be loaded."""
    saved: int = 0
    """How many blocks, from the first on, need not be saved."""


@dataclass
class _State:
    requests: dict[str, _Request] = field(default_factory=dict)
    questions: dict[int, str] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)


class SchedulerSide:
    """Nothing here waits: a request whose blocks are being asked about is tried again in the next step."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._shared = blocks.open()
        self._transfers = Transfers(self._shared.store, blocks.namespace)
        self._figures = connector_metrics.ConnectorFigures("scheduler")
        self._state = _State()

    def on_new_request(self, request: Any) -> None:
        """Asks the store at once, before the scheduler looks at the request."""
        known = self._state.requests.setdefault(request.request_id, _Request(request))
        self._ask(known, 0)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind those that are computed the store has, whether they are loaded beside steps; None if
        the store has not said yet."""
        self._take_answers()
        known = self._state.requests.setdefault(request.request_id, _Request(request))
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
        """Has blocks loaded. The second call for an asynchronous load says 0."""
        known = self._state.requests[request.request_id]
        count = external // self._blocks.tokens
        first = known.first
        if count:
            pairs = [(bytes(request.block_hashes[at]), block_ids[at]) for at in range(first, first + count)]
            self._state.steps.loads[request.request_id] = pairs
            known.saved = max(known.saved, first + count)
        # What is learnt later is asked for again: the request may be preempted and come back.
        known.answer = None

    def next_step(self, scheduled: Any) -> Steps:
        """What workers are to do in a step."""
        steps, self._state.steps = self._state.steps, Steps()
        cached = scheduled.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, tokens in scheduled.num_scheduled_tokens.items():
            known = self._state.requests.get(name)
            if known is None:
                continue
            hashes = known.request.block_hashes
            whole = min((computed[name] + tokens) // self._blocks.tokens, len(hashes))
            # Blocks that were cached when the request came were saved by who computed them.
            begin = max(known.saved, computed[name] // self._blocks.tokens)
            if begin < whole:
                ids = scheduled.kv_connector_block_state.get_block_ids(name)[0]
                steps.saves += [(bytes(hashes[at]), ids[at]) for at in range(begin, whole)]
                known.saved = whole
        return steps

    def finished(self, name: str) -> None:
        """Forgets a request."""
        self._state.requests.pop(name, None)

    def figures(self) -> Any:
        """What has come since the last time."""
        return self._figures.take(self._transfers, self._shared.store)

    def close(self) -> None:
        """Questions under way are of no use any more."""
        self._transfers.wait_idle(10.0)
        self._transfers.close()
        self._shared.close()

    def _limit(self, request: Any) -> int:
        """At least one token must be computed, or there is nothing to choose the next one by."""
        before_last: int = (request.num_tokens - 1) // self._blocks.tokens
        return min(before_last, len(request.block_hashes))

    def _ask(self, known: _Request, first: int) -> None:
        limit = self._limit(known.request)
        if first >= limit:
            return
        hashes = known.request.block_hashes[first:limit]
        keys = [key for one in hashes for rank in range(self._blocks.ranks) for key in keys_of([one], rank)]
        known.question = self._transfers.submit_exists(keys, prefetch_to_memory=True)
        known.asked, known.answer = (first, limit), None
        self._state.questions[known.question] = known.request.request_id

    def _take_answers(self) -> None:
        for completed in self._transfers.drain():
            self._figures.note(completed)
            known = self._state.requests.get(self._state.questions.pop(completed.job))
            if known is None or known.question != completed.job:
                continue
            known.question = None
            gone = next((at for at, there in enumerate(completed.ok) if not there), len(completed.codes))
            # A block is there if the parts of all ranks are.
            known.answer = gone // self._blocks.ranks
