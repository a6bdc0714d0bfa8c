"""How long a prefix can be restored, where a model keeps more than KV for each page.

A pool beside KV says by its policy what of it must be there for a prefix to be of use. The names of policies are
SGLang's (``PoolHitPolicy``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


@dataclass(frozen=True)
class Beside:
    """What is there of a pool beside KV."""

    name: str
    policy: str
    found: Sequence[bool]
    """For each page of the span, whether the pool's part of it is there."""
    trailing_pages: int = 1
    """How many pages at the end of a prefix have a part, where only those do."""
    block_pages: int = 0
    """How many pages of KV make a block, where the pool keeps blocks."""
    group_pages: int = 0
    """How many parts belong to a block: those of its last pages, whose keys follow from all of the block."""


@dataclass
class Prefix:
    """How long a prefix can be restored."""

    pages: int
    """The longest one."""
    by_pool: dict[str, int] = field(default_factory=dict)
    """How far each pool by itself reaches; those that have nothing are left out."""
    restorable: list[int] = field(default_factory=list)
    """All lengths that can be restored, the shortest first: parts at the end of a prefix are not at each length."""


def leading(found: Sequence[bool]) -> int:
    """How many are there before the first that is not."""
    return next((place for place, is_there in enumerate(found) if not is_there), len(found))


def restorable_prefix(kv_pages: int, pools: Sequence[Beside]) -> Prefix:
    """What can be restored of a span whose first ``kv_pages`` pages have their KV."""
    lengths = set(range(1, kv_pages + 1))
    prefix = Prefix(0)
    for pool in pools:
        if pool.policy == BLOCK_GROUPS:
            # Another form of the same pages, which nobody has to have.
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
    """The lengths of prefixes for which the pool has what is needed."""
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
    """How many blocks from the start on are there."""
    if not 0 < pool.group_pages <= pool.block_pages:
        return 0
    blocks = range(len(pool.found) // pool.block_pages)

    def is_whole(block: int) -> bool:
        end = (block + 1) * pool.block_pages
        return all(pool.found[end - pool.group_pages : end])

    return leading([is_whole(block) for block in blocks])
