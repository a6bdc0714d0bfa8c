"""Compares Terrace's disk store with LMCache's native files, through the interface of LMCache's
adapters.

    python lmcache_disk.py --folder /var/tmp

Each stores the same chunks in batches, and reads them back. They take turns, each in a folder of
its own, under new names in every round; reads are measured with what the system has cached, and
after the cache was dropped if that is allowed. Prints bytes a second of each, and ratios of the
medians. Terrace's are verified by a checksum and a namespace, and LMCache's are not.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

KINDS = ("store", "load", "load from disk")


def terrace(folder: Path, arguments: argparse.Namespace) -> Any:
    from terrace_kv.lmcache import TerraceClient

    return TerraceClient(
        store=f"disk:{folder}",
        object_max=arguments.chunk,
        capacity=(arguments.rounds + 1) * arguments.chunk * arguments.chunks + (64 << 20),
        memory=arguments.memory,
        write_behind=arguments.write_behind,
        weights="a revision",
        kv_dtype="bfloat16",
        layout="bench",
        chunk_tokens=256,
        parallelism={"tensor": 1, "pipeline": 1},
    )


def lmcache(folder: Path, arguments: argparse.Namespace) -> Any:
    from lmcache.lmcache_fs import LMCacheFSClient

    folder.mkdir()
    return LMCacheFSClient(str(folder), arguments.workers, "", False, 0)


class Clock:
    """Submits batches, several at a time, and waits for all of them."""

    def __init__(self, client: Any, arguments: argparse.Namespace) -> None:
        self.client, self.batch, self.ahead = client, arguments.batch, arguments.ahead
        self.poll = select.poll()
        self.poll.register(client.event_fd(), select.POLLIN)

    def seconds(self, submit: Callable[..., int], keys: list[str], views: list[memoryview]) -> float:
        started = time.perf_counter()
        under_way: set[int] = set()
        for begin in range(0, len(keys), self.batch):
            while len(under_way) >= self.ahead:
                self._drain(under_way)
            under_way.add(int(submit(keys[begin : begin + self.batch], views[begin : begin + self.batch])))
        while under_way:
            self._drain(under_way)
        return time.perf_counter() - started

    def _drain(self, under_way: set[int]) -> None:
        self.poll.poll(10_000)
        for number, is_ok, error, _ in self.client.drain_completions():
            assert is_ok, error
            under_way.discard(int(number))


def aligned(arguments: argparse.Namespace) -> npt.NDArray[np.uint8]:
    """Page-aligned memory for all chunks, as in LMCache."""
    shape = (arguments.chunks, arguments.chunk)
    return np.frombuffer(mmap.mmap(-1, arguments.chunks * arguments.chunk), np.uint8).reshape(shape)


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return True
    except OSError:
        return False


def measure(
    client: Any,
    round_: int,
    memory: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
    arguments: argparse.Namespace,
) -> dict[str, float]:
    clock = Clock(client, arguments)
    keys = [f"a/model@01000100@{round_}@{number:064x}" for number in range(arguments.chunks)]
    views, into = [memoryview(row) for row in memory], [memoryview(row) for row in target]
    seconds = {"store": clock.seconds(client.submit_batch_set, keys, views)}
    target[:] = 0
    seconds["load"] = clock.seconds(client.submit_batch_get, keys, into)
    assert (target == memory).all(), "what was loaded is not what was stored"
    if drop_caches():
        target[:] = 0
        seconds["load from disk"] = clock.seconds(client.submit_batch_get, keys, into)
        assert (target == memory).all(), "what was loaded is not what was stored"
    return {kind: memory.nbytes / took for kind, took in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None, help="where both keep their files")
    parser.add_argument("--chunk", type=int, default=4 << 20, help="bytes of a chunk")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="chunks of a call")
    parser.add_argument("--ahead", type=int, default=4, help="calls at a time")
    parser.add_argument("--workers", type=int, default=4, help="threads of LMCache's, its default")
    parser.add_argument("--memory", default="0", help="memory over Terrace's disk, beside what the system caches of files")
    parser.add_argument("--write-behind", action="store_true", help="write to Terrace's disk in the background; needs memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    memory, target = aligned(arguments), aligned(arguments)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
    rates: dict[str, dict[str, list[float]]] = {"terrace": {}, "lmcache": {}}
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        clients = {"lmcache": lmcache(folder / "lmcache", arguments), "terrace": terrace(folder / "terrace", arguments)}
        for round_ in range(arguments.rounds):
            for name, client in clients.items():
                for kind, rate in measure(client, round_, memory, target, arguments).items():
                    rates[name].setdefault(kind, []).append(rate)
                # Pending writes must not slow the next turn.
                os.sync()
                time.sleep(1)
        for client in clients.values():
            client.close()
    finally:
        shutil.rmtree(folder)
    medians = {name: {kind: statistics.median(found) for kind, found in its.items()} for name, its in rates.items()}
    ratios = {kind: medians["terrace"][kind] / medians["lmcache"][kind] for kind in medians["terrace"]}
    if arguments.json:
        print(json.dumps({"bytes_per_second": medians, "ratios": ratios}))
        return
    for kind in KINDS:
        if kind in ratios:
            theirs, ours = (medians[name][kind] / 1e6 for name in ("lmcache", "terrace"))
            print(f"{kind:15} lmcache {theirs:8.0f} MB/s   terrace {ours:8.0f} MB/s   {ratios[kind]:.2f} times")


if __name__ == "__main__":
    main()
