"""Asynchronous transfers for adapters to other engines. Submitting a job never blocks.

An adapter passes the engine's own keys, of any length, and memory that it has registered. It learns which jobs have ended
from :meth:`Transfers.drain`, from a file descriptor for its event loop, or from blocking calls.
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
    """Combines several parts into one key. Different parts never give the same key, because each is encoded with its type and
    length."""
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
    """The result of a job. The engine may use the memory of the job again."""

    job: int
    """The number of the job."""
    kind: str
    """The operation: ``put``, ``get``, ``exists`` or ``remove``."""
    codes: bytes
    """A number for each key: 255 if it failed. Otherwise: where the object is (``exists``, with 0 for absent, and ``get``),
    whether it was already stored (``put``), or 1 (``remove``)."""
    bytes: int
    """Bytes that were transferred."""
    seconds: float
    """Time from submission to end."""
    error: str | None
    """The first error message, or None. A missing object is not an error."""

    @property
    def ok(self) -> list[bool]:
        """For each key, whether it was stored, read or removed; for ``exists``, whether the object exists."""
        if self.kind == "exists":
            return [code not in (0, FAILED) for code in self.codes]
        return [code != FAILED for code in self.codes]

    @property
    def all_ok(self) -> bool:
        """Whether :attr:`ok` is true for every key."""
        return FAILED not in self.codes and not (self.kind == "exists" and 0 in self.codes)


class Region:
    """Registered memory, divided into pages of one size."""

    def __init__(self, number: int, address: int, size: int, page_bytes: int) -> None:
        self.number = number
        """The number of the region in native calls."""
        self.address = address
        """The start address."""
        self.bytes = size
        """The size in bytes."""
        self.page_bytes = page_bytes
        """The size of a page in bytes."""

    def pages(self, pages: Sequence[int] | npt.NDArray[Any], lengths: Sequence[int] | None = None) -> Places:
        """The given pages of this region; with ``lengths``, only the first bytes of each."""
        used = None if lengths is None else np.ascontiguousarray(lengths, dtype=np.uint64)
        return _NativePlaces((self.number, np.ascontiguousarray(pages, dtype=np.uint32), used))


class Places(Protocol):
    """Memory that a job reads or writes, one place per key: :meth:`Region.pages`, :class:`Buffers` or
    :func:`addresses`."""

    def native_arguments(self, *, writable: bool) -> tuple[Any, Any, Any]:
        """The arguments for native calls; ``writable`` if the job writes to the memory."""


class _NativePlaces(NamedTuple):
    places: tuple[Any, Any, Any]

    def native_arguments(self, *, writable: bool) -> tuple[Any, Any, Any]:
        return self.places


class Buffers:
    """Any memory. A buffer that starts at a page of a registered region and fits into it uses that registration. Other buffers
    are registered for the job, which takes time with RDMA."""

    def __init__(self, buffers: Iterable[Any]) -> None:
        self._buffers = list(buffers)

    def native_arguments(self, *, writable: bool) -> tuple[Any, Any, Any]:
        """The arguments for native calls.

        :raises ValueError: if the job writes to memory that is read-only.
        """
        flat = [as_bytes(buffer, writable=writable) for buffer in self._buffers]
        places = addresses([view.ctypes.data for view in flat], [view.nbytes for view in flat], flat)
        return places.native_arguments(writable=writable)


def addresses(
    starts: Sequence[int] | npt.NDArray[Any], lengths: Sequence[int] | npt.NDArray[Any], owner: Any
) -> Places:
    """Like :class:`Buffers`, for memory given by its addresses. ``owner`` is an object that keeps the memory alive."""
    return _NativePlaces((np.array(starts, dtype=np.uint64), np.array(lengths, dtype=np.uint64), owner))


class Transfers:
    """Jobs of an adapter in a namespace of a store.

    Until a job has ended, the engine must not change the memory that the job reads, and must neither read nor change the memory
    that it writes. A job ends only when the store no longer uses that memory, even if it has failed long before. So the memory
    may be reused as soon as the end of the job is reported. Failures do not raise exceptions; they are reported for each key.
    """

    def __init__(self, store: Store, namespace: bytes) -> None:
        # Without a reference to the store itself, whose files close with its last reference.
        self._native = _native.Transfers(store._native, namespace)
        self.namespace = namespace
        """The namespace of the objects of jobs that are submitted."""

    def move_to(self, namespace: bytes) -> None:
        """Moves jobs that are submitted from now on to another namespace. Jobs in flight stay in
        theirs, and lookups must be created again, because they cache results."""
        self._native.move_to(namespace)
        self.namespace = namespace

    def register(self, memory: Any, page_bytes: int) -> Region:
        """Registers memory, divided into pages: an array, a tensor on the host, or any object with the buffer protocol.

        :raises ValueError: if the memory is not contiguous, or its size is not a multiple of the page size.
        """
        flat = as_bytes(memory, writable=True)
        return self.register_address(flat.ctypes.data, flat.nbytes, page_bytes, memory)

    def register_address(self, address: int, size: int, page_bytes: int, owner: Any) -> Region:
        """Registers ``size`` bytes at an address. ``owner`` is an object that keeps the memory alive; it is referenced as long as
        the store may access the memory."""
        number = self._native.register(address, size, page_bytes, owner)
        return Region(number, address, size, page_bytes)

    def unregister(self, region: Region) -> None:
        """Ends the registration of a region. Jobs in flight are not affected."""
        self._native.unregister(region.number)

    def submit_put(self, keys: EngineKeys, places: Places) -> int:
        """Stores the content of each place under its key. Returns the number of the job."""
        number: int = self._native.put(keys, places.native_arguments(writable=False), False, False)
        return number

    def submit_get(self, keys: EngineKeys, places: Places) -> int:
        """Reads objects into places. Each object must have exactly the length of its place. Returns the number of the job."""
        number: int = self._native.get(keys, places.native_arguments(writable=True), False)
        return number

    def submit_exists(
        self, keys: EngineKeys, *, parts: int = 0, lease: bool = False, prefetch_to_memory: bool = False
    ) -> int:
        """Looks up which objects exist. Returns the number of the job.

        With ``parts``, each key stands for that many objects, which exist together or not at all for the caller. Their keys
        are the key, followed by the number of the part in 4 bytes, big endian; they are made off the calling thread.
        """
        number: int = self._native.exists(keys, parts, lease, prefetch_to_memory, False)
        return number

    def touch(self, keys: EngineKeys, *, parts: int = 0) -> None:
        """Marks objects as recently used, so that they are evicted later. Does not wait, and is not reported by
        :meth:`drain`. ``parts`` as in :meth:`submit_exists`."""
        self._native.touch(keys, parts)

    def lookups(self, *, hit: Any, miss: Any, retry: Any, seconds: float = 5.0) -> _native.Lookups:
        """Non-blocking lookups for a scheduler that looks up one key at a time.

        ``lookup(key, context)`` returns ``hit``, ``miss``, or ``retry`` while the result is not known. ``context`` is ignored.
        New keys are looked up by the next ``flush()``, in one batch per step. Results arrive without another call;
        ``pending()`` says whether some are still missing. ``forget(keys)`` makes keys be looked up again, for example after
        they were stored. ``missed(keys)`` marks keys as misses, for example because they could not be read.

        :param seconds: how long a result stays valid.
        """
        return _native.Lookups(self._native, hit, miss, retry, seconds)

    def submit_remove(self, keys: EngineKeys) -> int:
        """Removes objects. Returns the number of the job."""
        number: int = self._native.remove(keys, False)
        return number

    def put(self, keys: EngineKeys, places: Places, *, durable: bool = False) -> Completed:
        """Like :meth:`submit_put`, but blocks until the job has ended. Releases the GIL."""
        return Completed(*self._native.put(keys, places.native_arguments(writable=False), durable, True))

    def get(self, keys: EngineKeys, places: Places) -> Completed:
        """Like :meth:`submit_get`, but blocks until the job has ended. Releases the GIL."""
        return Completed(*self._native.get(keys, places.native_arguments(writable=True), True))

    def exists(self, keys: EngineKeys, *, lease: bool = False, prefetch_to_memory: bool = False) -> Completed:
        """Like :meth:`submit_exists`, but blocks until the job has ended. Releases the GIL."""
        return Completed(*self._native.exists(keys, 0, lease, prefetch_to_memory, True))

    def remove(self, keys: EngineKeys) -> Completed:
        """Like :meth:`submit_remove`, but blocks until the job has ended. Releases the GIL."""
        return Completed(*self._native.remove(keys, True))

    def drain(self) -> list[Completed]:
        """The submitted jobs that have ended and were not returned yet, in order of their end."""
        return [Completed(*result) for result in self._native.drain()]

    def event_fd(self) -> int:
        """A descriptor that is readable while there are jobs to drain. Draining resets it; do not close it.

        :raises OSError: on systems other than Linux.
        """
        return self._native.event_fd()

    def pending(self) -> int:
        """The number of jobs in flight, including those of blocking calls."""
        return self._native.pending()

    def wait_idle(self, seconds: float | None = None) -> bool:
        """Waits until no job is in flight, or until this time has passed. Returns whether no job is in flight. :meth:`drain`
        returns the ended jobs."""
        return self._native.wait_idle(seconds)

    def close(self) -> None:
        """Releases the store, and all memory that no job uses. After that, no job can be submitted."""
        self._native.close()

    def stats(self) -> dict[str, dict[str, Any]]:
        """For ``put``, ``get``, ``exists`` and ``remove``: jobs, objects, hits, misses, failures by kind, bytes,
        seconds, and the number of jobs in each bucket of the latency histogram (:data:`BUCKETS`)."""
        stats: dict[str, dict[str, Any]] = json.loads(self._native.stats())
        return stats


BUCKETS: tuple[float, ...] = tuple(_native.TRANSFER_BUCKETS)
"""Upper bounds of the buckets of the latency histogram, in seconds. One more bucket has no bound."""

