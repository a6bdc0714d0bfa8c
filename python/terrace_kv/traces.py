"""Replay: simulate a trace of requests on a configuration, in virtual time."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from . import _native
from ._native import ConfigError, TraceError
from .scheduler import Tokens, _tokens

Kind = Literal["chat", "agents", "documents", "bursts", "mix"]
Format = Literal["mooncake", "azure", "burstgpt", "sharegpt", "openai", "bench"]
Numbers = Sequence[float] | npt.NDArray[Any]
Costs = str | os.PathLike[str] | Mapping[str, Numbers] | npt.NDArray[Any]
_STEP_COLUMNS: Final = ("prefill_tokens", "prefill_pairs", "decode_rows", "decode_context", "step_us")


@dataclass(frozen=True)
class Ceiling:
    """The hit rate of an unlimited cache, which keeps every earlier prompt."""

    prompt_tokens: int
    """Total number of prompt tokens."""
    reusable_tokens: int
    """Prompt tokens that could be reused if requests ran one after the other."""
    any_order_tokens: int
    """The same if the order of requests may change, as it does when requests overlap. No replay reuses more."""
    by_request: npt.NDArray[np.int64]
    """Reusable tokens of each request, in order of arrival."""

    @property
    def ratio(self) -> float:
        """The share of all prompt tokens that could be reused."""
        return self.reusable_tokens / max(self.prompt_tokens, 1)


class Trace:
    """Requests in order of arrival: their arrival times, their lengths, and which blocks their prompts share.

    Create a trace with :meth:`read`, :meth:`synthetic`, :meth:`of_blocks` or :meth:`of_prompts`. It can be replayed any
    number of times, also by several threads at once.
    """

    def __init__(self, native: _native.Trace) -> None:
        self._native = native
        arrival_us, self._input_tokens, self._output_tokens = native.columns()
        self._arrival_s = arrival_us / 1e6

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        block_tokens: int | None = None,
        bad_lines: Literal["refuse", "skip"] = "refuse",
        format: Format | None = None,
        rate: float = 4.0,
        seed: int = 0,
        tokenise: Callable[[str], Sequence[int]] | None = None,
    ) -> Trace:
        """Reads a file with one request per line, plain or gzip, or a folder of such files. The format is detected from the
        beginning of the file, unless ``format`` is given.

        ``block_tokens`` is the number of tokens per block for lines without that information; the default is 512, or 16
        for formats other than Mooncake's. Lines that cannot be parsed are an error, or with ``bad_lines="skip"`` they are
        skipped and counted in :attr:`skipped_lines`.

        ``tokenise`` converts text to tokens, such as the ``encode`` method of a tokenizer; without it, four letters count as
        one token. If the file has no arrival times, they are random: ``rate`` requests per second, drawn with ``seed``.

        :raises TraceError: if something cannot be read; it names the file and the line.
        """
        return cls(_native.Trace.read(path, block_tokens, bad_lines == "skip", format, (rate, seed), tokenise))

    @classmethod
    def synthetic(
        cls, kind: Kind = "mix", *, requests: int = 5000, rate: float = 4.0, seed: int = 0, block_tokens: int = 512
    ) -> Trace:
        """Generates requests, about ``rate`` per second. The same seed gives the same trace on every machine. Another seed
        gives other requests with the same distribution.

        :raises TraceError: if a value is out of range; it names the limit.
        """
        return cls(_native.Trace.synthetic(kind, requests, rate, seed, block_tokens))

    @classmethod
    def of_blocks(
        cls,
        arrival_s: Numbers,
        input_tokens: Numbers,
        output_tokens: Numbers,
        block_ids: Iterable[Numbers],
        *,
        block_tokens: int = 512,
    ) -> Trace:
        """Creates a trace from block ids: for each request its arrival time, the lengths of prompt and output, and an id
        for each block of the prompt. Equal ids mean equal tokens.

        :raises TraceError: if a request is invalid; it names the first one.
        """
        ids = [np.asarray(of_request, np.uint64) for of_request in block_ids]
        arrival = np.asarray(arrival_s, np.float64)
        if not (arrival >= 0).all():
            raise TraceError("arrivals must be seconds from 0 on: remove or move earlier ones")
        return cls(
            _native.Trace.of_blocks(
                np.rint(arrival * 1e6).astype(np.uint64),
                _counts("prompt lengths", input_tokens),
                _counts("output lengths", output_tokens),
                np.array([len(of_request) for of_request in ids], np.uint64),
                np.concatenate([np.empty(0, np.uint64), *ids]),
                block_tokens,
            )
        )

    @classmethod
    def of_prompts(
        cls,
        arrival_s: Numbers,
        prompts: Iterable[Tokens],
        output_tokens: Numbers,
        *,
        block_tokens: int = 16,
    ) -> Trace:
        """Creates a trace from the tokens of prompts. Common prefixes are found in whole blocks, so ``block_tokens`` should
        not be larger than the page size.

        :raises TraceError: if a request is invalid; it names the first one.
        """
        if block_tokens < 1:
            raise TraceError(f"blocks of {block_tokens} tokens: use at least 1 token per block")
        numbers: dict[bytes, int] = {}
        lengths: list[int] = []
        block_ids: list[list[int]] = []
        for prompt in map(_tokens, prompts):
            blocks = (prompt[at : at + block_tokens].tobytes() for at in range(0, len(prompt), block_tokens))
            block_ids.append([numbers.setdefault(block, len(numbers)) for block in blocks])
            lengths.append(len(prompt))
        return cls.of_blocks(arrival_s, lengths, output_tokens, block_ids, block_tokens=block_tokens)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace to a file, one request per line, compressed if the name ends in ``.gz``. Reading it gives the same
        trace."""
        lines = self._native.lines()
        Path(path).write_bytes(gzip.compress(lines, mtime=0) if Path(path).suffix == ".gz" else lines)

    def __len__(self) -> int:
        return len(self._native)

    @property
    def arrival_s(self) -> npt.NDArray[np.float64]:
        """Arrival times in seconds, relative to the first request."""
        return self._arrival_s

    @property
    def input_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of each request."""
        return self._input_tokens

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        """Output tokens of each request."""
        return self._output_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._native.block_tokens()

    @property
    def skipped_lines(self) -> int:
        """Number of lines that could not be parsed and were skipped."""
        return self._native.skipped()[0]

    @property
    def skipped(self) -> list[str]:
        """Error messages for the first few skipped lines."""
        return self._native.skipped()[1]

    def ceiling(self, page_size: int = 16) -> Ceiling:
        """The tokens that an unlimited cache with this page size could reuse."""
        return Ceiling(*self._native.ceiling(page_size))

    def describe(self, page_size: int = 16) -> dict[str, Any]:
        """Statistics of the trace: lengths, common prefixes, working sets, and the possible hit rate by cache size."""
        described: dict[str, Any] = json.loads(self._native.describe(page_size))
        return described

    def __repr__(self) -> str:
        span_s = self.arrival_s[-1] if len(self) else 0.0
        return f"<Trace of {len(self)} requests in {span_s:.0f} s, {self.input_tokens.sum()} prompt tokens>"


class Sweep(list[dict[str, Any]]):
    """One row for each combination: its settings and the results of its replay. The last setting changes fastest.

    Results have the names that they have in a report; for nested ones the names are joined by ``_``: ``reuse_total``,
    ``ttft_ms_p99``, ``bytes_moved_host_to_device``. ``pandas.DataFrame(rows)`` makes a table of them.
    """

    answer: str
    """The conclusion, in one sentence."""
    recommended: dict[str, Any]
    """The row of the smallest configuration whose TTFT is close to the best."""

    def __init__(self, rows: Iterable[dict[str, Any]], answer: str, recommended: int) -> None:
        super().__init__(rows)
        self.answer = answer
        self.recommended = self[recommended]


def fit_costs(costs: Costs) -> dict[str, Any]:
    """Fits the cost model of a step to measured steps. Returns the ``cost`` and the error of the fit.

    Measured steps are a file (CSV or JSON lines) or an array with ``prefill_tokens``, ``prefill_pairs``, ``decode_rows``,
    ``decode_context`` and ``step_us``. An array has named columns, or these five columns in this order.

    :raises ConfigError: if the measurements are invalid or too few.
    """
    fit: dict[str, Any] = json.loads(_native.fit_costs(_measurements(costs)))
    return fit


def replay(
    trace: Trace | str | os.PathLike[str], /, *, costs: Costs | None = None, **settings: object
) -> dict[str, Any]:
    """Replays a trace in virtual time with the real scheduler. Returns the report.

    ``settings`` are those of the program ``terrace replay``, with underscores: ``device="40GiB"``, ``host=0``,
    ``policy="slru"``, ``workers=4``. Sizes are tokens (``1000000``, ``"2M"``) or bytes of the model's KV
    (``"64GiB"``). ``costs`` are measured steps (:func:`fit_costs`); the cost model is then fitted to them instead of
    derived from model and GPU.

    The report has the same content as the JSON output of the program. ``ttft_curve``, ``itl_curve`` and ``series`` are
    dictionaries of arrays. The same trace, settings and seed give the same report. The call releases the GIL, and
    :exc:`KeyboardInterrupt` stops it.

    :raises ConfigError: if a setting is invalid; it lists the valid ones.
    :raises TraceError: if the trace cannot be read, or has no requests.
    """
    steps = None if costs is None else _measurements(costs)
    report: dict[str, Any] = json.loads(_native.replay(_trace(trace), _texts(settings), steps))
    for name in ("ttft_curve", "itl_curve"):
        points = report[name]
        report[name] = {column: np.array([point[column] for point in points], float) for column in ("ms", "share")}
    series = report["series"]
    for name, values in series.items():
        if isinstance(values, list):
            series[name] = np.array(values, np.int64 if values and isinstance(values[0], int) else np.float64)
    return report


def sweep(
    trace: Trace | str | os.PathLike[str],
    grid: Mapping[str, Sequence[object]],
    /,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    costs: Costs | None = None,
    **settings: object,
) -> Sweep:
    """Replays a trace on every combination of the values in ``grid``, one replay per thread.

    All combinations are checked before the first replay starts. ``threads`` is the number of cores by default; it does not
    affect the results. ``progress`` is called repeatedly on the calling thread with the number of finished replays and the
    total. An exception in it ends the sweep.

    :raises ConfigError: if a setting is invalid; it lists the valid ones.
    :raises TraceError: if the trace cannot be read, or has no requests.
    """
    axes = {name: [values] if isinstance(values, str) else list(values) for name, values in grid.items()}
    told = [(name, [str(value) for value in values]) for name, values in axes.items()]
    steps = None if costs is None else _measurements(costs)
    swept = json.loads(_native.sweep(_trace(trace), _texts(settings), steps, told, threads, progress))
    # The indices of a point's values on the axes, in the order of the points.
    places = np.ndindex(*(len(values) for values in axes.values()))
    rows = []
    for point, place in zip(swept["points"], places):
        del point["values"]
        # First in a row, and as given where a figure has the same name.
        chosen = {name: values[at] for (name, values), at in zip(axes.items(), place)}
        rows.append({**chosen, **dict(_flat(point)), **chosen})
    return Sweep(rows, swept["answer"], swept["recommended"])


def _flat(point: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in point.items():
        if isinstance(value, dict):
            yield from ((f"{name}_{part}", figure) for part, figure in value.items())
        else:
            yield name, value


def _trace(trace: Trace | str | os.PathLike[str]) -> _native.Trace:
    return (trace if isinstance(trace, Trace) else Trace.read(trace))._native


def _texts(settings: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in settings.items()]


def _measurements(costs: Costs) -> str:
    if not isinstance(costs, str | os.PathLike):
        return _csv(costs)
    text = Path(costs).read_text()
    try:
        _native.fit_costs(text)
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(costs)}: {error}") from None
    return text


def _csv(costs: Mapping[str, Numbers] | npt.NDArray[Any]) -> str:
    if isinstance(costs, np.ndarray) and costs.dtype.names is None:
        if costs.ndim != 2 or costs.shape[1] != len(_STEP_COLUMNS):
            raise ConfigError(f"measured steps of shape {costs.shape}: give the columns {', '.join(_STEP_COLUMNS)}")
        costs = dict(zip(_STEP_COLUMNS, costs.T))
    names = (costs.dtype.names or ()) if isinstance(costs, np.ndarray) else tuple(costs)
    columns = [np.asarray(costs[name]).tolist() for name in names]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ConfigError(f"columns of measured steps have {lengths} rows: give the same number in each")
    # Counts may arrive as floats.
    rows = [[str(int(value)) if float(value).is_integer() else str(value) for value in row] for row in zip(*columns)]
    return "\n".join(",".join(row) for row in [names, *rows])


def _counts(what: str, values: Numbers) -> npt.NDArray[np.uint32]:
    counts = np.asarray(values)
    if counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0 or counts.max() >= 1 << 32):
        raise TraceError(f"{what} must be integers from 0 to {(1 << 32) - 1}")
    return np.ascontiguousarray(counts, np.uint32)
