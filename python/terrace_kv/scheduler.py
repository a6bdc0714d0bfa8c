"""The scheduler: decides what an engine computes next, and which KV pages it copies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _native
from .events import KvEvents, _event
from .plan import Plan

Outcome = Literal["done", "partial", "missing", "failed", "corrupt", "corrupt_after", "called_off", "timed_out"]
Tier = Literal["nothing", "device", "host", "l3"]
Tokens = npt.NDArray[np.uint32] | Sequence[int]


class Hits(NamedTuple):
    """Cache hits of a prompt by tier: tokens whose KV was not computed."""

    device_tokens: int
    host_tokens: int
    l3_tokens: int


class Passage(NamedTuple):
    """Positions ``start`` up to ``end`` of a prompt with extra information, for example placeholder tokens of an image."""

    start: int
    end: int
    content: bytes | None = None
    """A strong hash (16 bytes) of the content that the tokens stand for, such as an image. None if there is none."""
    is_whole: bool = False
    """Whether no step may end inside the passage."""


def _tokens(tokens: Tokens) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(tokens, dtype=np.uint32)


class Scheduler:
    """Decides what an engine computes next, and which KV pages it copies.

    ``settings`` are those of ``docs/configuration.md``, by section: ``{"cache": {"page_size": 16,
    "device_pages": 1024}}``. Missing settings have their defaults. Times are microseconds since the scheduler was
    created; pass ``now`` to use your own clock, for example in a replay.

    The scheduler has no threads and no files, so after :func:`os.fork` both processes can use their copy. Several threads may
    share a scheduler; calls are serialised.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._native = _native.Scheduler(json.dumps(settings or {}))
        self._began = time.monotonic_ns()

    def _now(self, now: int | None) -> int:
        return (time.monotonic_ns() - self._began) // 1000 if now is None else now

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, with defaults filled in."""
        settings: dict[str, Any] = json.loads(self._native.config())
        return settings

    def submit(
        self,
        request: int,
        prompt: Tokens,
        max_new_tokens: int,
        *,
        priority: int = 0,
        adapter: str = "",
        salt: str = "",
        computes_prompt: bool = False,
        waits_for_tokens: bool = False,
        passages: Iterable[Passage] = (),
        reads: Tier = "l3",
        writes: Tier = "l3",
        siblings: Sequence[int] = (),
        now: int | None = None,
    ) -> None:
        """Submits a request and its siblings (further outputs for the same prompt). The next plan may include them.

        :raises SubmitError: if the request is rejected; then nothing has changed.
        """
        wishes: dict[str, Any] = {}
        if computes_prompt:
            wishes["computes_prompt"] = True
        if waits_for_tokens:
            wishes["waits_for_tokens"] = True
        if (reads, writes) != ("l3", "l3"):
            wishes["reads"], wishes["writes"] = reads, writes
        if siblings:
            wishes["siblings"] = list(siblings)
        told = [_passage(passage) for passage in passages]
        if told:
            wishes["passages"] = told
        self._native.submit(
            self._now(now),
            request,
            _tokens(prompt),
            max_new_tokens,
            priority,
            adapter,
            salt,
            json.dumps(wishes) if wishes else None,
        )

    def abort(self, request: int, *, now: int | None = None) -> None:
        """Aborts a request in any state.

        :raises UnknownRequest: if there is no such request, or it has ended.
        """
        self._native.abort(self._now(now), request)

    def set_priority(self, request: int, priority: int) -> None:
        """Changes the priority of a request.

        :raises UnknownRequest: if there is no such request, or it has ended.
        """
        self._native.set_priority(request, priority)

    def plan(self, *, now: int | None = None) -> Plan:
        """The next plan. Call it after every event, and when the :meth:`deadline` has passed."""
        return Plan(self._native.plan(self._now(now)))

    def step_done(
        self,
        step: int,
        requests: npt.NDArray[np.uint64],
        tokens: npt.NDArray[np.uint32],
        *,
        counts: npt.NDArray[np.uint32] | None = None,
        finished: npt.NDArray[np.bool_] | None = None,
        failed: Sequence[int] = (),
        now: int | None = None,
    ) -> None:
        """Reports that a step is done and its KV is written.

        ``requests`` are those that produce tokens in the step (:attr:`Plan.producers`), ``tokens`` their new tokens: one
        per request, or as many as given in ``counts``. ``finished`` marks requests whose output ends here. Requests in
        ``failed`` are computed again.

        :raises EventError: if this does not match the plan; then nothing has changed.
        """
        self._native.step_done(self._now(now), step, requests, tokens, counts, finished, list(failed))

    def step_failed(self, step: int, *, now: int | None = None) -> None:
        """Reports that a step failed. Its results are discarded, and all of it is planned again."""
        self._native.step_failed(self._now(now), step)

    def operation(
        self, op: int, outcome: Outcome, pages: int = 0, *, rank: int = 0, now: int | None = None
    ) -> None:
        """Reports the outcome of a copy or an L3 operation on one rank. ``pages`` is the number of leading pages that were
        transferred, for the outcomes ``partial``, ``corrupt_after`` and ``called_off``.

        :raises EventError: if no plan contained the operation, or it has fewer pages.
        """
        self._native.operation(self._now(now), op, rank, outcome, pages)

    def deadline(self) -> int | None:
        """The time at which :meth:`plan` must be called even if no event occurs."""
        return self._native.deadline()

    def now(self) -> int:
        """The current time of this scheduler, in microseconds."""
        return self._now(None)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges."""
        stats: dict[str, Any] = json.loads(self._native.stats())
        return stats

    def tokens(self, request: int) -> npt.NDArray[np.uint32] | None:
        """A copy of all tokens of a live request."""
        tokens = self._native.tokens(request)
        return None if tokens is None else np.frombuffer(tokens, "<u4")

    def state(self, request: int) -> str | None:
        """The state of a live request, such as ``decoding``."""
        state = self._native.state(request)
        return None if state is None else str(json.loads(state))

    def hits(self, request: int) -> Hits | None:
        """The cache hits of a live request."""
        hits = self._native.hits(request)
        return None if hits is None else Hits(*hits)

    def cached(self, prompt: Tokens, *, adapter: str = "", salt: str = "") -> tuple[int, int]:
        """The number of leading pages of a prompt on the device, and of those that follow on the host."""
        return self._native.cached(_tokens(prompt), adapter, salt)

    def adapter(self, number: int) -> str | None:
        """The name of the LoRA adapter with this number in plans; 0 means no adapter."""
        return self._native.adapter(number)

    def namespace(self, *, adapter: str = "", salt: str = "") -> bytes:
        """The namespace digest of requests with this LoRA adapter and salt."""
        return self._native.namespace(adapter, salt)

    def replace_weights(self, fingerprint: str, *, now: int | None = None) -> None:
        """Tells the scheduler that the model has new weights. KV of the previous weights is no longer matched.

        :raises StepsInFlight: if steps are in flight; report them first.
        """
        self._native.replace_weights(self._now(now), fingerprint)

    def clear_cache(self) -> tuple[int, int]:
        """Removes all unused pages from the cache. Returns the number of pages removed on device and on host."""
        return self._native.clear_cache()

    def kv_events(self) -> KvEvents:
        """KV events since the last call. They are recorded only if ``cache.kv_event_keys_max`` is above 0."""
        is_snapshot, first, following, events = self._native.kv_events(False)
        return KvEvents(is_snapshot, first, following, [_event(event) for event in events])

    def kv_snapshot(self) -> KvEvents:
        """A snapshot of everything in the cache, as KV events."""
        is_snapshot, first, following, events = self._native.kv_events(True)
        return KvEvents(is_snapshot, first, following, [_event(event) for event in events])


def _passage(passage: Passage) -> dict[str, Any]:
    told: dict[str, Any] = {"start": passage.start, "end": passage.end, "is_whole": passage.is_whole}
    if passage.content is not None:
        told["content"] = passage.content[::-1].hex()
    return told
