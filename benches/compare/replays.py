"""Replays of a trace in virtual time: Terrace and Dynamo."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench import HERE, Bench, Figures, Name, best, describe, in_turns, output_of
from environments import install
from report import Bar, Group, Report, times

DEVICE_TOKENS = 1_048_576
# Bytes of a token's KV in Terrace's replay: Llama 3.1 8B in 16 bits.
KV_BYTES_PER_TOKEN = 131_072
# Dynamo's simulated schedulers, by their names in its replay.
BACKENDS = {"vllm": "Dynamo 1.6.1, vLLM's scheduler", "sglang": "Dynamo 1.6.1, SGLang's scheduler"}


def measure_terrace(program: str, trace: Path, page_size: int) -> Figures:
    """Measures a whole process, including its start and reading the trace."""
    device = f"{DEVICE_TOKENS * KV_BYTES_PER_TOKEN >> 30}GiB"
    tiers = ["--model", "llama-3.1-8b", "--device", device, "--host", "0", "--l3", "0"]
    command = [program, "replay", str(trace), "--page-size", str(page_size), *tiers, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"`{' '.join(command)}` ended with {process.returncode}")
    return {
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "resident_mib": used.ru_maxrss / 1024,
        "hit_ratio": json.loads(printed)["reuse"]["total"],
    }


def measure_dynamo(python: Path, trace: Path, page_size: int, backend: str) -> Figures:
    """Measures the replay call, without the start of the process."""
    options = ["--page-size", str(page_size), "--device-tokens", str(DEVICE_TOKENS), "--backend", backend]
    figures: Figures = output_of([str(python), str(HERE / "dynamo_replay.py"), str(trace), *options])
    return figures


def compare(bench: Bench) -> Report:
    """Compares the cost of a replay with the device tier alone, and the hits."""
    python = install("dynamo", bench.environments)
    program, traces = bench.terrace(), bench.traces()
    page_sizes = [16] if bench.quick else [16, 64]
    contenders: dict[Name, Callable[[], Figures]] = {}
    for name, trace in traces:
        for size in page_sizes:
            contenders[name, str(size), "Terrace"] = lambda t=trace, s=size: measure_terrace(program, t, s)
            for backend, who in BACKENDS.items():
                contenders[name, str(size), who] = lambda t=trace, s=size, b=backend: measure_dynamo(python, t, s, b)
    measured = in_turns(bench.rounds, contenders)

    rows, groups = [], []
    for name, _ in traces:
        for size in map(str, page_sizes):
            bars, ours_s = [], best(measured[name, size, "Terrace"], "cpu_seconds")["cpu_seconds"]
            for who in ("Terrace", *BACKENDS.values()):
                figures = best(measured[name, size, who], "cpu_seconds")
                seconds = figures["cpu_seconds"]
                cells = [f"{seconds:.2f}", times(seconds / ours_s), f"{figures['resident_mib']:,.0f}"]
                rows.append([name, size, who, *cells, f"{figures['hit_ratio']:.2%}"])
                bars.append(Bar(who, seconds, f"{seconds:.2f} s", who == "Terrace"))
            groups.append(Group(f"{name}, pages of {size} tokens", bars))
    return Report(
        title="Replay of a trace: CPU time (less is better)",
        run=f"A device tier of {DEVICE_TOKENS:,} tokens. Traces: "
        + "; ".join(f"*{name}*, {describe(trace)}" for name, trace in traces)
        + ".",
        header=["trace", "page", "", "CPU seconds", "beside Terrace", "memory, MiB", "tokens found"],
        rows=rows,
        groups=groups,
    )
