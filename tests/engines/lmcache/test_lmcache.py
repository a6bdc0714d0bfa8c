"""LMCache's own storage, in several processes, over Terrace's stores: what one stores another fetches, and nothing that
goes wrong gives a wrong byte, a failure or a hang."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PEER = Path(__file__).with_name("peer.py")
CHUNK_BYTES = 2 * 4 * 64 * 128 * 2

_spec = importlib.util.spec_from_file_location("terrace_places", ROOT / "python/tests/conftest.py")
assert _spec is not None and _spec.loader is not None
places = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = places
_spec.loader.exec_module(places)

MODEL = {
    "weights": "revision 1",
    "kv_dtype": "bfloat16",
    "layout": "a test's",
    "chunk_tokens": 64,
    "parallelism": {"tensor": 1, "pipeline": 1},
}


class Peer:
    """LMCache in a separate process, which opens one storage after the other."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __call__(self, do: str, numbers: list[int] | None = None, **others: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        told = {"do": do, **others} if numbers is None else {"do": do, "numbers": numbers, **others}
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def open(self, **params: Any) -> dict[str, Any]:
        adapter = {
            "type": "native_plugin",
            "module_path": "terrace_kv.lmcache",
            "class_name": "TerraceClient",
            "adapter_params": params,
        }
        return self("open", adapter=adapter)

    @contextmanager
    def over(self, **params: Any) -> Iterator[Peer]:
        """Opens a storage over a store."""
        assert self.open(**params) == {"open": True}
        yield self
        assert self("close") == {"open": False}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Peer]]:
    """Two processes."""
    log = tmp_path_factory.mktemp("peers") / "log"
    both = (Peer(log), Peer(log))
    yield both
    for one in both:
        assert one.process.stdin is not None
        one.process.stdin.close()
        try:
            assert one.process.wait(60) == 0
        finally:
            one.process.kill()


def on_disk(folder: Path, **others: Any) -> dict[str, Any]:
    return {"store": f"disk:{folder}/kv", "object_max": CHUNK_BYTES, "capacity": "64MiB", "reserve": 0, **MODEL, **others}


@pytest.mark.parametrize("kind", ["disk", "nodes"])
def test_a_second_process_fetches_what_the_first_stored(kind: str, peers: tuple[Peer, Peer], tmp_path: Path) -> None:
    for place in places.open_place(kind, tmp_path):
        own = {name: place.settings[name] for name in ("secret_file",) if name in place.settings}
        params = on_disk(tmp_path) if kind == "disk" else {"store": place.place, **own, **MODEL}
        with peers[0].over(**params) as first:
            assert first("store", list(range(12))) == {"stored": 12}
            first("store", [100], rank=1, world=2)
            first("store", [200], salt="a tenant")
        with peers[1].over(**params) as second:
            told = second("fetch", [*range(12), 50])
            assert (told["hits"], told["right"], told["l2"]) == (list(range(12)), True, 12)
            # Other ranks, world sizes, models and tenants have other KV.
            assert second("fetch", [100], rank=1, world=2)["hits"] == [0]
            for other in [{}, {"rank": 1, "world": 4}, {"rank": 1, "world": 2, "model": "b"}]:
                assert second("fetch", [100], **other)["hits"] == []
            assert second("fetch", [200], salt="a tenant")["hits"] == [0] and second("fetch", [200])["hits"] == []
            second("delete", [3])
        with peers[0].over(**params) as third:
            assert third("fetch", list(range(12)))["hits"] == [0, 1, 2]
            told = third("fetch", list(range(12)), policy="full")
            assert told["hits"] == [number for number in range(12) if number != 3] and told["right"]


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "revision 2"},
        {"kv_dtype": "float16"},
        {"layout": "another"},
        {"chunk_tokens": 32},
        {"parallelism": {"tensor": 2, "pipeline": 1}},
    ],
)
def test_what_the_keys_do_not_say_keeps_kv_apart_too(
    changed: dict[str, Any], peers: tuple[Peer, Peer], tmp_path: Path
) -> None:
    with peers[0].over(**on_disk(tmp_path)) as first:
        assert first("store", [1]) == {"stored": 1}
    with peers[1].over(**on_disk(tmp_path, **changed)) as second:
        assert second("fetch", [1])["hits"] == []


def test_it_does_not_start_without_what_the_keys_do_not_say(peers: tuple[Peer, Peer], tmp_path: Path) -> None:
    for missing in [*MODEL, "object_max"]:
        params = {name: value for name, value in on_disk(tmp_path).items() if name != missing}
        assert missing in peers[0].open(**params)["error"]
    assert "capacity" in peers[0].open(**on_disk(tmp_path, capcity="1GiB"))["error"]


def test_corrupt_chunks_are_misses(peers: tuple[Peer, Peer], tmp_path: Path) -> None:
    import torch
    from peer import chunk

    with peers[0].over(**on_disk(tmp_path)) as first:
        assert first("store", list(range(8))) == {"stored": 8}
    wanted = chunk(3).view(torch.uint8).numpy().tobytes()
    files = [one for one in (tmp_path / "kv").rglob("*") if one.is_file()]
    (file,) = [one for one in files if wanted in one.read_bytes()]
    with file.open("r+b") as opened:
        opened.seek(file.read_bytes().index(wanted) + 1000)
        opened.write(b"\x5a\xa5\x5a")
    with peers[1].over(**on_disk(tmp_path)) as second:
        told = second("fetch", list(range(8)))
        assert (told["hits"], told["right"]) == ([0, 1, 2], True)
        # It can be stored again.
        assert second("store", [3])["stored"] == 1


def test_a_node_that_hangs_or_dies_costs_a_bounded_time(peers: tuple[Peer, Peer], tmp_path: Path) -> None:
    for place in places.open_place("nodes", tmp_path):
        params = {"store": place.place, "secret_file": place.settings["secret_file"], **MODEL}
        with peers[0].over(**params) as first:
            assert first("store", list(range(4))) == {"stored": 4}
        with peers[1].over(**params) as second:
            place.pause(True)
            for _ in range(6):
                told = second("fetch", list(range(4)))
                assert told["hits"] == [] and told["seconds"] < 10
            # The breaker is open by now: nobody waits any more.
            assert told["seconds"] < 0.5
            place.pause(False)
            deadline = time.monotonic() + 60
            while not (told := second("fetch", list(range(4))))["hits"] and time.monotonic() < deadline:
                time.sleep(0.2)
            assert (told["hits"], told["right"]) == ([0, 1, 2, 3], True)
            (node,) = place.processes
            node.send_signal(signal.SIGKILL)
            node.wait()
            assert second("fetch", [10, 11])["hits"] == []
            assert second("store", [20])["stored"] == 0, "and nothing hangs"
