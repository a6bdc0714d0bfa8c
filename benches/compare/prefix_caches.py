"""Prefix caches: Terrace's tree and SGLang's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench import HERE, Bench, Figures, Name, best, describe, in_turns, output_of
from environments import install
from report import Bar, Group, Report, times

PAGE_SIZE = 16
UNLIMITED = "unlimited"
TERRACE, SGLANG = "Terrace", "SGLang 0.5.23, Rust core"


class Sglang:
    """A process with SGLang's cache: importing it takes longer than most measurements."""

    def __init__(self, python: Path, log: Path) -> None:
        self._log = log
        command = [str(python), str(HERE / "sglang_cache.py")]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log.open("w"), text=True)

    def measure(self, trace: Path, pages: int | None) -> Figures:
        assert self._process.stdin and self._process.stdout
        order = {"trace": str(trace), "page_size": PAGE_SIZE, "device_pages": pages}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The process has ended:\n{self._log.read_text()[-2000:]}")
        figures: Figures = json.loads(answer)
        return figures

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def measure_terrace(program: str, trace: Path, pages: int | None) -> Figures:
    limit = ["--device-pages", str(pages)] if pages else []
    figures = output_of([program, "cache", "--trace", str(trace), "--page-size", str(PAGE_SIZE), *limit, "--json"])
    spread = figures["us_per_request"]
    return {"hit_ratio": figures["hit_ratio"], "us_mean": spread["mean"], "us_max": spread["max"]}


def check_same_work(trace: str, size: str, measured: dict[Name, list[Figures]]) -> None:
    """Checks that caches without a limit have equal hits, which are a property of the trace:
    otherwise they do different work."""
    found = {who: measured[trace, size, who][0]["hit_ratio"] for who in (TERRACE, SGLANG)}
    if size == UNLIMITED and abs(found[TERRACE] - found[SGLANG]) > 1e-9:
        raise RuntimeError(f"Of {trace}, unlimited caches do not find the same: {found}")


def compare(bench: Bench) -> Report:
    """Compares cost and hits per request, for several cache sizes."""
    python = install("sglang", bench.environments)
    program, traces = bench.terrace_bench(), bench.traces()
    sizes = {"50,000 pages": 50_000}
    if not bench.quick:
        sizes = {UNLIMITED: None, "200,000 pages": 200_000, **sizes}
    theirs = Sglang(python, bench.work / "sglang.log")
    contenders: dict[Name, Callable[[], Figures]] = {}
    for name, trace in traces:
        for size, pages in sizes.items():
            contenders[name, size, TERRACE] = lambda t=trace, p=pages: measure_terrace(program, t, p)
            contenders[name, size, SGLANG] = lambda t=trace, p=pages: theirs.measure(t, p)
    try:
        measured = in_turns(bench.rounds, contenders)
    finally:
        theirs.end()

    rows, groups = [], []
    for name, _ in traces:
        for size in sizes:
            check_same_work(name, size, measured)
            bars, ours_us = [], best(measured[name, size, TERRACE], "us_mean")["us_mean"]
            for who in (TERRACE, SGLANG):
                figures = best(measured[name, size, who], "us_mean")
                us, worst_ms = figures["us_mean"], figures["us_max"] / 1000
                cells = [f"{us:.1f}", times(us / ours_us), f"{worst_ms:.2f}", f"{figures['hit_ratio']:.2%}"]
                rows.append([name, size, who, *cells])
                bars.append(Bar(who, us, f"{us:.1f} µs", who == TERRACE))
            groups.append(Group(f"{name}, {size}", bars))
    return Report(
        title="Prefix cache: time for a request (less is better)",
        run="Traces: " + "; ".join(f"*{name}*, {describe(trace)}" for name, trace in traces) + ".",
        header=["trace", "cache", "", "µs a request", "beside Terrace", "worst request, ms", "tokens found"],
        rows=rows,
        groups=groups,
    )
