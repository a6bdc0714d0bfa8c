"""The PyTorch engine gives the answers of its model without pages and cache."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import torch_engine  # noqa: E402
from torch_engine import Engine, Model, ModelSize, Request  # noqa: E402

SIZE = ModelSize(layers=2, hidden=64, heads=4, kv_heads=2, vocabulary=256)
BOOKS = np.random.default_rng(1).integers(0, SIZE.vocabulary, (6, 60))
#: Each is read, and read again after others have evicted it from the device; some are requested at
#: once.
ORDER = [0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 5, 5, 3, 4]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads that wait for each other are slow when the machine is busy.
    torch.set_num_threads(1)

    def sleep(seconds: float) -> None:
        assert seconds < 0.1, "whoever sleeps for long has missed an event"

    monkeypatch.setattr("time.sleep", sleep)


def requests(first: int = 0, order: list[int] = ORDER) -> list[Request]:
    numbers = range(first, first + len(order))
    return [Request(n, [*BOOKS[book].tolist(), n % 256, 7], 6 + n % 3) for n, book in zip(numbers, order)]


class SteadyEngine(Engine):
    """Time advances per turn, so that the choice between loading and computing does not depend on
    the machine's load."""

    turns = 0

    def serve(self, requests: Iterable[Request], alive_max: int) -> None:
        self.scheduler._now = lambda now: 10_000 * self.turns  # type: ignore[method-assign]
        super().serve(requests, alive_max)

    def turn(self) -> None:
        self.turns += 1
        super().turn()


def engine(device: str = "cpu", dtype: torch.dtype = torch.float32, **settings: Any) -> Engine:
    model = Model(SIZE, dtype, torch.device(device))
    sizes = {"page_size": 4, "device_pages": 60, "host_pages": 200, "running_max": 3, "step_tokens_max": 100}
    return SteadyEngine(model, **{**sizes, **settings})


def agreement(one: Engine, asked: list[Request]) -> float:
    """The share of right tokens in the worst answer."""
    return min(
        torch_engine.agreement(one.model, request, one.answers[request.number].tokens)[0] for request in asked
    )


class Late:
    """The event of a copy that completes when it is waited for, or after some queries."""

    def __init__(self, copy: Callable[[], object], times: int) -> None:
        self.copy, self.times = copy, times

    def synchronize(self) -> None:
        self.copy()
        self.copy, self.times = lambda: None, 0

    def query(self) -> bool:
        self.times -= 1
        if self.times <= 0:
            self.synchronize()
        return self.times == 0


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("step_tokens_max", [17, 100])
def test_answers_from_device_and_host_are_right(step_tokens_max: int, overlaps: bool) -> None:
    one, asked = engine(step_tokens_max=step_tokens_max, overlaps=overlaps), requests()
    one.serve(asked, 4)
    for request in asked:
        assert len(one.answers[request.number].tokens) == request.max_new_tokens
    assert agreement(one, asked) == 1
    hits = [one.answers[request.number].hits for request in asked]
    assert sum(hit.device_tokens for hit in hits) > 0 and sum(hit.host_tokens for hit in hits) >= 3 * 60
    stats = one.scheduler.stats()
    assert stats["running"] == 0 and stats["finished"] == len(asked)


def test_without_cache_answers_are_equal() -> None:
    cached, uncached, asked = engine(), engine(uses_cache=False), requests()
    for one in (cached, uncached):
        one.serve(asked, 4)
    assert agreement(uncached, asked) == 1
    for request in asked:
        assert cached.answers[request.number].tokens == uncached.answers[request.number].tokens
    everything = sum(len(request.prompt) + request.max_new_tokens - 1 for request in asked)
    assert cached.computed_tokens < 0.7 * everything and uncached.computed_tokens == everything


def test_two_steps_are_in_flight_and_one_begins_with_what_the_other_chooses() -> None:
    one, in_flight, awaited = engine(), [], []
    launch = one.launch

    def watched(plan: Any, number: int) -> torch_engine.Step:
        in_flight.append(len(one.steps))
        awaited.extend(plan.decodes["input"].tolist())
        return launch(plan, number)

    one.launch = watched  # type: ignore[method-assign]
    one.serve(requests(), 4)
    assert max(in_flight) == 1, "one besides that which is launched"
    assert max(awaited) > 0, "a row that is awaited"
    assert agreement(one, requests()) == 1


