"""Pages of SGLang's host pools as objects of a store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._native import ConfigError
from ..store import FAILED
from ..transfers import Completed, EngineKeys, Places, Transfers, addresses

log = logging.getLogger(__name__)

# Approximate size of the parts in which copied pages are moved: it bounds the memory of the copies.
COPIED_AT_A_TIME = 64 << 20
# Largest number of objects per page, if it cannot be copied into one.
RUNS_MAX = 8

Move = Callable[[EngineKeys, Places], Completed]
"""Puts or gets objects, and waits."""


@dataclass(frozen=True)
class Form:
    """Mapping of a page to objects."""

    kind: str
    """``runs``: each contiguous run of its memory is an object, without a copy. ``flat``: it is
    copied into one object. ``nothing``: the pool has no memory of its own."""
    sizes: tuple[int, ...]
    """The bytes of each object of a page."""
    regions: tuple[tuple[int, int, int], ...] = ()
    """Memory to register: its address, its bytes, and those of one run."""

    @property
    def page_bytes(self) -> int:
        """The bytes of a page."""
        return sum(self.sizes)


def form_of(name: str, pool: Any) -> Form:
    """The mapping of the pool's pages to objects.

    :raises ConfigError: if there is none.
    """
    if getattr(pool, "shard_size", 1) > 1:
        raise ConfigError(f"the pool {name} is sharded over ranks by page: leave out --enable-kv-cache-sharding")
    runs, why = _runs(pool)
    if runs is not None and runs.kind == "nothing":
        return runs
    # The two objects of a page may differ a little in size: slots of stores are as large as the
    # largest object.
    if runs is not None and len(runs.sizes) <= 2 and 2 * min(runs.sizes) >= max(runs.sizes):
        return runs
    flat = _flat(pool)
    if flat is not None:
        return flat
    if runs is not None and len(runs.sizes) <= RUNS_MAX:
        return runs
    raise ConfigError(
        f"pages of the pool {name} ({type(pool).__name__}, layout {pool.layout}) cannot be stored{why}: "
        "start SGLang with --hicache-mem-layout page_first or page_first_direct"
    )


def _runs(pool: Any) -> tuple[Form | None, str]:
    """The contiguous runs of a page; or why they are unknown."""
    page = getattr(pool, "logical_page_size", pool.page_size)
    pages = getattr(pool, "logical_size", pool.size) // page
    try:
        told = [pool.get_page_buffer_meta(torch.arange(at * page, (at + 1) * page)) for at in {0, pages - 1}]
    except (ValueError, NotImplementedError, AttributeError) as error:
        return None, f" ({error})"
    if not all(told):
        return Form("nothing", ()), ""
    sizes = tuple(int(size) for size in told[0][1])
    memories = _memories(pool)
    regions = []
    for place, size in enumerate(sizes):
        addresses = [int(pointers[place]) for pointers, _ in told]
        memory = next((one for one in memories if all(one[0] <= at < one[0] + one[1] for at in addresses)), None)
        if memory is None or any((at - memory[0]) % size for at in addresses):
            return None, " (its pages are not contiguous)"
        regions.append((memory[0], memory[1] // size * size, size))
    apart = {address: size for address, _, size in regions}
    if any(apart[address] != size for address, _, size in regions):
        return None, " (one buffer has runs of several sizes)"
    return Form("runs", sizes, tuple(dict.fromkeys(regions))), ""


def _memories(pool: Any) -> list[tuple[int, int]]:
    """The pool's memory: addresses and bytes, whole buffers before parts of them."""
    found: list[torch.Tensor] = []
    beside = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else []
    for buffer in (getattr(pool, "kv_buffer", None), beside):
        tensors = buffer if isinstance(buffer, (list, tuple)) else [buffer]
        found += [one for one in tensors if isinstance(one, torch.Tensor) and one.is_contiguous()]
    return [(one.data_ptr(), one.numel() * one.element_size()) for one in found]


def _flat(pool: Any) -> Form | None:
    """The mapping of a page to one object, if the pool can copy it."""
    try:
        page = pool.get_data_page(0)
    except (ValueError, NotImplementedError, AttributeError):
        return None
    return Form("flat", (page.numel() * page.element_size(),))


