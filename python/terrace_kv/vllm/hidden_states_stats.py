"""Statistics of hidden states in a feature store, for vLLM's log and metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

_SUMS = {
    "samples": "Stored samples of hidden states.",
    "bytes": "Stored bytes of hidden states.",
    "failures": "Promised samples that could not be stored.",
    "refused": "Requests that ended without a sample; the response has the reason.",
}
_SECONDS = "seconds"
_BUCKETS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]


class HiddenStatesStats(KVConnectorStats):
    """Events of an interval: sums, and the time of each sample from its promise to the store."""

    data: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @staticmethod
    def of(
        samples: int = 0, nbytes: int = 0, failures: int = 0, refused: int = 0, seconds: list[float] | None = None
    ) -> HiddenStatesStats:
        """Figures of a step."""
        return HiddenStatesStats(
            data={
                "samples": samples,
                "bytes": nbytes,
                "failures": failures,
                "refused": refused,
                _SECONDS: seconds or [],
            }
        )

    def reset(self) -> None:
        self.data = {**dict.fromkeys(_SUMS, 0), _SECONDS: []}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in (*_SUMS, _SECONDS):
            self.data[name] += other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds = self.data[_SECONDS]
        mean_ms = round(1000 * sum(seconds) / len(seconds), 1) if seconds else 0.0
        return {f"hidden_states_{name}": self.data[name] for name in _SUMS} | {"hidden_states_mean_ms": mean_ms}

    def is_empty(self) -> bool:
        return not any(self.data[name] for name in _SUMS)


class HiddenStatesMetrics(KVConnectorPromMetrics):
    """The same for Prometheus: ``vllm:terrace_hidden_states_...``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, documentation: str) -> Any:
            metric = self._counter_cls(
                name=f"vllm:terrace_hidden_states_{name}", documentation=documentation, labelnames=labelnames
            )
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._sums = {name: counter(name, documentation) for name, documentation in _SUMS.items()}
        seconds = self._histogram_cls(
            name="vllm:terrace_hidden_states_seconds",
            documentation="Time from the promise of a sample to the end of its put.",
            buckets=_BUCKETS,
            labelnames=labelnames,
        )
        self._seconds = create_metric_per_engine(seconds, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metric in self._sums.items():
            metric[engine_idx].inc(transfer_stats_data[name])
        for seconds in transfer_stats_data[_SECONDS]:
            self._seconds[engine_idx].observe(seconds)
