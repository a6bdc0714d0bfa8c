"""Schedulers: the cost of a decode step in Terrace and TokenSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import HERE, Bench, Figures, Name, best, in_turns, output_of
from environments import install
from report import Bar, Group, Report, times

# The first version with a radix tree over pages, and the latest.
VERSIONS = ["0.1.0", "0.1.42"]


@dataclass(frozen=True)
class Load:
    """Decoding requests."""

    running: int
    context: int
    page_size: int
    device_pages: int
    shared_percent: int

    @property
    def title(self) -> str:
        return f"{self.running:,} requests of {self.context:,} tokens"

    @property
    def flags(self) -> list[str]:
        return [
            *("--running", str(self.running), "--context", str(self.context)),
            *("--page-size", str(self.page_size), "--device-pages", str(self.device_pages)),
            *("--shared", str(self.shared_percent)),
        ]


LOADS = [Load(256, 1024, 16, 16_384, 50), Load(1024, 1024, 16, 65_536, 50), Load(256, 32_768, 64, 16_384, 90)]


def measure_terrace(program: str, load: Load) -> Figures:
    figures = output_of([program, "steps", *load.flags, "--json"])
    return step(figures["plan_us"]["mean"], figures["advance_us"]["mean"])


def measure_tokenspeed(python: Path, load: Load) -> Figures:
    figures = output_of([str(python), str(HERE / "tokenspeed_steps.py"), *load.flags])
    return step(figures["plan_us"], figures["advance_us"])


def step(plan_us: float, report_us: float) -> Figures:
    return {"plan": plan_us, "report": report_us, "both": plan_us + report_us}


def compare(bench: Bench) -> Report:
    """Compares the costs of plans and reports while all requests decode."""
    pythons = {version: install(f"tokenspeed-{version}", bench.environments) for version in VERSIONS}
    program = bench.terrace_bench()
    loads = LOADS[:1] if bench.quick else LOADS
    contenders: dict[Name, Callable[[], Figures]] = {}
    for load in loads:
        contenders[load.title, "Terrace"] = lambda load=load: measure_terrace(program, load)
        for version, python in pythons.items():
            who = f"TokenSpeed {version}"
            contenders[load.title, who] = lambda load=load, python=python: measure_tokenspeed(python, load)
    measured = in_turns(bench.rounds, contenders)

    rows, groups = [], []
    for load in loads:
        bars, ours_us = [], best(measured[load.title, "Terrace"], "both")["both"]
        for title, who in measured:
            if title != load.title:
                continue
            figures = best(measured[title, who], "both")
            cells = [f"{figures[part]:,.1f}" for part in ("plan", "report", "both")]
            rows.append([title, who, *cells, times(figures["both"] / ours_us)])
            bars.append(Bar(who, figures["both"], f"{figures['both']:,.1f} µs", who == "Terrace"))
        groups.append(Group(load.title, bars))
    pages = "; ".join(
        f"{load.title}: pages of {load.page_size} tokens, {load.device_pages:,} of them, "
        f"{load.shared_percent} % of each prompt in common"
        for load in loads
    )
    return Report(
        title="Scheduler: time for a decode step (less is better)",
        run=f"Means over 64 decode steps. {pages}.",
        header=["running", "", "plan, µs", "report, µs", "both, µs", "beside Terrace"],
        rows=rows,
        groups=groups,
    )
