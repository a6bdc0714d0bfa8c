"""A small model, real stores, and vLLM as its users start it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAYERS = [1, 2, 3]
VOCABULARY = 512


def _of_package(file: str) -> Any:
    """Imports a file of the package's tests or examples under a name that no other conftest
    uses."""
    spec = importlib.util.spec_from_file_location(f"terrace_{Path(file).stem}", ROOT / "python" / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


places = _of_package("tests/conftest.py")
trainer = _of_package("examples/hidden_states_trainer.py")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=4096
    )
    fast.save_pretrained(folder)
    return folder


def environment() -> dict[str, str]:
    others = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**os.environ, **others}


# Settings with which vLLM runs on two cores without a GPU.
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 4,
}


class Server:
    """vLLM's server of the OpenAI API, with the connector."""

    def __init__(self, model: Path, settings: dict[str, Any], log: Path) -> None:
        self.model, self.settings, self.log = str(model), settings, log
        self.port = places.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        flags = ["--model", self.model, "--port", str(self.port), "--host", "127.0.0.1"]
        for name, value in ENGINE.items():
            flag = f"--{name.replace('_', '-')}"
            flags += [flag] if value is True else [flag, str(value)]
        flags += ["--speculative-config", json.dumps(trainer.speculation())]
        flags += ["--kv-transfer-config", json.dumps(trainer.connector(self.settings))]
        # `vllm serve` looks for a distribution called vllm, and the one for CPUs has another name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), start_new_session=True
            )
        for _ in range(1200):
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM has ended:\n{self.log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(f"vLLM does not get ready:\n{self.log.read_text()[-3000:]}")

    def ask(self, prompt: list[int], tokens: int = 1, timeout: float = 120, **params: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"kv_transfer_params": params, "return_token_ids": True} if params else {}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            told: dict[str, Any] = json.load(answer)
            return told

    def metrics(self) -> dict[str, float]:
        """The connector's metrics, by the end of their names."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        ours = [line for line in lines if line.startswith("vllm:terrace_hidden_states_") and "_created" not in line]
        found: dict[str, float] = {}
        for line in ours:
            name = line.partition("{")[0].removeprefix("vllm:terrace_hidden_states_")
            if "bucket" not in name:
                found[name] = float(line.rpartition(" ")[2])
        return found

    def kill(self) -> None:
        """Kills all processes at once, as a power failure does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Stops the server as an operator does."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def a_place(kind: str, folder: Path) -> Iterator[Any]:
    yield from places.open_place(kind, folder)
