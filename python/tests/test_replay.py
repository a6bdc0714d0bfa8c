"""Replay from Python."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrace_kv as terrace
from terrace_kv import Trace

SMALL: dict[str, Any] = {"device": "200k", "l3": 0}


def two_turns() -> Trace:
    """A trace with a prompt of 900 tokens, and two seconds later the same with 500 more."""
    return Trace.of_blocks([0, 2], [900, 1400], [8, 8], [[1, 2], [1, 2, 3]])


def plain(report: Any) -> Any:
    """A report with lists in place of arrays, for comparison."""
    if isinstance(report, dict):
        return {name: plain(value) for name, value in report.items()}
    return report.tolist() if isinstance(report, np.ndarray) else report


def test_a_prompt_that_returns_is_reused_in_whole_pages() -> None:
    report = terrace.replay(two_turns())
    assert (report["requests"], report["finished"], report["output_tokens"]) == (2, 2, 16)
    assert report["reuse_tokens"] == {"device": 896, "host": 0, "l3": 0, "total": 896, "ceiling": 896}
    assert report["computed_tokens"] == 900 + 1400 - 896
    assert terrace.replay(two_turns(), page_size=64)["reuse_tokens"]["total"] == 14 * 64
    assert terrace.replay(two_turns(), page_size=256)["reuse_tokens"]["total"] == 3 * 256


def test_prompts_may_be_given_by_their_tokens() -> None:
    rng = np.random.default_rng(1)
    system = rng.integers(0, 50_000, 100)
    prompts = [np.concatenate([system, rng.integers(0, 50_000, 50)]) for _ in range(3)]
    trace = Trace.of_prompts([0, 5, 10], prompts, [4, 4, 4])
    assert trace.input_tokens.tolist() == [150] * 3
    assert trace.ceiling().by_request.tolist() == [0, 96, 96]
    assert terrace.replay(trace)["reuse_tokens"]["total"] == 192
    # With smaller pages more is shared, if blocks are not larger.
    assert Trace.of_prompts([0, 5, 10], prompts, [4, 4, 4], block_tokens=4).ceiling(4).reusable_tokens == 200


def test_a_trace_has_its_requests_as_arrays() -> None:
    trace = Trace.of_blocks([7.5, 5], [600, 100], [3, 2], [[1, 2], [1]])
    assert (len(trace), trace.block_tokens) == (2, 512)
    assert trace.arrival_s.tolist() == [0, 2.5], "sorted, and counted from the first"
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([100, 600], [2, 3])
    assert (trace.arrival_s.dtype.name, trace.input_tokens.dtype.name) == ("float64", "int64")
    ceiling = trace.ceiling(page_size=16)
    assert (ceiling.prompt_tokens, ceiling.reusable_tokens, ceiling.by_request.tolist()) == (700, 96, [0, 96])
    assert ceiling.ratio == 96 / 700
    assert trace.describe()["input"]["max"] == 600
    assert repr(trace) == "<Trace of 2 requests in 2 s, 700 prompt tokens>"


def test_traces_are_read_from_files_and_folders(tmp_path: Path) -> None:
    trace = Trace.synthetic("chat", requests=60, seed=5)
    expected = plain(terrace.replay(trace, **SMALL))
    trace.write(tmp_path / "chat.jsonl")
    trace.write(str(tmp_path / "packed.gz"))
    for path in (tmp_path / "chat.jsonl", str(tmp_path / "packed.gz"), Trace.read(tmp_path / "packed.gz")):
        assert plain(terrace.replay(path, **SMALL)) == expected
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == (tmp_path / "chat.jsonl").read_bytes()
    assert len(Trace.read(tmp_path)) == 120, "both, as one"
    first = json.loads((tmp_path / "chat.jsonl").read_text().splitlines()[0])
    assert first["input_length"] == trace.input_tokens[0]


def test_traffic_of_other_formats_is_read_as_it_is(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:17:0{second}.000000,{100 + second},10" for second in range(5)]
    azure.write_text("\n".join(rows) + "\n")
    trace = Trace.read(azure)
    assert (trace.input_tokens.tolist(), trace.arrival_s.tolist()) == ([100, 101, 102, 103, 104], [0, 1, 2, 3, 4])
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "four five"}]
    chats.write_text(json.dumps({"messages": messages}) + "\n")
    words: dict[str, int] = {}

    def tokenise(text: str) -> list[int]:
        return [words.setdefault(word, len(words)) for word in text.split()]

    by_letters, by_words = Trace.read(chats), Trace.read(chats, tokenise=tokenise)
    assert len(by_letters) == len(by_words) == 1
    assert by_words.output_tokens.tolist() == [2] and {"one", "two", "three"} <= set(words)
    assert by_words.input_tokens[0] < by_letters.input_tokens[0]
    with pytest.raises(terrace.TraceError, match='there is no format "csv": use one of mooncake, azure'):
        Trace.read(azure, format="csv")  # type: ignore[arg-type]

    def breaks(text: str) -> list[int]:
        raise RuntimeError(f"no tokens for {text}")

    with pytest.raises(terrace.TraceError, match="no tokens for"):
        Trace.read(chats, tokenise=breaks)


def test_lines_that_are_not_understood_are_refused_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}'
    path.write_text(f"{line}\nnonsense\n")
    with pytest.raises(terrace.TraceError, match=r'line 2: .*; bad_lines="skip" skips such lines'):
        Trace.read(path)
    trace = Trace.read(path, bad_lines="skip")
    assert (len(trace), trace.skipped_lines, len(trace.skipped)) == (1, 1, 1)
    assert "line 2" in trace.skipped[0]


def test_the_same_trace_settings_and_seed_give_the_same_report() -> None:
    trace = Trace.synthetic("mix", requests=150, seed=2)
    settings: dict[str, Any] = {"device": "100k", "host": "400k", "l3_failures": 0.2, "workers": 2}
    once = plain(terrace.replay(trace, seed=1, **settings))
    assert plain(terrace.replay(Trace.synthetic("mix", requests=150, seed=2), seed=1, **settings)) == once
    assert plain(terrace.replay(trace, seed=2, **settings)) != once, "the dice fall otherwise"
    assert Trace.synthetic("mix", requests=150, seed=3).input_tokens.tolist() != trace.input_tokens.tolist()


@pytest.mark.parametrize("kind", ["chat", "agents", "documents", "bursts", "mix"])
def test_more_host_memory_never_reuses_less_and_nothing_goes_above_the_ceiling(kind: Any) -> None:
    trace = Trace.synthetic(kind, requests=300, seed=4)
    rows = terrace.sweep(trace, {"host": [0, "100k", "1M", "20M"]}, device="100k", l3=0)
    reuse = [row["reuse_total"] for row in rows]
    assert reuse == sorted(reuse) and reuse[0] < reuse[-1]
    ceiling = trace.ceiling()
    assert reuse[-1] <= rows[-1]["reuse_ceiling"] == ceiling.any_order_tokens / ceiling.prompt_tokens


def test_a_report_has_arrays_by_name() -> None:
    trace = Trace.synthetic("agents", requests=200)
    report = terrace.replay(trace, **SMALL)
    series = report["series"]
    assert isinstance(series["interval_s"], float)
    arrays = {name: values for name, values in series.items() if name != "interval_s"}
    assert {values.dtype for values in arrays.values()} == {np.dtype(np.int64), np.dtype(np.float64)}
    assert {values.shape for values in arrays.values()} == {series["arrivals"].shape}
    assert series["arrivals"].dtype == np.int64 and series["arrivals"].sum() == 200
    assert series["output_tokens"].sum() == report["output_tokens"] == trace.output_tokens.sum()
    for name in ("ttft_curve", "itl_curve"):
        curve = report[name]
        assert (np.diff(curve["ms"]) > 0).all() and (np.diff(curve["share"]) >= 0).all() and curve["share"][-1] == 1


def test_settings_are_those_of_the_program() -> None:
    config = terrace.replay(
        two_turns(), page_size=32, device_tokens=64_000, host="1M", policy="slru", workers=np.int64(3), speed_up=2.0
    )["config"]
    cache = config["scheduler"]["cache"]
    assert (cache["page_size"], cache["device_pages"], cache["host_pages"]) == (32, 2000, 31_250)
    assert (cache["eviction"], config["workers"], config["arrival"]) == ("slru", 3, {"trace": {"speed_up": 2.0}})


def test_a_sweep_has_a_row_for_each_combination() -> None:
    trace = Trace.synthetic("chat", requests=150)
    grid: dict[str, list[Any]] = {"host": [0, "400k"], "policy": ["lru", "slru"]}
    rows = terrace.sweep(trace, grid, threads=3, **SMALL)
    assert [(row["host"], row["policy"]) for row in rows] == [
        (0, "lru"), (0, "slru"), ("400k", "lru"), ("400k", "slru")
    ]
    assert rows == terrace.sweep(trace, grid, threads=1, **SMALL), "whatever the threads"
    for row in rows:
        report = terrace.replay(trace, host=row["host"], policy=row["policy"], **SMALL)
        assert row["reuse_total"] == report["reuse"]["total"]
        assert row["ttft_ms_p99"] == report["ttft_ms"]["p99"]
        assert row["bytes_moved_host_to_device"] == report["bytes_moved"]["host_to_device"]
    assert rows.recommended in rows and rows.answer.startswith(f"Take host {rows.recommended['host']}, policy ")
    # The setting as given, not in tokens.
    assert terrace.sweep(trace, {"host_tokens": ["0", "400k"]}, **SMALL)[1]["host_tokens"] == "400k"
    assert terrace.sweep(trace, {"policy": "slru"}, **SMALL)[0]["policy"] == "slru"


def test_progress_runs_on_the_calling_thread_and_may_stop_the_sweep() -> None:
    trace = Trace.synthetic("chat", requests=2000)
    told: list[tuple[int, int, threading.Thread]] = []
    grid = {"host": [0, "100k", "200k", "400k"]}
    terrace.sweep(trace, grid, progress=lambda done, all: told.append((done, all, threading.current_thread())), **SMALL)
    assert told[-1] == (4, 4, threading.current_thread())
    assert [done for done, _, _ in told] == sorted({done for done, _, _ in told})

    def enough(done: int, _: int) -> None:
        raise StopIteration(done)

    with pytest.raises(StopIteration):
        terrace.sweep(trace, {"host": list(range(100_000, 200_000, 1000))}, progress=enough, **SMALL)


STEPS = [
    (512, 131_072, 0, 0, 6_000.5), (1024, 524_288, 0, 0, 12_000), (0, 0, 1, 1000, 900), (0, 0, 8, 9000, 1_000),
    (0, 0, 64, 50_000, 1_900), (256, 32_768, 16, 16_000, 4_100), (2048, 2_097_152, 4, 4000, 25_000),
]
COLUMNS = ("prefill_tokens", "prefill_pairs", "decode_rows", "decode_context", "step_us")


def test_costs_are_measured_steps_from_a_file_or_an_array(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([",".join(COLUMNS), *(",".join(map(str, step)) for step in STEPS)]))
    fit = terrace.fit_costs(path)
    assert fit["measurements"] == 7 and 0 < fit["relative_residual"] < 0.2
    array = np.array(STEPS)
    by_name = dict(zip(COLUMNS, array.T))
    records = np.array(STEPS, [(name, "f8" if name == "step_us" else "i8") for name in COLUMNS])
    assert fit == terrace.fit_costs(array) == terrace.fit_costs(by_name) == terrace.fit_costs(records)

    report = terrace.replay(two_turns(), costs=path, host=0)
    assert report["config"]["cost"] == fit["cost"]
    slower = terrace.replay(two_turns(), costs=array * [1, 1, 1, 1, 3], host=0)
    assert slower["ttft_ms"]["mean"] == pytest.approx(3 * report["ttft_ms"]["mean"], rel=0.01)
    (row,) = terrace.sweep(two_turns(), {"host": [0]}, costs=array)
    assert row["ttft_ms_mean"] == terrace.replay(two_turns(), costs=array, host=0)["ttft_ms"]["mean"]


def test_invalid_settings_list_valid_ones(tmp_path: Path) -> None:
    trace = two_turns()
    for settings, message in [
        ({"hots": 1}, 'there is no setting "hots"; there are model, gpu'),
        ({"device": 0}, "device 0: a device needs at least one page"),
        ({"policy": "random"}, "policy random: use lru, lfu"),
        ({"gpu": "abacus"}, '"abacus": use one of a100'),
        ({"costs": np.zeros((3, 4))}, "give the columns prefill_tokens, "),
        ({"costs": {"step_us": [1.0]}}, "too few"),
        ({"costs": {"step_us": [1.0, 2.0], "decode_rows": [1]}}, r"have \[2, 1\] rows"),
        ({"costs": {"step_us": [1.0, 2.0], "decode_rows": [1.5, 2]}}, "decode_rows = .* is not a count"),
    ]:
        with pytest.raises(terrace.ConfigError, match=message):
            terrace.replay(trace, **settings)  # type: ignore[arg-type]
    for grid, message in [
        ({"host": [0, "lots"]}, "host lots: write tokens"),
        ({"colour": ["red"]}, "there is no setting"),
        ({"host": []}, "the sweep of host has no values"),
        ({"host": [0], "host_tokens": [1]}, "host is swept twice"),
        ({"host": range(200), "l3": range(200)}, "40000 configurations are too many: at most 10000"),
    ]:
        with pytest.raises(terrace.ConfigError, match=message):
            terrace.sweep(trace, grid)  # type: ignore[arg-type]
    with pytest.raises(terrace.ConfigError, match="0 threads: use 1 to"):
        terrace.sweep(trace, {"host": [0]}, threads=0)
    with pytest.raises(terrace.ConfigError, match="page_size 0: use a power of two"):
        trace.ceiling(0)
    (tmp_path / "steps.csv").write_text("colour\nred\n")
    with pytest.raises(terrace.ConfigError, match="steps.csv: measurements, line 2: unknown column"):
        terrace.replay(trace, costs=tmp_path / "steps.csv")


def test_invalid_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(terrace.TraceError, match="none.jsonl: No such file"):
        terrace.replay(tmp_path / "none.jsonl")
    with pytest.raises(terrace.TraceError, match="no file that ends in"):
        terrace.sweep(tmp_path, {"host": [0]})
    with pytest.raises(terrace.TraceError, match="0 requests: use 1 to"):
        Trace.synthetic(requests=0)
    with pytest.raises(terrace.TraceError, match='no workload "poetry": use chat'):
        Trace.synthetic("poetry")  # type: ignore[arg-type]
    with pytest.raises(terrace.TraceError, match="request 1: 1 block ids for a prompt of 600 tokens, which has 2"):
        Trace.of_blocks([0, 1], [5, 600], [1, 1], [[1], [1]])
    with pytest.raises(terrace.TraceError, match="2 arrivals, 1 prompt lengths"):
        Trace.of_blocks([0, 1], [5], [1, 1], [[1], [1]])
    with pytest.raises(terrace.TraceError, match="arrivals must be seconds from 0 on"):
        Trace.of_blocks([-1], [5], [1], [[1]])
    with pytest.raises(terrace.TraceError, match="output lengths must be integers"):
        Trace.of_blocks([0], [5], [-1], [[1]])
    with pytest.raises(terrace.TraceError, match="request 0: a prompt without tokens"):
        Trace.of_prompts([0], [[]], [1])
    empty = Trace.of_blocks([], [], [], [])
    assert len(empty) == 0 and repr(empty)
    for refused in (lambda: terrace.replay(empty), lambda: terrace.sweep(empty, {"host": [0]})):
        with pytest.raises(terrace.TraceError, match="the trace has no requests"):
            refused()


def test_other_threads_go_on_while_a_trace_is_replayed() -> None:
    trace = Trace.synthetic("mix", requests=8000)
    replaying = threading.Thread(target=terrace.replay, args=(trace,), kwargs={"device": "200k"})
    turns = 0
    replaying.start()
    while replaying.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20


@pytest.mark.parametrize("is_sweep", [False, True])
def test_interrupt_stops_a_replay(is_sweep: bool) -> None:
    trace = Trace.synthetic("mix", requests=300_000)
    threads = len(os.listdir("/proc/self/task"))
    began = time.monotonic()
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        if is_sweep:
            terrace.sweep(trace, {"host": ["1M", "2M", "4M", "8M"]}, threads=2, device="200k")
        else:
            terrace.replay(trace, device="200k")
    assert 0.5 <= time.monotonic() - began < 3
    interrupt.join()
    # Ended threads disappear a moment later.
    while len(os.listdir("/proc/self/task")) > threads:
        assert time.monotonic() - began < 3, "a replay goes on behind its back"
        time.sleep(0.01)
