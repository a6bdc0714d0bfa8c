"""SGLang's prefix cache under traces, one request at a time: match, lock, evict, insert, unlock.

Reads orders from standard input, one JSON object a line with `trace`, `page_size`, `device_pages` (or null for as many
as the trace can need), and answers each with a line of figures: importing SGLang takes longer than most of them.

It is SGLang's own UnifiedRadixCache over its core in Rust, called as its scheduler calls it. Only its calls are timed:
making prompts and handing out pages is this program's work.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any

# Uses the core in the wheel, not one that is built here.
os.environ["SGLANG_RUST_BUILD_MODE"] = "never"

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import select_tree_core_backend
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from prompts import prompts


class Pages:
    """Free pages. The cache returns evicted pages and those that an insert did not need."""

    device = "cpu"

    def __init__(self, count: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_count = count
        self._within_page = torch.arange(page_size)
        self._free = torch.arange(count, dtype=torch.int64)
        self._given_back: list[torch.Tensor] = []

    def take(self, count: int) -> torch.Tensor:
        """Allocates pages, and returns the slots of all their tokens."""
        if len(self._free) < count:
            self._free = torch.cat([self._free, *self._given_back])
            self._given_back.clear()
        taken, self._free = self._free[:count], self._free[count:]
        self.free_count -= count
        return (taken[:, None] * self.page_size + self._within_page).reshape(-1)

    def free(self, slots: torch.Tensor) -> None:
        pages = slots[:: self.page_size] // self.page_size
        self._given_back.append(pages)
        self.free_count += len(pages)

    def free_segment(self, slots: torch.Tensor, start_pos: int = 0) -> None:
        del start_pos
        self.free(slots)

    def free_segments(self, segments: list[tuple[torch.Tensor, int]]) -> None:
        for slots, _ in segments:
            self.free(slots)


class Stopwatch:
    """Processor time of calls of the cache, which is independent of the machine's load."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self, call: Any, *arguments: Any) -> Any:
        began = time.process_time_ns()
        answer = call(*arguments)
        self.ns += time.process_time_ns() - began
        return answer


def serve_request(cache: UnifiedRadixCache, pages: Pages, tokens: array, watch: Stopwatch) -> int:
    """Runs all cache operations of a request; returns the number of hit tokens."""
    page_size = pages.page_size
    # A request computes its last token in any case.
    match = watch(cache.match_prefix, MatchPrefixParams(key=RadixKey(tokens, limit=len(tokens) - 1)))
    found = match.device_prefix_len
    if found:
        slots = watch(cache.path_device_indices, match.last_device_node)
    else:
        slots = torch.empty(0, dtype=torch.int64)
    lock = watch(cache.lock, match.last_device_node)
    missing = len(tokens) // page_size - found // page_size
    if pages.free_count < missing:
        watch(cache.evict, EvictParams(num_tokens=(missing - pages.free_count) * page_size))
    if pages.free_count >= missing:
        slots = torch.cat([slots, pages.take(missing)])
        key = RadixKey(tokens).page_aligned(page_size)
        watch(cache.insert, InsertParams(key=key, value=slots, prev_prefix_len=found))
    watch(cache.unlock, lock)
    return found


def measure(trace: Path, page_size: int, device_pages: int | None) -> dict[str, float]:
    lengths = [json.loads(line)["input_length"] for line in trace.open()]
    pages = Pages(device_pages or sum(length // page_size for length in lengths), page_size)
    params = CacheInitParams(
        tree_components=(ComponentType.FULL,),
        tree_core_backend="rust",
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=pages,
        page_size=page_size,
        eviction_policy="lru",
    )
    core = select_tree_core_backend(params)
    if core != "rust":
        raise SystemExit(f"SGLang takes its core in {core} here, and the one in Rust is to be measured")
    cache = UnifiedRadixCache(params)
    # The garbage collector must not scan existing objects while requests are timed.
    gc.collect()
    gc.freeze()
    hit_tokens, samples_ns = 0, []
    for prompt in prompts(trace):
        watch = Stopwatch()
        hit_tokens += serve_request(cache, pages, array("q", prompt.tobytes()), watch)
        samples_ns.append(watch.ns)
    return {
        "hit_ratio": hit_tokens / sum(lengths),
        "us_mean": sum(samples_ns) / len(samples_ns) / 1000,
        "us_max": max(samples_ns) / 1000,
    }


def main() -> None:
    torch.set_num_threads(1)
    # Libraries print to standard output, so answers use a separate descriptor.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        figures = measure(Path(order["trace"]), order["page_size"], order["device_pages"])
        print(json.dumps(figures), file=answers, flush=True)


main()