class Pages:
    """The pages of one pool in a store, under separate names. Calls block until their memory is no
    longer used."""

    def __init__(self, pool: Any, form: Form, transfers: Transfers, lineage: Callable[[], bytes]) -> None:
        self.pool = pool
        self.form = form
        """Mapping of pages to objects."""
        self.transfers = transfers
        """The transfers of the store."""
        self.page_size: int = getattr(pool, "logical_page_size", pool.page_size)
        """Number of pool slots per page."""
        self._lineage = lineage
        for region in form.regions:
            transfers.register_address(*region, pool)

    def close(self) -> None:
        """Releases the store, and the pool's memory once no call uses it."""
        self.transfers.wait_idle()
        self.transfers.close()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page exists, with all its parts."""
        if self.form.kind == "nothing":
            return [True] * len(keys)
        told = self.transfers.exists(self._names(keys), prefetch_to_memory=True)
        found = np.frombuffer(told.codes, np.uint8)
        return self._whole((found != 0) & (found != FAILED))

    def put(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Stores pages of the pool; returns which of them are in the store."""
        return self._move_pages(keys, host_indices, self.transfers.put, self._put_copies)

    def get(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Reads pages into the pool; returns which of them were read."""
        return self._move_pages(keys, host_indices, self.transfers.get, self._get_copies)

    def _move_pages(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        move: Move,
        move_copies: Callable[[Sequence[str], Sequence[int]], list[bool]],
    ) -> list[bool]:
        """Moves pages in place if the pool permits it, and otherwise copies of them, a few at a
        time."""
        starts = self._starts(keys, host_indices)
        if starts is None:
            return [False] * len(keys)
        if self.form.kind == "nothing":
            return [True] * len(keys)
        if self.form.kind == "runs":
            return self._move(move, keys, *self._addresses(host_indices), self.pool)
        moved: list[bool] = []
        for part in self._parts(len(keys)):
            moved += move_copies(keys[part], starts[part])
            if not all(moved):
                # Pages behind a missing page are useless, in the store as in the pool.
                break
        return moved + [False] * (len(keys) - len(moved))

    def _put_copies(self, keys: Sequence[str], starts: Sequence[int]) -> list[bool]:
        return self.put_tensors(keys, [self.pool.get_data_page(start) for start in starts])

    def _get_copies(self, keys: Sequence[str], starts: Sequence[int]) -> list[bool]:
        sample = self.pool.get_data_page(0)
        pages = [torch.empty_like(sample) for _ in starts]
        got = self.get_tensors(keys, pages)
        for start, page, is_there in zip(starts, pages, got):
            if is_there:
                self.pool.set_from_flat_data_page(start, page)
        return got

    def put_tensors(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Stores pages that were copied out of the pool."""
        flat = [page.contiguous() for page in pages]
        return self._move(self.transfers.put, keys, *self._addresses_of(flat), flat)

    def get_tensors(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Reads pages that will be copied into the pool."""
        return self._move(self.transfers.get, keys, *self._addresses_of(pages), list(pages))

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        """The names of the objects of pages: lineage, part and key."""
        lineage = self._lineage()
        parts = [lineage + bytes([part]) for part in range(len(self.form.sizes))]
        return [part + key for key in map(str.encode, keys) for part in parts]

    def _whole(self, objects: npt.NDArray[np.bool_]) -> list[bool]:
        """Whether all objects of each page exist."""
        return [bool(page.all()) for page in objects.reshape(-1, len(self.form.sizes))]

    def _move(
        self, move: Move, keys: Sequence[str], starts: Any, sizes: Any, owner: Any
    ) -> list[bool]:
        if not keys:
            return []
        told = move(self._names(keys), addresses(starts, sizes, owner))
        if told.error is not None:
            log.warning("terrace: %s of %d pages: %s", told.kind, len(keys), told.error)
        return self._whole(np.frombuffer(told.codes, np.uint8) != FAILED)

    def _addresses(self, host_indices: torch.Tensor) -> tuple[Any, Any]:
        pointers, sizes = self.pool.get_page_buffer_meta(host_indices)
        return np.array(pointers, np.uint64), np.array(sizes, np.uint64)

    def _addresses_of(self, pages: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """The parts of pages that are contiguous in tensors, in the pool's order."""
        for page in pages:
            if page.numel() * page.element_size() != self.form.page_bytes or not page.is_contiguous():
                raise ValueError(f"a page has {self.form.page_bytes} contiguous bytes, but this tensor is {page.shape}")
        sizes = np.array(self.form.sizes, np.uint64)
        offsets = np.cumsum(sizes) - sizes
        starts = np.array([page.data_ptr() for page in pages], np.uint64)
        return (starts[:, None] + offsets).reshape(-1), np.tile(sizes, len(pages))

    def _starts(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int] | None:
        """The start slots of pages in the pool, if there is one per key."""
        if host_indices is None or host_indices.numel() != len(keys) * self.page_size:
            told = 0 if host_indices is None else host_indices.numel()
            log.error("terrace: %d keys with %d places, for pages of %d", len(keys), told, self.page_size)
            return None
        starts: list[int] = host_indices[:: self.page_size].tolist()
        return starts

    def _parts(self, pages: int) -> Iterator[slice]:
        """Parts of a batch, none larger than the limit for copies."""
        at_a_time = max(1, COPIED_AT_A_TIME // self.form.page_bytes)
        for start in range(0, pages, at_a_time):
            yield slice(start, start + at_a_time)
