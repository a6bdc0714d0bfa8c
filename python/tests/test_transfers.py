"""The parts of engine adapters: jobs, namespaces, and stores opened from a configuration."""

from __future__ import annotations

import hashlib
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrace_kv as terrace
from conftest import open_place
from terrace_kv.adapters import open_store
from terrace_kv.namespaces import engine_namespace, private_namespace, weights_of
from terrace_kv.transfers import Buffers, Completed, Transfers, key_of

PAGE = 4096
FIELDS: dict[str, Any] = {
    "engine": "an engine",
    "hash_algorithm": "sha256",
    "model": "a model",
    "weights": "its weights",
    "dtype": "bfloat16",
    "kv_dtype": "fp8",
    "layout": "heads first",
    "block_tokens": 16,
    "parallelism": {"tp": 2},
    "rank": 0,
}
NAMESPACE = engine_namespace(**FIELDS)
KEYS = [bytes([number]) * 32 for number in range(8)]


def memory() -> np.ndarray:
    pages = np.zeros((16, PAGE), np.uint8)
    pages[:8] = np.random.default_rng(3).integers(0, 256, (8, PAGE), np.uint8)
    return pages


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Transfers, terrace.Store]]:
    shared = open_store({"store": f"disk:{tmp_path}", "capacity": "16MiB", "reserve": 0}, object_bytes=PAGE)
    made = Transfers(shared.store, NAMESPACE)
    yield made, shared.store
    made.close()
    shared.close()


@pytest.fixture
def transfers(opened: tuple[Transfers, terrace.Store]) -> Transfers:
    return opened[0]


@pytest.fixture
def store(opened: tuple[Transfers, terrace.Store]) -> terrace.Store:
    return opened[1]


def drained(transfers: Transfers) -> list[Completed]:
    assert transfers.wait_idle(30)
    return transfers.drain()


def test_jobs_report_each_key(transfers: Transfers) -> None:
    pages = memory()
    region = transfers.register(pages, PAGE)
    job = transfers.submit_put(KEYS[:6], region.pages(range(6)))
    [put] = drained(transfers)
    assert (put.job, put.kind, put.all_ok, put.bytes, put.error) == (job, "put", True, 6 * PAGE, None)
    again = transfers.put(KEYS[:6], region.pages(range(6)))
    assert again.all_ok and again.bytes == 0, "they are there already"
    assert transfers.exists(KEYS).ok == [True] * 6 + [False] * 2
    got = transfers.get(KEYS, region.pages(range(8, 16)))
    assert got.ok == [True] * 6 + [False] * 2 and not got.all_ok and got.error is None
    assert (pages[8:14] == pages[:6]).all()
    assert transfers.remove(KEYS[:1]).all_ok and not transfers.exists(KEYS[:1]).all_ok
    stats = transfers.stats()
    assert (stats["get"]["hits"], stats["get"]["misses"], stats["get"]["bytes"]) == (6, 2, 6 * PAGE)
    assert sum(stats["get"]["buckets"]) == stats["get"]["jobs"] == 1
    assert transfers.drain() == [], "calls that wait are told to who waits"


def test_names_of_objects_outlive_versions(transfers: Transfers, store: terrace.Store) -> None:
    pages = memory()
    region = transfers.register(pages, PAGE)
    transfers.put(KEYS[:1], region.pages([0]))
    name = hashlib.sha256(b"terrace-kv engine key 1\0" + KEYS[0]).digest()[:16]
    assert store.exists(NAMESPACE, name).codes.tolist() == [2]
    assert NAMESPACE.hex() == "e287e28873086af1d27506ca417430af"


def test_other_namespaces_have_other_objects(transfers: Transfers, store: terrace.Store) -> None:
    region = transfers.register(memory(), PAGE)
    transfers.put(KEYS, region.pages(range(8)))
    for name, value in {
        "engine": "another",
        "hash_algorithm": "xxhash",
        "model": "another",
        "weights": "others",
        "dtype": "float16",
        "kv_dtype": "bfloat16",
        "layout": "tokens first",
        "block_tokens": 32,
        "parallelism": {"tp": 1},
        "rank": 1,
        "adapter": "an adapter",
        "salt": "a tenant",
        "more": "something else",
    }.items():
        other = engine_namespace(**FIELDS | {name: value})
        assert not any(Transfers(store, other).exists(KEYS).ok), name
    assert engine_namespace(**FIELDS | {"parallelism": None, "rank": None}) != NAMESPACE
    with pytest.raises(TypeError, match="twice"):
        engine_namespace(**FIELDS | {"parallel tp": 2})


