"""Samples of hidden states and the writer that puts them, without an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import terrace_kv as terrace
from conftest import Place
from terrace_kv.feature_writer import FeatureWriter
from terrace_kv.hidden_states import HiddenStatesSettings, Shape, parts_of

SHAPE = Shape(layers=2, hidden_size=8, dtype="F32", itemsize=4)


def sample(number: int, tokens: int = 6) -> dict[str, np.ndarray]:
    return {
        "hidden_states": np.full((tokens, 2, 8), number, np.float32),
        "token_ids": np.arange(number, number + tokens, dtype=np.int64),
    }


def promise(number: int, tokens: int = 6) -> terrace.FeatureRef:
    return terrace.FeatureRef.promise("features", 0, f"sample {number}", parts_of(SHAPE, tokens, 1 << 20))


def copy_of(number: int) -> Callable[[], dict[str, np.ndarray]]:
    return lambda: sample(number)


def until_copied(writer: FeatureWriter, keys: set[int]) -> None:
    """Waits until the writer has returned each of these keys once."""
    left = set(keys)

    def are_told() -> bool:
        told = writer.take_copied()
        assert told <= left
        left.difference_update(told)
        return not left

    until(are_told)


def until(is_so: Callable[[], bool], patience_s: float = 30) -> None:
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


class Slow(terrace.FeatureStore):
    """A feature store whose puts wait until they may go on, and then may fail."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.may_go_on = threading.Event()
        self.failure: Exception | None = None

    def keep(self, promise: terrace.FeatureRef, tensors: Mapping[str, Any]) -> None:
        assert self.may_go_on.wait(60)
        if self.failure is not None:
            raise self.failure
        super().keep(promise, tensors)


def slow(**settings: Any) -> Slow:
    return Slow(terrace.Store("memory", capacity="16MiB", object_max="1MiB"), owner=0, **settings)


def test_promised_samples_are_put(place: Place) -> None:
    features = terrace.FeatureStore(place.open(), owner=0)
    consumer = terrace.FeatureStore(place.open())
    writer = FeatureWriter(features, backlog_max=1 << 20, gc_s=0.05)
    refs = [promise(number) for number in range(8)]
    for number, ref in enumerate(refs):
        assert writer.submit(number, ref, copy_of(number), SHAPE.sample_bytes(6), within_s=60)
    for number, ref in enumerate(refs):
        found = consumer.get(ref, wait=60)
        assert (found["hidden_states"] == number).all() and found["token_ids"][0] == number
        assert consumer.release(ref) == "freed"
    until_copied(writer, set(range(8)))
    until(lambda: features.stats()["live"] == 0 and features.stats()["resident_bytes"] == 0)
    until(lambda: writer.status.backlog_bytes == 0)
    counts = writer.take_counts()
    assert (counts.samples, counts.failures, len(counts.put_seconds)) == (8, 0, 8)
    assert counts.bytes == 8 * SHAPE.sample_bytes(6)
    assert writer.close(60)
    assert not writer.submit(9, promise(9), lambda: sample(9), 10, within_s=60), "it is closed"


def test_hanging_store_does_not_block_the_engine() -> None:
    features = slow()
    writer = FeatureWriter(features, backlog_max=3 * SHAPE.sample_bytes(6), threads=1, retry_s=60)
    refs = [promise(number) for number in range(4)]
    taken = [
        writer.submit(number, ref, copy_of(number), SHAPE.sample_bytes(6), within_s=0.3)
        for number, ref in enumerate(refs)
    ]
    assert taken == [True, True, True, False], "the backlog is bounded"
    until_copied(writer, {0, 1, 2})
    assert writer.status.backlog_bytes == 3 * SHAPE.sample_bytes(6)
    until(lambda: writer.status.error is not None)
    assert "has not answered" in str(writer.status.error)
    assert not writer.close(0.01), "it does not wait for ever"

    # It goes on: a sample that is too late is removed.
    features.may_go_on.set()
    until(lambda: writer.status.backlog_bytes == 0)
    until(lambda: features.stats()["resident_bytes"] == 0 and features.stats()["live"] == 0)
    for ref in refs:
        with pytest.raises(terrace.Gone):
            features.get(ref, wait=0.01)
    assert "too slow" in str(writer.status.error)
    assert (writer.take_counts().failures, features.stats()["puts"]) == (4, 1)


