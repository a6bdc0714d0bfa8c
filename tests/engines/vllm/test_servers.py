"""Engines of several processes: two ranks, one rank after two, and servers over HTTP. Each takes
minutes to start."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ENVIRONMENT, Answer, Door, Host, Node, connector, tier

PROMPT = "The quick brown fox jumps over the lazy dog. " * 6


@pytest.mark.parametrize("door", [tier, connector])
def test_one_rank_never_reads_what_two_have_stored(
    second: Host, model: Path, plain: Answer, door: Door, node: Node, tmp_path: Path
) -> None:
    ranks = Host(tmp_path / "ranks.log", VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    try:
        stored = ranks.run(model, door(node.settings), tensor_parallel_size=2)
        hit = ranks.run(model, door(node.settings), tensor_parallel_size=2)
    finally:
        ranks.close()
    assert stored.tokens == hit.tokens == plain.tokens
    assert hit.cached[0] == 288, "two ranks find what two ranks have stored"
    alone = second.run(model, door(node.settings))
    assert alone.tokens == plain.tokens
    assert alone.cached[0] == 0, "and one rank does not"


def test_a_server_finds_what_it_had_before_it_was_restarted(model: Path, node: Node, tmp_path: Path) -> None:
    answers = []
    for start in range(2):
        with server(model, connector(node.settings), tmp_path / f"server-{start}.log") as address:
            body = {"model": str(model), "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "cache_salt": "a tenant"}
            answers.append(post(f"{address}/v1/completions", body)["choices"][0]["text"])
            if start == 1:
                post(f"{address}/v1/completions", body | {"cache_salt": "another"})
            for _ in range(30):
                # Ended transfers are reported with the next step. Less than a block is neither
                # stored nor looked up.
                post(f"{address}/v1/completions", body | {"prompt": "The", "max_tokens": 1})
                metrics = get(f"{address}/metrics")
                stored = counted(metrics, "vllm:terrace_objects_total", 'operation="put",result="hit"')
                if stored >= 8:
                    break
                time.sleep(1)
        found = counted(metrics, "vllm:terrace_objects_total", 'operation="get",result="hit"')
        assert stored >= 8 and found == (8 if start else 0), "and nothing of another tenant's"
    assert answers[0] == answers[1]


@contextmanager
def server(model: Path, transfer: dict[str, Any], log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"]
    command += ["--block-size", "32", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=output, stderr=output)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(f"{address}/health", process, log)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, f"the server has died: see {log}\n{log.read_text()[-3000:]}"
        try:
            get(url)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError("the server does not answer")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def counted(metrics: str, name: str, labels: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(name) and labels in line]
    return sum(float(re.split(r"\s", line)[-1]) for line in lines)
