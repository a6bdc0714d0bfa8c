"""Compares the cost of the prefix cache per request of a trace in Python with that in Rust, in one
run.

    cargo build --release -p terrace-bench --bin terrace-bench
    python python/benches/trace.py target/release/terrace-bench conversation_trace.jsonl

A line of the trace is a request as JSON: `input_length`, and `hash_ids`, one for each block of 512
tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from terrace_kv import PrefixCache

BLOCK_TOKENS = 512
REQUESTS_AT_ONCE = 200


def splitmix64(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = seeds + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def prompts(trace: Path) -> Iterator[npt.NDArray[np.uint32]]:
    """Prompts in which token j of block h is a fixed function of h and j, as in `terrace-bench`.
    They are generated for many requests at once and copied right before use, because in Rust,
    too, they were just written."""
    records = [json.loads(line) for line in trace.open()]
    places = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    memory = np.empty(max(record["input_length"] for record in records), np.uint32)
    for first in range(0, len(records), REQUESTS_AT_ONCE):
        some = records[first : first + REQUESTS_AT_ONCE]
        blocks = np.concatenate([np.array(record["hash_ids"], np.uint64) for record in some])
        words = splitmix64(blocks[:, None] * np.uint64(BLOCK_TOKENS) + places)
        tokens = (words % np.uint64(128_000)).astype(np.uint32).ravel()
        start = 0
        for record in some:
            prompt = memory[: record["input_length"]]
            prompt[:] = tokens[start : start + len(prompt)]
            start += len(record["hash_ids"]) * BLOCK_TOKENS
            yield prompt


def through_python(trace: Path, device_pages: int, page_size: int) -> tuple[float, int]:
    """Microseconds per request, and hit tokens."""
    cache = PrefixCache(device_pages, page_size=page_size)
    took, found = [], 0
    for prompt in prompts(trace):
        # As in Rust: all whole pages, without spare capacity.
        whole = len(prompt) // page_size * page_size
        began = time.perf_counter_ns()
        with cache.hold(prompt, whole) as held:
            held.publish(whole)
        took.append((time.perf_counter_ns() - began) / 1000)
        found += held.found_pages * page_size
    return statistics.fmean(took), found


def in_rust(program: str, trace: Path, device_pages: int, page_size: int) -> tuple[float, int]:
    bounds = ["--device-pages", str(device_pages), "--page-size", str(page_size)]
    command = [program, "cache", "--json", "--trace", str(trace), *bounds]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return told["us_per_request"]["mean"], told["hit_tokens"]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("terrace_bench")
    words.add_argument("trace", type=Path)
    words.add_argument("--device-pages", type=int, default=50_000)
    words.add_argument("--page-size", type=int, default=16)
    words.add_argument("--rounds", type=int, default=5)
    asked = words.parse_args()
    bounds = (asked.trace, asked.device_pages, asked.page_size)
    rounds = [(through_python(*bounds), in_rust(asked.terrace_bench, *bounds)) for _ in range(asked.rounds)]
    for (_, found), (_, found_in_rust) in rounds:
        assert found == found_in_rust, f"{found} tokens were found, and {found_in_rust} in Rust"
    python = statistics.median(ours for (ours, _), _ in rounds)
    rust = statistics.median(theirs for _, (theirs, _) in rounds)
    print(
        f"a request over {asked.device_pages} pages: {python:.1f} µs through Python, {rust:.1f} µs in Rust, "
        f"{python / rust:.2f} times; {rounds[0][0][1]} tokens found by both"
    )


if __name__ == "__main__":
    main()
