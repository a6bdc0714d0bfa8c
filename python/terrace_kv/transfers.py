"""Transfers for engines that a store is plugged into: jobs that never block who submits them.

An adapter gives the engine's own keys, of any length, and memory that was registered once; it is told of jobs that
have ended by :meth:`Transfers.drain`, by a descriptor for its event loop, or by calls that wait.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from . import _native
from .arrays import as_bytes
from .store import FAILED, Store

EngineKeys = Collection[bytes]


def key_of(*parts: bytes | str | int) -> bytes:
    """One key of several parts, such that other parts never give the same: each goes with its type and length."""
    joined = bytearray()
    for part in parts:
        if isinstance(part, int):
            tag, value = b"i", str(part).encode()
        elif isinstance(part, str):
            tag, value = b"s", part.encode()
        else:
            tag, value = b"b", bytes(part)
        joined += tag + len(value).to_bytes(8, "little") + value
    return bytes(joined)


class Completed(NamedTuple):
    """What came of a job. The memory that it was about is the engine's again."""

    job: int
    """Its number."""
    kind: str
    """What it did: ``put``, ``get``, ``exists`` or ``remove``."""
    codes: bytes
    """A number for each key: 255 if it failed; else where the object is (``exists``: 0 if nowhere; ``get``), whether it
    was there already (``put``), or 1."""
    bytes: int
    """What was moved."""
    seconds: float
    """From its submission to its end."""
    error: str | None
    """What the first error says; that objects are not there is none."""

    @property
    def ok(self) -> list[bool]:
        """For each key, whether it was stored, read or removed; for ``exists``, whether it is there."""
        if self.kind == "exists":
            return [code not in (0, FAILED) for code in self.codes]
        return [code != FAILED for code in self.codes]

    @property
    def all_ok(self) -> bool:
        """Whether that is so for every key."""
        return FAILED not in self.codes and not (self.kind == "exists" and 0 in self.codes)


class Region:
    """Memory that was registered, as pages of one size."""

    def __init__(self, number: int, address: int, size: int, page_bytes: int) -> None:
        self.number = number
        """What native calls know it by."""
        self.address = address
        """Where it begins."""
        self.bytes = size
        """Its size."""
        self.page_bytes = page_bytes
        """The size of a page."""

    def pages(self, pages: Sequence[int] | npt.NDArray[Any], lengths: Sequence[int] | None = None) -> Places:
        """Some of its pages, of each all or as much as ``lengths`` says."""
        told = None if lengths is None else np.ascontiguousarray(lengths, dtype=np.uint64)
        return _Told((self.number, np.ascontiguousarray(pages, dtype=np.uint32), told))


class Places(Protocol):
    """Memory that a job reads or fills, a place for each key: :meth:`Region.pages`, :class:`Buffers` or
    :func:`addresses`."""

    def told(self, *, writable: bool) -> tuple[Any, Any, Any]:
        """As native calls take it; ``writable`` if it is to be filled."""


class _Told(NamedTuple):
    places: tuple[Any, Any, Any]

    def told(self, *, writable: bool) -> tuple[Any, Any, Any]:
        return self.places


class Buffers:
    """Any memory. What is a page of a registered region, or its beginning, is used as such; all else is registered for
    the job, which takes time on RDMA."""

    def __init__(self, buffers: Iterable[Any]) -> None:
        self._buffers = list(buffers)

    def told(self, *, writable: bool) -> tuple[Any, Any, Any]:
        """As native calls take it.

        :raises ValueError: if it is to be filled and can only be read.
        """
        flat = [as_bytes(buffer, writable=writable) for buffer in self._buffers]
        places = addresses([view.ctypes.data for view in flat], [view.nbytes for view in flat], flat)
        return places.told(writable=writable)


def addresses(
    starts: Sequence[int] | npt.NDArray[Any], lengths: Sequence[int] | npt.NDArray[Any], owner: Any
) -> Places:
    """As :class:`Buffers`, for memory that is known by its address and kept by ``owner``."""
    return _Told((np.array(starts, dtype=np.uint64), np.array(lengths, dtype=np.uint64), owner))


