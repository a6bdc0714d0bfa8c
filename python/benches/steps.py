"""Compares the cost of a decode step in Python with that in Rust, in one run, and measures the
import.

    cargo build --release -p terrace-bench --bin terrace-bench
    python python/benches/steps.py target/release/terrace-bench
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import numpy as np

from terrace_kv import Scheduler

RUNNING, CONTEXT, PAGE_SIZE, DEVICE_PAGES, STEPS = 256, 1024, 16, 24_576, 256


def scheduler() -> Scheduler:
    one = Scheduler(
        {
            "cache": {"page_size": PAGE_SIZE, "device_pages": DEVICE_PAGES},
            "batch": {
                "running_max": RUNNING,
                "step_tokens_max": 8192,
                "chunk_tokens_min": 8192,
                "mixed": False,
                "prefill_streak_max": 2**32 - 1,
            },
            "queue": {"window": RUNNING},
        }
    )
    for request in range(RUNNING):
        prompt = np.arange(CONTEXT, dtype=np.uint32)
        prompt[CONTEXT // 2 :] += request + 1
        one.submit(request, prompt, 2 * STEPS, now=0)
    return one


def startup_ms(program: str) -> float:
    """Start time of an interpreter that runs only this program."""
    took = []
    for _ in range(10):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True)
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


def main() -> None:
    through_python = []
    in_rust = []
    for _ in range(20):
        one = scheduler()
        chosen = np.full(RUNNING, 7, np.uint32)
        took: list[float] = []
        while len(took) < STEPS:
            began = time.perf_counter_ns()
            plan = one.plan(now=0)
            decodes, tokens, positions, rows = plan.decodes, plan.tokens, plan.positions, plan.rows
            producers = plan.producers
            planned = time.perf_counter_ns()
            assert plan.step is not None and len(tokens) == len(positions) and rows is not None
            is_decode = len(decodes) == RUNNING
            resumed = time.perf_counter_ns()
            one.step_done(plan.step, producers, chosen[: len(producers)], now=0)
            if is_decode:
                took.append((planned - began + time.perf_counter_ns() - resumed) / 1000)
        through_python.append(statistics.fmean(took))
        command = [sys.argv[1], "steps", "--json", "--decode-steps", str(STEPS), "--device-pages", str(DEVICE_PAGES)]
        told = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        in_rust.append(told["plan_us"]["mean"] + told["advance_us"]["mean"])
    python, rust = statistics.median(through_python), statistics.median(in_rust)
    print(f"a decode step of {RUNNING}: {python:.1f} µs through Python, {rust:.1f} µs in Rust, {python / rust:.2f} times")
    nothing, numpy, terrace = startup_ms("pass"), startup_ms("import numpy"), startup_ms("import terrace_kv")
    print(f"the import: {terrace - nothing:.0f} ms beyond the interpreter, {terrace - numpy:.0f} ms beyond NumPy")


if __name__ == "__main__":
    main()
