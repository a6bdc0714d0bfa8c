"""Plans: what to compute next, and which pages to copy. All arrays of a plan are views of one buffer."""

from __future__ import annotations

import struct
from typing import Any, Final, Generic, Iterator, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ._native import PLAN_HEAD_BYTES, TerraceError

_FORMAT: Final = b"TERPLAN2"
_NONE: Final = 0xFFFF_FFFF_FFFF_FFFF
#: The format, three words of the step, then entries and first byte of each array.
_HEAD: Final = struct.Struct(f"<8s3Q{(PLAN_HEAD_BYTES - 32) // 4}I")


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
"""A prefill chunk. ``waits_for`` is the load-back that must finish first, or -1."""
DECODE: Final = _entry(
    ("request", "u8"),
    ("slot", "u4"),
    ("start", "u4"),
    ("tokens", "u4"),
    ("input", "i4"),
    ("adapter", "u4"),
    ("_", "u4"),
)
"""A decode: a request that produces its next token. ``input`` is -1 if the input token is known. Otherwise it is the row of
the previous step (:attr:`Plan.behind`), still in flight, that produces the input token."""
ROW: Final = _entry(("slot", "u4"), ("first_entry", "u4"), ("first_page", "u4"), ("pages", "u4"))
"""Changed entries in a row of the page table: ``pages`` entries from ``first_entry`` on, with the values
``row_pages[first_page:first_page + pages]``."""
COPY: Final = _entry(("op", "u8"), ("direction", "u4"), ("first_page", "u4"), ("pages", "u4"), ("_", "u4"))
"""A copy between device and host: ``direction`` is 0 for a load-back (to the device) and 1 for a write-back (to the host)."""
L3: Final = _entry(
    ("op", "u8"), ("kind", "u4"), ("first_key", "u4"), ("keys", "u4"), ("first_page", "u4"), ("pages", "u4"), ("_", "u4")
)
"""An L3 operation: ``kind`` is 0 for a probe, 1 for a prefetch and 2 for a backup."""
_ENDED: Final = _entry(("request", "u8"), ("state", "u4"), ("reason", "u4"))

KEY: Final = np.dtype("V16")
"""The type of a page key: 16 bytes."""
_U32: Final[np.dtype[np.uint32]] = np.dtype("<u4")
_U64: Final[np.dtype[np.uint64]] = np.dtype("<u8")

LOAD_BACK: Final = 0
WRITE_BACK: Final = 1
PROBE: Final = 0
PREFETCH: Final = 1
BACKUP: Final = 2

_Records = npt.NDArray[np.void]
_Entry = TypeVar("_Entry", bound=np.generic)


class PlanError(TerraceError):
    """The bytes are not a plan."""


class Ended(NamedTuple):
    """A request that has ended."""

    request: int
    state: str
    """``finished``, ``aborted`` or ``failed``."""
    reason: str | None
    """Why it failed: ``timed_out`` or ``step_failed``."""


class _Array(Generic[_Entry]):
    """An array of a plan: a view that is created on first access and then replaces this
    descriptor."""

    def __init__(self, place: int, dtype: np.dtype[_Entry], doc: str) -> None:
        # Two words per array follow the format and three words of the step.
        self._word, self._dtype, self.__doc__ = 4 + 2 * place, dtype, doc

    def __set_name__(self, owner: type[Plan], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, plan: None, owner: type[Plan]) -> _Array[_Entry]: ...
    @overload
    def __get__(self, plan: Plan, owner: type[Plan]) -> npt.NDArray[_Entry]: ...
    def __get__(self, plan: Plan | None, owner: type[Plan]) -> _Array[_Entry] | npt.NDArray[_Entry]:
        if plan is None:
            return self
        word = self._word
        try:
            array = np.frombuffer(plan.data, self._dtype, plan._head[word], plan._head[word + 1])
        except ValueError:
            raise PlanError("the end of the plan is missing: send all of Plan.data") from None
        plan.__dict__[self._name] = array
        return array


