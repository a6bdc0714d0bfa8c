"""Metrics of the store for SGLang."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

GIB = float(1 << 30)
# SGLang polls in each step of its scheduler; counters may be this old.
COUNTED_EVERY_S = 1.0
# Largest number of calls remembered until SGLang polls, which it does only with --enable-metrics.
CALLS_MAX = 1024


class Metrics:
    """Counts calls for SGLang's histograms, and exports the counters of the store."""

    def __init__(self, storage_config: Any) -> None:
        self._is_wanted = bool(storage_config.enable_storage_metrics)
        self._labels = {
            name: str(getattr(storage_config, name, 0)) for name in ("tp_rank", "pp_rank", "dp_rank", "attn_cp_rank")
        }
        self._lock = threading.Lock()
        self._loads: list[tuple[int, float]] = []
        self._stores: list[tuple[int, float]] = []
        self._counters: _Counters | None = None
        self._counted = 0.0

    def loaded(self, pages: int, size: int, seconds: float) -> None:
        """Records pages that were read."""
        self._note(self._loads, pages, size, seconds)

    def stored(self, pages: int, size: int, seconds: float) -> None:
        """Records pages that were stored, or were stored already."""
        self._note(self._stores, pages, size, seconds)

    def _note(self, calls: list[tuple[int, float]], pages: int, size: int, seconds: float) -> None:
        if self._is_wanted:
            with self._lock:
                calls.append((pages, size / GIB / max(seconds, 1e-9)))
                del calls[:-CALLS_MAX]

    def drain(self, figures: Mapping[str, Any]) -> Any:
        """Events since the last call, in SGLang's form. ``figures`` are functions, one per pool,
        called only when needed."""
        if not self._is_wanted:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            (loads, self._loads), (stores, self._stores) = (self._loads, []), (self._stores, [])
        now = time.monotonic()
        if now - self._counted >= COUNTED_EVERY_S:
            self._counted = now
            if self._counters is None:
                self._counters = _Counters(self._labels)
            for pool, figure in figures.items():
                self._counters.count(pool, figure())
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[speed for _, speed in loads],
            backup_bandwidth=[speed for _, speed in stores],
        )


class _Counters:
    """Counters beside SGLang's own, exported by its server."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter

        self._labels = dict(labels)
        names = ["pool", "operation", *labels]
        self._objects = Counter("terrace_l3_objects", "Objects by outcome.", [*names, "outcome"])
        self._bytes = Counter("terrace_l3_bytes", "Bytes transferred.", names)
        self._calls = Counter("terrace_l3_calls", "Calls to the store.", names)
        self._seconds = Counter("terrace_l3_seconds", "Time spent in calls.", names)
        self._before: dict[tuple[str, ...], float] = {}

    def count(self, pool: str, figures: Mapping[str, Any]) -> None:
        """Adds the increase of a pool's figures."""
        for operation, figure in figures.items():
            labels = {"pool": pool, "operation": operation, **self._labels}
            outcomes = {"hit": figure["hits"], "miss": figure["misses"], **figure["failures"]}
            for outcome, value in outcomes.items():
                self._add(self._objects, {**labels, "outcome": outcome}, value)
            self._add(self._bytes, labels, figure["bytes"])
            self._add(self._calls, labels, figure["jobs"])
            self._add(self._seconds, labels, figure["seconds"])

    def _add(self, counter: Any, labels: dict[str, str], value: float) -> None:
        key = (counter._name, *labels.values())
        new = value - self._before.get(key, 0.0)
        self._before[key] = value
        if new > 0:
            counter.labels(**labels).inc(new)
