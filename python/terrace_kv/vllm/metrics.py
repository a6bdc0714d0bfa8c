"""Metrics of the adapters in vLLM's own metrics."""

from __future__ import annotations

import time
from typing import Any

from ..store import Store
from ..transfers import BUCKETS, Completed, Transfers

OBJECTS = "vllm:terrace_objects"
FAILURES = "vllm:terrace_failures"
BYTES = "vllm:terrace_bytes"
SECONDS = "vllm:terrace_job_seconds"
BREAKER = "vllm:terrace_breaker_open"

DOCUMENTS = {
    OBJECTS: ("Chunks of Terrace's jobs, by operation and result: hit or miss.", ("tier", "operation", "result")),
    FAILURES: ("Chunks that Terrace could not store, read or look up, by operation and kind of failure.",
                ("tier", "operation", "kind")),
    BYTES: ("Bytes that Terrace has transferred, by operation.", ("tier", "operation")),
    SECONDS: ("Duration of Terrace's jobs, from submission to end, by operation, in seconds.", ("tier", "operation")),
    BREAKER: ("1 while the circuit breaker of Terrace's store is open.", ("tier",)),
}


# vLLM polls in every step on the scheduler's thread; this interval suffices for readers.
INTERVAL_S = 0.1


def definitions() -> dict[str, Any]:
    """Metrics of the tier, as vLLM registers them."""
    from vllm.v1.kv_offload.base import (
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
    )

    made: dict[str, Any] = {}
    for name, (text, labels) in DOCUMENTS.items():
        if name == SECONDS:
            made[name] = OffloadingHistogramMetadata(documentation=text, labelnames=labels, buckets=BUCKETS)
        else:
            kind = OffloadingGaugeMetadata if name == BREAKER else OffloadingCounterMetadata
            made[name] = kind(documentation=text, labelnames=labels)
    return made


class Growth:
    """Increases of counters since the last call."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, ...], float] = {}

    def of(self, transfers: Transfers) -> dict[tuple[str, ...], float]:
        """Increases by metric and labels behind the tier; unchanged counters are omitted."""
        totals: dict[tuple[str, ...], float] = {}
        for operation, told in transfers.stats().items():
            totals[OBJECTS, operation, "hit"] = told["hits"]
            totals[OBJECTS, operation, "miss"] = told["misses"]
            totals[BYTES, operation] = told["bytes"]
            for kind, count in told["failures"].items():
                totals[FAILURES, operation, kind] = count
        grown = {name: total - self._before.get(name, 0) for name, total in totals.items()}
        self._before = totals
        return {name: growth for name, growth in grown.items() if growth}


class TierFigures:
    """The figures of one tier since its last report."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._growth = Growth()
        self._due = 0.0
        self._times: list[tuple[str, float]] = []

    def note(self, completed: Completed) -> None:
        """Records the duration of a job."""
        self._times.append((completed.kind, completed.seconds))

    def take(self, transfers: Transfers, store: Store) -> Any:
        """The figures since the last call, in vLLM's form. None if that was too recent and jobs are
        still in flight: the last jobs before an engine is idle are reported at once, because
        vLLM does not poll then."""
        now = time.monotonic()
        if now < self._due and (not self._times or transfers.pending()):
            return None
        self._due = now + INTERVAL_S
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

        stats = OffloadingConnectorStats()
        for (name, *labels), growth in self._growth.of(transfers).items():
            stats.increase_counter(name, growth, (self._tier, *labels))
        for kind, seconds in self._times:
            stats.observe_histogram(SECONDS, seconds, (self._tier, kind))
        self._times.clear()
        stats.set_gauge(BREAKER, int(breaker_open(store)), (self._tier,))
        return stats


def breaker_open(store: Store) -> bool:
    """Whether the circuit breaker is open."""
    guard = store.stats().get("guard") or {}
    return guard.get("breaker") == "open"
