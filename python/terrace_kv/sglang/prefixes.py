"""The length of a prefix that can be restored, for models with more state than KV per page.

The policy of an additional pool defines which of its parts a prefix needs. The names of policies
are SGLang's (``PoolHitPolicy``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


@dataclass(frozen=True)
class Beside:
    """The available parts of an additional pool."""

    name: str
    policy: str
    found: Sequence[bool]
    """For each page of the span, whether the pool's part of it exists."""
    trailing_pages: int = 1
    """Number of trailing pages of a prefix that need a part, if only those do."""
    block_pages: int = 0
    """KV pages per block, if the pool keeps blocks."""
    group_pages: int = 0
    """Parts per block: those of its last pages, whose keys depend on the whole block."""


@dataclass
class Prefix:
    """Restorable prefixes."""

    pages: int
    """The longest one."""
    by_pool: dict[str, int] = field(default_factory=dict)
    """The reach of each pool alone; pools without any parts are omitted."""
    restorable: list[int] = field(default_factory=list)
    """All restorable lengths in ascending order: parts at the end of a prefix do not exist at each
    length."""


def leading(found: Sequence[bool]) -> int:
    """The number of leading true values."""
    return next((place for place, is_there in enumerate(found) if not is_there), len(found))


def restorable_prefix(kv_pages: int, pools: Sequence[Beside]) -> Prefix:
    """The restorable prefixes of a span whose first ``kv_pages`` pages have their KV."""
    lengths = set(range(1, kv_pages + 1))
    prefix = Prefix(0)
    for pool in pools:
        if pool.policy == BLOCK_GROUPS:
            # Another form of the same pages, which is optional.
            reach = _blocks(pool) * pool.block_pages
        else:
            good = _good_lengths(pool, kv_pages)
            lengths &= good
            reach = max(good, default=0)
        if reach:
            prefix.by_pool[pool.name] = reach
    prefix.restorable = sorted(lengths)
    prefix.pages = prefix.restorable[-1] if prefix.restorable else 0
    return prefix


def _good_lengths(pool: Beside, kv_pages: int) -> set[int]:
    """The lengths of prefixes for which the pool has all needed parts."""
    if pool.policy == ALL_PAGES:
        return set(range(1, leading(pool.found[:kv_pages]) + 1))
    if pool.policy == TRAILING_PAGES:
        good, in_a_row = set(), 0
        for length, is_there in enumerate(pool.found[:kv_pages], 1):
            in_a_row = in_a_row + 1 if is_there else 0
            if in_a_row >= min(pool.trailing_pages, length):
                good.add(length)
        return good
    raise ValueError(
        f"the pool {pool.name} has an unknown policy, {pool.policy!r}: "
        "this SGLang is newer than this version of terrace-kv"
    )


def _blocks(pool: Beside) -> int:
    """The number of leading complete blocks."""
    if not 0 < pool.group_pages <= pool.block_pages:
        return 0
    blocks = range(len(pool.found) // pool.block_pages)

    def is_whole(block: int) -> bool:
        end = (block + 1) * pool.block_pages
        return all(pool.found[end - pool.group_pages : end])

    return leading([is_whole(block) for block in blocks])
