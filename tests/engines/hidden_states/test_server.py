"""Hidden states of a real vLLM server in a feature store on a real node: their content, and
failures."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrace_kv as terrace
from conftest import LAYERS, VOCABULARY, Server, places
from terrace_kv.hidden_states import read_hidden_states

WAIT = 60


class World:
    """A node, a server that stores hidden states there, and a consumer."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.secret, self.port = folder / "secret", places.free_port()
        self.secret.write_text("known to those who may use the nodes")
        self.start_node()
        # Long enough for a busy machine, and short enough to wait for.
        timeouts = {"exists_timeout_ms": 4000, "get_timeout_ms": 4000, "put_timeout_ms": 4000}
        self.store_settings = {"secret_file": str(self.secret), **timeouts}
        settings = {
            "store": f"nodes://127.0.0.1:{self.port}",
            "store_settings": self.store_settings,
            # Small, so that samples are split.
            "object_max": "64KiB",
            "max_resident": "5MiB",
            # The restarted server takes over its samples.
            "owner": 0,
            "within_s": 8,
            "hold_s": 2,
        }
        try:
            self.server = Server(model, settings, folder / "vllm.log")
        except BaseException:
            self.node.kill()
            raise

    def start_node(self) -> None:
        listen = ["--listen", f"127.0.0.1:{self.port}", "--memory", "64MiB", "--secret-file", str(self.secret)]
        command = [places.the_program(), "node", *listen, "--object-max", "64KiB"]
        self.node = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        places.wait_for(self.port)

    def consumer(self) -> terrace.FeatureStore:
        store = terrace.Store(f"nodes://127.0.0.1:{self.port}", **self.store_settings)
        return terrace.FeatureStore(store, "hidden states")

    def objects(self) -> int:
        """The number of objects on the node, without the three for the producer's number."""
        stats = terrace.Store(f"nodes://127.0.0.1:{self.port}", **self.store_settings).stats()
        return max(int(stats["remote"]["objects"]) - 3, 0)

    def figures(self) -> dict[str, float]:
        """The server's metrics of stored samples: a step updates them."""
        self.server.ask(prompt(0, 3), hidden_states=False)
        return self.server.metrics()

    def until_well(self) -> dict[str, Any]:
        """Returns the first answer with a ref whose sample can be read."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            told = self.server.ask(prompt(5, 40))["kv_transfer_params"]
            if "hidden_states_ref" in told:
                ref = terrace.FeatureRef(told["hidden_states_ref"])
                try:
                    features = self.consumer()
                    read_hidden_states(features, ref, wait=9)
                    features.release(ref)
                    return dict(told)
                except terrace.TerraceError:
                    continue
            time.sleep(0.5)
        raise TimeoutError("the store does not get well")


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(model, tmp_path_factory.mktemp("world"))
    try:
        yield world
    finally:
        world.node.send_signal(signal.SIGCONT)
        world.server.stop()
        world.node.kill()
        world.node.wait()


def prompt(seed: int, tokens: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY, tokens).tolist()
    return found


def expected(model: Path, tokens: list[int]) -> Any:
    """The result of transformers: (tokens, layers, size)."""
    import torch
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in LAYERS], dim=1)


def until(is_so: Callable[[], bool], patience_s: float = 30) -> None:
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)


def is_gone(features: terrace.FeatureStore, ref: terrace.FeatureRef) -> bool:
    try:
        features.get(ref)
        return False
    except terrace.Gone:
        return True


def ref_of(answer: dict[str, Any]) -> terrace.FeatureRef:
    told = answer["kv_transfer_params"]
    assert set(told) == {"hidden_states_ref", "hidden_states_within_s"}, told
    return terrace.FeatureRef(told["hidden_states_ref"])


def check(world: World, model: Path, answer: dict[str, Any], tokens: list[int]) -> None:
    """Reads the sample, compares every state, and releases it."""
    features, ref = world.consumer(), ref_of(answer)
    states, token_ids = read_hidden_states(features, ref, wait=WAIT)
    assert token_ids.tolist() == tokens
    wanted = expected(model, tokens)
    assert states.shape == wanted.shape
    assert (states - wanted).abs().max() < 1e-3 * wanted.abs().max()
    assert features.release(ref) == "freed"
    with pytest.raises(terrace.Gone):
        features.get(ref)


def test_they_are_those_that_transformers_computes(world: World, model: Path) -> None:
    for seed, tokens in enumerate([1, 31, 32, 80, 300]):
        asked = prompt(seed, tokens)
        check(world, model, world.server.ask(asked), asked)


def test_a_prompt_that_vllm_has_cached_has_all_of_them_too(world: World, model: Path) -> None:
    asked = prompt(77, 200)
    for _ in range(2):
        check(world, model, world.server.ask(asked), asked)
    longer = asked + prompt(78, 50)
    check(world, model, world.server.ask(longer), longer)


def test_output_tokens_are_included_if_asked_for(world: World, model: Path) -> None:
    asked = prompt(9, 40)
    answer = world.server.ask(asked, tokens=10, include_output_tokens=True)
    generated = answer["choices"][0]["token_ids"]
    assert len(generated) == 10
    check(world, model, answer, asked + generated[:-1])


def test_samples_have_the_names_that_clients_give_and_supersede(world: World) -> None:
    first = ref_of(world.server.ask(prompt(1, 40), sample="epoch 1/7"))
    features = world.consumer()
    read_hidden_states(features, first, wait=WAIT)
    second = ref_of(world.server.ask(prompt(2, 40), sample="epoch 1/7"))
    assert first.sample == second.sample == "epoch 1/7"
    _, token_ids = read_hidden_states(features, second, wait=WAIT)
    assert token_ids.tolist() == prompt(2, 40)
    # A promised ref can be read as soon as the sample exists, a moment before it supersedes the
    # earlier one.
    until(lambda: is_gone(features, first))
    assert features.release(second) == "freed"


def test_what_cannot_be_is_told_and_the_request_is_answered(world: World) -> None:
    for wrong in ["x" * 600, "", 7]:
        answer = world.server.ask(prompt(1, 40), sample=wrong)
        assert len(answer["choices"][0]["text"]) > 0 or answer["usage"]["completion_tokens"] == 1
        assert "the name of a sample" in answer["kv_transfer_params"]["hidden_states_error"]
    assert world.server.ask(prompt(1, 40), hidden_states=False)["kv_transfer_params"] is None


def test_requests_wait_for_room_and_then_are_told_that_there_is_none(world: World) -> None:
    """Back-pressure: 5 MiB of the store may wait to be consumed, and a sample of 300 tokens takes 1.1."""
    features = world.consumer()
    until(lambda: world.objects() == 0)
    refs = []
    started = time.monotonic()
    for seed in range(100, 110):
        told = world.server.ask(prompt(seed, 300))["kv_transfer_params"]
        if "hidden_states_error" in told:
            break
        refs.append(terrace.FeatureRef(told["hidden_states_ref"]))
        read_hidden_states(features, refs[-1], wait=WAIT)
    assert len(refs) == 4
    assert "max_resident" in told["hidden_states_error"] and time.monotonic() - started > 2
    for ref in refs:
        features.release(ref)
    ref = ref_of(world.server.ask(prompt(1, 300)))
    read_hidden_states(features, ref, wait=WAIT)
    features.release(ref)


def test_requests_that_are_aborted_leave_nothing(world: World) -> None:
    stored = world.figures()["samples_total"]
    body = {"model": world.server.model, "prompt": prompt(3, 100), "max_tokens": 800, "stream": True}
    text = json.dumps(body | {"ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
    with socket.create_connection(("127.0.0.1", world.server.port)) as client:
        client.sendall(f"{head}\r\n\r\n{text}".encode())
        assert b"200" in client.recv(100)
        client.recv(1000)
    # It disappears while the request decodes.
    check_after = ref_of(world.server.ask(prompt(4, 40)))
    features = world.consumer()
    read_hidden_states(features, check_after, wait=WAIT)
    features.release(check_after)
    until(lambda: world.figures()["samples_total"] == stored + 1)
    until(lambda: world.objects() == 0)


def test_metrics_tell_what_happens(world: World) -> None:
    features = world.consumer()
    before = world.figures()
    ref = ref_of(world.server.ask(prompt(6, 64)))
    read_hidden_states(features, ref, wait=WAIT)
    features.release(ref)
    until(lambda: world.figures()["samples_total"] > before["samples_total"])
    after = world.server.metrics()
    assert after["bytes_total"] - before["bytes_total"] == 64 * (3 * 256 * 4 + 8)
    assert after["seconds_count"] == after["samples_total"] and after["refused_total"] >= 3


def test_a_node_that_hangs_costs_requests_nothing_and_is_told(world: World) -> None:
    world.node.send_signal(signal.SIGSTOP)
    promised = []
    try:
        told: dict[str, Any] = {}
        slowest = 0.0
        for seed in range(40):
            started = time.monotonic()
            told = world.server.ask(prompt(seed, 40), timeout=30)["kv_transfer_params"]
            slowest = max(slowest, time.monotonic() - started)
            if "hidden_states_error" in told:
                break
            promised.append(terrace.FeatureRef(told["hidden_states_ref"]))
            time.sleep(0.5)
        assert "hidden_states_error" in told, "it is told in the end"
        assert slowest < 10
    finally:
        world.node.send_signal(signal.SIGCONT)
    world.until_well()
    features = world.consumer()

    def is_nothing_left() -> bool:
        # Promised samples may still arrive, and then belong to the consumer. Partial ones belong to
        # no one.
        for ref in promised:
            with suppress(terrace.TerraceError):
                read_hidden_states(features, ref)
                features.release(ref)
        return world.objects() == 0

    until(is_nothing_left, patience_s=60)


def test_a_node_that_dies_costs_requests_nothing_and_is_told(world: World) -> None:
    world.node.kill()
    world.node.wait()
    told: dict[str, Any] = {}
    for seed in range(40):
        told = world.server.ask(prompt(seed, 40), timeout=30)["kv_transfer_params"]
        if "hidden_states_error" in told:
            break
        time.sleep(0.5)
    assert "hidden_states_error" in told, "it is told in the end"
    world.start_node()
    world.until_well()


def test_samples_outlive_a_server_that_is_killed_and_nothing_is_left(world: World, model: Path) -> None:
    features = world.consumer()
    refs = [ref_of(world.server.ask(prompt(seed, 40))) for seed in range(4)]
    for ref in refs:
        read_hidden_states(features, ref, wait=WAIT)
    world.server.ask(prompt(9, 300))
    world.server.kill()
    world.server.start()
    for seed, ref in enumerate(refs):
        _, token_ids = read_hidden_states(features, ref)
        assert token_ids.tolist() == prompt(seed, 40)
        assert features.release(ref) == "freed"
    answer = world.server.ask(prompt(1, 80))
    check(world, model, answer, prompt(1, 80))
    world.server.stop()
    # Unread samples expire, whoever is the producer then.
    store = terrace.Store(f"nodes://127.0.0.1:{world.port}", **world.store_settings)
    heir = terrace.FeatureStore(store, "hidden states", owner=0, max_hold=0.001)
    until(lambda: heir.gc() is not None and heir.stats()["live"] == 0 and heir.stats()["resident_bytes"] == 0)
    until(lambda: world.objects() == 0)
