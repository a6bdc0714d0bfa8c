"""Fixtures with real stores of every kind, including node programs and a Mooncake cluster."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import terrace_kv as terrace

MIB = 1 << 20
STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[STATUS] = int(exitstatus)


def pytest_unconfigure(config: pytest.Config) -> None:
    # Threads of Mooncake's library outlive a process, and may crash in its destructors. All output
    # is written by now.
    if "TERRACE_MOONCAKE_PROGRAMS" in os.environ and STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[STATUS])


@dataclass
class Place:
    """The location of a store, and its settings."""

    kind: str
    place: str
    settings: dict[str, Any]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _opened: terrace.Store | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several processes can use it at once."""
        return self.kind in ("nodes", "mooncake", "bucket", "s3")

    def open(self) -> terrace.Store:
        """Opens the store as another process would; the existing one, if there can be only one."""
        if self._opened is None or self.is_shared:
            self._opened = terrace.Store(self.place, **self.settings)
        return self._opened

    def pause(self, is_paused: bool) -> None:
        """Freezes or resumes the processes that hold the objects."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)
            if is_paused:
                # Its threads answer until all of them have stopped.
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 0.1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"nobody listens at port {port}")


def the_program() -> str:
    """The path of the program `terrace`."""
    program = os.environ.get("TERRACE") or shutil.which("terrace")
    if program is None:
        pytest.skip("the program `terrace` is not there: TERRACE names it")
    return program


def open_place(kind: str, folder: Path) -> Iterator[Place]:
    capacity = {"capacity": 256 * MIB, "object_max": MIB}
    if kind == "memory":
        yield Place(kind, "memory", capacity)
    elif kind == "disk":
        yield Place(kind, f"disk:{folder}/disk", capacity)
    elif kind == "tiers":
        yield Place(kind, f"disk:{folder}/tiers", {**capacity, "memory": 64 * MIB})
    elif kind == "bucket":
        (folder / "bucket").mkdir()
        yield Place(kind, f"bucket:file://{folder}/bucket", capacity)
    elif kind == "s3":
        bucket = os.environ.get("TERRACE_S3_BUCKET")
        if bucket is None:
            pytest.skip("no server that speaks S3 is there: run it by scripts/test-buckets run")
        yield Place(kind, f"s3://{bucket}/{folder.name}", {**capacity, "request_timeout_ms": 60_000})
    elif kind == "nodes":
        secret, port = folder / "secret", free_port()
        secret.write_text("known to those who may use the nodes")
        listen = ["--listen", f"127.0.0.1:{port}", "--memory", "256MiB", "--secret-file", str(secret)]
        node = subprocess.Popen([the_program(), "node", *listen, "--object-max", "1MiB"], stdout=subprocess.DEVNULL)
        wait_for(port)
        # Long timeouts: a busy machine is not a failure.
        patience = {"exists_timeout_ms": 10_000, "get_timeout_ms": 10_000, "put_timeout_ms": 10_000}
        settings = {"secret_file": str(secret), **patience}
        try:
            yield Place(kind, f"nodes://127.0.0.1:{port}", settings, [node])
        finally:
            node.send_signal(signal.SIGCONT)
            node.kill()
            node.wait()
    else:
        yield from open_mooncake(capacity)


def open_mooncake(capacity: dict[str, Any]) -> Iterator[Place]:
    programs = os.environ.get("TERRACE_MOONCAKE_PROGRAMS")
    if programs is None:
        pytest.skip("Mooncake is not there: run it by scripts/test-mooncake run")
    rpc, metrics, node = (free_port() for _ in range(3))

    def start(program: str, *arguments: str) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen([f"{programs}/{program}", *arguments], stdout=quiet, stderr=quiet)

    master = f"--rpc_address=127.0.0.1 --rpc_port={rpc} --metrics_port={metrics} --default_kv_lease_ttl=500"
    # Unfinished puts expire soon.
    master += " --put_start_discard_timeout_sec=5 --put_start_release_timeout_sec=6"
    holder = f"--host=127.0.0.1 --port={node} --local_buffer_size=0 --protocol=tcp --device_names= --threads=2"
    holder += f" --master_server_address=127.0.0.1:{rpc} --metadata_server=P2PHANDSHAKE"
    running = [start("mooncake_master", *master.split())]
    try:
        wait_for(rpc)
        running.append(start("mooncake_client", *holder.split(), "--global_segment_size=128 MB"))
        wait_for(node)
        library = os.environ["TERRACE_MOONCAKE_LIBRARY"]
        settings = {**capacity, "library": library, "for_features": True}
        yield Place("mooncake", f"mooncake://127.0.0.1:{rpc}", settings)
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.fixture(params=["memory", "disk", "tiers", "nodes", "mooncake", "bucket", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from open_place(request.param, tmp_path)


@pytest.fixture(params=["nodes", "mooncake", "bucket", "s3"])
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A store that several processes use at once."""
    yield from open_place(request.param, tmp_path)
