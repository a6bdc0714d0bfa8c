"""Training on a model's hidden states: vLLM computes them, PyTorch trains a small head on them, and
a feature store passes them from one to the other.

    nodes='--store nodes://10.0.0.1:7450 --settings {"store_settings":{"secret_file":"secret"}}'
    python hidden_states_trainer.py produce --model MODEL $nodes --refs refs --samples 1000
    python hidden_states_trainer.py train   $nodes --refs refs --samples 1000

Both may be killed and restarted at any time: each continues, and the store is empty in the end.
Refs are passed in a shared folder, one file each. A trainer releases a sample after reading it,
which frees its memory at once, and then deletes the ref. If it dies in between, it finds the sample
gone; if it dies before that, it trains on one sample again. A producer that dies leaves samples
whose refs it has published; a restart frees those that it had only started to put. A store on disk
has one user at a time: let the producer end first.

With ``--server URL`` the producer asks a vLLM server that has the connector, instead of an engine
of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import terrace_kv as terrace
from terrace_kv.hidden_states import HiddenStatesSettings, read_hidden_states

LAYERS = [1, 2, 3]
NAME = "hidden states"


class Engine(Protocol):
    def answers(self, prompts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
        """The engine's answers about the hidden states of each sample's prompt."""


class Offline:
    """vLLM in child processes."""

    def __init__(self, model: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.llm = LLM(
            model=model,
            speculative_config=speculation(),
            kv_transfer_config=KVTransferConfig(**connector(settings)),
            **options,
        )

    def answers(self, prompts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
        from vllm import SamplingParams

        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts.values()]
        params = [
            SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": {"sample": sample}})
            for sample in prompts
        ]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return {sample: output.kv_transfer_params or {} for sample, output in zip(prompts, outputs, strict=True)}


class Server:
    """vLLM behind HTTP."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def answers(self, prompts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
        return {sample: self._ask(sample, prompt) for sample, prompt in prompts.items()}

    def _ask(self, sample: str, prompt: list[int]) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"sample": sample}}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            told: dict[str, Any] = json.load(answer)["kv_transfer_params"] or {}
            return told


def speculation() -> dict[str, Any]:
    """vLLM's settings of the speculative method that extracts hidden states."""
    layers = {"eagle_aux_hidden_state_layer_ids": LAYERS}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }


def connector(settings: dict[str, Any]) -> dict[str, Any]:
    """vLLM's settings of the connector that stores them."""
    return {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "terrace_kv.vllm.hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": settings,
    }


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    others = json.loads(arguments.settings)
    # The same number after a restart, so that the producer takes over its samples.
    return {"store": arguments.store, "object_max": arguments.object_max, "name": NAME, "owner": 0, **others}


def prompt_of(number: int, tokens: int, vocabulary: int) -> list[int]:
    """A prompt that depends only on its number. Each token is derived from the one before, so there
    is something to learn."""
    first = int(np.random.default_rng(number).integers(3, vocabulary))
    return [3 + (first + 7 * place) % (vocabulary - 3) for place in range(tokens)]


def produce(arguments: argparse.Namespace) -> None:
    refs = Path(arguments.refs)
    refs.mkdir(parents=True, exist_ok=True)
    position = refs / "produced"
    done = int(position.read_text()) if position.exists() else 0
    engine: Engine
    if arguments.server is not None:
        engine = Server(arguments.server, arguments.model)
    else:
        engine = Offline(arguments.model, settings_of(arguments), json.loads(arguments.engine))
    while done < arguments.samples:
        numbers = range(done, min(done + arguments.batch, arguments.samples))
        for number, ref in produced(engine, list(numbers), arguments):
            write(refs / f"{number:08}.ref", ref)
        done = numbers.stop
        write(position, str(done))
        print(json.dumps({"produced": done}), flush=True)
        time.sleep(arguments.pause)
    print(json.dumps({"ended": done}), flush=True)


