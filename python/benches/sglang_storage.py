"""SGLang's hierarchical cache on a store of Terrace's, beside SGLang's own file backend: the same pages of the same
host pool, in the same batches, as its controller hands them over, on the same disk, by turns.

    python sglang_storage.py FOLDER [--pages 256] [--page-mib 4] [--rounds 3]

Speeds depend on how busy the machine is, and not for both alike: one copies in its own thread, the other has the disk
reach the pool's memory by itself. What each takes of the processor, in its process and for it in the kernel, is told
besides, and depends on that least.

Needs SGLang (scripts/test-engines has an environment with it). The file backend writes into the system's cache of
files and is never synced; so it reads from there too, unless that is emptied first, as it is for ``cold``. Without a
GPU no memory is pinned, which spares it pinning each page that it reads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from terrace_kv.sglang import TerraceStorage

PAGE_SIZE, HEADS, HEAD_DIM = 64, 8, 128
MIB = 1 << 20
MEMORY_GIB = 2


class File:
    """SGLang's file backend, with the copies that its controller makes for it."""

    name = "SGLang's file backend"

    def __init__(self, folder: Path, pool: Any) -> None:
        self.pool = pool
        self.backend = HiCacheFile(config(), str(folder))

    def store(self, keys: list[str], indices: torch.Tensor) -> bool:
        starts = indices[::PAGE_SIZE]
        pages = [self.pool.get_data_page(starts[place]) for place in range(len(keys))]
        return bool(self.backend.batch_set(keys, pages))

    def load(self, keys: list[str], indices: torch.Tensor) -> bool:
        starts = indices[::PAGE_SIZE]
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        pages = self.backend.batch_get(keys, targets)
        for start, page in zip(starts, pages):
            self.pool.set_from_flat_data_page(start, page)
        return all(page is not None for page in pages)

    def exists(self, keys: list[str]) -> int:
        return int(self.backend.batch_exists(keys))

    def close(self) -> None:
        pass


class Terrace:
    """Terrace's backend, called as with interface_v1."""

    name = "terrace"

    def __init__(self, folder: Path, pool: Any, **settings: str | bool) -> None:
        self.backend = TerraceStorage(config(store=f"disk:{folder}", capacity="32GiB", interface_v1=1, **settings), {})
        self.backend.register_mem_pool_host(pool)
        self.backend.on_host_pools_registered()

    def store(self, keys: list[str], indices: torch.Tensor) -> bool:
        return all(self.backend.batch_set_v1(keys, indices))

    def load(self, keys: list[str], indices: torch.Tensor) -> bool:
        return all(self.backend.batch_get_v1(keys, indices))

    def exists(self, keys: list[str]) -> int:
        return self.backend.batch_exists(keys)

    def close(self) -> None:
        self.backend.close()


class TerraceWithMemory(Terrace):
    """With a memory cache over the disk, as the file backend has the page cache."""

    name = "terrace, memory over disk"

    def __init__(self, folder: Path, pool: Any, **settings: str | bool) -> None:
        super().__init__(folder, pool, memory=f"{MEMORY_GIB}GiB", **settings)


class TerraceWrittenBehind(TerraceWithMemory):
    """Like the file backend, objects count as stored in memory and are written to disk later."""

    name = "terrace, written behind"

    def __init__(self, folder: Path, pool: Any) -> None:
        super().__init__(folder, pool, write_behind=True)


