"""The stores from Python."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrace_kv as terrace
from conftest import MIB, Place, open_place
from terrace_kv.store import ABSENT

NAMESPACE = terrace.namespace("a model, its revision", 16)
KEYS = terrace.page_keys(NAMESPACE, np.arange(16 * 64, dtype=np.uint32), 16)


def filled(pages: int, page_bytes: int = 4096) -> np.ndarray:
    """Pages whose bytes are derived from their place."""
    return np.random.default_rng(7).integers(0, 256, (pages, page_bytes), np.uint8)


def test_stored_pages_are_read_back(place: Place) -> None:
    store = place.open()
    ours = filled(8)
    theirs = np.zeros_like(ours)
    with store.register(ours) as source, store.register(theirs) as target:
        assert (source.pages, source.page_bytes) == (8, 4096)
        assert store.exists(NAMESPACE, KEYS[:8]).codes.tolist() == [ABSENT] * 8
        put = store.put(NAMESPACE, KEYS[:8], source, range(8)).check()
        assert put.codes.tolist() == [0] * 8, "they are new"
        assert store.put(NAMESPACE, KEYS[:1], source, [0]).codes.tolist() == [1], "it is there already"
        assert store.exists(NAMESPACE, KEYS[:9]).codes[:8].all() and not store.exists(NAMESPACE, KEYS[8:9]).codes.any()
        got = store.get(NAMESPACE, KEYS[7::-1], target, range(8)).check()
        assert got.ok.all() and (theirs == ours[::-1]).all()


def test_each_object_has_a_result_of_its_own(place: Place) -> None:
    store = place.open()
    memory = filled(4)
    with store.register(memory) as pages:
        store.put(NAMESPACE, KEYS[:1], pages, [0]).check()
        got = store.get(NAMESPACE, KEYS[:3], pages, [1, 2, 3])
        assert got.ok.tolist() == [True, False, False] and (memory[1] == memory[0]).all()
        assert {kind: type(error) for kind, error in got.errors.items()} == {
            1: terrace.MissingObject,
            2: terrace.MissingObject,
        }
        with pytest.raises(terrace.MissingObject, match="no such object"):
            got.check()
        other = terrace.namespace("another model", 16)
        assert not store.get(other, KEYS[:1], pages, [1]).ok.any(), "another model's is another object"
        shorter = store.get(NAMESPACE, KEYS[:1], pages, [1], lengths=[100])
        assert not shorter.ok.any(), "an object is read whole, or not at all"


def test_objects_are_removed_pinned_and_replaced(place: Place) -> None:
    store = place.open()
    memory = filled(3)
    with store.register(memory) as pages:
        store.put(NAMESPACE, KEYS[:2], pages, [0, 1], pin="hard:this test").check()
        assert not store.remove(NAMESPACE, KEYS[:1]).ok.any(), "it is pinned"
        store.unpin(NAMESPACE, KEYS[:1], "hard:this test").check()
        store.remove(NAMESPACE, KEYS[:1], removal="forced").check()
        assert not store.get(NAMESPACE, KEYS[:1], pages, [2]).ok.any()
        store.remove(NAMESPACE, KEYS[1:2], removal="final").check()
        store.put(NAMESPACE, KEYS[:1], pages, [0], generations=[1]).check()
        store.put(NAMESPACE, KEYS[:1], pages, [1], generations=[2]).check()
        assert not store.get(NAMESPACE, KEYS[:1], pages, [2], generations=[1]).ok.any(), "it was replaced"
        store.get(NAMESPACE, KEYS[:1], pages, [2], generations=[2]).check()
        assert (memory[2] == memory[1]).all()


def test_the_event_loop_goes_on_meanwhile(place: Place) -> None:
    store = place.open()
    memory = filled(64)
    target = np.zeros_like(memory)

    async def all_at_once() -> None:
        with store.register(memory) as ours, store.register(target) as theirs:
            puts = (store.put_async(NAMESPACE, KEYS[n : n + 8], ours, range(n, n + 8)) for n in range(0, 64, 8))
            for done in await asyncio.gather(*puts):
                done.check()
            assert (await store.exists_async(NAMESPACE, KEYS)).codes.all()
            gets = (store.get_async(NAMESPACE, KEYS[n : n + 8], theirs, range(n, n + 8)) for n in range(0, 64, 8))
            for done in await asyncio.gather(*gets):
                done.check()
            (await store.remove_async(NAMESPACE, KEYS, removal="forced")).check()
            await store.flush_async()
            with pytest.raises(ValueError, match="no page 64"):
                await store.put_async(NAMESPACE, KEYS[:1], ours, [64])

    asyncio.run(all_at_once())
    assert (target == memory).all()


@pytest.mark.parametrize("behind", [False, True])
def test_restart_keeps_durable_objects(tmp_path: Path, behind: bool) -> None:
    memory = filled(2)
    for life in range(2):
        settings: dict[str, Any] = {"memory": "1MiB", "write_behind": True} if behind else {}
        with terrace.Store(f"disk:{tmp_path}/store", capacity="16MiB", object_max="64KiB", **settings) as store:
            with store.register(memory) as pages:
                if life == 0:
                    # Write-behind objects are on disk when the store is closed.
                    store.put(NAMESPACE, KEYS[:1], pages, [0], durable=not behind).check()
                else:
                    store.get(NAMESPACE, KEYS[:1], pages, [1]).check()
        with pytest.raises(terrace.StoreError, match="shut down"):
            store.flush()
        # Its files are closed with the last handle.
        del store, pages
        gc.collect()
    assert (memory[1] == memory[0]).all()


def test_any_memory_can_be_registered() -> None:
    store = terrace.Store("memory", capacity=MIB, object_max=4096)
    given = [bytearray(4096), memoryview(bytearray(4096)), np.zeros(1024, np.float32)]
    for memory in given:
        with store.register(memory, pages=1) as pages:
            store.put(NAMESPACE, KEYS[:1], pages, [0]).check()
    for wrong, why in [
        (np.zeros((8, 8), np.uint8).T, "transposed"),
        (np.zeros((8, 8), np.uint8)[:, :4], "gaps"),
        (b"read only", "cannot be written"),
    ]:
        with pytest.raises(ValueError, match=why):
            store.register(wrong)
    with pytest.raises(ValueError, match="10 bytes cannot be 3 pages"):
        store.register(bytearray(10), pages=3)


def test_pages_on_a_gpu_pass_through_pinned_memory() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    store = terrace.Store("memory", capacity="8MiB", object_max="64KiB")
    ours = torch.randn(8, 64, 128, device="cuda", dtype=torch.bfloat16)
    theirs = torch.zeros_like(ours)
    with store.register(ours) as source, store.register(theirs) as target:
        assert (source.pages, source.page_bytes) == (8, 64 * 128 * 2)
        store.put(NAMESPACE, KEYS[:4], source, [1, 3, 5, 7]).check()
        got = store.get(NAMESPACE, KEYS[:5], target, [4, 3, 2, 1, 0])
        assert got.ok.tolist() == [True] * 4 + [False]
        assert (theirs[[4, 3, 2, 1]] == ours[[1, 3, 5, 7]]).all() and not theirs[[0, 5, 6, 7]].any()

        async def read() -> None:
            (await store.put_async(NAMESPACE, KEYS[8:9], source, [0])).check()
            (await store.get_async(NAMESPACE, KEYS[8:9], target, [7])).check()

        asyncio.run(read())
        assert (theirs[7] == ours[0]).all()


def test_staged_pages_in_use_are_not_written_to(tmp_path: Path) -> None:
    class Copies:
        """A substitute for a GPU that records copies."""

        fetched: list[int] = []

        def fetch(self, pages: np.ndarray) -> None:
            self.fetched += pages.tolist()

        def bring(self, pages: np.ndarray) -> None:
            pass

    async def both(place: Place) -> None:
        store = place.open()
        pages = store.register(filled(3))
        store.put(NAMESPACE, KEYS[:1], pages, [0]).check()
        pages._staging = Copies()  # type: ignore[assignment]
        place.pause(True)
        try:
            reading = asyncio.create_task(store.get_async(NAMESPACE, KEYS[:1], pages, [1]))
            while not pages.is_lent(1):
                await asyncio.sleep(0.001)
            with pytest.raises(terrace.StoreError, match="page 1 is in use"):
                store.put(NAMESPACE, KEYS[1:3], pages, [2, 1])
            assert Copies.fetched == []
        finally:
            place.pause(False)
        (await reading).check()
        store.put(NAMESPACE, KEYS[1:3], pages, [2, 1]).check()
        assert Copies.fetched == [2, 1]

    for place in open_place("nodes", tmp_path):
        asyncio.run(both(place))


def test_memory_is_kept_as_long_as_it_is_registered() -> None:
    store = terrace.Store("memory", capacity=MIB, object_max=4096)
    memory = filled(4)
    is_there = weakref.ref(memory)
    pages = store.register(memory)
    pages.array = None
    del memory
    gc.collect()
    assert is_there() is not None
    store.put(NAMESPACE, KEYS[:4], pages, range(4)).check()
    pages.close()
    assert store.put(NAMESPACE, KEYS[:1], pages, [0], generations=[1]).errors, "it is not registered any more"
    del pages
    gc.collect()
    assert is_there() is None


def test_pages_in_use_are_refused_to_others() -> None:
    store = terrace.Store("memory", capacity=MIB, object_max=4096)
    pages = store.register(filled(2))
    store.put(NAMESPACE, KEYS[:1], pages, [0]).check()
    with pytest.raises(terrace.StoreError, match="page 1 of the arena is in use"):
        store.get(NAMESPACE, KEYS[[0, 0]], pages, [1, 1])
    assert not pages.is_lent(1), "nothing of it was begun"


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    for place, settings, why in [
        ("nowhere", {}, "use memory, disk:FOLDER"),
        ("memory", {"capacity": MIB, "object_max": 4096, "colour": 1}, "colour"),
        ("nodes://127.0.0.1:1", {}, "secret_file"),
        ("mooncake://127.0.0.1:1", {"capacity": MIB, "object_max": 4096}, "library"),
        (f"disk:{tmp_path}/x", {"capacity": 0, "object_max": 4096}, "."),
        (f"disk:{tmp_path}/x", {"capacity": MIB, "object_max": 4096, "write_behind": True}, "set memory, like 8GiB"),
        ("memory", {"capacity": MIB, "object_max": 4096, "memory": MIB, "write_behind": True}, "use disk:FOLDER"),
    ]:
        with pytest.raises(terrace.ConfigError, match=why):
            terrace.Store(place, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a size"):
        terrace.Store("memory", capacity="much")
    with pytest.raises(terrace.ConfigError):
        terrace.namespace("m", 16, slat="a misspelt salt")


def test_missing_build_features_state_the_remedy() -> None:
    """Release builds have neither: buckets in the cloud need many libraries, and RDMA needs one
    that machines without it lack."""
    for place in ("s3://bucket/kv", "bucket:gs://bucket/kv", "az://container/kv"):
        with pytest.raises(terrace.ConfigError, match=r"--features s3.*bucket:file:///FOLDER"):
            terrace.Store(place)
    with pytest.raises(terrace.ConfigError, match="--features rdma"):
        terrace.Store("nodes://127.0.0.1:1", rdma="mlx5_0/1")
    with pytest.raises(terrace.ConfigError, match="secret_file"):
        terrace.Store("nodes://127.0.0.1:1", rdma="auto")


def test_guarded_store_caches_misses() -> None:
    store = terrace.Store("memory", capacity=MIB, object_max=4096, guard={"negative_ttl_ms": 60_000})
    with store.register(filled(1)) as pages:
        for _ in range(3):
            assert not store.get(NAMESPACE, KEYS[:1], pages, [0]).ok.any()
    assert store.stats()["guard"]["negative_hits"] > 0


def test_calls_release_the_gil(tmp_path: Path) -> None:
    with terrace.Store(f"disk:{tmp_path}/store", capacity="64MiB", object_max="1MiB") as store:
        gate, came = threading.Lock(), threading.Event()

        def come() -> None:
            gate.acquire()
            came.set()

        other = threading.Thread(target=come)
        before = sys.getswitchinterval()
        with store.register(filled(16, MIB)) as pages:
            gate.acquire()
            other.start()
            # From here on, a thread keeps the GIL unless it releases it.
            sys.setswitchinterval(1000)
            try:
                gate.release()
                assert not came.is_set()
                store.put(NAMESPACE, KEYS[:16], pages, range(16), durable=True).check()
                assert came.is_set()
            finally:
                sys.setswitchinterval(before)
        other.join()


def test_fork_needs_a_new_store() -> None:
    store = terrace.Store("memory", capacity=MIB, object_max=4096)
    child = os.fork()
    if child == 0:
        try:
            store.stats()
        except terrace.TerraceError as error:
            says_so = "before a fork" in str(error)
            fresh = terrace.Store("memory", capacity=MIB, object_max=4096)
            with fresh.register(filled(1)) as pages:
                works = bool(fresh.put(NAMESPACE, KEYS[:1], pages, [0]).ok.all())
            os._exit(0 if says_so and works else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.stats()["memory"]["objects"] == 0


def test_keys_are_those_of_the_scheduler() -> None:
    scheduler = terrace.Scheduler({"model": {"fingerprint": "m"}, "cache": {"page_size": 16}})
    assert scheduler.namespace() == terrace.namespace("m", 16)
    assert scheduler.namespace(adapter="a", salt="s") == terrace.namespace("m", 16, adapter="a", salt="s")
    assert (terrace.page_keys(NAMESPACE, range(40), 16) == KEYS[:2]).all(), "whole pages alone"
