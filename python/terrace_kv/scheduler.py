"""The scheduler: what an engine computes next, and which KV pages move."""

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
    """Tokens of a prompt whose KV did not have to be computed."""

    device_tokens: int
    host_tokens: int
    l3_tokens: int


class Passage(NamedTuple):
    """Tokens ``start`` up to ``end`` of a prompt that say more than they are, as those of an image."""

    start: int
    end: int
    content: bytes | None = None
    """16 bytes that name what they stand for: a strong hash of the image. None if they stand for themselves."""
    is_whole: bool = False
    """Whether no step may end inside."""


def _tokens(tokens: Tokens) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(tokens, dtype=np.uint32)


class Scheduler:
    """Decides what an engine computes next and which KV pages move.

    ``settings`` are those of ``docs/configuration.md``, by section: ``{"cache": {"page_size": 16,
    "device_pages": 1024}}``; whatever is left out has its default. Times are microseconds since the scheduler was
    made; whoever replays something gives its own with ``now``.

    It has no threads and no files, so it is the same after :func:`os.fork`, in both processes. Threads may share
    it: they take turns.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._native = _native.Scheduler(json.dumps(settings or {}))
        self._began = time.monotonic_ns()

    def _now(self, now: int | None) -> int:
        return (time.monotonic_ns() - self._began) // 1000 if now is None else now

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are in force, all of them."""
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
        """Takes a request, with its siblings: further answers to the same prompt. They are considered from the
        next plan on.

        :raises SubmitError: if it cannot be taken; nothing has changed then.
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
        """Calls a request off, whatever it is doing.

        :raises UnknownRequest: if there is no such request, or it has ended.
        """
        self._native.abort(self._now(now), request)

    def set_priority(self, request: int, priority: int) -> None:
        """From now on the request is as urgent as this.

        :raises UnknownRequest: if there is no such request, or it has ended.
        """
        self._native.set_priority(request, priority)

    def plan(self, *, now: int | None = None) -> Plan:
        """What to do next. Ask after every event, and when :meth:`deadline` has come."""
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
        """A step is over, and its KV is written.

        ``requests`` are those who were to produce tokens (:attr:`Plan.producers`), ``tokens`` what they produced:
        one each, or as many as ``counts`` says. ``finished`` says whose are the last. Requests in ``failed`` try
        again.

        :raises EventError: if that is not what was planned; nothing has changed then.
        """
        self._native.step_done(self._now(now), step, requests, tokens, counts, finished, list(failed))

    def step_failed(self, step: int, *, now: int | None = None) -> None:
        """A step came to nothing: what it wrote is not trusted, and all of it will be planned again."""
        self._native.step_failed(self._now(now), step)

    def operation(
        self, op: int, outcome: Outcome, pages: int = 0, *, rank: int = 0, now: int | None = None
    ) -> None:
        """A copy, or something for L3, has an outcome on a rank. ``pages`` says how far it came, where it is
        ``partial``, ``corrupt_after`` or ``called_off``.

        :raises EventError: if no plan held it, or it has not so many pages.
        """
        self._native.operation(self._now(now), op, rank, outcome, pages)

    def deadline(self) -> int | None:
        """When a plan is to be asked for even if nothing happens."""
        return self._native.deadline()

    def now(self) -> int:
        """The present, as this scheduler counts it."""
        return self._now(None)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges."""
        stats: dict[str, Any] = json.loads(self._native.stats())
        return stats

    def tokens(self, request: int) -> npt.NDArray[np.uint32] | None:
        """All tokens of a live request, a copy."""
        tokens = self._native.tokens(request)
        return None if tokens is None else np.frombuffer(tokens, "<u4")

    def state(self, request: int) -> str | None:
        """The state of a live request, such as ``decoding``."""
        state = self._native.state(request)
        return None if state is None else str(json.loads(state))

    def hits(self, request: int) -> Hits | None:
        """What of a live request's prompt the cache held."""
        hits = self._native.hits(request)
        return None if hits is None else Hits(*hits)

    def cached(self, prompt: Tokens, *, adapter: str = "", salt: str = "") -> tuple[int, int]:
        """Pages of a prompt that are on device, and behind those on host."""
        return self._native.cached(_tokens(prompt), adapter, salt)

    def adapter(self, number: int) -> str | None:
        """The name of the adapter that has this number in plans; 0 is none."""
        return self._native.adapter(number)

    def namespace(self, *, adapter: str = "", salt: str = "") -> bytes:
        """The digest that the keys of such requests begin with."""
        return self._native.namespace(adapter, salt)

    def replace_weights(self, fingerprint: str, *, now: int | None = None) -> None:
        """The model uses other weights from here on: KV of the previous weights is no longer matched.

        :raises StepsInFlight: report them first.
        """
        self._native.replace_weights(self._now(now), fingerprint)

    def clear_cache(self) -> tuple[int, int]:
        """Forgets every page that nothing holds: how many on device and on host."""
        return self._native.clear_cache()

    def kv_events(self) -> KvEvents:
        """What has changed since the last call. They are kept if ``cache.kv_event_keys_max`` is above 0."""
        is_snapshot, first, following, events = self._native.kv_events(False)
        return KvEvents(is_snapshot, first, following, [_event(event) for event in events])

    def kv_snapshot(self) -> KvEvents:
        """Everything that is held."""
        is_snapshot, first, following, events = self._native.kv_events(True)
        return KvEvents(is_snapshot, first, following, [_event(event) for event in events])


def _passage(passage: Passage) -> dict[str, Any]:
    told: dict[str, Any] = {"start": passage.start, "end": passage.end, "is_whole": passage.is_whole}
    if passage.content is not None:
        told["content"] = passage.content[::-1].hex()
    return told
