"""SGLang's cache on Terrace's store, in two processes: pages that one has stored are right in the
other, or missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Node, Sglang

Pair = tuple[Sglang, Sglang]
FIRST, PAGES, TOKENS = 1000, 8, 8 * 16


@pytest.fixture
def one(pair: Pair) -> Iterator[Sglang]:
    yield pair[0]
    pair[0].ask("stop")


@pytest.fixture
def two(pair: Pair) -> Iterator[Sglang]:
    yield pair[1]
    pair[1].ask("stop")


def disk(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"store": f"disk:{folder}", "capacity": "256MiB", "reserve": 0, **settings}


def stored_by(server: Sglang, settings: dict[str, Any], **start: Any) -> dict[str, Any]:
    """The pages that a server stored before it ended."""
    server.tell("start", settings=settings, **start)
    told = server.tell("compute", first=FIRST, pages=PAGES, seed=1)
    server.tell("stop")
    pages: dict[str, Any] = told["pages"]
    assert len(pages["kv"]) == PAGES
    return pages


def restored_by(server: Sglang, settings: dict[str, Any], **start: Any) -> dict[str, Any]:
    """The part of them that another server finds."""
    server.tell("start", settings=settings, **start)
    return server.tell("restore", first=FIRST, pages=PAGES)


def restored_in_time(server: Sglang) -> dict[str, Any]:
    """The part of them that a server finds after its store has recovered."""
    until = time.monotonic() + 60
    while True:
        restored = server.tell("restore", first=FIRST, pages=PAGES)
        if restored["tokens"] or time.monotonic() > until:
            return restored
        time.sleep(0.2)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first", "page_head"])
def test_what_one_process_stores_the_other_restores(one: Sglang, two: Sglang, tmp_path: Path, layout: str) -> None:
    one.tell("start", settings=disk(tmp_path), layout=layout)
    stored = one.tell("compute", first=FIRST, pages=PAGES, seed=1)
    on_device = one.tell("device", first=FIRST, pages=PAGES)
    one.tell("stop")
    restored = restored_by(two, disk(tmp_path), layout=layout)
    assert restored["tokens"] == TOKENS and restored["pages"] == stored["pages"]
    assert two.tell("load", first=FIRST, pages=PAGES) == on_device, "and so it is on the device"


def test_pages_that_are_copied_are_the_same_objects(one: Sglang, two: Sglang, tmp_path: Path) -> None:
    stored = stored_by(one, disk(tmp_path, interface_v1=0))
    restored = restored_by(two, disk(tmp_path))
    assert restored["tokens"] == TOKENS and restored["pages"] == stored
    two.tell("stop")
    assert restored_by(two, disk(tmp_path, interface_v1=0))["pages"] == stored


def test_other_bytes_under_valid_checksums_are_seen(one: Sglang, two: Sglang, tmp_path: Path) -> None:
    # The control of all tests here: restored pages equal those of the store, and the comparison
    # detects differences.
    one.tell("start", settings=disk(tmp_path))
    stored = one.tell("compute", first=FIRST, pages=PAGES, seed=1)["pages"]
    assert all(one.tell("forge", first=FIRST, pages=PAGES)["forged"])
    one.tell("stop")
    restored = restored_by(two, disk(tmp_path))
    assert restored["tokens"] == TOKENS and restored["pages"].keys() == stored.keys()
    assert all(restored["pages"]["kv"][key] != stored["kv"][key] for key in stored["kv"])


def test_damaged_pages_are_not_there(one: Sglang, two: Sglang, tmp_path: Path) -> None:
    stored = stored_by(one, disk(tmp_path))
    slots = max((file for file in tmp_path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_blocks)
    page = 16 * 4 * 2 * 64 * 2
    with slots.open("r+b") as file:
        content = file.read()
        # The sixth page of the prompt, keys and values: the pages before it are still usable.
        whole = [at for at in range(0, len(content), 4096) if any(content[at : at + 4096])]
        for at in whole[len(whole) // 2 :]:
            file.seek(at + 100)
            file.write(bytes(byte ^ 1 for byte in content[at + 100 : at + 104]))
    assert len(content) >= PAGES * 2 * page
    restored = restored_by(two, disk(tmp_path))
    assert 0 <= restored["tokens"] < TOKENS
    assert restored["pages"].get("kv", {}).items() <= stored["kv"].items(), "and whatever came is right"


def test_a_longer_prompt_finds_what_is_there_of_it(one: Sglang, two: Sglang, tmp_path: Path) -> None:
    stored = stored_by(one, disk(tmp_path))
    two.tell("start", settings=disk(tmp_path))
    restored = two.tell("restore", first=FIRST, pages=2 * PAGES)
    assert restored["tokens"] == TOKENS and restored["pages"] == stored
    assert two.tell("restore", first=7 * FIRST, pages=PAGES)["tokens"] == 0, "another prompt"


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "2" * 40},
        {"attention_backend": "triton"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"config": {"head_dim": 32, "head_num": 4}},
        {"layout": "page_first_direct"},
        {"settings": {"salt": "another"}},
        {"settings": {"revision": "tuned"}},
    ],
    ids=str,
)
def test_whatever_makes_kv_differ_keeps_pages_apart(
    one: Sglang, two: Sglang, tmp_path: Path, other: dict[str, Any]
) -> None:
    stored_by(one, disk(tmp_path))
    settings = disk(tmp_path, **other.get("settings", {}))
    start = {name: value for name, value in other.items() if name != "settings"}
    assert restored_by(two, settings, **start)["tokens"] == 0
    two.tell("stop")
    assert restored_by(two, disk(tmp_path))["tokens"] == TOKENS, "who is alike finds them"


def test_other_weights_and_cleared_pages_are_not_read(one: Sglang, two: Sglang, tmp_path: Path) -> None:
    stored_by(one, disk(tmp_path))
    two.tell("start", settings=disk(tmp_path))
    two.tell("weights", version="step 2")
    assert two.tell("restore", first=FIRST, pages=PAGES)["tokens"] == 0
    two.tell("weights", version="default")
    assert two.tell("clear")["cleared"]
    assert two.tell("restore", first=FIRST, pages=PAGES)["tokens"] == 0
    computed = two.tell("compute", first=FIRST, pages=PAGES, seed=2)
    assert len(computed["pages"]["kv"]) == PAGES, "what is stored since is not in the way"


def test_what_is_wrong_with_the_settings_is_said(two: Sglang, tmp_path: Path) -> None:
    answer = two.ask("start", settings=disk(tmp_path, capasity="1GiB"))
    assert "Did you mean 'capacity'" in answer["error"]
    two.ask("stop")
    answer = two.ask("start", settings=disk(tmp_path), revision=None)
    assert "--revision" in answer["error"]
    two.ask("stop")
    answer = two.ask("start", settings={"store": "nodes://127.0.0.1:9", "secret_file": "/nowhere"})
    assert "secret" in answer["error"] or "nowhere" in answer["error"]


@pytest.mark.parametrize(
    ("pools", "config"),
    [
        (["kv", "swa"], {"page_size": 16, "sliding_window_size": 32}),
        (["kv", "mamba"], {"page_size": 1}),
    ],
    ids=["sliding window", "mamba"],
)
def test_pools_beside_kv(one: Sglang, two: Sglang, tmp_path: Path, pools: list[str], config: dict[str, Any]) -> None:
    start = {"config": {**config, "pools": pools, "num_layers": 6, "full_attention_layer_ids": [1, 3]}}
    one.tell("start", settings=disk(tmp_path), **start)
    stored = one.tell("compute", first=FIRST, pages=PAGES, seed=1)["pages"]
    one.tell("stop")
    assert set(stored) == set(pools)
    two.tell("start", settings=disk(tmp_path), **start)
    restored = two.tell("restore", first=FIRST, pages=PAGES)
    assert restored["tokens"] == PAGES * config["page_size"]
    assert set(restored["pages"]) == set(pools), "what belongs to the end of the prefix came along"
    for pool in pools:
        assert restored["pages"][pool].items() <= stored[pool].items()


def test_a_store_that_hangs_costs_a_bounded_time(one: Sglang, two: Sglang, node: Node) -> None:
    stored = stored_by(one, node.settings)
    two.tell("start", settings=node.settings)
    node.hang(True)
    waited = two.tell("restore", first=FIRST, pages=PAGES)
    assert waited["tokens"] == 0 and waited["seconds"] < 10
    # A hanging store is skipped: later requests do not wait for it.
    again = [two.tell("restore", first=FIRST, pages=PAGES)["seconds"] for _ in range(6)]
    assert min(again) < 1
    node.hang(False)
    restored = restored_in_time(two)
    assert restored["tokens"] == TOKENS and restored["pages"] == stored, "and is used again when it is well"


def test_a_store_that_dies(one: Sglang, two: Sglang, node: Node) -> None:
    stored = stored_by(one, node.settings)
    node.make_durable()
    two.tell("start", settings=node.settings)
    node.die()
    dead = two.tell("restore", first=FIRST, pages=PAGES)
    assert dead["tokens"] == 0 and dead["seconds"] < 10
    assert two.tell("compute", first=5 * FIRST, pages=PAGES)["seconds"] < 20, "nor does storing hold anybody up"
    node.start()
    restored = restored_in_time(two)
    assert restored["tokens"] > 0 and restored["pages"]["kv"].items() <= stored["kv"].items()


def test_failures_and_delays_of_sglangs_own(one: Sglang, two: Sglang, tmp_path: Path) -> None:
    one.tell("start", settings=disk(tmp_path))
    stored = [one.tell("compute", first=FIRST * n, pages=PAGES, seed=n)["pages"]["kv"] for n in range(1, 6)]
    one.tell("stop")
    injected = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": 0.4, "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": 0.05}
    started = two.tell("start", settings=disk(tmp_path), environment=injected)
    assert started["backend"] == "HiCacheStorageFailureInjector"
    tokens = []
    for turn in range(4):
        for n in range(1, 6):
            restored = two.tell("restore", first=FIRST * n, pages=PAGES)
            assert restored["pages"].get("kv", {}).items() <= stored[n - 1].items()
            tokens.append(restored["tokens"])
        computed = two.tell("compute", first=FIRST * (20 + turn), pages=2, seed=turn)
        assert len(computed["pages"]["kv"]) == 2
    assert TOKENS in tokens, "what fails now and then is had in the end"


def test_metrics(one: Sglang, two: Sglang, tmp_path: Path) -> None:
    one.tell("start", settings=disk(tmp_path))
    assert one.tell("figures") == {"told": None}, "nobody has asked for metrics"
    one.tell("compute", first=FIRST, pages=PAGES)
    one.tell("stop")
    two.tell("start", settings=disk(tmp_path), has_metrics=True)
    two.tell("restore", first=FIRST, pages=PAGES)
    two.tell("compute", first=2 * FIRST, pages=2)
    # Counters are updated once per second.
    time.sleep(1.1)
    told = two.tell("figures")
    assert told["prometheus"]["terrace_l3_objects_total"]["get hit"] == 2 * PAGES, "keys and values of each page"
    assert told["prometheus"]["terrace_l3_bytes_total"]["put"] > 0


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_kv_that_all_ranks_have_alike_is_shared(pair: Pair, node: Node, layout: str) -> None:
    one, two = pair
    stored = one.tell("latent", settings=node.settings, layout=layout, rank=0, ranks=2, seed=1)
    loaded = two.tell("latent", settings=node.settings, layout=layout, rank=3, ranks=4)
    assert stored["done"] == loaded["done"] == [True] * 4
    assert loaded["pages"] == stored["pages"] and len(set(stored["pages"])) == 4


class Ranks:
    """Both processes as the ranks of one server."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def tell(self, do: str, **order: Any) -> list[dict[str, Any]]:
        """Sends a command to both ranks at once, because they synchronise."""
        for each in self.pair:
            each.send(do, **order)
        answers = [each.answer() for each in self.pair]
        assert not any("error" in answer for answer in answers), answers
        return answers

    def start(self, settings: dict[str, Any], **start: Any) -> None:
        for rank, each in enumerate(self.pair):
            each.send("start", settings=settings, rank=rank, ranks=2, **start)
        answers = [each.answer() for each in self.pair]
        assert not any("error" in answer for answer in answers), answers