class Transfers:
    """Jobs of an adapter in one namespace of a store.

    Until a job has ended, the engine must leave the memory alone that it reads, and neither read nor write what it
    fills. A job ends only when the store has let go of that memory, even if it has failed long before; so its memory
    may be used again as soon as its end is told. Failures never raise: they are told key by key.
    """

    def __init__(self, store: Store, namespace: bytes) -> None:
        # Without the store itself, which closes its files when nobody has it any more.
        self._native = _native.Transfers(store._native, namespace)
        self.namespace = namespace
        """What they are named in."""

    def register(self, memory: Any, page_bytes: int) -> Region:
        """Lets the store use memory, as pages: an array, a tensor on the host, or whatever has the buffer protocol.

        :raises ValueError: if its bytes do not lie side by side, or are not whole pages.
        """
        flat = as_bytes(memory, writable=True)
        return self.register_address(flat.ctypes.data, flat.nbytes, page_bytes, memory)

    def register_address(self, address: int, size: int, page_bytes: int, owner: Any) -> Region:
        """Lets the store use ``size`` bytes at an address; ``owner`` keeps them, and is kept as long as they may be
        touched."""
        number = self._native.register(address, size, page_bytes, owner)
        return Region(number, address, size, page_bytes)

    def unregister(self, region: Region) -> None:
        """Takes memory back from the store. Jobs that have begun end as they would have."""
        self._native.unregister(region.number)

    def submit_put(self, keys: EngineKeys, places: Places) -> int:
        """Stores what is at places, each under its key, and gives the job's number."""
        number: int = self._native.put(keys, places.told(writable=False), False, False)
        return number

    def submit_get(self, keys: EngineKeys, places: Places) -> int:
        """Reads objects into places, each exactly as long as its place."""
        number: int = self._native.get(keys, places.told(writable=True), False)
        return number

    def submit_exists(self, keys: EngineKeys, *, lease: bool = False, prefetch_to_memory: bool = False) -> int:
        """Looks up which objects exist."""
        number: int = self._native.exists(keys, lease, prefetch_to_memory, False)
        return number

    def lookups(self, *, hit: Any, miss: Any, retry: Any, seconds: float = 5.0) -> _native.Lookups:
        """Lookups for a scheduler that asks key by key and waits for nothing.

        ``lookup(key, context)`` gives ``hit``, ``miss``, or ``retry`` as long as the store has not answered; the context
        is the engine's and not looked at. Keys that are new are asked about by the next ``flush()``, so that there is
        one question a step, and answers come without another call, ``pending()`` tells whether all have. ``forget(keys)``
        has keys asked about again after they were stored; ``missed(keys)`` takes keys that could not be read for misses.

        :param seconds: how long an answer is believed.
        """
        return _native.Lookups(self._native, hit, miss, retry, seconds)

    def submit_remove(self, keys: EngineKeys) -> int:
        """Removes objects."""
        number: int = self._native.remove(keys, False)
        return number

    def put(self, keys: EngineKeys, places: Places, *, durable: bool = False) -> Completed:
        """As :meth:`submit_put`, and waits without the interpreter's lock."""
        return Completed(*self._native.put(keys, places.told(writable=False), durable, True))

    def get(self, keys: EngineKeys, places: Places) -> Completed:
        """As :meth:`submit_get`, and waits."""
        return Completed(*self._native.get(keys, places.told(writable=True), True))

    def exists(self, keys: EngineKeys, *, lease: bool = False, prefetch_to_memory: bool = False) -> Completed:
        """As :meth:`submit_exists`, and waits."""
        return Completed(*self._native.exists(keys, lease, prefetch_to_memory, True))

    def remove(self, keys: EngineKeys) -> Completed:
        """As :meth:`submit_remove`, and waits."""
        return Completed(*self._native.remove(keys, True))

    def drain(self) -> list[Completed]:
        """The submitted jobs that have ended and were not returned yet, in order of their end."""
        return [Completed(*told) for told in self._native.drain()]

    def event_fd(self) -> int:
        """A descriptor that is readable while there are jobs to drain. Draining resets it; do not close it.

        :raises OSError: on systems other than Linux.
        """
        return self._native.event_fd()

    def pending(self) -> int:
        """How many jobs are under way, waited for or not."""
        return self._native.pending()

    def wait_idle(self, seconds: float | None = None) -> bool:
        """Waits until no job is running, or for this time. Returns whether none is; :meth:`drain` returns ended jobs."""
        return self._native.wait_idle(seconds)

    def close(self) -> None:
        """Lets go of the store, and of all memory that no job uses. Nothing can be submitted after that."""
        self._native.close()

    def stats(self) -> dict[str, dict[str, Any]]:
        """For ``put``, ``get``, ``exists`` and ``remove``: jobs, objects, hits, misses, failures by kind, bytes,
        seconds, and how many jobs took at most as long as :data:`BUCKETS` says."""
        stats: dict[str, dict[str, Any]] = json.loads(self._native.stats())
        return stats


BUCKETS: tuple[float, ...] = tuple(_native.TRANSFER_BUCKETS)
"""Upper ends of the buckets of times, in seconds; one more bucket has no limit."""