def test_parts_of_keys_do_not_run_together() -> None:
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of(b"ab", "c"), key_of("ab", "c", "")}) == 5
    assert key_of(1) != key_of("1")


def test_weights_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    def write(folder: str, middle: int) -> str:
        made = tmp_path / folder
        made.mkdir()
        header = b'{"a":{"dtype":"U8","shape":[65536],"data_offsets":[0,65536]}}'
        body = bytearray(65536)
        body[32768] = middle
        (made / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
        return weights_of(str(made))

    assert write("one", 1) == write("same", 1) != write("other", 2)
    assert weights_of("no/folder", "a" * 40) != weights_of("no/folder", "b" * 40)
    ours = weights_of(str(tmp_path / "one"))
    (tmp_path / "one" / "hf_quant_config.json").write_text("{}")
    assert weights_of(str(tmp_path / "one")) != ours


@pytest.mark.parametrize(
    ("model", "revision"), [("no/folder", None), ("no/folder", "main"), ("s3://bucket/model", None), ("empty", None)]
)
def test_unidentified_weights_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, revision: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(terrace.ConfigError, match=f"weights of {model}|{model} has no weights"):
        weights_of(model, revision)


def test_jobs_move_to_another_namespace(transfers: Transfers) -> None:
    region = transfers.register(memory(), PAGE)
    assert transfers.put(KEYS, region.pages(range(8))).all_ok
    transfers.move_to(private_namespace(NAMESPACE))
    assert transfers.exists(KEYS).ok == [False] * 8
    assert transfers.put(KEYS[:1], region.pages([0])).all_ok
    transfers.move_to(NAMESPACE)
    assert transfers.exists(KEYS).all_ok
    assert private_namespace(NAMESPACE) != private_namespace(NAMESPACE)


def test_descriptor_signals_ended_jobs(transfers: Transfers) -> None:
    region = transfers.register(memory(), PAGE)
    descriptor = transfers.event_fd()
    assert select.select([descriptor], [], [], 0)[0] == []
    transfers.submit_put(KEYS, region.pages(range(8)))
    assert select.select([descriptor], [], [], 30)[0] == [descriptor]
    assert [ended.all_ok for ended in transfers.drain()] == [True]
    assert select.select([descriptor], [], [], 0)[0] == []


def test_accepts_any_memory(transfers: Transfers) -> None:
    ours = [os.urandom(100), os.urandom(PAGE)]
    theirs = [bytearray(100), bytearray(PAGE)]
    transfers.submit_put(KEYS[:2], Buffers(ours))
    transfers.submit_exists(KEYS[:3])
    put = [ended for ended in drained(transfers) if ended.kind == "put"]
    assert put[0].all_ok and put[0].bytes == 100 + PAGE
    assert transfers.get(KEYS[:2], Buffers(theirs)).all_ok and [bytes(one) for one in theirs] == ours
    short = transfers.get(KEYS[:1], Buffers([bytearray(99)]))
    assert not short.all_ok and short.error is not None and "100 bytes" in short.error
    assert transfers.stats()["get"]["failures"] == {"damaged": 1}


def test_memory_of_a_job_is_not_lent_to_another(transfers: Transfers) -> None:
    pages = memory()
    region = transfers.register(pages, PAGE)
    transfers.put(KEYS, region.pages(range(8)))
    # One page for two keys at once: one of them fails.
    got = transfers.get(KEYS[:2], region.pages([9, 9]))
    assert got.ok == [True, False] and got.error is not None and "in use" in got.error
    with pytest.raises(ValueError, match="no page 16"):
        transfers.submit_get(KEYS[:1], region.pages([16]))
    with pytest.raises(ValueError, match="one of each"):
        transfers.submit_get(KEYS[:2], region.pages([1]))
    transfers.unregister(region)
    with pytest.raises(ValueError, match="no such region"):
        transfers.submit_get(KEYS[:1], region.pages([1]))


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    place = f"disk:{tmp_path}"
    for config, words in (
        ({}, '"store" is missing'),
        ({"store": "tape:1"}, "no store 'tape:1'"),
        ({"store": place, "capasity": 1}, "Did you mean 'capacity'"),
        ({"store": place, "secret_file": "x"}, "setting of nodes stores"),
        ({"store": "nodes://127.0.0.1:1"}, "secret"),
        ({"store": place, "reserve": "1000000TiB"}, "set a smaller \"reserve\""),
    ):
        with pytest.raises(terrace.ConfigError, match=words):
            open_store(config, object_bytes=PAGE)


def test_one_process_opens_a_folder_once(tmp_path: Path) -> None:
    config = {"store": f"disk:{tmp_path}", "capacity": "16MiB", "reserve": 0}
    one, two = open_store(config, object_bytes=PAGE), open_store(config, object_bytes=PAGE)
    assert one.store is two.store
    one.close()
    assert two.store.exists(NAMESPACE, b"k" * 16).ok.all(), "it is still open"
    child = os.fork()
    if child == 0:
        try:
            open_store(config, object_bytes=PAGE)
        except terrace.ConfigError as error:
            os._exit(0 if "terrace node" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    two.close()
    # It is closed, so it can be opened again.
    open_store(config, object_bytes=PAGE).close()


def test_a_store_that_is_shut_down_fails_key_by_key(transfers: Transfers, store: terrace.Store) -> None:
    region = transfers.register(memory(), PAGE)
    store.close()
    put = transfers.put(KEYS[:2], region.pages([0, 1]))
    assert put.ok == [False, False] and put.error is not None
    assert sum(transfers.stats()["put"]["failures"].values()) == 2


def test_a_store_that_hangs_or_dies_ends_jobs_in_time(tmp_path: Path) -> None:
    for place in open_place("nodes", tmp_path):
        config = {"store": place.place, "secret_file": place.settings["secret_file"]}
        limits = {"exists_timeout_ms": 500, "get_timeout_ms": 500, "put_timeout_ms": 500}
        shared = open_store(config | limits, object_bytes=PAGE)
        transfers = Transfers(shared.store, NAMESPACE)
        pages = memory()
        region = transfers.register(pages, PAGE)
        assert transfers.put(KEYS, region.pages(range(8))).all_ok
        place.pause(True)
        transfers.submit_get(KEYS, region.pages(range(8, 16)))
        transfers.submit_exists(KEYS)
        assert transfers.wait_idle(20), "the store has let go of the memory"
        assert not any(ok for ended in transfers.drain() for ok in ended.ok)
        pages[8:] = 7
        place.pause(False)
        for node in place.processes:
            node.kill()
        assert not any(transfers.get(KEYS, region.pages(range(8, 16))).ok)
        assert (pages[8:] == 7).all(), "what comes late touches nothing"
        told = transfers.stats()["get"]
        assert sum(told["failures"].values()) == 8 and told["misses"] == 8, "what failed is not asked for again so soon"
        transfers.close()
        shared.close()


def test_an_object_of_several_parts_is_there_if_all_its_parts_are(transfers: Transfers) -> None:
    region = transfers.register(memory(), PAGE)

    def part(key: bytes, number: int) -> bytes:
        return key + number.to_bytes(4, "big")

    parts = [part(key, number) for key in KEYS[:3] for number in range(2)] + [part(KEYS[3], 1)]
    assert transfers.put(parts, region.pages(range(len(parts)))).all_ok
    number = transfers.submit_exists(KEYS[:5], parts=2)
    assert transfers.wait_idle(30)
    [told] = transfers.drain()
    assert told.job == number and told.ok == [True, True, True, False, False]
    transfers.touch(KEYS[:5], parts=2)
    assert transfers.wait_idle(30) and not transfers.drain()
