"""Real vLLM engines on the CPU, with a tiny model."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import make_model  # noqa: E402

PREFIX = list(range(10, 310))
# The second shares nine blocks of 32 tokens with the first, and the third two.
PROMPTS = [PREFIX + [7, 8, 9], PREFIX + [11, 12, 13, 14] * 10, PREFIX[:64]]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


class Answer(dict[str, Any]):
    """The answers of an engine."""

    @property
    def tokens(self) -> list[list[int]]:
        return [answer["tokens"] for answer in self["answers"]]

    @property
    def cached(self) -> list[int]:
        return [answer["cached"] for answer in self["answers"]]

    def counted(self, name: str, **labels: str) -> float:
        """Returns the sum of a counter over all other labels."""
        total = 0.0
        for told, value in self["metrics"].items():
            its_name, _, its_labels = told.partition("{")
            found = json.loads("{" + its_labels) if its_labels else {}
            if its_name == name and labels.items() <= found.items():
                total += value
        return total


class Host:
    """A process that runs engines one after the other."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "host.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment,
        )

    def begin(self, model: Path, transfer: dict[str, Any] | None, **more: Any) -> None:
        """Starts an engine with prompts; :meth:`end` returns the result."""
        asked = {name: more.pop(name) for name in ("prompt_logprobs", "between") if name in more}
        asked["prompts"] = more.pop("prompts", PROMPTS)
        asked["engine"] = {"model": str(model), "kv_transfer_config": transfer} | more
        assert self.process.stdin is not None
        print(json.dumps({"what": "generate"} | asked), file=self.process.stdin, flush=True)

    def end(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine has died: see {self.log}\n{self.log.read_text()[-3000:]}"
        answer = Answer(json.loads(line))
        assert "error" not in answer, f"{answer['error']}: see {self.log}\n{self.log.read_text()[-3000:]}"
        return answer

    def run(self, model: Path, transfer: dict[str, Any] | None, **more: Any) -> Answer:
        self.begin(model, transfer, **more)
        return self.end()

    def fails(self, model: Path, transfer: dict[str, Any] | None, **more: Any) -> str:
        """Returns the error of an engine that does not start."""
        self.begin(model, transfer, **more)
        assert self.process.stdout is not None
        return str(json.loads(self.process.stdout.readline())["error"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class Node:
    """A real `terrace node`."""

    def __init__(self, folder: Path, object_max: str = "1MiB") -> None:
        self.folder, self.object_max = folder, object_max
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = folder / "secret"
        self.secret.write_text(base64.b64encode(os.urandom(32)).decode() + "\n")
        self.secret.chmod(0o600)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        terrace = os.environ.get("TERRACE", "terrace")
        command = [terrace, "node", "--listen", self.address, "--secret-file", str(self.secret)]
        command += ["--memory", "256MiB", "--object-max", self.object_max]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        host, port = self.address.split(":")
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the node does not answer")

    @property
    def settings(self) -> dict[str, Any]:
        return {"store": f"nodes://{self.address}", "secret_file": str(self.secret)}

    def hang(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def tier(settings: dict[str, Any], kind: str = "TerraceTier", module: str = "terrace_kv.vllm") -> dict[str, Any]:
    """The configuration of the offloading connector with a tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [{"type": kind, "module_path": module} | settings],
        },
    }


def by_name_alone(transfer: dict[str, Any]) -> dict[str, Any]:
    """The same without the path of a module, so that only what an installed package registers with vLLM is found."""
    transfer.pop("kv_connector_module_path", None)
    for tier in transfer["kv_connector_extra_config"].get("secondary_tiers", []):
        del tier["module_path"]
    return transfer


def connector(settings: dict[str, Any], kind: str = "TerraceConnector", module: str = "terrace_kv.vllm") -> dict[str, Any]:
    """The configuration of Terrace's connector."""
    return {
        "kv_connector": kind,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return make_model.write(folder / "model")


@pytest.fixture(scope="session")
def first(folder: Path) -> Iterator[Host]:
    """The process that stores."""
    host = Host(folder / "first.log")
    yield host
    host.close()


@pytest.fixture(scope="session")
def second(folder: Path) -> Iterator[Host]:
    """The process that finds the first one's objects."""
    host = Host(folder / "second.log")
    yield host
    host.close()


@pytest.fixture(scope="session")
def plain(first: Host, model: Path) -> Answer:
    """The answers without a connector."""
    answer = first.run(model, None)
    assert answer.cached == [0, 288, 32]
    return answer


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "node")
    yield node
    node.kill()


Door = Callable[[dict[str, Any]], dict[str, Any]]
