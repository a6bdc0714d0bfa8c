"""Two processes of vLLM share KV through Terrace's store, by its tier and by its connector."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import make_model
import pytest
from conftest import PROMPTS, Answer, Door, Host, Node, by_name_alone, connector, tier

# Tokens that the second process finds: all whole blocks of a prompt without its last token. The
# engine's own cache counts too.
FOUND_BY_TIER = [288, 320, 64]
FOUND_BY_CONNECTOR = [288, 320, 32]
SLOT_BYTES = 131072 + 4096


def synchronous(settings: dict[str, Any]) -> dict[str, Any]:
    return connector(settings | {"load": "sync"})


def on_disk(folder: Path) -> dict[str, Any]:
    return {"store": f"disk:{folder}", "capacity": "1GiB", "reserve": 0}


DOORS = {"tier": (tier, FOUND_BY_TIER), "connector": (connector, FOUND_BY_CONNECTOR), "sync": (synchronous, FOUND_BY_CONNECTOR)}


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> tuple[Door, list[int]]:
    return DOORS[request.param]


def damage(folder: Path, slots: list[int]) -> None:
    """Flips a byte of some objects."""
    [data] = folder.glob("*/data")
    with data.open("r+b") as file:
        for slot in slots:
            file.seek(slot * SLOT_BYTES + 70_000)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x55]))


def test_the_second_process_finds_what_the_first_has_stored(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    settings, (transfer, found) = on_disk(tmp_path), door
    stored = first.run(model, transfer(settings))
    assert stored.tokens == plain.tokens
    assert stored.counted("vllm:terrace_objects", operation="put", result="hit") >= 10
    hit = second.run(model, transfer(settings))
    assert hit.cached == found and hit.tokens == plain.tokens
    assert hit.counted("vllm:terrace_objects", operation="get", result="hit") == 10
    assert hit.counted("vllm:terrace_failures") == 0


@pytest.mark.parametrize("door", [tier, connector])
def test_names_without_module_paths_are_found(
    first: Host, second: Host, model: Path, plain: Answer, door: Door, tmp_path: Path
) -> None:
    settings = on_disk(tmp_path)
    first.run(model, by_name_alone(door(settings)))
    hit = second.run(model, door(settings))
    assert hit.cached[0] == 288 and hit.tokens == plain.tokens, "the path of a module is no part of the namespace"


def test_what_was_written_behind_is_there_for_the_next_process(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    settings = on_disk(tmp_path) | {"memory": "64MiB", "write_behind": True}
    transfer, found = door
    first.run(model, transfer(settings))
    hit = second.run(model, transfer(settings))
    assert hit.cached == found and hit.tokens == plain.tokens


@pytest.mark.parametrize("kind", ["tier", "connector"])
def test_what_is_loaded_is_what_answers_are_made_of(
    first: Host, second: Host, model: Path, plain: Answer, kind: str, tmp_path: Path
) -> None:
    settings = on_disk(tmp_path)
    transfer, wrong = (tier, "ZeroingTier") if kind == "tier" else (connector, "ZeroingConnector")
    first.run(model, transfer(settings, wrong, "cpu_tiering"), prompts=PROMPTS[:1])
    assert second.run(model, transfer(settings), prompts=PROMPTS[:1]).tokens != plain.tokens[:1]


def test_damaged_chunks_are_computed(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    settings, (transfer, _) = on_disk(tmp_path), door
    first.run(model, transfer(settings))
    damage(tmp_path, [2, 5])
    hit = second.run(model, transfer(settings))
    assert hit.tokens == plain.tokens and {answer["finish"] for answer in hit["answers"]} == {"length"}
    assert hit.counted("vllm:terrace_failures", operation="get", kind="damaged") == 2
    assert hit.counted("vllm:terrace_objects", operation="get", result="hit") >= 2, "the others are used"


def test_chunks_that_vanish_are_computed(first: Host, model: Path, plain: Answer, tmp_path: Path) -> None:
    answer = first.run(model, tier(on_disk(tmp_path), "ClaimingTier", "cpu_tiering"))
    assert answer.tokens == plain.tokens
    assert answer.counted("vllm:terrace_objects", operation="get", result="miss") >= 9


def test_other_weights_find_nothing(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    settings, (transfer, _) = on_disk(tmp_path / "kv"), door
    first.run(model, transfer(settings))
    # Another model with the same name elsewhere: only its bytes differ.
    other = make_model.write(tmp_path / "other" / model.name, seed=1)
    alone = second.run(other, None)
    beside = second.run(other, transfer(settings))
    assert beside.tokens == alone.tokens != plain.tokens
    assert beside.counted("vllm:terrace_objects", operation="get") == 0
    # The same model elsewhere hits all blocks.
    again = second.run(make_model.write(tmp_path / "moved"), transfer(settings), prompts=PROMPTS[:1])
    assert again.cached == [288] and again.tokens == plain.tokens[:1]


def test_engines_that_were_told_something_else_find_nothing(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    settings, (transfer, found) = on_disk(tmp_path), door
    first.run(model, transfer(settings))
    # Positions of some models are scaled by it. Those of this one are not, so the answers are the
    # same.
    other = second.run(model, transfer(settings), max_model_len=768)
    assert other.tokens == plain.tokens and other.counted("vllm:terrace_objects", operation="get") == 0
    larger = second.run(model, transfer(settings), max_num_seqs=8, gpu_memory_utilization=0.5)
    assert larger.tokens == plain.tokens and larger.cached == found, "whatever has no influence"


def test_f81_weights_that_nothing_identifies_are_refused_with_what_to_do(
    second: Host, model: Path, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    settings, (transfer, _) = on_disk(tmp_path), door
    error = second.fails(model, transfer(settings), load_format="dummy")
    assert "--load-format is dummy" in error and '"weights"' in error
    named = second.run(model, transfer(settings | {"weights": "random"}), load_format="dummy", prompts=PROMPTS[:1])
    assert len(named.tokens[0]) == 48


RESETS = {
    "reset": [["reset_prefix_cache", {"reset_connector": True}]],
    "sleep": [["sleep", {"level": 1}], ["wake_up", {}]],
    "silent reset": [["reset_prefix_cache", {}]],
}


@pytest.mark.parametrize("reset", RESETS)
def test_f77_nothing_of_before_a_reset_is_read(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], reset: str, tmp_path: Path
) -> None:
    settings, (transfer, found) = on_disk(tmp_path), door
    if reset == "silent reset" and transfer is tier:
        pytest.skip("vLLM's own cache in host memory is not reset either")
    after = first.run(model, transfer(settings), between=RESETS[reset])
    # Only the engine's own caches have the shared prefixes.
    assert after.tokens == plain.tokens and after.cached == [0, 288, found[2]]
    assert after.counted("vllm:terrace_objects", operation="get") == 0
    assert second.run(model, transfer(settings)).cached == found, "others find what was stored before"


def test_f77_kv_of_new_weights_is_not_shared_with_engines_of_the_old(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    settings, (transfer, found) = on_disk(tmp_path / "kv"), door
    other = make_model.write(tmp_path / "other", seed=1)
    alone = second.run(other, None)
    reload = ["collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}]
    updated = first.run(model, transfer(settings), between=[reload, *RESETS["reset"]])
    assert updated.tokens == alone.tokens != plain.tokens
    hit = second.run(model, transfer(settings))
    assert hit.cached == found and hit.tokens == plain.tokens


def test_requests_that_skip_the_cache_are_not_looked_up(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    settings, (transfer, found) = on_disk(tmp_path), door
    first.run(model, transfer(settings))
    computed = second.run(model, transfer(settings), prompt_logprobs=1)
    assert computed.tokens == plain.tokens and computed.cached == [0, 0, 0]
    assert computed.counted("vllm:terrace_objects", operation="exists") == 0, "nothing is brought to memory for them"
    assert computed.counted("vllm:terrace_objects", operation="get") == 0
    assert second.run(model, transfer(settings)).cached == found, "and what they compute is saved as ever"


def test_a_folder_that_somebody_else_has_is_refused_with_what_to_do(
    first: Host, second: Host, model: Path, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    from terrace_kv.adapters import open_store

    settings, (transfer, _) = on_disk(tmp_path), door
    shared = open_store(settings, object_bytes=131072)
    try:
        assert "terrace node" in second.fails(model, transfer(settings))
    finally:
        shared.close()
    assert "capacity" in second.fails(model, transfer({"store": f"disk:{tmp_path}", "capcity": "1GiB"}))


def test_a_node_for_smaller_objects_is_told_in_the_log_with_the_size_that_it_needs(
    first: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], tmp_path: Path
) -> None:
    node, (transfer, _) = Node(tmp_path, object_max="64KiB"), door
    before = len(first.log.read_text())
    try:
        answer = first.run(model, transfer(node.settings))
    finally:
        node.kill()
    assert answer.tokens == plain.tokens and answer.counted("vllm:terrace_failures", operation="put") >= 9
    log = first.log.read_text()[before:]
    assert "objects of 131072 bytes" in log and "an object of 131072 bytes is too large" in log


def test_both_at_once_share_nodes(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], node: Node
) -> None:
    transfer, found = door
    for host in (first, second):
        host.begin(model, transfer(node.settings))
    answers = [host.end() for host in (first, second)]
    assert [answer.tokens for answer in answers] == [plain.tokens] * 2
    assert second.run(model, transfer(node.settings)).cached == found


def test_a_store_that_hangs_costs_a_bounded_time(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], node: Node
) -> None:
    transfer, found = door
    settings = node.settings | {"get_timeout_ms": 500, "put_timeout_ms": 500, "exists_timeout_ms": 200}
    first.run(model, transfer(settings))
    second.begin(model, transfer(settings), prompts=PROMPTS[:1] * 3, hang=node.process.pid)
    begun = time.monotonic()
    try:
        hung = second.end()
    finally:
        node.go_on()
    assert hung.tokens == plain.tokens[:1] * 3
    assert hung.counted("vllm:terrace_failures") > 0
    assert time.monotonic() - begun < 120
    assert second.run(model, transfer(settings)).cached == found, "it is well again"


def test_a_store_that_dies_is_done_without(
    first: Host, second: Host, model: Path, plain: Answer, door: tuple[Door, list[int]], node: Node
) -> None:
    transfer, _ = door
    first.run(model, transfer(node.settings))
    second.begin(model, transfer(node.settings), kill=node.process.pid)
    died = second.end()
    assert died.tokens == plain.tokens and {answer["finish"] for answer in died["answers"]} == {"length"}
    assert died.counted("vllm:terrace_objects", operation="get", result="hit") == 0