class Plan:
    """What the engine does next: a step, changes of the page table, copies and L3 operations.

    The engine has a page table with one row for each slot. It applies :attr:`rows` first, and may then start everything
    else concurrently. Parts of a plan do not depend on each other, except prefills with ``waits_for``.

    All arrays are little-endian views of :attr:`data`, created on first access. To send a plan to another rank, send
    its bytes and call ``Plan(received)`` there.
    """

    prefills = _Array(0, PREFILL, "Prefill chunks (:data:`PREFILL`).")
    decodes = _Array(1, DECODE, "Requests that produce their next tokens (:data:`DECODE`).")
    producers = _Array(2, _U64, "Requests that produce tokens in the step, in the order of its rows.")
    tokens = _Array(
        3,
        _U32,
        "The input tokens of the step: those of the prefills, then one per decode; 0 if the token is not known yet"
        " (see ``input`` in :data:`DECODE`).",
    )
    positions = _Array(4, _U32, "The positions of :attr:`tokens`.")
    rows = _Array(5, ROW, "Changed entries of the page table (:data:`ROW`).")
    row_pages = _Array(6, _U32, "The device pages of :attr:`rows`.")
    copies = _Array(7, COPY, "Copies between device and host (:data:`COPY`).")
    copy_device_pages = _Array(8, _U32, "The device pages of :attr:`copies`.")
    copy_host_pages = _Array(9, _U32, "The host pages of :attr:`copies`: the n-th belongs to the n-th device page.")
    l3 = _Array(10, L3, "L3 operations (:data:`L3`).")
    l3_keys = _Array(11, KEY, "The keys of :attr:`l3`, 16 bytes each.")
    l3_host_pages = _Array(12, _U32, "The host pages of :attr:`l3`; probes have none.")
    cancelled = _Array(
        13, _U64, "Operations that no request waits for any more. They may be cancelled, but must still report an outcome."
    )
    completed = _Array(14, _U64, "Requests that have produced their last token since the last plan.")
    _ended = _Array(15, _ENDED, "Requests that have ended since the last plan.")

    def __init__(self, data: bytearray | bytes | memoryview) -> None:
        #: The bytes of the plan.
        self.data = data
        self._head: tuple[Any, ...] = _HEAD.unpack_from(data) if len(data) >= PLAN_HEAD_BYTES else (None,)
        if self._head[0] != _FORMAT:
            raise PlanError("these bytes are not a plan of this version of Terrace: send Plan.data unchanged")

    @property
    def step(self) -> int | None:
        """The number of the step; None if there is nothing to compute, or if the maximum number of steps is in flight."""
        return None if self._head[1] == _NONE else self._head[1]

    @property
    def behind(self) -> int | None:
        """The step in flight that this step follows, or None."""
        return None if self._head[2] == _NONE else self._head[2]

    @property
    def repeats_max(self) -> int:
        """How many times the step may be repeated, each decode one token further, before all results are reported at once."""
        return int(self._head[3])

    def apply_rows(self, table: npt.NDArray[Any]) -> None:
        """Applies :attr:`rows` to a page table: an array with ``running_max`` rows and one column per page of the longest
        request."""
        for slot, entry, first, pages in self.rows.tolist():
            table[slot, entry : entry + pages] = self.row_pages[first : first + pages]

    def each_copy(self) -> Iterator[tuple[int, int, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]]:
        """For each copy: operation id, direction, device pages and host pages."""
        for op, direction, first, pages, _ in self.copies.tolist():
            end = first + pages
            yield op, direction, self.copy_device_pages[first:end], self.copy_host_pages[first:end]

    def each_l3(self) -> Iterator[tuple[int, int, _Records, npt.NDArray[np.uint32]]]:
        """For each L3 operation: operation id, kind, keys and host pages."""
        for op, kind, first_key, keys, first_page, pages, _ in self.l3.tolist():
            host_pages = self.l3_host_pages[first_page : first_page + pages]
            yield op, kind, self.l3_keys[first_key : first_key + keys], host_pages

    @property
    def ended(self) -> list[Ended]:
        """Requests that have ended since the last plan."""
        states, reasons = ("finished", "aborted", "failed"), (None, "timed_out", "step_failed")
        return [Ended(request, states[state], reasons[reason]) for request, state, reason in self._ended.tolist()]

    @property
    def is_idle(self) -> bool:
        """Whether the plan is empty."""
        if self.step is not None:
            return False
        return not any(map(len, (self.copies, self.l3, self.cancelled, self.completed, self._ended)))

    def __repr__(self) -> str:
        names = [name for name, kind in vars(Plan).items() if isinstance(kind, _Array)]
        counts = {name.strip("_"): len(getattr(self, name)) for name in names}
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"<Plan of step {self.step}: {told or 'nothing'}>"
