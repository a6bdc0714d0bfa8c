"""Common parts of all comparisons: programs, traces, rounds."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent

#: Fields of a line of a trace.
FIELDS = ["timestamp", "input_length", "output_length", "hash_ids"]
#: Measured values by name.
Figures = dict[str, float]
#: The workload, and the contender.
Name = tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """Locations of programs, and the extent of measurements."""

    target: Path
    quick: bool
    trace: Path | None

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    @property
    def environments(self) -> Path:
        return self.target / "compare-env"

    @property
    def work(self) -> Path:
        """Files of this run: those of a quick run are separate."""
        return self.target / "compare" / ("quick" if self.quick else "whole")

    def terrace(self) -> str:
        return self._built("TERRACE", "terrace", ["--bin", "terrace"])

    def terrace_bench(self) -> str:
        return self._built("TERRACE_BENCH", "terrace-bench", ["-p", "terrace-bench", "--bin", "terrace-bench"])

    def _built(self, variable: str, name: str, what: list[str]) -> str:
        """Returns a program named by a variable, or builds it."""
        if variable not in os.environ:
            command = ["cargo", "build", "--release", "--locked", *what]
            environment = {**os.environ, "CARGO_TARGET_DIR": str(self.target)}
            subprocess.run(command, cwd=REPOSITORY, check=True, env=environment)
        return os.environ.get(variable, str(self.target / "release" / name))

    def traces(self) -> list[tuple[str, Path]]:
        """Returns the generated trace and the given one, with their names."""
        requests_max = 500 if self.quick else 6000
        made = self.work / "made.jsonl"
        command = [self.terrace(), "trace", "generate", "--kind", "mix", "--seed", "1", "-o", str(made)]
        subprocess.run([*command, "--requests", str(requests_max)], check=True, stdout=subprocess.DEVNULL)
        traces = [("made-up mix", self._plain(made, None))]
        if self.trace:
            given = self._plain(self.trace, requests_max if self.quick else None)
            traces.append((self.trace.stem.replace("_", " "), given))
        return traces

    def _plain(self, trace: Path, requests_max: int | None) -> Path:
        """Writes a copy with only the fields that all contenders read: without sessions, requests
        arrive at their times."""
        plain = self.work / f"plain-{trace.name}"
        with trace.open() as lines, plain.open("w") as copy:
            for line in islice(lines, requests_max):
                record = json.loads(line)
                request = {name: record[name] for name in FIELDS}
                copy.write(json.dumps({**request, "timestamp": round(request["timestamp"])}) + "\n")
        return plain


def describe(trace: Path) -> str:
    """Describes a trace, so that readers can identify it."""
    lengths = [json.loads(line)["input_length"] for line in trace.open()]
    digest = hashlib.sha256(trace.read_bytes()).hexdigest()[:16]
    return f"{len(lengths):,} requests with {sum(lengths) / 1e6:.1f} M tokens, SHA-256 {digest}…"


def output_of(command: list[str]) -> Any:
    """Returns a program's JSON output."""
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        raise RuntimeError(f"`{' '.join(command)}` ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return json.loads(ended.stdout)


def in_turns(rounds: int, contenders: dict[Name, Callable[[], Figures]]) -> dict[Name, list[Figures]]:
    """Runs all contenders in turn, for several rounds."""
    measured: dict[Name, list[Figures]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, measure in contenders.items():
            print(f"round {number + 1} of {rounds}: {', '.join(name)}", file=sys.stderr, flush=True)
            measured[name].append(measure())
    return measured


def best(measured: list[Figures], figure: str) -> Figures:
    """Returns the round in which a figure was smallest."""
    return min(measured, key=lambda figures: figures[figure])
