"""The scheduler from Python."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np
import pytest

import terrace_kv as terrace
from terrace_kv.plan import LOAD_BACK, PREFETCH, WRITE_BACK

SETTINGS = {"cache": {"page_size": 4, "device_pages": 64, "host_pages": 64}, "batch": {"running_max": 8}}


def scheduler(**settings: dict[str, Any]) -> terrace.Scheduler:
    return terrace.Scheduler({**SETTINGS, **settings})


def run_step(scheduler: terrace.Scheduler, token: int = 7, now: int = 0) -> terrace.Plan:
    """Plans, executes and reports a step; returns the plan."""
    plan = scheduler.plan(now=now)
    for op, _, _, _ in plan.each_copy():
        scheduler.operation(op, "done", now=now)
    if plan.step is not None:
        tokens = np.full(len(plan.producers), token, np.uint32)
        scheduler.step_done(plan.step, plan.producers, tokens, now=now)
    return plan


def test_plan_lists_work() -> None:
    one = scheduler()
    one.submit(5, list(range(10, 20)), 3, now=0)
    plan = run_step(one)
    assert (plan.step, plan.behind, plan.repeats_max) == (0, None, 0)
    assert plan.prefills[["request", "slot", "start", "tokens", "produces_token", "waits_for"]].tolist() == [
        (5, 0, 0, 10, 1, -1)
    ]
    assert plan.tokens.tolist() == list(range(10, 20))
    assert plan.positions.tolist() == list(range(10))
    assert plan.producers.tolist() == [5]
    table = np.zeros((8, 64), np.uint32)
    plan.apply_rows(table)
    assert len(set(table[0, :3].tolist())) == 3, "three pages of its own"
    plan = run_step(one)
    assert plan.decodes[["request", "start", "tokens", "input"]].tolist() == [(5, 10, 1, -1)]
    assert (plan.tokens.tolist(), plan.positions.tolist()) == ([7], [10])
    run_step(one)
    plan = run_step(one)
    assert plan.step is None and plan.completed.tolist() == [5]
    assert [copy[1] for copy in plan.each_copy()] == [WRITE_BACK]
    assert run_step(one).ended == [terrace.Ended(5, "finished", None)]
    assert one.plan(now=1).is_idle
    assert one.cached(list(range(10, 20))) == (2, 0)
    assert one.stats()["generated_tokens"] == 3


def test_results_with_several_tokens_and_finished_requests() -> None:
    one = scheduler(batch={"running_max": 8, "decode_tokens": 3})
    for request in (1, 2):
        one.submit(request, [request] * 6, 40, now=0)
    run_step(one)
    plan = one.plan(now=0)
    assert plan.decodes["tokens"].tolist() == [3, 3] and plan.step is not None
    counts, finished = np.array([2, 1], np.uint32), np.array([False, True])
    tokens = np.array([8, 9, 10], np.uint32)
    one.step_done(plan.step, plan.producers, tokens, counts=counts, finished=finished, now=0)
    answered = one.tokens(1)
    assert answered is not None and answered.tolist() == [1] * 6 + [7, 8, 9]
    assert one.plan(now=0).completed.tolist() == [2]


def test_plans_are_views_of_bytes_that_other_ranks_can_read() -> None:
    one = scheduler()
    for request in range(6):
        one.submit(request, np.arange(request, request + 9, dtype=np.uint32), 4, now=0)
    for _ in range(3):
        plan = run_step(one)
        received = terrace.Plan(bytes(plan.data))
        for name in ("prefills", "decodes", "tokens", "positions", "rows", "row_pages", "copies", "producers"):
            assert (getattr(plan, name) == getattr(received, name)).all(), name
        assert (received.step, repr(received)) == (plan.step, repr(plan))
        assert np.shares_memory(plan.tokens, np.frombuffer(plan.data, np.uint8))
    with pytest.raises(terrace.PlanError, match="are not a plan"):
        terrace.Plan(b"something else")
    with pytest.raises(terrace.PlanError, match="is missing"):
        terrace.Plan(bytes(plan.data)[:-8]).rows, terrace.Plan(bytes(plan.data)[:200]).decodes


def test_the_same_inputs_give_the_same_plans() -> None:
    def live() -> list[bytes]:
        one, plans = scheduler(l3={}), []
        for now in range(60):
            if now % 3 == 0:
                one.submit(now, [now % 5] * 4 * (1 + now % 7), 1 + now % 4, now=now)
            plan = run_step(one, now % 11, now)
            for op, _, _, _ in plan.each_l3():
                one.operation(op, "missing" if now % 2 else "failed", now=now)
            plans.append(bytes(plan.data))
        return plans

    assert live() == live()


def test_two_steps_in_flight_name_the_row_that_is_awaited() -> None:
    one = scheduler(batch={"running_max": 8, "steps_in_flight_max": 2})
    for request in (1, 2):
        one.submit(request, [request] * 6, 5, now=0)
    first, second = one.plan(now=0), one.plan(now=0)
    assert (second.behind, second.decodes["input"].tolist()) == (first.step, [0, 1])
    assert second.tokens.tolist() == [0, 0], "they are yet to be produced"
    assert one.plan(now=0).step is None, "two are in flight"
    for plan in (first, second):
        assert plan.step is not None
        one.step_done(plan.step, plan.producers, np.array([3, 4], np.uint32), now=0)
    answered = one.tokens(2)
    assert answered is not None and answered.tolist() == [2] * 6 + [4, 4]


def test_optional_request_properties() -> None:
    one = scheduler(batch={"running_max": 8, "adapters_max": 1})
    prompt = list(range(16))
    one.submit(1, prompt, 1, adapter="cats", salt="tenant", priority=3, writes="nothing", now=0)
    plan = run_step(one)
    assert one.adapter(int(plan.prefills["adapter"][0])) == "cats"
    while not run_step(one).is_idle:
        pass
    assert one.cached(prompt, adapter="cats", salt="tenant") == (0, 0), "it writes nothing"
    image = terrace.Passage(4, 9, bytes(range(16)), is_whole=True)
    one.submit(2, prompt, 2, passages=[image], siblings=[3, 4], now=0)
    assert run_step(one).prefills["request"].tolist() == [2]
    assert [one.state(request) for request in (2, 3, 4)].count(None) == 0
    one.set_priority(3, 9)
    one.abort(3, now=0)
    assert terrace.Ended(3, "aborted", None) in run_step(one).ended
    while not run_step(one).is_idle:
        pass
    assert one.cached(prompt) == (1, 0), "up to the image"
    one.submit(5, prompt, 2, passages=[image], now=0)
    run_step(one)
    assert one.hits(5) == terrace.Hits(12, 0, 0)
    assert one.namespace() != one.namespace(salt="tenant")


def test_pages_round_trip_through_host_and_l3() -> None:
    # Computing is slow, so that loading always pays.
    one = scheduler(l3={}, rates={"prefill_ns_per_token": 10**9}, cache={**SETTINGS["cache"], "device_pages": 8})
    stored: dict[bytes, int] = {}
    moved = {LOAD_BACK: 0, WRITE_BACK: 0}

    def settle(now: int) -> None:
        idle = 0
        while idle < 3:
            plan = run_step(one, now=now)
            idle = idle + 1 if plan.is_idle else 0
            for _, direction, device, host in plan.each_copy():
                assert len(device) == len(host)
                moved[direction] += len(device)
            for op, kind, keys, host_pages in plan.each_l3():
                names = [key.tobytes() for key in keys]
                assert all(len(name) == 16 for name in names)
                if kind == 2:
                    stored.update(zip(names, host_pages.tolist()))
                found = sum(name in stored for name in names)
                if kind == PREFETCH:
                    assert len(host_pages) == len(keys)
                one.operation(op, "done" if found == len(names) else "partial", found, now=now)

    for now, request in enumerate(range(4)):
        one.submit(request, [request] * 24, 1, now=now)
        settle(now)
    assert len(stored) == 24 and moved[WRITE_BACK] == 24
    one.submit(10, [0] * 24 + [1], 1, now=10)
    settle(10)
    assert moved[LOAD_BACK] == 6
    assert one.stats()["host_hit_tokens"] == 24


def test_kv_events_report_stored_and_removed_pages() -> None:
    one = scheduler(cache={**SETTINGS["cache"], "kv_event_keys_max": 1000})
    first = one.kv_events()
    assert first.is_snapshot and first.events == [], "whoever begins to listen is told everything"
    one.submit(1, list(range(8)), 1, now=0)
    while not run_step(one).is_idle:
        pass
    told = one.kv_events()
    assert (told.is_snapshot, told.first, told.next) == (False, first.next, first.next + 2)
    stored = [event for event in told.events if isinstance(event, terrace.Stored)]
    assert [event.tier for event in stored] == ["device", "host"]
    assert stored[0].parent == one.namespace()
    assert stored[0].tokens.tolist() == list(range(8)) and len(stored[0].keys) == 2
    snapshot = one.kv_snapshot()
    assert snapshot.is_snapshot and len(snapshot.events) == 2
    assert one.clear_cache() == (2, 2)
    assert any(isinstance(event, (terrace.Removed, terrace.Cleared)) for event in one.kv_events().events)


def test_new_weights_hit_no_old_page() -> None:
    one = scheduler()
    one.submit(1, list(range(8)), 2, now=0)
    plan = one.plan(now=0)
    with pytest.raises(terrace.StepsInFlight, match="report its results"):
        one.replace_weights("others", now=0)
    assert plan.step is not None
    one.step_failed(plan.step, now=0)
    one.replace_weights("others", now=0)
    assert one.cached(list(range(8))) == (0, 0)
    assert one.settings["model"]["fingerprint"] == "others"


def test_error_messages_state_the_remedy() -> None:
    with pytest.raises(terrace.ConfigError, match="cache.page_size = 17"):
        scheduler(cache={"page_size": 17})
    with pytest.raises(terrace.ConfigError, match="unknown field `pages`"):
        scheduler(cache={"pages": 17})
    one = scheduler(queue={"requests_max": 1})
    with pytest.raises(terrace.SubmitError, match="raise cache.device_pages"):
        one.submit(1, [1] * 1000, 1)
    with pytest.raises(terrace.SubmitError, match="empty prompt"):
        one.submit(1, [], 1)
    one.submit(1, [1] * 5, 1)
    with pytest.raises(terrace.QueueFull, match="raise queue.requests_max"):
        one.submit(2, [1] * 5, 1)
    with pytest.raises(terrace.UnknownRequest, match="r9 is unknown"):
        one.abort(9)
    with pytest.raises(terrace.EventError, match="never issued"):
        one.operation(77, "done")
    with pytest.raises(ValueError, match="there is no outcome"):
        one.operation(77, "well")  # type: ignore[arg-type]
    plan = one.plan()
    assert plan.step is not None
    with pytest.raises(ValueError, match="1 requests have 2 tokens"):
        one.step_done(plan.step, plan.producers, np.array([1, 2], np.uint32))
    with pytest.raises(terrace.EventError, match="no result for r1"):
        one.step_done(plan.step, np.zeros(0, np.uint64), np.zeros(0, np.uint32))
    with pytest.raises(TypeError):
        one.step_done(plan.step, plan.producers, np.array([1.5]))
    one.step_done(plan.step, plan.producers, np.array([1], np.uint32))
    assert issubclass(terrace.QueueFull, terrace.SubmitError) and issubclass(terrace.SubmitError, terrace.TerraceError)


def test_default_clock_and_deadlines() -> None:
    one = scheduler(queue={"start_timeout_ms": 1}, batch={"running_max": 1})
    one.submit(1, [1] * 8, 5)
    one.submit(2, [2] * 8, 5)
    plan = one.plan()
    assert plan.prefills["request"].tolist() == [1]
    deadline = one.deadline()
    assert deadline is not None and deadline <= one.now() + 1000
    while one.now() <= deadline:
        pass
    assert one.plan().ended == [terrace.Ended(2, "failed", "timed_out")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_it_is_the_same_after_a_fork() -> None:
    one = scheduler()
    one.submit(1, list(range(8)), 3, now=0)
    run_step(one)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, bytes(run_step(one, now=5).data))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        theirs = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert theirs == bytes(run_step(one, now=5).data)


def test_threads_take_turns() -> None:
    one = scheduler(queue={"requests_max": 1000})

    def submit(first: int) -> None:
        for request in range(first, first + 100):
            one.submit(request, [request] * 8, 1)
            one.plan()

    threads = [threading.Thread(target=submit, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.stats()["submitted"] == 400


def test_a_long_prompt_is_hashed_without_the_interpreters_lock() -> None:
    one = scheduler(cache={"page_size": 16, "device_pages": 70_000}, queue={"requests_max": 1000})
    prompt = np.zeros(1_000_000, np.uint32)
    go, ran = threading.Event(), threading.Event()

    def wait() -> None:
        go.wait()
        ran.set()

    thread = threading.Thread(target=wait)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        # No preemption: the other thread runs only if this one releases the GIL.
        sys.setswitchinterval(1000)
        go.set()
        for request in range(200):
            one.submit(request, prompt, 1)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
