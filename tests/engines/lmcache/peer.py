"""LMCache's storage, as in its multi-process server, in a separate process. It reads commands as
lines of JSON and answers each with a line; the first command opens a storage with an adapter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import NativePluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

# (K and V, layers, tokens, size)
SHAPE = torch.Size([2, 4, 64, 128])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
CHUNK_BYTES = SHAPE.numel() * 2


def key(number: int, rank: int = 0, world: int = 1, model: str = "a/model", salt: str = "") -> ObjectKey:
    kv_rank = ObjectKey.ComputeKVRank(world, rank, world, rank)
    return ObjectKey(number.to_bytes(32, "big"), model, kv_rank, 0, salt)


def chunk(number: int) -> torch.Tensor:
    """The bytes of a chunk, derived from its number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SHAPE, generator=generator).to(torch.bfloat16)


def manager(adapter: dict[str, Any]) -> StorageManager:
    memory = L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")
    config = StorageManagerConfig(
        L1ManagerConfig(memory),
        EvictionConfig("LRU"),
        L2AdaptersConfig([NativePluginL2AdapterConfig.from_dict(adapter)]),
    )
    return StorageManager(config)


def store(storage: StorageManager, numbers: list[int], **named: Any) -> dict[str, Any]:
    """Writes chunks, which LMCache stores in the background; waits until it has stored or dropped
    them."""
    keys = [key(number, **named) for number in numbers]
    reserved = storage.reserve_write(keys, LAYOUT)
    for number, one in zip(numbers, keys, strict=True):
        reserved[one].tensor.copy_(chunk(number))
    before = stored_bytes(storage)
    storage.finish_write(keys)
    deadline = time.monotonic() + 15
    while stored_bytes(storage) - before < len(keys) * CHUNK_BYTES and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"stored": (stored_bytes(storage) - before) // CHUNK_BYTES}


def stored_bytes(storage: StorageManager) -> int:
    return sum(usage.total_bytes_used for usage in (adapter.get_usage() for _, adapter in storage.l2_adapters()))


def fetch(storage: StorageManager, numbers: list[int], policy: str = "prefix", **named: Any) -> dict[str, Any]:
    """Fetches chunks as for a prompt: the hits, whether each is right, and the time."""
    keys = [key(number, **named) for number in numbers]
    started = time.monotonic()
    asked = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)], fetching_policy=policy)
    handle = storage.submit_prefetch_task(asked)
    is_done = storage.wait_prefetch_status(handle, 60)
    seconds = time.monotonic() - started
    result = storage.query_prefetch_status(handle)
    if not is_done or result is None:
        return {"hits": None, "seconds": seconds}
    hits = [place for place in range(len(keys)) if result.hit_cells[0].test(place)]
    right = True
    if hits:
        wanted = [keys[place] for place in hits]
        with storage.read_prefetched_results(wanted) as objects:
            assert objects is not None
            right = all(torch.equal(one.tensor, chunk(numbers[hit])) for hit, one in zip(hits, objects, strict=True))
        storage.finish_read_prefetched(wanted)
    return {"hits": hits, "right": right, "l2": result.l2_hit_count, "seconds": seconds}


def delete(storage: StorageManager, numbers: list[int]) -> dict[str, Any]:
    for _, adapter in storage.l2_adapters():
        adapter.delete([key(number) for number in numbers])
    return {}


def main() -> None:
    # LMCache's log must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    storage: StorageManager | None = None
    for line in sys.stdin:
        told = json.loads(line)
        do = told.pop("do")
        answer: dict[str, Any]
        if do == "open":
            try:
                storage, answer = manager(told["adapter"]), {"open": True}
            except Exception as error:  # noqa: BLE001
                answer = {"error": str(error)}
        elif do == "close":
            storage, closed, answer = None, storage, {"open": False}
            assert closed is not None
            closed.close()
        else:
            assert storage is not None
            answer = {"store": store, "fetch": fetch, "delete": delete}[do](storage, **told)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
