"""Compares Terrace's tier with vLLM's file tier: the same jobs, one after the other in one process,
on the same disk.

    python vllm_tier.py [--chunks 512] [--chunk-kib 512] [--rounds 5] [--folder FOLDER]

Needs vLLM. It prints bytes a second of stores and loads, and how long the scheduler's thread was
blocked. Both tiers use direct IO where the file system has it, so what is loaded comes from the
disk. Tiers with memory over the disk (setting ``memory``) have figures of their own: they load from
memory, which has room for what was stored last. One reports success after everything is on disk,
and the other (setting ``write_behind``) writes it there in the background.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from terrace_kv.vllm import TerraceTier

STEP_END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
FILES, DISK, MEMORY, BEHIND = "vllm fs", "terrace", "memory over disk", "written behind"


def specification(chunk_bytes: int) -> Any:
    """The parts of an engine's specification that tiers use."""
    parallel = OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
        data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


class Kept:
    """Time of the scheduler's thread in the tier, and processor time of it: the rest is waiting for
    a lock or a core."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.computed = 0.0

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        computed, since = time.thread_time(), time.perf_counter()
        result = call(*arguments)
        self.seconds += time.perf_counter() - since
        self.computed += time.thread_time() - computed
        return result


def finish(tier: SecondaryTierManager, kept: Kept, jobs: int) -> None:
    """Polls like an engine with steps of five milliseconds."""
    while jobs:
        for result in kept(lambda: list(tier.get_finished_jobs())):
            assert result.success, result
            jobs -= 1
        kept(tier.on_schedule_end, STEP_END)
        if jobs:
            time.sleep(0.005)


def look_up(tier: SecondaryTierManager, kept: Kept, keys: list[bytes], request: ReqContext) -> list[float]:
    """Looks up a request's chunks until all answers have arrived; returns the blocked time of each
    step."""
    steps = []

    def look() -> list[LookupResult]:
        lookup = tier.lookup
        return [lookup(key, request) for key in keys]

    while True:
        since = kept.computed
        kept(lambda: list(tier.get_finished_jobs()))
        found = kept(look)
        kept(tier.on_schedule_end, STEP_END)
        steps.append(kept.computed - since)
        if LookupResult.RETRY not in found:
            assert set(found) == {LookupResult.HIT}
            return steps
        time.sleep(0.001)


def run(tier: SecondaryTierManager, rows: np.ndarray, chunks: int, round_: int) -> dict[str, float]:
    """Stores jobs of 64 chunks, looks all up, and loads them into other rows."""
    keys = [os.urandom(32) + b"\0\0\0\0" for _ in range(chunks)]
    request = ReqContext(req_id=f"r{round_}")
    tier.on_new_request(request)
    parts = [range(at, min(at + 64, chunks)) for at in range(0, chunks, 64)]
    stored, loaded, asked = Kept(), Kept(), Kept()
    total = chunks * rows.shape[1]

    since = time.perf_counter()
    for number, part in enumerate(parts):
        job = TransferJob(number, [keys[at] for at in part], np.array(part, np.int32), False, request)
        stored(tier.submit_store, job)
    finish(tier, stored, len(parts))
    store_s = time.perf_counter() - since

    steps = look_up(tier, asked, keys, request)

    rows[chunks:] = 0
    since = time.perf_counter()
    for number, part in enumerate(parts):
        places = np.array([chunks + at for at in part], np.int32)
        loaded(tier.submit_load, TransferJob(1000 + number, [keys[at] for at in part], places, True, request))
    finish(tier, loaded, len(parts))
    load_s = time.perf_counter() - since
    assert (rows[:chunks] == rows[chunks:]).all(), "what was loaded is what was stored"
    tier.on_request_finished(request)
    return {
        "store_gb_s": total / store_s / 1e9,
        "load_gb_s": total / load_s / 1e9,
        "scheduler_ms": (stored.seconds + loaded.seconds + asked.seconds) * 1e3,
        "scheduler_computed_ms": (stored.computed + loaded.computed + asked.computed) * 1e3,
        "lookup_us_per_1000": asked.computed * 1e9 / chunks,
        "asking_us_per_1000": steps[0] * 1e9 / chunks,
        "answer_us_per_1000": steps[-1] * 1e9 / chunks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=512)
    parser.add_argument("--chunk-kib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--only", choices=[FILES, DISK, MEMORY, BEHIND])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chunk_bytes = options.chunk_kib << 10
    folder = Path(tempfile.mkdtemp(prefix="tiers-", dir=options.folder))
    memory = mmap.mmap(-1, 2 * options.chunks * chunk_bytes)
    rows = np.frombuffer(memory, np.uint8).reshape(2 * options.chunks, chunk_bytes)
    rows[: options.chunks] = np.random.default_rng(1).integers(0, 256, (options.chunks, chunk_bytes), np.uint8)
    spec = specification(chunk_bytes)
    view = memoryview(memory).cast("B", (2 * options.chunks, chunk_bytes))

    def terrace(name: str, **settings: str | bool) -> TerraceTier:
        place = f"disk:{folder / name}"
        return TerraceTier(spec, view, "TerraceTier", store=place, capacity="16GiB", weights="bench", **settings)

    # Room for two rounds, so that all chunks of a round are still there when it loads.
    memory_bytes = 2 * options.chunks * (chunk_bytes + 4096)
    tiers: dict[str, SecondaryTierManager] = {
        FILES: FileSystemTierManager(spec, view, "fs", root_dir=str(folder / "fs")),
        DISK: terrace("disk"),
        MEMORY: terrace("memory", memory=str(memory_bytes)),
        BEHIND: terrace("behind", memory=str(memory_bytes), write_behind=True),
    }
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in tiers}
    try:
        # In turn, so that other load on the machine affects all of them.
        for round_ in range(options.rounds):
            for name, tier in tiers.items():
                if options.only in (None, name):
                    figures[name].append(run(tier, rows, options.chunks, round_))
                    if isinstance(tier, TerraceTier):
                        # Pending writes must not slow the next turn.
                        tier._shared.store.flush()
        asked = tiers[DISK]._transfers.stats()["exists"]
    finally:
        for tier in tiers.values():
            tier.shutdown()
        shutil.rmtree(folder)
    medians = {
        name: {figure: statistics.median(row[figure] for row in rows_) for figure in rows_[0]}
        for name, rows_ in figures.items()
        if rows_
    }
    if options.json or options.only:
        print(json.dumps(medians, indent=1))
        return
    for figure, theirs in medians[FILES].items():
        line = f"{figure:24} {FILES} {theirs:9.3f}"
        for name in (DISK, MEMORY, BEHIND):
            its = medians[name][figure]
            line += f"   {name} {its:9.3f}, {its / theirs:.2f} times"
        print(line)
    print(f"Off the scheduler's thread, Terrace looks up 1,000 chunks in {asked['seconds'] / asked['objects'] * 1e6:.3f} ms.")


if __name__ == "__main__":
    main()