@pytest.fixture(scope="session")
def ranks(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    meet = str(tmp_path_factory.mktemp("ranks") / "meet")
    for rank, each in enumerate(pair):
        each.send("join", rank=rank, ranks=2, meet=meet)
    assert [each.answer() for each in pair] == [{}, {}]
    return Ranks(pair)


def test_two_ranks_and_one_rank_after_two(ranks: Ranks, pair: Pair, node: Node) -> None:
    ranks.start(node.settings)
    for rank, each in enumerate(pair):
        # Each rank has the KV of its heads.
        each.send("compute", first=FIRST, pages=PAGES, seed=rank)
    stored = [each.answer()["pages"] for each in pair]
    assert stored[0]["kv"].keys() == stored[1]["kv"].keys() and stored[0] != stored[1]
    ranks.tell("stop")
    ranks.start(node.settings)
    restored = ranks.tell("restore", first=FIRST, pages=PAGES)
    assert [each["tokens"] for each in restored] == [TOKENS, TOKENS]
    assert [each["pages"] for each in restored] == stored, "each its own"
    ranks.tell("stop")
    for each in pair:
        assert restored_by(each, node.settings)["tokens"] == 0, "one rank does not take what is a half for a whole"
        each.tell("stop")
    alone = stored_by(pair[0], node.settings)
    ranks.start(node.settings)
    restored = ranks.tell("restore", first=FIRST, pages=PAGES)
    assert [each["pages"] for each in restored] == stored, "nor do two take the whole for their halves"
    ranks.tell("stop")
    assert restored_by(pair[1], node.settings)["pages"] == alone
    pair[1].tell("stop")


def test_ranks_on_a_folder_have_their_own(ranks: Ranks, pair: Pair, tmp_path: Path) -> None:
    ranks.start(disk(tmp_path))
    stored = [told["pages"] for told in ranks.tell("compute", first=FIRST, pages=PAGES)]
    ranks.tell("stop")
    assert len(list(tmp_path.iterdir())) == 2
    ranks.start(disk(tmp_path))
    assert [told["pages"] for told in ranks.tell("restore", first=FIRST, pages=PAGES)] == stored
    ranks.tell("stop")


def test_a_rank_that_lost_pages_shortens_the_prefix_for_all(ranks: Ranks, pair: Pair, tmp_path: Path) -> None:
    ranks.start(disk(tmp_path))
    stored = [told["pages"]["kv"] for told in ranks.tell("compute", first=FIRST, pages=PAGES)]
    ranks.tell("stop")
    ranks.start(disk(tmp_path))
    pair[1].send("lose", key=list(stored[1])[5])
    assert pair[1].answer() == {}
    restored = ranks.tell("restore", first=FIRST, pages=PAGES)
    assert [told["tokens"] for told in restored] == [5 * 16, 5 * 16]
    ranks.tell("stop")
