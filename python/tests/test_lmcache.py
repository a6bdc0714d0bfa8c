"""The LMCache plug-in, called as LMCache does, without LMCache."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrace_kv as terrace
from terrace_kv.lmcache import TerraceClient

MODEL: dict[str, Any] = {
    "weights": "revision 1",
    "kv_dtype": "bfloat16",
    "layout": "a test's",
    "chunk_tokens": 64,
    "parallelism": {"tensor": 1, "pipeline": 1},
}
Told = tuple[int, bool, str, list[bool]]


def client(folder: Path, **others: Any) -> TerraceClient:
    return TerraceClient(store=f"disk:{folder}/kv", object_max="16KiB", capacity="16MiB", reserve=0, **{**MODEL, **others})


def ended(one: TerraceClient, number: int) -> Told:
    """Waits for the descriptor, as LMCache does."""
    poll = select.poll()
    poll.register(one.event_fd(), select.POLLIN)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if poll.poll(1000):
            (told,) = one.drain_completions()
            assert told[0] == number
            assert not poll.poll(0), "drained"
            return told
    raise TimeoutError("nothing was told")


def keys(*numbers: int) -> list[str]:
    return [f"a/model@01000100@0@{number:064x}" for number in numbers]


def test_batches_are_stored_found_read_and_removed(tmp_path: Path) -> None:
    one = client(tmp_path)
    memory: np.ndarray = np.random.default_rng(0).integers(0, 256, (4, 16384), np.uint8)
    views = [row.data for row in memory]
    assert ended(one, one.submit_batch_set(keys(0, 1, 2), views[:3]))[1:] == (True, "", [True] * 3)
    # A missing object is not a failure of a lookup, but is one of a read.
    assert ended(one, one.submit_batch_exists(keys(0, 7, 2)))[1:] == (True, "", [True, False, True])
    target = np.zeros((3, 16384), np.uint8)
    into = [row.data for row in target]
    number, is_ok, _, found = ended(one, one.submit_batch_get(keys(2, 7, 0), into))
    assert (is_ok, found) == (False, [True, False, True])
    assert (target[0] == memory[2]).all() and (target[2] == memory[0]).all()
    assert ended(one, one.submit_batch_delete(keys(0)))[3] == [True]
    assert ended(one, one.submit_batch_exists(keys(0, 1)))[3] == [False, True]
    # An object of another length than the buffer counts as missing.
    assert ended(one, one.submit_batch_get(keys(1), [target[0][:4096].data]))[3] == [False]
    assert one.stats()["get"]["hits"] == 2
    one.close()
    one.close()
    again = client(tmp_path)
    assert ended(again, again.submit_batch_exists(keys(1, 2)))[3] == [True, True], "they are there after a restart"
    again.close()


def test_missing_namespace_settings_are_errors(tmp_path: Path) -> None:
    for missing in MODEL:
        others = {name: value for name, value in MODEL.items() if name != missing}
        with pytest.raises(terrace.ConfigError, match=missing):
            TerraceClient(store=f"disk:{tmp_path}/kv", object_max="16KiB", reserve=0, **others)
    with pytest.raises(terrace.ConfigError, match="object_max"):
        TerraceClient(store=f"disk:{tmp_path}/kv", reserve=0, **MODEL)
    with pytest.raises(terrace.ConfigError, match='"store" is missing'):
        TerraceClient(**MODEL)
    with pytest.raises(terrace.ConfigError, match="parallelism"):
        client(tmp_path, parallelism=2)
    client(tmp_path).close()


def test_every_namespace_setting_separates_kv(tmp_path: Path) -> None:
    one = client(tmp_path)
    ended(one, one.submit_batch_set(keys(1), [memoryview(bytes(16384))]))
    one.close()
    changes: list[dict[str, Any]] = [
        {"weights": "revision 2"},
        {"kv_dtype": "float16"},
        {"layout": "another"},
        {"chunk_tokens": 128},
        {"parallelism": {"tensor": 2, "pipeline": 1}},
        {"hash_algorithm": "sha256_cbor"},
        {"namespace": "a cluster"},
    ]
    for changed in [{}, *changes]:
        other = client(tmp_path, **changed)
        assert ended(other, other.submit_batch_exists(keys(1)))[3] == [not changed], changed
        other.close()