def config(**settings: Any) -> HiCacheStorageConfig:
    """A server of one rank."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    kind = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    return HiCacheStorageConfig(**ranks, **kind, model_name="bench", extra_config=settings)


def host_pool(pages: int, page_mib: int) -> Any:
    """A host pool with pages of ``page_mib`` MiB, keys and values of all layers, with distinct
    contents."""
    layers = max(1, page_mib * MIB // (2 * PAGE_SIZE * HEADS * HEAD_DIM * 2))
    tokens = pages * PAGE_SIZE
    shape = {"head_num": HEADS, "head_dim": HEAD_DIM, "layer_num": layers}
    common = {"page_size": PAGE_SIZE, "dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}
    device = MHATokenToKVPool(size=PAGE_SIZE, **shape, **common)
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE_SIZE,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=PAGE_SIZE,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=tokens,
    )
    pool.kv_buffer.view(torch.int16).random_()
    return pool


def pool_bytes(pool: Any) -> int:
    return int(pool.kv_buffer.numel() * pool.kv_buffer.element_size())


def batches(pages: int) -> Iterator[tuple[int, int]]:
    """Batches of the size that the controller uses."""
    for start in range(0, pages, STORAGE_BATCH_SIZE):
        yield start, min(start + STORAGE_BATCH_SIZE, pages)


def timed(pages: int, work: Callable[[int, int], bool]) -> tuple[float, float]:
    """Elapsed time and processor time of a function."""
    since, before = time.perf_counter(), time.process_time()
    for start, end in batches(pages):
        assert work(start, end), "it failed"
    return time.perf_counter() - since, time.process_time() - before


def forget_files(folder: Path) -> None:
    """Writes back and drops the page cache."""
    subprocess.run(["sync", "-f", str(folder)], check=True)
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(kind: type[Any], folder: Path, pool: Any, pages: int, turn: int) -> dict[str, tuple[float, float]]:
    """Times of a backend to store and load all pages of the pool. Other pages are stored first, so
    that its memory is committed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    keys = [f"{turn:032x}{number:032x}" for number in range(pages)]
    places = torch.arange(pages * PAGE_SIZE)
    expected = pool.kv_buffer.view(torch.int16)[:, ::997].clone()
    backend = kind(folder, pool)

    def part(start: int, end: int) -> tuple[list[str], torch.Tensor]:
        return keys[start:end], places[start * PAGE_SIZE : end * PAGE_SIZE]

    for old in range(1, (MEMORY_GIB << 30) // pool_bytes(pool) + 1):
        others = [f"{turn:032x}{old * pages + number:032x}" for number in range(pages)]
        for start, end in batches(pages):
            assert backend.store(others[start:end], part(start, end)[1]), "it failed"
    # Pending writes must not slow the next turn.
    os.sync()
    time.sleep(1)
    told = {"store": timed(pages, lambda start, end: backend.store(*part(start, end)))}
    told["exists"] = timed(pages, lambda start, end: backend.exists(keys[start:end]) == end - start)
    pool.kv_buffer.zero_()
    told["load"] = timed(pages, lambda start, end: backend.load(*part(start, end)))
    assert torch.equal(expected, pool.kv_buffer.view(torch.int16)[:, ::997]), "other bytes came back"
    backend.close()
    forget_files(folder)
    backend = kind(folder, pool)
    pool.kv_buffer.zero_()
    told["load cold"] = timed(pages, lambda start, end: backend.load(*part(start, end)))
    assert torch.equal(expected, pool.kv_buffer.view(torch.int16)[:, ::997]), "other bytes came back"
    backend.close()
    shutil.rmtree(folder)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--page-mib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    # Copies of pages use one thread: several would spin while others need the processor.
    torch.set_num_threads(1)
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", revision="1"))
    pool = host_pool(asked.pages, asked.page_mib)
    size = pool_bytes(pool)
    print(f"{asked.pages} pages of {size / asked.pages / MIB:.1f} MiB, {size / (1 << 30):.2f} GiB, in {asked.folder}")
    kinds = (File, Terrace, TerraceWithMemory, TerraceWrittenBehind)
    seconds: dict[str, list[dict[str, tuple[float, float]]]] = {kind.name: [] for kind in kinds}
    for turn in range(asked.rounds):
        for kind in kinds:
            seconds[kind.name].append(measure(kind, asked.folder / "bench", pool, asked.pages, turn))
    print(f"{'GB/s, and CPU seconds a GB':28}{'store':>16}{'load':>16}{'load cold':>16}   exists, us a page")
    for name, rounds in seconds.items():
        line = f"{name:28}"
        for what in ("store", "load", "load cold"):
            wall, processor = (statistics.median(each[what][place] for each in rounds) for place in (0, 1))
            line += f"{size / wall / 1e9:>9.2f}{processor / size * 1e9:>7.2f}"
        print(f"{line}{statistics.median(each['exists'][0] for each in rounds) / asked.pages * 1e6:>12.1f}")


if __name__ == "__main__":
    main()
