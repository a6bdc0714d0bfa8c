"""Plans: what to compute next, and which pages move, as arrays that lie in one piece of memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, Iterator, NamedTuple

import numpy as np
import numpy.typing as npt

from ._native import PLAN_WORDS, TerraceError

_FORMAT: Final = b"TERPLAN1"
_NONE: Final = 0xFFFF_FFFF_FFFF_FFFF


def _entry(*fields: tuple[str, str]) -> np.dtype[np.void]:
    return np.dtype([(name, "<" + kind) for name, kind in fields])


PREFILL: Final = _entry(
    ("request", "u8"),
    ("waits_for", "i8"),
    ("slot", "u4"),
    ("start", "u4"),
    ("tokens", "u4"),
    ("adapter", "u4"),
    ("produces_token", "u4"),
    ("_", "u4"),
)
"""A part of a prompt to compute. ``waits_for`` is -1 without a load-back to wait for."""
DECODE: Final = _entry(
    ("request", "u8"),
    ("slot", "u4"),
    ("start", "u4"),
    ("tokens", "u4"),
    ("input", "i4"),
    ("adapter", "u4"),
    ("_", "u4"),
)
"""A request that produces its next token. ``input`` is -1 where the token to start from is known; else the row
of the step that the plan is behind that is yet to produce it."""
ROW: Final = _entry(("slot", "u4"), ("first_entry", "u4"), ("first_page", "u4"), ("pages", "u4"))
"""Entries of a row of the page table that change: ``pages`` of them from ``first_entry`` on, which are
``row_pages[first_page:first_page + pages]``."""
COPY: Final = _entry(("op", "u8"), ("direction", "u4"), ("first_page", "u4"), ("pages", "u4"), ("_", "u4"))
"""A copy between device and host: ``direction`` is 0 for a load-back, to the device, and 1 for a write-back."""
L3: Final = _entry(
    ("op", "u8"), ("kind", "u4"), ("first_key", "u4"), ("keys", "u4"), ("first_page", "u4"), ("pages", "u4"), ("_", "u4")
)
"""Something for L3: ``kind`` is 0 for a probe, 1 for a prefetch and 2 for a backup."""
_ENDED: Final = _entry(("request", "u8"), ("state", "u4"), ("reason", "u4"))

KEY: Final = np.dtype("V16")
"""Page keys are 16 bytes each."""
_U32: Final = np.dtype("<u4")
_U64: Final = np.dtype("<u8")

_ARRAYS: Final = (
    ("prefills", PREFILL),
    ("decodes", DECODE),
    ("tokens", _U32),
    ("positions", _U32),
    ("rows", ROW),
    ("row_pages", _U32),
    ("copies", COPY),
    ("copy_device_pages", _U32),
    ("copy_host_pages", _U32),
    ("l3", L3),
    ("l3_keys", KEY),
    ("l3_host_pages", _U32),
    ("cancelled", _U64),
    ("completed", _U64),
    ("_ended", _ENDED),
)
_PLACES: Final = {name: (4 + place, dtype) for place, (name, dtype) in enumerate(_ARRAYS)}

LOAD_BACK: Final = 0
WRITE_BACK: Final = 1
PROBE: Final = 0
PREFETCH: Final = 1
BACKUP: Final = 2

_Records = npt.NDArray[np.void]


class PlanError(TerraceError):
    """Bytes that are not a plan."""


class Ended(NamedTuple):
    """A request whose life has ended."""

    request: int
    state: str
    """``finished``, ``aborted`` or ``failed``."""
    reason: str | None
    """Why it failed: ``timed_out`` or ``step_failed``."""


class Plan:
    """What to do next.

    The engine keeps a page table with one row for each slot. It applies :attr:`rows` first, then may start all
    else at once: nothing in a plan depends on something else in it, except for prefills that say so.

    All arrays are views of :attr:`data`, little-endian and read when they are first asked for. The same bytes
    make the same plan on another rank: ``Plan(received)``.
    """

    def __init__(self, data: bytearray | bytes | memoryview) -> None:
        #: The plan's bytes.
        self.data = data
        if len(data) < 8 * PLAN_WORDS or bytes(data[:8]) != _FORMAT:
            raise PlanError("these bytes are no plan of this version of Terrace: send Plan.data as it is")
        self._head: list[int] = np.frombuffer(data, _U64, PLAN_WORDS).tolist()

    def _array(self, name: str) -> npt.NDArray[Any]:
        word, dtype = _PLACES[name]
        start = 8 * PLAN_WORDS
        for place in range(4, word):
            start += (self._head[place] * _ARRAYS[place - 4][1].itemsize + 7) // 8 * 8
        count = self._head[word]
        if start + count * dtype.itemsize > len(self.data):
            raise PlanError("the end of the plan is missing: send all of Plan.data")
        return np.frombuffer(self.data, dtype, count, start)

    @property
    def step(self) -> int | None:
        """The forward step; none if there is nothing to compute, or as many as may are in flight."""
        return None if self._head[1] == _NONE else self._head[1]

    @property
    def behind(self) -> int | None:
        """The step in flight that it follows."""
        return None if self._head[2] == _NONE else self._head[2]

    @property
    def repeats_max(self) -> int:
        """How often the step may be repeated before its results are reported, all at once."""
        return self._head[3]

    @cached_property
    def prefills(self) -> _Records:
        """Parts of prompts to compute (:data:`PREFILL`)."""
        return self._array("prefills")

    @cached_property
    def decodes(self) -> _Records:
        """Requests that produce their next tokens (:data:`DECODE`)."""
        return self._array("decodes")

    @cached_property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """The tokens that the step computes: those of the prefills, then one of each decode; 0 where that is
        yet to be produced."""
        return self._array("tokens")

    @cached_property
    def positions(self) -> npt.NDArray[np.uint32]:
        """The positions of :attr:`tokens`."""
        return self._array("positions")

    @cached_property
    def producers(self) -> npt.NDArray[np.uint64]:
        """Who produces tokens in the step, in the order of its rows."""
        last = self.prefills[self.prefills["produces_token"] > 0]["request"]
        return np.concatenate([last, self.decodes["request"]])

    @cached_property
    def rows(self) -> _Records:
        """Entries of the page table that change (:data:`ROW`)."""
        return self._array("rows")

    @cached_property
    def row_pages(self) -> npt.NDArray[np.uint32]:
        """The device pages that :attr:`rows` are about."""
        return self._array("row_pages")

    def apply_rows(self, table: npt.NDArray[Any]) -> None:
        """Writes the changes to a page table: an array of ``running_max`` rows, as wide as the longest request
        has pages."""
        for slot, entry, first, pages in self.rows.tolist():
            table[slot, entry : entry + pages] = self.row_pages[first : first + pages]

    @cached_property
    def copies(self) -> _Records:
        """Copies between device and host (:data:`COPY`)."""
        return self._array("copies")

    @cached_property
    def copy_device_pages(self) -> npt.NDArray[np.uint32]:
        """The device pages of :attr:`copies`."""
        return self._array("copy_device_pages")

    @cached_property
    def copy_host_pages(self) -> npt.NDArray[np.uint32]:
        """Their host pages: the n-th belongs to the n-th device page."""
        return self._array("copy_host_pages")

    def each_copy(self) -> Iterator[tuple[int, int, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]]:
        """Each copy: its operation, its direction, its device pages and its host pages."""
        for op, direction, first, pages, _ in self.copies.tolist():
            end = first + pages
            yield op, direction, self.copy_device_pages[first:end], self.copy_host_pages[first:end]

    @cached_property
    def l3(self) -> _Records:
        """Questions and transfers for L3 (:data:`L3`)."""
        return self._array("l3")

    @cached_property
    def l3_keys(self) -> _Records:
        """The keys of :attr:`l3`, 16 bytes each."""
        return self._array("l3_keys")

    @cached_property
    def l3_host_pages(self) -> npt.NDArray[np.uint32]:
        """The host pages of :attr:`l3`; probes have none."""
        return self._array("l3_host_pages")

    def each_l3(self) -> Iterator[tuple[int, int, _Records, npt.NDArray[np.uint32]]]:
        """Each operation of L3: its name, its kind, its keys and its host pages."""
        for op, kind, first_key, keys, first_page, pages, _ in self.l3.tolist():
            host_pages = self.l3_host_pages[first_page : first_page + pages]
            yield op, kind, self.l3_keys[first_key : first_key + keys], host_pages

    @cached_property
    def cancelled(self) -> npt.NDArray[np.uint64]:
        """Operations that nobody waits for any more: they may be stopped, and owe an outcome all the same."""
        return self._array("cancelled")

    @cached_property
    def completed(self) -> npt.NDArray[np.uint64]:
        """Requests whose last token is known since the last plan."""
        return self._array("completed")

    @property
    def ended(self) -> list[Ended]:
        """Requests whose life has ended since the last plan."""
        states, reasons = ("finished", "aborted", "failed"), (None, "timed_out", "step_failed")
        told = self._array("_ended").tolist()
        return [Ended(request, states[state], reasons[reason]) for request, state, reason in told]

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        counts = dict(zip((name for name, _ in _ARRAYS), self._head[4:]))
        names = ("copies", "l3", "cancelled", "completed", "_ended")
        return self.step is None and not any(counts[name] for name in names)

    def __repr__(self) -> str:
        counts = (f"{count} {name.strip('_')}" for (name, _), count in zip(_ARRAYS, self._head[4:]) if count)
        return f"<Plan of step {self.step}: {', '.join(counts) or 'nothing'}>"
