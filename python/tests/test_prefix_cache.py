"""The prefix cache alone, from Python."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import terrace_kv as terrace


def tokens(count: int, first: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.arange(first, first + count, dtype=np.uint32)


def cache(device_pages: int = 8) -> terrace.PrefixCache:
    return terrace.PrefixCache(device_pages, page_size=4)


def fill(one: terrace.PrefixCache, prompt: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> list[int]:
    """Runs a request that computes its prompt and ends; returns its pages."""
    with one.hold(prompt, len(prompt)) as held:
        held.publish(len(prompt))
        pages: list[int] = held.pages.tolist()
    return pages


def in_use(one: terrace.PrefixCache) -> tuple[int, int]:
    """Free and evictable pages."""
    return one.free_pages, one.evictable_pages


def test_prompt_hits_published_pages() -> None:
    one = cache()
    first = fill(one, tokens(10))
    assert len(set(first)) == 3 and max(first) < 8
    assert in_use(one) == (6, 2), "the part of a page is not kept"
    assert one.cached(tokens(10)) == 2 and one.cached(tokens(10, first=1)) == 0
    assert one.cached(tokens(8)) == 2 and one.cached([0, 1, 2, 3, 9]) == 1
    with one.hold(tokens(8), 12) as held:
        assert held.found_pages == 1, "the last token is always computed"
        assert held.pages.tolist()[:1] == first[:1] and len(held.pages) == 3
    assert in_use(one) == (6, 2)
    assert one.clear() == 2 and one.cached(tokens(10)) == 0


def test_adapters_and_tenants_share_nothing() -> None:
    one = cache()
    fill(one, tokens(8))
    assert one.cached(tokens(8), adapter="cats") == one.cached(tokens(8), salt="tenant") == 0
    with one.hold(tokens(8), 8, salt="tenant") as held:
        assert held.found_pages == 0
        held.publish(8)
    assert one.cached(tokens(8), salt="tenant") == 2


def test_evicts_least_recently_used_pages() -> None:
    one = cache(6)
    for first in (0, 100, 200):
        fill(one, tokens(8, first))
    assert in_use(one) == (0, 6)
    one.hold(tokens(9, 0)).close()
    fill(one, tokens(8, 300))
    assert one.evicted_pages == 2
    assert [one.cached(tokens(8, first)) for first in (0, 100, 200, 300)] == [2, 0, 2, 2]


def test_held_pages_are_not_evicted() -> None:
    one = cache(6)
    fill(one, tokens(8))
    held = one.hold(tokens(9), 12)
    kept = held.pages.tolist()
    assert held.found_pages == 2 and in_use(one) == (3, 0)
    with pytest.raises(terrace.OutOfPages, match="4 more pages are needed, but only 3 are available: close"):
        one.hold(tokens(16, 100), 16)
    with pytest.raises(terrace.OutOfPages, match="4 more pages are needed"):
        held.reserve(28)
    assert in_use(one) == (3, 0) and held.pages.tolist() == kept, "nothing has changed"
    others = fill(one, tokens(12, 100))
    assert not set(others) & set(kept)
    held.close()
    assert len(fill(one, tokens(24, 200))) == 6


def test_failed_hold_holds_no_page() -> None:
    one = cache(6)
    fill(one, tokens(8))
    with one.hold(tokens(12, 100), 12):
        with pytest.raises(terrace.OutOfPages, match="3 more pages are needed, but only 1 are available"):
            one.hold(tokens(20), 20)
        assert in_use(one) == (1, 2), "nor what it found"


def test_a_request_grows() -> None:
    one = cache()
    with one.hold(tokens(6), 6) as held:
        assert held.publish(6) is None
        held.append([6])
        held.append(tokens(3, 7))
        held.reserve(10)
        assert len(held.pages) == 3
        held.publish(10)
    assert one.cached(tokens(10)) == 2


def test_equal_requests_share_pages_after_publishing() -> None:
    one = cache()
    first, second = one.hold(tokens(8), 10), one.hold(tokens(8), 10)
    assert not set(first.pages.tolist()) & set(second.pages.tolist())
    assert first.publish(8) is None
    assert second.publish(4) == 0, "from the first page on"
    assert second.publish(8) == 1
    assert second.pages.tolist()[:2] == first.pages.tolist()[:2]
    assert in_use(one) == (8 - 2 - 1 - 1, 0), "two in common, and another page each"
    first.close()
    assert one.evictable_pages == 0
    second.close()
    assert in_use(one) == (6, 2)


def test_misuse_is_refused_and_changes_nothing() -> None:
    one = cache()
    held = one.hold(tokens(8), 4)
    with pytest.raises(ValueError, match="cannot publish 12 tokens, only 8 are known: append"):
        held.publish(12)
    with pytest.raises(ValueError, match="cannot publish 2 pages, only 1 are reserved: reserve"):
        held.publish(8)
    with pytest.raises(TypeError):
        held.append(["text"])  # type: ignore[list-item]
    with pytest.raises(OverflowError):
        held.append([-1])
    assert one.cached(tokens(8)) == 0 and in_use(one) == (7, 0)
    held.close()
    held.close()
    for use in (lambda: held.pages, lambda: held.reserve(4), lambda: held.publish(4), lambda: held.append([1])):
        with pytest.raises(ValueError, match="were released: hold the prompt again"):
            use()
    assert in_use(one) == (8, 0)
    with pytest.raises(terrace.ConfigError, match="page_size = 48: use a power of two"):
        terrace.PrefixCache(8, page_size=48)
    with pytest.raises(terrace.ConfigError, match='eviction = "best": use lru'):
        terrace.PrefixCache(8, eviction="best")


def test_dropped_requests_release_their_pages() -> None:
    one = cache()
    with pytest.raises(ZeroDivisionError), one.hold(tokens(8), 8):
        1 / 0
    assert in_use(one) == (8, 0) and one.cached(tokens(8)) == 0
    forgotten = one.hold(tokens(8), 8)
    forgotten.publish(4)
    assert in_use(one) == (6, 0)
    del forgotten
    assert in_use(one) == (7, 1)
    in_a_circle: list[object] = [one.hold(tokens(8), 8)]
    in_a_circle.append(in_a_circle)
    del in_a_circle
    gc.collect()
    assert in_use(one) == (7, 1)
    outlives = one.hold(tokens(8))
    del one
    assert len(outlives.pages) == 1


def test_accepts_any_array_type() -> None:
    one = cache()
    fill(one, tokens(8))
    for prompt in (tokens(16)[:8], np.arange(8), np.repeat(tokens(8), 2)[::2], tokens(8).tolist(), tuple(range(8))):
        assert one.cached(prompt) == 2  # type: ignore[arg-type]
    long = tokens(100_000)
    large = terrace.PrefixCache(30_000, page_size=4)
    fill(large, long)
    long[-1] += 1
    assert large.cached(long) == 24_999, "the cache has a copy"


def test_threads_share_a_cache() -> None:
    one = cache(64)

    def work(first: int) -> None:
        for number in range(300):
            prompt = tokens(12 + number % 17, first * (number % 5))
            with one.hold(prompt, len(prompt)) as held:
                assert len(set(held.pages.tolist())) == len(held.pages)
                held.publish(len(prompt))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(in_use(one)) == 64
