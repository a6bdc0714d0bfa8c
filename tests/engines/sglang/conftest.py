"""Processes with SGLang in them, and stores that they share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terrace_kv import Store

HERE = Path(__file__).parent


class Sglang:
    """A process with SGLang's cache in it."""

    def __init__(self, log: Path) -> None:
        self.log = log
        pipe = subprocess.PIPE
        command = [sys.executable, str(HERE / "server.py")]
        # SGLang compiles the hash of pages when it is first used, with a program that lies beside the interpreter.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log.open("w"), text=True, env=environment
        )

    def send(self, do: str, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process has ended:\n{self.log.read_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """What became of an order."""
        self.send(do, **order)
        return self.answer()

    def tell(self, do: str, **order: Any) -> dict[str, Any]:
        """The answer to an order that must not fail."""
        answer = self.ask(do, **order)
        assert "error" not in answer, f"{do}: {answer['error']}\n{self.log.read_text()[-4000:]}"
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sglang, Sglang]]:
    """Two processes."""
    folder = tmp_path_factory.mktemp("logs")
    one, two = Sglang(folder / "one"), Sglang(folder / "two")
    try:
        for each in (one, two):
            assert each.answer() == {"ready": True}
        yield one, two
    finally:
        one.end()
        two.end()


class Node:
    """A program `terrace node` on a folder."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", port or 0))
            self.port: int = free.getsockname()[1]
        self.secret = folder.parent / "secret"
        self.secret.write_text("known to those who may use the node")
        self.start()

    def start(self) -> None:
        program = os.environ.get("TERRACE") or shutil.which("terrace")
        assert program is not None, "the program `terrace` is not there: TERRACE names it"
        listen = ["--listen", f"127.0.0.1:{self.port}", "--secret-file", str(self.secret)]
        sizes = ["--memory", "64MiB", "--disk", str(self.folder), "--disk-capacity", "1GiB", "--object-max", "1MiB"]
        self.process = subprocess.Popen([program, "node", *listen, *sizes], stdout=subprocess.DEVNULL)
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("the node does not listen")

    @property
    def settings(self) -> dict[str, Any]:
        """What a server is told of it."""
        return {"store": f"nodes://127.0.0.1:{self.port}", "secret_file": str(self.secret)}

    def make_durable(self) -> None:
        """Waits until what was stored is still there after the node has died."""
        store = Store(f"nodes://127.0.0.1:{self.port}", secret_file=str(self.secret))
        store.flush()
        store.close()

    def hang(self, is_hanging: bool) -> None:
        self.process.send_signal(signal.SIGSTOP if is_hanging else signal.SIGCONT)

    def die(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path / "node")
    try:
        yield one
    finally:
        one.die()