def produced(engine: Engine, numbers: list[int], arguments: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Refs of samples. A sample for which the store had no room is requested again."""
    for pause in itertools.chain([0.1, 0.3, 1, 3], itertools.repeat(5, arguments.tries)):
        named = {f"sample {number}": number for number in numbers}
        prompts = {name: prompt_of(number, arguments.tokens, arguments.vocabulary) for name, number in named.items()}
        numbers = []
        for name, told in engine.answers(prompts).items():
            if "hidden_states_ref" in told:
                yield named[name], told["hidden_states_ref"]
            else:
                numbers.append(named[name])
                print(json.dumps({"refused": name, "why": told.get("hidden_states_error")}), flush=True)
        if not numbers:
            return
        time.sleep(pause)
    raise TimeoutError(f"the store has no room for samples {numbers}, and nobody makes any")


def train(arguments: argparse.Namespace) -> None:
    import torch

    refs = Path(arguments.refs)
    torch.manual_seed(0)
    settings = HiddenStatesSettings.of(settings_of(arguments))
    features = terrace.FeatureStore(settings.open_store(), NAME)
    head: torch.nn.Module | None = None
    losses: list[float] = []
    trained = gone = 0
    for file, ref in each_ref(refs, arguments):
        try:
            states, token_ids = read_hidden_states(features, ref, wait=arguments.wait)
        except terrace.Gone:
            gone += 1
            print(json.dumps({"is gone": ref.sample}), flush=True)
            file.unlink()
            continue
        given = states[:-1].flatten(1).float()
        if head is None:
            width = given.shape[1]
            head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, arguments.vocabulary))
            optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
        loss = torch.nn.functional.cross_entropy(head(given), token_ids[1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
        # Released: the store frees it at once. The ref is deleted only when that would survive a
        # crash: otherwise a sample on the disk of this process could return without a ref.
        features.release(ref)
        features.store.flush()
        trained += 1
        # Printed before the ref is deleted, so that the lines of killed trainers include every
        # sample.
        print(json.dumps({"trained": ref.sample, "loss": round(losses[-1], 4)}), flush=True)
        file.unlink()
    first, last = losses[:10], losses[-10:]
    mean = [round(sum(part) / len(part), 4) if part else None for part in (first, last)]
    print(json.dumps({"samples": trained, "gone": gone, "first loss": mean[0], "last loss": mean[1]}), flush=True)


def each_ref(refs: Path, arguments: argparse.Namespace) -> Iterator[tuple[Path, terrace.FeatureRef]]:
    """Refs in order of arrival, until all samples were produced and each was returned."""
    patience = time.monotonic() + arguments.patience
    while time.monotonic() < patience:
        position = refs / "produced"
        is_all = position.exists() and int(position.read_text()) >= arguments.samples
        found = sorted(refs.glob("*.ref"))
        for file in found:
            yield file, terrace.FeatureRef(file.read_text())
            patience = time.monotonic() + arguments.patience
        if is_all and not found:
            return
        if not found:
            time.sleep(0.05)
    raise TimeoutError(f"no ref has come for {arguments.patience} s")


def write(file: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = file.with_suffix(".new")
    temporary.write_text(text)
    os.replace(temporary, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["produce", "train"])
    parser.add_argument("--store", default="", help="where hidden states go: disk:FOLDER, nodes://..., mooncake://...")
    parser.add_argument("--settings", default="{}", help="other settings of the connector, as JSON")
    parser.add_argument("--object-max", default="1MiB", help="the largest object of the store")
    parser.add_argument("--refs", required=True, help="a folder that producer and trainer see")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=80, help="of each sample")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--model", help="a folder or a name that vLLM knows")
    parser.add_argument("--engine", default="{}", help="options of vLLM's, as JSON")
    parser.add_argument("--server", help="a vLLM server to ask instead")
    parser.add_argument("--batch", type=int, default=4, help="requests at a time")
    parser.add_argument("--pause", type=float, default=0, help="seconds between them")
    parser.add_argument("--tries", type=int, default=60, help="how often a sample is asked for that has no room")
    parser.add_argument("--wait", type=float, default=35, help="seconds to wait for a promised sample")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for a ref")
    arguments = parser.parse_args()
    produce(arguments) if arguments.what == "produce" else train(arguments)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
