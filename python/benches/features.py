"""Costs of the feature store in Python: large tensors compared with memory copies and with pickles
in the same store, in one run; then many small cycles and their memory use.

    python python/benches/features.py [--mebibytes 64] [--cycles 100000]
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from terrace_kv import FeatureStore, Store

ROUNDS = 21
T = TypeVar("T")


def timed(times: list[float], work: Callable[[], T]) -> T:
    began = time.perf_counter()
    done = work()
    times.append(time.perf_counter() - began)
    return done


def large(mebibytes: int) -> None:
    size = mebibytes << 20
    # Notes take a slot each as well. The system commits only memory that is written.
    store = Store("memory", capacity=16 * (size + 4096), object_max=size + 4096)
    features = FeatureStore(store, owner=0)
    tensor = np.random.default_rng(0).standard_normal(size // 4, np.float32)
    into = {"hidden": np.zeros_like(tensor)}
    copied = np.zeros_like(tensor)
    took: dict[str, list[float]] = {"memcpy": [], "put": [], "get": [], "pickled put": [], "pickled get": []}

    def pickled_tensor() -> dict[str, npt.NDArray[np.uint8]]:
        return {"bytes": np.frombuffer(pickle.dumps(tensor), np.uint8)}

    for _ in range(ROUNDS):
        timed(took["memcpy"], lambda: np.copyto(copied, tensor))
        plain = timed(took["put"], lambda: features.put("plain", {"hidden": tensor}))
        timed(took["get"], lambda: features.get(plain, into))
        assert (into["hidden"][:: 1 << 16] == tensor[:: 1 << 16]).all()
        features.release(plain)
        pickled = timed(took["pickled put"], lambda: features.put("pickled", pickled_tensor()))
        timed(took["pickled get"], lambda: pickle.loads(features.get(pickled)["bytes"].tobytes()))
        features.release(pickled)
    median = {name: statistics.median(times) for name, times in took.items()}
    for name, time_ in median.items():
        print(f"{name:12} {size / time_ / 1e9:6.2f} GB/s, {median['memcpy'] / time_:5.2f} of memcpy")
    both = median["put"] + median["get"]
    print(f"pickling takes {(median['pickled put'] + median['pickled get']) / both:.1f} times as long")


def small(cycles: int) -> None:
    store = Store("memory", capacity="8MiB", object_max="64KiB")
    features = FeatureStore(store, owner=0)
    tensors = {"hidden": np.ones((16, 64), np.float32), "tokens": np.arange(16)}

    def resident() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6

    began = time.perf_counter()
    for number in range(cycles):
        ref = features.put(str(number), tensors)
        features.get(ref)
        features.release(ref)
        if number == cycles // 10:
            before = resident()
    took = (time.perf_counter() - began) / cycles
    print(f"{cycles} cycles of {took * 1e6:.0f} µs")
    print(f"memory {before:.1f} MB after a tenth of them, {resident():.1f} MB at the end")
    features.gc()
    print(f"{store.stats()['memory']['objects']} objects are left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--cycles", type=int, default=100_000)
    given = parser.parse_args()
    large(given.mebibytes)
    small(given.cycles)


if __name__ == "__main__":
    main()
