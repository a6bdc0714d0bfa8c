"""The training loop: vLLM produces, PyTorch trains, both are killed and restarted, and the store is
empty in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import terrace_kv as terrace
from conftest import ENGINE, ROOT, a_place, environment
from terrace_kv.hidden_states import HiddenStatesSettings

SAMPLES = 24
# Engines take minutes to start on a busy machine.
PATIENCE_S = 1200


LIVES: list[Peer] = []


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """Kills the processes that a failed test leaves behind."""
    yield
    for peer in LIVES:
        if peer.process.poll() is None:
            peer.kill()
    LIVES.clear()


class Peer:
    """The example in a separate process, and its output."""

    def __init__(self, what: str, place: Any, folder: Path, *others: str) -> None:
        own = {name: value for name, value in place.settings.items() if name not in ("object_max", "for_features")}
        # If both run at once, the producer has to wait for the trainer.
        settings = {"store_settings": own, "max_resident": "16MiB" if place.is_shared else "128MiB", "owner": 0}
        command = [sys.executable, str(ROOT / "python/examples/hidden_states_trainer.py"), what]
        command += ["--store", place.place, "--settings", json.dumps(settings), "--object-max", "1MiB"]
        # Few tokens, so that few samples suffice to learn.
        command += ["--vocabulary", "64"]
        command += ["--refs", str(folder / "refs"), "--samples", str(SAMPLES), *others]
        self.said: list[dict[str, Any]] = []
        LIVES.append(self)
        self.log = folder / f"{what}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=environment(), text=True, start_new_session=True
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # vLLM and Mooncake's library print there as well.
            if line.startswith("{"):
                self.said.append(json.loads(line))

    def until(self, what: str, count: int = 1, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while sum(what in line for line in self.said) < count:
            assert time.monotonic() < deadline, f"it did not come to that:\n{self.log.read_text()[-3000:]}"
            assert self.process.poll() is None, f"it has ended:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.02)

    def samples(self, what: str) -> set[str]:
        """The samples for which it has printed that message."""
        return {line[what] for line in self.said if what in line}

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Its last message."""
        status = self.process.wait(patience_s)
        # Threads of Mooncake's library outlive `main`, and may crash in its destructors.
        assert status in (0, -signal.SIGSEGV, -signal.SIGABRT), self.log.read_text()[-3000:]
        time.sleep(0.2)
        return self.said[-1]


@pytest.mark.parametrize("kind", ["disk", "nodes", "mooncake"])
def test_either_side_may_be_killed_and_nothing_is_left(kind: str, model: Path, tmp_path: Path) -> None:
    with a_place(kind, tmp_path) as place:
        engine = ["--model", str(model), "--engine", json.dumps(ENGINE), "--batch", "2", "--pause", "0.3"]

        def produce() -> Peer:
            return Peer("produce", place, tmp_path, *engine)

        def train() -> Peer:
            return Peer("train", place, tmp_path, "--wait", "10", "--patience", str(PATIENCE_S))

        # A store on disk has one user at a time: the processes alternate.
        at_once = place.is_shared
        trainers: list[Peer] = []
        producer = produce()
        if at_once:
            trainers.append(train())
        producer.until("produced", 2)
        if at_once:
            trainers[0].until("trained", 2)
            trainers[0].kill()
        producer.kill()
        producer = produce()
        if at_once:
            trainers.append(train())
        assert producer.ended() == {"ended": SAMPLES}
        if not at_once:
            trainers.append(train())
            trainers[0].until("trained", 5)
            trainers[0].kill()
            trainers.append(train())
        told = trainers[1].ended()
        trained, gone = (set().union(*(one.samples(what) for one in trainers)) for what in ("trained", "is gone"))
        print(kind, told, "not trained on:", sorted(gone - trained))
        assert trained | gone == {f"sample {number}" for number in range(SAMPLES)}, "each sample is accounted for"
        # Some samples promised before the producer was killed were never put, and one may have been
        # released when the trainer was killed.
        assert len(gone - trained) <= 5
        assert told["last loss"] < told["first loss"]
        assert not list((tmp_path / "refs").glob("*.ref"))

        own = {name: value for name, value in place.settings.items() if name not in ("object_max", "for_features")}
        settings = {"store": place.place, "object_max": "1MiB", "store_settings": own, "max_hold_s": 3600, "owner": 0}
        features = HiddenStatesSettings.of(settings).open()
        ref = features_ref(features)
        features.gc()
        stats = features.stats()
        assert stats["live"] == 0 and stats["resident_bytes"] == 0 and stats["parked"] == 0, stats
        features.close()
        tiers = features.store.stats()
        for tier in ("disk", "memory", "remote"):
            assert tiers.get(tier) is None or tiers[tier]["objects"] == 0, tiers
        with pytest.raises(terrace.Gone):
            features.get(ref)


def features_ref(features: terrace.FeatureStore) -> terrace.FeatureRef:
    """The ref of a released sample: the store reports that, and does not hang."""
    import numpy as np

    ref = features.put("last", {"x": np.ones(3)})
    features.release(ref)
    return ref