@pytest.mark.parametrize(
    ("waits", "times"), [(True, [2]), (True, [4]), (True, [10]), (True, [2, 3, 4, 8]), (False, [4])]
)
def test_steps_wait_for_copies_that_are_late(waits: bool, times: list[int]) -> None:
    one, asked, awaited = engine(), requests(), []
    copy, each_times = one.copy, itertools.cycle(times)
    one.copy = lambda *pages: Late(lambda: copy(*pages), next(each_times))  # type: ignore[method-assign, assignment]

    def await_copy(event: Any) -> None:
        if event is not None:
            awaited.append(event)
            if waits:
                event.synchronize()

    one.await_copy = await_copy  # type: ignore[method-assign]
    one.serve(asked, 4)
    assert len(awaited) > 0
    assert (agreement(one, asked) == 1) == waits, "whoever does not wait reads what is not there"


def test_no_sleep_after_a_reported_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    one, reported = engine(), []
    monkeypatch.setattr(one.scheduler, "operation", lambda op, _: reported.append(op))
    monkeypatch.setattr(one.scheduler, "deadline", lambda: 10**9)
    one.copies[5] = None
    one.turn()
    assert reported == [5]
    with pytest.raises(AssertionError, match="missed an event"):
        one.turn()


def test_retracted_request_gives_the_same_answer() -> None:
    one = engine(device_pages=26)
    asked = [Request(n, BOOKS[n % 6, :20].tolist(), 50) for n in range(6)]
    one.serve(asked, 4)
    assert one.scheduler.stats()["retractions"] > 0
    assert {len(answer.tokens) for answer in one.answers.values()} == {50} and agreement(one, asked) == 1


def test_wrong_page_is_detected() -> None:
    one = engine()
    one.serve(requests(), 4)
    one.host_kv.zero_()
    again = requests(100, [0, 1, 2, 3])
    one.serve(again, 4)
    assert any(one.answers[request.number].hits.host_tokens > 0 for request in again)
    assert agreement(one, again) < 1


def test_an_answer_ends_with_the_stop_token() -> None:
    free, asked = engine(), requests()
    free.serve(asked, 4)
    stop = free.answers[0].tokens[2]
    stopping = engine(stop_token=stop)
    stopping.serve(asked, 4)
    for request in asked:
        whole = free.answers[request.number].tokens
        expected = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert stopping.answers[request.number].tokens == expected
    assert len(stopping.answers[0].tokens) <= 3 and stopping.computed_tokens < free.computed_tokens


def test_pages_that_follow_each_other_are_copied_at_once() -> None:
    device, host = np.array([4, 5, 6, 9, 8, 2], np.uint32), np.array([1, 2, 4, 5, 6, 7], np.uint32)
    told = [(a.start, a.stop, b.start, b.stop) for a, b in torch_engine.runs(device, host)]
    assert told == [(4, 6, 1, 3), (6, 7, 4, 5), (9, 10, 5, 6), (8, 9, 6, 7), (2, 3, 7, 8)]


def test_it_runs_as_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--layers 2 --hidden 64 --heads 4 --books 4 --book-tokens 64 --requests 8 --device-pages 40"
    torch_engine.main(words.split())
    told = capsys.readouterr().out
    assert "request 7: of 80 tokens" in told
    assert "100.00 % of the answers' tokens are what the model says" in told


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(("dtype", "less_likely_max"), [(torch.float32, 1e-3), (torch.bfloat16, 0.25)])
def test_it_is_the_same_on_a_gpu(dtype: torch.dtype, less_likely_max: float, overlaps: bool) -> None:
    one, asked = engine("cuda", dtype, overlaps=overlaps), requests()
    one.serve(asked, 4)
    answers = [one.answers[request.number] for request in asked]
    assert sum(answer.hits.host_tokens for answer in answers) > 0
    for request, answer in zip(asked, answers):
        assert torch_engine.agreement(one.model, request, answer.tokens)[1] < less_likely_max
