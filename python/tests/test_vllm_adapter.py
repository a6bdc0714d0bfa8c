"""The parts of the vLLM adapters that work without vLLM. With it: tests/engines/vllm."""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest

import terrace_kv as terrace
from terrace_kv.adapters import open_store
from terrace_kv.transfers import Completed, Transfers
from terrace_kv.vllm import versions
from terrace_kv.vllm.metrics import Growth
from terrace_kv.vllm.naming import tier_namespace

PAGE = 4096
KEYS = [number.to_bytes(36, "big") for number in range(1000)]


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[Transfers]:
    shared = open_store({"store": f"disk:{tmp_path}", "capacity": "16MiB", "reserve": 0}, object_bytes=PAGE)
    made = Transfers(shared.store, b"n" * 16)
    yield made
    made.close()
    shared.close()


def stored(transfers: Transfers, keys: list[bytes]) -> None:
    region = transfers.register(np.ones((len(keys), PAGE), np.uint8), PAGE)
    assert transfers.put(keys, region.pages(range(len(keys)))).all_ok
    transfers.unregister(region)


def lookups_of(transfers: Transfers, seconds: float = 60) -> Any:
    return transfers.lookups(hit="hit", miss="miss", retry="retry", seconds=seconds)


def step(lookups: Any, transfers: Transfers, keys: list[bytes]) -> list[Any]:
    """A step of a scheduler that looks up a request; returns the answers to the lookups of the
    previous step."""
    assert transfers.wait_idle(30)
    found = [lookups.lookup(key, None) for key in keys]
    lookups.flush()
    return found


def test_lookups_are_answered_in_the_next_step(transfers: Transfers) -> None:
    stored(transfers, KEYS[:4])
    lookups = lookups_of(transfers)
    assert step(lookups, transfers, KEYS[:6]) == ["retry"] * 6
    assert step(lookups, transfers, KEYS[:6]) == ["hit"] * 4 + ["miss"] * 2 and not lookups.pending()
    assert transfers.stats()["exists"]["jobs"] == 1, "one question a step, and only about what is new"
    assert step(lookups, transfers, KEYS[:7])[-1] == "retry"
    lookups.missed(KEYS[:1])
    assert step(lookups, transfers, KEYS[:7]) == ["miss"] + ["hit"] * 3 + ["miss"] * 3
    assert not transfers.drain(), "answers are not jobs of the adapter's"


def test_unreadable_object_is_a_miss_despite_an_expired_answer(transfers: Transfers) -> None:
    """A scheduler that gets a hit again would try to read it for ever."""
    stored(transfers, KEYS[:4])
    lookups = lookups_of(transfers)
    lookups.missed(KEYS[:2])
    assert lookups.lookup(KEYS[2], None) == "retry"
    lookups.missed(KEYS[2:4])
    lookups.forget(KEYS[3:4])
    step(lookups, transfers, KEYS[:4])
    assert step(lookups, transfers, KEYS[:4]) == ["miss"] * 3 + ["hit"]


def test_newly_stored_objects_are_hits(transfers: Transfers) -> None:
    lookups = lookups_of(transfers)
    step(lookups, transfers, KEYS[:2])
    assert step(lookups, transfers, KEYS[:2]) == ["miss"] * 2
    stored(transfers, KEYS[:2])
    lookups.forget(KEYS[:2])
    assert step(lookups, transfers, KEYS[:2]) == ["retry"] * 2
    assert step(lookups, transfers, KEYS[:2]) == ["hit"] * 2


def test_answers_older_than_a_store_are_ignored(transfers: Transfers) -> None:
    """Whether or not the store has answered by then."""
    lookups = lookups_of(transfers)
    for at in range(0, len(KEYS), 100):
        keys = KEYS[at : at + 100]
        step(lookups, transfers, keys)
        lookups.forget(keys)
        stored(transfers, keys)
        lookups.forget(keys)
        assert step(lookups, transfers, keys) == ["retry"] * 100
        assert step(lookups, transfers, keys) == ["hit"] * 100


def test_failed_lookup_is_a_miss(transfers: Transfers) -> None:
    lookups = lookups_of(transfers)
    assert lookups.lookup(KEYS[0], None) == "retry"
    transfers.close()
    with pytest.raises(ValueError, match="closed"):
        lookups.flush()
    assert lookups.lookup(KEYS[0], None) == "miss" and not lookups.pending()