def test_failed_store_is_reported_for_a_while() -> None:
    features = slow()
    features.failure = terrace.StoreUnavailable("nobody is there")
    features.may_go_on.set()
    writer = FeatureWriter(features, backlog_max=1 << 20, retry_s=0.3)
    writer.submit(0, promise(0), lambda: sample(0), 100, within_s=60)
    until(lambda: writer.status.error == "nobody is there")
    until(lambda: writer.status.error is None)
    features.failure = None
    ref = promise(1)
    writer.submit(1, ref, lambda: sample(1), 100, within_s=60)
    assert (features.get(ref, wait=60)["hidden_states"] == 1).all()
    until(lambda: writer.status.backlog_bytes == 0)
    assert writer.status.error is None and writer.close(60)


def test_failed_copy_is_a_failed_put() -> None:
    features = slow()
    features.may_go_on.set()
    writer = FeatureWriter(features, backlog_max=1 << 20)

    def fail() -> dict[str, Any]:
        raise RuntimeError("the device has gone")

    writer.submit("a", promise(0), fail, 100, within_s=60)
    until(lambda: writer.take_copied() == {"a"})
    until(lambda: "the device has gone" in str(writer.status.error))
    assert writer.status.backlog_bytes == 0 and writer.close(60)


def test_large_samples_are_split_and_joined() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from terrace_kv.hidden_states import read_hidden_states

    specs = parts_of(SHAPE, tokens=100, object_max=1000)
    assert [spec.name for spec in specs[:2]] == ["hidden_states.000", "hidden_states.001"]
    assert sum(spec.shape[0] for spec in specs[:-1]) == 100 and specs[-1].shape == [100]
    states = torch.arange(100 * 16, dtype=torch.float32).reshape(100, 2, 8)
    parts = dict(zip((spec.name for spec in specs), states.split(specs[0].shape[0]), strict=False))
    features = terrace.FeatureStore(terrace.Store("memory", capacity="1MiB", object_max="4KiB"), owner=0)
    ref = terrace.FeatureRef.promise("features", 0, "a", specs)
    features.keep(ref, {**parts, "token_ids": torch.arange(100)})
    found, ids = read_hidden_states(features, ref)
    assert (found == states).all() and (ids == torch.arange(100)).all()
    whole = features.put("b", {"hidden_states": states[:5], "token_ids": torch.arange(5)})
    assert (read_hidden_states(features, whole)[0] == states[:5]).all()
    with pytest.raises(ValueError, match="need an object_max of"):
        parts_of(SHAPE, tokens=100 * 127, object_max=6400)


@pytest.mark.parametrize("tokens_first", [True, False])
def test_reads_states_of_both_layouts(tokens_first: bool) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from terrace_kv.hidden_states import hidden_states_of

    # Each value encodes its place: block, layer, token, element.
    cache = torch.arange(10 * 2 * 4 * 8, dtype=torch.float32).reshape(10, 2, 4, 8)
    if tokens_first:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        held = cache.to(device)
        stream = torch.cuda.Stream() if device == "cuda" else None
        found = hidden_states_of(held, [7, 2, 5], 10, stream)
        assert found.shape == (10, 2, 8) and found.is_contiguous() and found.device.type == "cpu"
        for token in range(10):
            block = [7, 2, 5][token // 4]
            assert (found[token] == cache[block, :, token % 4]).all()


def test_settings_are_checked() -> None:
    settings = HiddenStatesSettings.of({"store": "memory", "object_max": "1MiB", "owner": 3}, engine=2)
    assert (settings.owner, settings.object_max, settings.within_s) == (5, 1 << 20, 30)
    with pytest.raises(ValueError, match="unknown settings: shop; there are"):
        HiddenStatesSettings.of({"store": "memory", "object_max": 1, "shop": 1})
    with pytest.raises(ValueError, match="object_max is missing"):
        HiddenStatesSettings.of({"store": "memory"})
