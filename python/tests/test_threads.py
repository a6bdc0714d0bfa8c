"""Objects that several threads share. Without a GIL (Python 3.14t), their calls really run at the same time."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

import terrace_kv as terrace
from terrace_kv.adapters import open_store
from terrace_kv.transfers import Transfers

THREADS = 8
ROUNDS = 50


def together(work: Callable[[int], None]) -> None:
    """Runs work on all threads at once, while another thread collects garbage, and raises what one of them has raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(THREADS)
    is_over = threading.Event()

    def guarded(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as failure:
            failures.append(failure)

    def collect() -> None:
        # Without a GIL, a collection stops all threads.
        while not is_over.wait(0.005):
            gc.collect(0)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(THREADS)]
    collector = threading.Thread(target=collect, daemon=True)
    for thread in [*threads, collector]:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread waits for a lock for ever"
    is_over.set()
    collector.join()
    for failure in failures:
        raise failure


def test_the_module_leaves_the_gil_off() -> None:
    is_free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    is_gil_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    assert is_gil_enabled() != is_free_threaded


def test_a_prefix_cache_loses_no_page() -> None:
    cache = terrace.PrefixCache(4 * THREADS, page_size=4)

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            prompt = np.arange(13, dtype=np.uint32) + (turn % 3) * (number % 2)
            with cache.hold(prompt, 13) as held:
                pages = held.pages.tolist()
                assert len(set(pages)) == 4
                held.publish(12)

    together(work)
    assert cache.free_pages + cache.evictable_pages == cache.device_pages


def test_a_scheduler_takes_requests_of_all_threads() -> None:
    scheduler = terrace.Scheduler({"cache": {"page_size": 4, "device_pages": 256}})

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            request = number * ROUNDS + turn
            scheduler.submit(request, [1, 2, 3, number, turn], 1)
            scheduler.plan()
            scheduler.abort(request)

    together(work)
    scheduler.plan()
    assert scheduler.cached([1, 2, 3]) == (0, 0)


def test_lookups_answer_all_threads(tmp_path: Path) -> None:
    keys = [number.to_bytes(36, "big") for number in range(64)]
    shared = open_store({"store": f"disk:{tmp_path}", "capacity": "16MiB", "reserve": 0}, object_bytes=4096)
    transfers = Transfers(shared.store, b"n" * 16)
    region = transfers.register(np.ones((32, 4096), np.uint8), 4096)
    assert transfers.put(keys[:32], region.pages(range(32))).all_ok
    lookups = transfers.lookups(hit="hit", miss="miss", retry="retry", seconds=60)

    def work(number: int) -> None:
        for _ in range(ROUNDS):
            found = [lookups.lookup(key, None) for key in keys]
            assert not {"miss"} & set(found[:32]) and not {"hit"} & set(found[32:])
            lookups.flush()

    together(work)
    assert transfers.wait_idle(30)
    assert [lookups.lookup(key, None) for key in keys] == ["hit"] * 32 + ["miss"] * 32
    transfers.unregister(region)
    transfers.close()
    shared.close()


def test_a_store_keeps_what_all_threads_put() -> None:
    store = terrace.Store("memory", capacity="16MiB", object_max="4KiB")
    model = terrace.namespace("a model", page_size=4)

    def work(number: int) -> None:
        pages = np.full((2, 4096), number, np.uint8)
        keys = terrace.page_keys(model, [number] * 4, page_size=4)
        with store.register(pages) as memory:
            for _ in range(ROUNDS):
                store.put(model, keys, memory, [0]).check()
                assert store.get(model, keys, memory, [1]).ok.all() and (pages[1] == number).all()

    together(work)
    store.close()