def test_answers_expire(transfers: Transfers) -> None:
    lookups = lookups_of(transfers, seconds=0)
    step(lookups, transfers, KEYS[:2])
    assert step(lookups, transfers, KEYS[:2]) == ["miss"] * 2
    assert step(lookups, transfers, KEYS[:2]) == ["retry"] * 2


def test_old_answers_of_many_keys_make_room(transfers: Transfers) -> None:
    """Enough keys that the places of old ones are reused."""
    lookups = lookups_of(transfers, seconds=0)
    stored(transfers, KEYS[::2])
    for round_ in range(12):
        of_round = [round_.to_bytes(4, "big") + bytes(32 + number % 3) + number.to_bytes(2, "big") for number in range(500)]
        keys = KEYS[round_:] + of_round
        assert set(step(lookups, transfers, keys)) == {"retry"}
        truth = ["hit" if key in KEYS[::2] else "miss" for key in keys]
        assert step(lookups, transfers, keys) == truth


def test_lookups_in_any_order_agree_with_a_plain_map(transfers: Transfers) -> None:
    dice = random.Random(7)
    for _ in range(30):
        transfers.remove(KEYS)
        lookups = lookups_of(transfers)
        in_store: set[bytes] = set()
        answers: dict[bytes, str] = {}
        # Misses from the next step on, whatever the store answers.
        unread: set[bytes] = set()
        for _ in range(20):
            start = dice.randrange(40)
            some = KEYS[start : start + dice.randrange(1, 20)]
            match dice.randrange(6):
                case 0:
                    stored(transfers, some)
                    in_store.update(some)
                    lookups.forget(some)
                    answers = {key: answer for key, answer in answers.items() if key not in some}
                case 1:
                    lookups.missed(some)
                    answers.update((key, "miss") for key in some if key in answers)
                    unread.update(key for key in some if key not in answers)
                case 2:
                    dice.shuffle(some)
                case _:
                    pass
            wanted = some + KEYS[: dice.randrange(30)]
            assert step(lookups, transfers, wanted) == [answers.get(key, "retry") for key in wanted]
            for key in [*wanted, *unread]:
                answers.setdefault(key, "hit" if key in in_store - unread else "miss")
            unread.clear()


def test_a_lookup_of_something_else_is_refused(transfers: Transfers) -> None:
    lookup = lookups_of(transfers).lookup
    for wrong in (("text", None), (None, None), (KEYS[0],), (KEYS[0], None, None), ()):
        with pytest.raises(TypeError):
            lookup(*wrong)
    with pytest.raises(TypeError):
        lookup(key=KEYS[0], context=None)
    assert lookup(b"", None) == "retry"


def test_lookups_are_fast(transfers: Transfers) -> None:
    lookups = lookups_of(transfers)
    step(lookups, transfers, KEYS)
    step(lookups, transfers, KEYS)
    best = float("inf")
    lookup = lookups.lookup
    for _ in range(50):
        since = time.perf_counter()
        for key in KEYS:
            lookup(key, None)
        best = min(best, time.perf_counter() - since)
    # A direct call of the store would take longer even on an idle machine.
    assert best < 500e-6


def tier(folder: Path, view: memoryview, **settings: Any) -> Any:
    """A tier over such memory of vLLM's."""
    fake_vllm.install()
    from terrace_kv.vllm.tier import TerraceTier

    spec = SimpleNamespace(config=engine(enable_kv_cache_events=False))
    told = {"store": f"disk:{folder}", "capacity": 16 * PAGE, "reserve": 0, "weights": "w"} | settings
    return TerraceTier(spec, view, "TerraceTier", **told)


def stores(tier: Any, rows: np.ndarray, keys: list[bytes]) -> None:
    tier.submit_store(SimpleNamespace(job_id=1, keys=keys, chunk_ids=np.arange(len(keys))))
    assert tier._transfers.wait_idle(30) and all(one.success for one in tier.get_finished_jobs())


def test_chunks_that_the_engine_uses_are_not_evicted_first(tmp_path: Path) -> None:
    rows = np.ones((8, PAGE), np.uint8)
    made = tier(tmp_path, rows.data, guard={})
    hot, others = KEYS[:2], KEYS[10:]
    stores(made, rows, hot)
    slots = 0
    for at in range(0, 40, 2):
        # vLLM finds them in its own memory in every step, and does not look them up in the store.
        made.touch(hot, None)
        made.on_schedule_end(None)
        stores(made, rows, others[at : at + 2])
        there = made._transfers.exists(hot + others[: at + 2])
        slots = max(slots, sum(there.ok))
        assert there.ok[:2] == [True, True], f"after {at + 2} others"
    assert slots < 42, "others were evicted"
    made.shutdown()


