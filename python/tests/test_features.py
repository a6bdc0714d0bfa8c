"""The guarantees of the feature store from Python, one by one, over every kind of store."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import pickle
import queue
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrace_kv as terrace
from conftest import MIB, Place
from peers import is_sample, sample

TENSORS: dict[str, np.ndarray] = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.arange(5, dtype=np.int64)}


def producer(place: Place, **settings: Any) -> terrace.FeatureStore:
    return terrace.FeatureStore(place.open(), owner=0, **settings)


def consumer(place: Place, **settings: Any) -> terrace.FeatureStore:
    """A consumer, in another process if the store can be shared."""
    return terrace.FeatureStore(place.open(), **settings)


def objects(place: Place) -> int:
    """The number of objects in the store; -1 if unknown."""
    stats = place.open().stats()
    tier = stats["disk"] or stats["memory"]
    return tier["objects"] if tier else -1


def test_sample_round_trip(place: Place) -> None:
    features = producer(place)
    ref = features.put("a", TENSORS)
    found = consumer(place).get(ref)
    assert list(found) == ["x", "y"]
    for name, tensor in TENSORS.items():
        assert (found[name] == tensor).all() and found[name].dtype == tensor.dtype
    assert [tuple(tensor) for tensor in ref.tensors] == [("x", "F32", [3, 4]), ("y", "I64", [5])]


def test_refs_can_be_pickled(place: Place) -> None:
    features = producer(place)
    ref = features.put("a", TENSORS)
    travelled = pickle.loads(pickle.dumps(ref))
    assert travelled == ref and len(pickle.dumps(ref)) < 500 and hash(travelled) == hash(ref)
    way: queue.Queue[terrace.FeatureRef] = queue.Queue()
    way.put(terrace.FeatureRef(ref.text))
    assert (consumer(place).get(way.get())["x"] == TENSORS["x"]).all()


def test_released_sample_is_gone_everywhere(place: Place) -> None:
    """No use after free: at once, in every process, despite leases of the read."""
    features, other = producer(place), consumer(place)
    ref = features.put("a", TENSORS)
    other.get(ref)
    assert other.release(ref) == "freed"
    for one in (features, other):
        with pytest.raises(terrace.Gone, match="is gone") as gone:
            one.get(ref)
        assert isinstance(gone.value, KeyError) and isinstance(gone.value, terrace.FeatureError)
        assert str(gone.value).endswith("expired"), "without quotes"
    assert other.release(ref) == "already-gone"


def test_aborted_sample_is_gone_everywhere(place: Place) -> None:
    features, other = producer(place), consumer(place)
    ref = features.put("a", TENSORS)
    assert (features.abort("a"), features.abort("a")) == (1, 0)
    for one in (features, other):
        with pytest.raises(terrace.Gone):
            one.get(ref)


def test_a_later_put_supersedes_and_a_stale_ref_frees_nothing(place: Place) -> None:
    """The generation guard."""
    features, other = producer(place), consumer(place)
    old = features.put("a", TENSORS)
    new = features.put("a", {"x": np.ones(3)})
    assert new.generation > old.generation
    with pytest.raises(terrace.Gone):
        other.get(old)
    assert other.release(old) == "already-gone"
    assert (other.get(new)["x"] == 1).all()


def test_read_arrays_survive_the_release(place: Place) -> None:
    """A consumer has a copy."""
    features = producer(place)
    ref = features.put("a", TENSORS)
    found = features.get(ref)
    features.release(ref)
    for number in range(8):
        features.release(features.put(str(number), {"x": np.full((3, 4), 9, np.float32)}))
    assert (found["x"] == TENSORS["x"]).all()


def test_forged_and_altered_refs_are_refused(place: Place) -> None:
    """Authentication."""
    features = producer(place, secret=b"of this run")
    ref = features.put("a", TENSORS)
    assert (consumer(place, secret=b"of this run").get(ref)["x"] == TENSORS["x"]).all()
    told = json.loads(ref.text)
    told["tensors"][0]["shape"] = [4, 3]
    for forged, secret in [(terrace.FeatureRef(json.dumps(told)), b"of this run"), (ref, b"of another")]:
        with pytest.raises(terrace.Forged, match="not authentic"):
            consumer(place, secret=secret).get(forged)


def test_later_producer_takes_over_the_number(place: Place) -> None:
    first = producer(place)
    ref = first.put("a", TENSORS)
    second = producer(place)
    with pytest.raises(terrace.Fenced, match="no longer producer 0"):
        first.put("b", TENSORS)
    with pytest.raises(terrace.Fenced):
        first.gc()
    assert (second.get(ref)["x"] == TENSORS["x"]).all() and second.stats()["live"] == 1
    assert second.release(ref) == "freed"


def test_producers_without_a_number_take_free_ones(place: Place) -> None:
    one, other = (terrace.FeatureStore(place.open(), owner="free") for _ in range(2))
    assert (one.owner, other.owner, consumer(place).owner) == (1023, 1022, None)
    one.close()
    assert terrace.FeatureStore(place.open(), owner="free").owner == 1023


def test_promised_refs_are_authenticated(place: Place) -> None:
    secret = b"of this run"
    features, other = producer(place, secret=secret), consumer(place, secret=secret)
    specs = [terrace.TensorSpec("x", "F32", [3, 4]), terrace.TensorSpec("y", "I64", [5])]
    ref = terrace.FeatureRef.promise("features", 0, "a", specs, secret=secret)
    features.keep(ref, TENSORS)
    assert (other.get(ref)["x"] == TENSORS["x"]).all()
    forged = terrace.FeatureRef.promise("features", 0, "a", specs)
    for refused in (lambda: features.keep(forged, TENSORS), lambda: other.get(forged)):
        with pytest.raises(terrace.Forged):
            refused()


def test_a_release_frees_the_memory(place: Place) -> None:
    """A consumed sample is freed at once."""
    features = producer(place)
    before = objects(place)
    refs = [features.put(str(number), TENSORS) for number in range(4)]
    assert features.stats()["resident_bytes"] > 0
    for ref in refs:
        features.release(ref)
    features.gc()
    assert features.stats()["resident_bytes"] == 0 and features.stats()["live"] == 0
    assert before == objects(place), "not even a note is left"


def test_a_retained_sample_lasts_for_further_epochs(place: Place) -> None:
    features = producer(place, retain=True)
    ref = features.put("a", TENSORS)
    for _ in range(3):
        assert (features.get(ref)["y"] == TENSORS["y"]).all()
        assert features.release(ref) == "retained"
    assert features.abort("a") == 1


def test_exhausted_budget_refuses_or_waits(place: Place) -> None:
    """Backpressure."""
    # A slot for the tensor and for each of two notes.
    max_resident = 4 * MIB
    features = producer(place, max_resident=max_resident, when_full=0)
    ref = features.put("a", {"x": np.zeros(1500, np.uint8)})
    with pytest.raises(terrace.OverBudget, match="release consumed samples"):
        features.put("b", {"x": np.zeros(1500, np.uint8)})
    features.release(ref)
    features.release(features.put("b", {"x": np.zeros(1500, np.uint8)}))

    async def wait() -> None:
        patient = terrace.FeatureStore(place.open(), "others", owner=0, max_resident=max_resident, when_full=60)
        first = await patient.put_async("a", {"x": np.zeros(1500, np.uint8)})
        second = asyncio.create_task(patient.put_async("b", {"x": np.zeros(1500, np.uint8)}))
        await asyncio.sleep(0.1)
        assert not second.done()
        await patient.release_async(first)
        await patient.release_async(await second)

    asyncio.run(wait())


def test_unreleased_samples_expire(place: Place) -> None:
    """Expiry of samples that are held for too long."""
    features = producer(place, max_hold=0.05)
    ref = features.put("a", TENSORS)
    time.sleep(0.1)
    freed = features.gc()
    assert freed["expired"] == 1
    with pytest.raises(terrace.Gone):
        features.get(ref)
    assert features.stats()["resident_bytes"] == 0


def test_samples_are_not_evicted(place: Place) -> None:
    """Samples are pinned: other objects do not evict them."""
    if place.kind == "mooncake":
        pytest.skip("a cluster evicts only when it is full, which takes it too long here")
    features = producer(place)
    ref = features.put("a", TENSORS)
    store, namespace = place.open(), terrace.namespace("filler", 16)
    with store.register(np.zeros((8, 1 << 20), np.uint8)) as pages:
        for number in range(60):
            keys = np.random.default_rng(number).integers(0, 256, (8, 16), np.uint8)
            store.put(namespace, keys, pages, range(8))
    assert (features.get(ref)["x"] == TENSORS["x"]).all()


def test_a_damaged_tensor_fails_the_whole_sample(tmp_path: Path) -> None:
    """Partial samples are never returned."""
    settings: dict[str, Any] = {"capacity": "8MiB", "object_max": "64KiB"}
    store = terrace.Store(f"disk:{tmp_path}/store", **settings)
    features = terrace.FeatureStore(store, owner=0, durable=True)
    tensor = np.full(50_000, 0xA5, np.uint8)
    ref = features.put("a", {"x": tensor, "y": tensor + 1})
    store.flush()
    (data,) = [file for file in (tmp_path / "store").iterdir() if tensor.tobytes() in file.read_bytes()]
    with data.open("r+b") as file:
        file.seek(data.read_bytes().index(tensor.tobytes()) + 25_000)
        file.write(b"\x5a")
    with pytest.raises(terrace.Damaged, match="is damaged"):
        features.get(ref)
    with pytest.raises(terrace.Gone):
        features.get(ref)


def test_gc_repeats_failed_releases(tmp_path: Path) -> None:
    """A failed release is queued and repeated until it succeeds."""
    from conftest import open_place

    for place in open_place("nodes", tmp_path):
        place.settings = {**place.settings, "get_timeout_ms": 200, "put_timeout_ms": 200, "exists_timeout_ms": 200}
        features = producer(place)
        refs = [features.put(str(number), TENSORS) for number in range(3)]
        place.pause(True)
        with pytest.raises(terrace.TerraceError, match="not in the store|does not answer|no answer"):
            features.release(refs[0])
        with pytest.raises(terrace.TerraceError):
            features.get(refs[0])
        place.pause(False)
        for _ in range(200):
            try:
                features.gc()
            except terrace.TerraceError:
                pass
            if features.stats()["parked"] == 0 and features.stats()["live"] == 2:
                break
            time.sleep(0.05)
        with pytest.raises(terrace.Gone):
            consumer(place).get(refs[0])
        assert features.stats()["live"] == 2 and features.stats()["parked"] == 0
        assert (features.get(refs[1])["x"] == TENSORS["x"]).all()


def test_get_into_caller_memory(place: Place) -> None:
    features = producer(place)
    ref = features.put("a", TENSORS)
    into = {"y": np.zeros(5, np.int64), "x": np.zeros((3, 4), np.float32)}
    found = features.get(ref, into)
    assert found["x"] is into["x"] and (into["x"] == TENSORS["x"]).all() and (into["y"] == TENSORS["y"]).all()
    with pytest.raises(ValueError, match="no memory for it"):
        features.get(ref, {"x": into["x"]})
    with pytest.raises(ValueError, match=r"'x' is F32 \[3, 4\], its memory is F64 \[3, 4\]"):
        features.get(ref, {**into, "x": np.zeros((3, 4))})


def test_invalid_samples_are_refused() -> None:
    features = terrace.FeatureStore(terrace.Store("memory", capacity="8MiB", object_max="1MiB"), owner=0)
    with pytest.raises(terrace.FeatureError, match="1 to"):
        features.put("a", {})
    with pytest.raises(TypeError, match="cannot be stored"):
        features.put("a", {"x": np.array(["text"])})
    with pytest.raises(terrace.FeatureError, match="can only consume"):
        terrace.FeatureStore(features.store).put("a", TENSORS)
    with pytest.raises(terrace.ConfigError, match="owner"):
        terrace.FeatureStore(features.store, owner=60_000)
    ref = features.put("every shape", {"scalar": np.array(7.0), "none": np.zeros((0, 3)), "strided": np.eye(4).T[::2]})
    found = features.get(ref)
    assert found["scalar"] == 7 and found["none"].shape == (0, 3) and (found["strided"] == np.eye(4).T[::2]).all()


def test_consume_reads_ahead_and_releases(place: Place) -> None:
    async def run() -> list[int]:
        features = producer(place)
        way: asyncio.Queue[terrace.FeatureRef | None] = asyncio.Queue(4)

        async def produce() -> None:
            for number in range(12):
                await way.put(await features.put_async(str(number), {"x": np.full(10, number)}))
            features.abort("5")
            await way.put(None)

        async def refs() -> AsyncIterator[terrace.FeatureRef]:
            while (ref := await way.get()) is not None:
                yield ref

        producing = asyncio.create_task(produce())
        seen = []
        async for ref, found in consumer(place).consume(refs()):
            assert int(ref.sample) == found["x"][0]
            seen.append(int(ref.sample))
        await producing
        await features.gc_async()
        assert features.stats()["live"] == 0
        return seen

    seen = asyncio.run(run())
    assert seen in ([*range(12)], [*range(5), *range(6, 12)]), "in order, each once, but for what was aborted in time"


def peer(what: str, place: Place, *others: str) -> subprocess.Popen[str]:
    script = Path(__file__).parent / "peers.py"
    command = [sys.executable, str(script), what, place.place, json.dumps(place.settings), *others]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return told(process)


def test_producer_killed_during_put_leaves_no_partial_sample(shared_place: Place) -> None:
    refs = []
    for life in range(3):
        one = peer("produce", shared_place, "1800")
        for _ in range(3 + life):
            assert told(one) == "putting"
            refs.append(terrace.FeatureRef(told(one)))
        assert told(one) == "putting"
        time.sleep(0.002 * life)
        one.kill()
        one.wait()
    # A restarted producer takes over earlier samples; only the last generation of a sample is
    # readable.
    features = terrace.FeatureStore(shared_place.open(), owner=1, max_hold=1800)
    other = consumer(shared_place)
    latest = {ref.sample: ref for ref in refs}
    right = 0
    for ref in refs:
        try:
            assert is_sample(int(ref.sample), other.get(ref))
            right += 1
            assert ref == latest[ref.sample]
        except terrace.Gone:
            pass
    assert right >= 4, "those of the last life, but for one that was superseded when it was killed"
    # All samples are freed once unwanted.
    impatient = terrace.FeatureStore(shared_place.open(), owner=1, max_hold=0.001)
    for _ in range(600):
        impatient.gc()
        if impatient.stats()["live"] == 0 and impatient.stats()["resident_bytes"] == 0:
            break
        time.sleep(0.1)
    assert impatient.stats()["live"] == 0 and impatient.stats()["resident_bytes"] == 0
    del features
    for ref in refs:
        with pytest.raises(terrace.Gone):
            other.get(ref)


def test_killed_consumer_leaks_no_sample(shared_place: Place) -> None:
    features = terrace.FeatureStore(shared_place.open(), owner=1, max_hold=1800)
    refs = [features.put(str(number), sample(number)) for number in range(3)]
    one = peer("consume", shared_place)
    assert tell(one, refs[0].text) == "right"
    assert tell(one, "release") == "freed"
    assert tell(one, refs[1].text) == "right"
    one.kill()
    one.wait()
    another = peer("consume", shared_place)
    assert tell(another, refs[1].text) == "right", "what is not released can be had again"
    assert tell(another, "release") == "freed"
    assert tell(another, refs[0].text) == "gone"
    another.kill()
    another.wait()
    features.gc()
    assert features.stats()["live"] == 1, "and the last waits for somebody"
    features.release(refs[2])


def test_many_cycles_leak_no_object_or_memory() -> None:
    store = terrace.Store("memory", capacity="8MiB", object_max="64KiB")
    features = terrace.FeatureStore(store, owner=0)
    into = {name: np.empty_like(tensor) for name, tensor in TENSORS.items()}

    def cycle(number: int) -> None:
        ref = features.put(str(number % 7), TENSORS)
        features.get(ref, into)
        features.release(ref)

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    for number in range(500):
        cycle(number)
    before = resident()
    for number in range(2000):
        cycle(number)
    assert resident() - before < 4 << 20
    features.gc()
    assert store.stats()["memory"]["objects"] == 3, "the notes of who has the number"
    features.close()
    assert store.stats()["memory"]["objects"] == 0


def _open_dataset(place: str, settings: dict[str, Any]) -> terrace.FeatureStore:
    return terrace.FeatureStore(terrace.Store(place, **settings))


class Opens:
    """Opens a feature store in the process that calls it."""

    def __init__(self, place: Place) -> None:
        self.place, self.settings = place.place, place.settings

    def __call__(self) -> terrace.FeatureStore:
        return _open_dataset(self.place, self.settings)


class Shares:
    """The refs of each worker."""

    def __init__(self, refs: list[terrace.FeatureRef]) -> None:
        self.refs = refs

    def __call__(self, worker: int, workers: int) -> list[terrace.FeatureRef]:
        return self.refs[worker::workers]


def test_torch_tensors_of_every_type_round_trip() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    features = terrace.FeatureStore(terrace.Store("memory", capacity="64MiB", object_max="1MiB"), owner=0)
    kinds = "bool uint8 int8 int16 float16 bfloat16 int32 float32 float64 int64 complex64 float8_e4m3fn float8_e5m2"
    tensors = {kind: torch.arange(24).reshape(2, 3, 4).to(getattr(torch, kind)) for kind in kinds.split()}
    tensors["transposed"] = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    tensors["learnt"] = torch.ones(3, requires_grad=True)
    ref = features.put("a", tensors)
    found = features.get_torch(ref)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert (found[name].to(torch.complex64) == tensor.detach().to(torch.complex64)).all(), name
    mixed = features.put("b", {"x": torch.ones(3, dtype=torch.bfloat16)})
    if importlib.util.find_spec("ml_dtypes") is None:
        with pytest.raises(TypeError, match="get_torch"):
            features.get(mixed)
    else:
        assert (features.get(mixed)["x"] == 1).all()
    store = features.store
    with store.register(torch.zeros(4, 1024, dtype=torch.bfloat16)) as pages:
        assert (pages.pages, pages.page_bytes) == (4, 2048)
    with pytest.raises(ValueError, match="contiguous"):
        store.register(torch.zeros(4, 8).T)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_with_workers_reads_each_sample_once(shared_place: Place, workers: int) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from terrace_kv.torch import FeatureDataset

    if workers and shared_place.kind == "mooncake":
        pytest.skip("Mooncake's library may crash when a process ends, which a loader of PyTorch's reports")

    features = terrace.FeatureStore(shared_place.open(), owner=1)
    refs = [features.put(str(number), {"x": torch.full((4,), number, dtype=torch.bfloat16)}) for number in range(10)]
    features.abort("3")
    dataset = FeatureDataset(Opens(shared_place), Shares(refs))
    apart: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "spawn"} if workers else {}
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, **apart)
    seen = sorted(int(found["x"][0]) for found in loader)
    assert seen == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    features.gc()
    assert features.stats()["live"] == 0, "each was released"


def test_a_promised_sample_is_waited_for(place: Place) -> None:
    features, other = producer(place), consumer(place)
    specs = [terrace.TensorSpec("x", "F32", [3, 4]), terrace.TensorSpec("y", "I64", [5])]
    ref = terrace.FeatureRef.promise("features", 0, "a", specs)
    assert ref.is_promised and terrace.FeatureRef(ref.text) == ref
    with pytest.raises(terrace.Gone):
        other.get(ref)
    started = time.monotonic()
    with pytest.raises(terrace.Gone):
        other.get(ref, wait=0.2)
    assert time.monotonic() - started >= 0.2

    async def both() -> dict[str, Any]:
        reading = asyncio.create_task(other.get_async(ref, wait=60))
        await asyncio.sleep(0.05)
        assert not reading.done()
        await features.keep_async(ref, TENSORS)
        return await reading

    found = asyncio.run(both())
    assert (found["x"] == TENSORS["x"]).all() and (found["y"] == TENSORS["y"]).all()
    assert other.release(ref) == "freed"
    features.gc()
    assert features.stats()["live"] == 0 and features.stats()["resident_bytes"] == 0
    with pytest.raises(terrace.ConfigError, match="has not promised"):
        features.keep(terrace.FeatureRef.promise("features", 1, "a", specs), TENSORS)
