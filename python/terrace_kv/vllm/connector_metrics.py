"""Metrics of the connector: the same as the tier's, through vLLM's interface for connectors."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ..store import Store
from ..transfers import BUCKETS, Completed, Transfers
from .metrics import BREAKER, DOCUMENTS, INTERVAL_S, SECONDS, Growth, breaker_open

SKIPPED = "vllm:terrace_blocks_skipped"
_ALL = DOCUMENTS | {SKIPPED: ("Blocks whose save was given up: the store was slower than the engine, or failed.", ("tier",))}


@dataclass
class ConnectorStats(KVConnectorStats):
    """Values by metric and labels, as JSON because it is sent between processes: a number, or
    times."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data.setdefault(name, []).extend(value)
            elif json.loads(name)[0] == BREAKER:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        told: dict[str, int | float] = {}
        for name, value in self.data.items():
            text = " ".join(json.loads(name))
            if isinstance(value, list):
                told[f"{text} count"], told[f"{text} sum"] = len(value), sum(value)
            else:
                told[text] = value
        return told


class ConnectorFigures:
    """The figures of one side since its last report."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._growth = Growth()
        # Appended from any thread.
        self._times: deque[tuple[str, float]] = deque()
        self._skipped = 0
        self._due = 0.0

    def note(self, completed: Completed) -> None:
        """Records the duration of a job."""
        self._times.append((completed.kind, completed.seconds))

    def take(self, transfers: Transfers, store: Store, *, skipped: int = 0) -> ConnectorStats | None:
        """The figures since the last call; None if that was too recent."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + INTERVAL_S
        data: dict[str, Any] = {}
        for (name, *labels), growth in self._growth.of(transfers).items():
            data[json.dumps([name, self._side, *labels])] = growth
        while self._times:
            kind, seconds = self._times.popleft()
            data.setdefault(json.dumps([SECONDS, self._side, kind]), []).append(seconds)
        if skipped > self._skipped:
            data[json.dumps([SKIPPED, self._side])] = skipped - self._skipped
            self._skipped = skipped
        data[json.dumps([BREAKER, self._side])] = int(breaker_open(store))
        return ConnectorStats(data=data)


class ConnectorMetrics(KVConnectorPromMetrics):
    """Registers the metrics, and writes reports into them."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._made: dict[str, Any] = {}
        for name, (text, labels) in _ALL.items():
            told: dict[str, Any] = {"name": name, "documentation": text, "labelnames": [*labelnames, *labels]}
            if name == SECONDS:
                self._made[name] = self._histogram_cls(buckets=BUCKETS, **told)
            elif name == BREAKER:
                self._made[name] = self._gauge_cls(**told)
            else:
                self._made[name] = self._counter_cls(**told)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for told, value in transfer_stats_data.items():
            name, *labels = json.loads(told)
            metric = self._made[name].labels(*self.per_engine_labelvalues[engine_idx], *labels)
            if name == SECONDS:
                for seconds in value:
                    metric.observe(seconds)
            elif name == BREAKER:
                metric.set(value)
            else:
                metric.inc(value)