def test_a_store_that_keeps_memory_does_not_stop_the_engine_from_cleaning_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = np.ones((8, PAGE), np.uint8)
    view = rows.data
    made = tier(tmp_path, view)
    monkeypatch.setattr(made._transfers, "wait_idle", lambda seconds: False)
    made.shutdown()
    assert "check whether its disk or network hangs" in caplog.text
    # As vLLM does next.
    view.release()


def is_alive(what: weakref.ref[Any]) -> bool:
    gc.collect()
    return what() is not None


def tier_of_an_engine_that_ends(folder: Path) -> tuple[Any, weakref.ref[Any]]:
    """A tier, and the memory that its engine has released."""
    rows = np.ones((8, PAGE), np.uint8)
    view = rows.data
    made = tier(folder, view)
    view.release()
    return made, weakref.ref(rows)


def test_memory_stays_while_a_store_that_comes_late_may_use_it(tmp_path: Path) -> None:
    made, memory = tier_of_an_engine_that_ends(tmp_path)
    assert is_alive(memory)
    made.shutdown()
    assert not is_alive(memory)


def engine(**changes: Any) -> SimpleNamespace:
    """An engine's parameters, as vLLM passes them to a tier."""
    parallel = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    parallel |= {name: changes.pop(name) for name in list(changes) if name in parallel}
    group = SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("a", "b"))
    told = {
        "groups": (group,),
        "model": SimpleNamespace(name=changes.pop("model", "a model"), dtype=changes.pop("dtype", "bfloat16")),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=changes.pop("blocks_per_chunk", 1)),
        "parallel": SimpleNamespace(**parallel, is_parallelism_agnostic=changes.pop("is_certified", False)),
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
        "replicated_layout": False,
    }
    return SimpleNamespace(**told | changes)


def test_engines_that_differ_have_other_namespaces() -> None:
    def name(weights: str = "w", row_bytes: int = PAGE, **changes: Any) -> bytes:
        return tier_namespace(engine(**changes), row_bytes, None, {"weights": weights})

    others = [
        name(model="another"),
        name(dtype="fp8"),
        name(weights="others"),
        name(row_bytes=2 * PAGE),
        name(blocks_per_chunk=2),
        name(kv_cache_layout="BLHNC"),
        name(tp_size=2, world_size=2),
        name(pp_size=2, world_size=2),
        # The claim that bytes are independent of ranks is ignored without the canonical layout.
        name(tp_size=2, world_size=2, is_certified=True),
    ]
    assert name() == name() and name() not in others
    assert len(set(others)) == len(others) - 1, "only the last two of two ranks are the same"
    with pytest.raises(terrace.ConfigError, match='"weights"'):
        tier_namespace(engine(), PAGE, None, {})


def test_only_a_certified_layout_is_shared_across_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("canonical_mapping")
    module.canonical_format_id = lambda layout: f"1 {layout}"  # type: ignore[attr-defined]
    place = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping"
    for parent in [place.rsplit(".", cut)[0] for cut in range(1, place.count(".") + 1)]:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, place, module)

    def name(ranks: int, is_certified: bool) -> bytes:
        told = engine(tp_size=ranks, world_size=ranks, canonical_layout=True, is_certified=is_certified)
        return tier_namespace(told, PAGE, None, {"weights": "w"})

    assert name(1, True) == name(2, True)
    assert name(1, False) != name(2, False)
    assert name(1, True) != tier_namespace(engine(is_certified=True), PAGE, None, {"weights": "w"})


def test_versions_that_were_not_tested_are_tried(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        versions.check(versions.TESTED[-1])
        versions.check(versions.TESTED[-1] + "+cpu")
        assert not caplog.records
        versions.check("0.99.1")
        versions.check("0.99.1")
    assert len(caplog.records) == 1 and "0.99.1" in caplog.text
    with pytest.raises(RuntimeError, match="0.30 or later"):
        versions.check("0.28.3")


def test_counters_are_reported_as_increases(transfers: Transfers) -> None:
    growth = Growth()
    stored(transfers, KEYS[:3])
    assert growth.of(transfers) == {
        ("vllm:terrace_objects", "put", "hit"): 3,
        ("vllm:terrace_bytes", "put"): 3 * PAGE,
    }
    assert growth.of(transfers) == {}
    missed: Completed = transfers.exists(KEYS[5:6])
    assert not missed.all_ok and growth.of(transfers) == {("vllm:terrace_objects", "exists", "miss"): 1}
