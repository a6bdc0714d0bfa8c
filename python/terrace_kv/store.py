"""L3 stores: in memory, on disk, on nodes, in a Mooncake cluster, in a bucket."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import _native
from .arrays import Bytes, Staging, as_bytes, is_torch, size
from .calls import Then, awaited

# The value in :attr:`Batch.codes` of an object that failed.
FAILED = 255
# Where an object is, as :meth:`Store.exists` and :meth:`Store.get` return it.
ABSENT, IN_MEMORY, ON_DISK = 0, 1, 2

Keys = npt.NDArray[Any] | bytes | Sequence[bytes]
Pages = npt.NDArray[Any] | Sequence[int]


def namespace(model: str, page_size: int, **fields: Any) -> bytes:
    """The 16-byte digest of a namespace, which is part of every page key. Change ``model`` whenever the weights
    change. The other fields are ``layout``, ``dtype``, ``tensor_ranks``, ``adapter``, ``salt`` and
    ``secret``.

    :raises ConfigError: if a field is unknown.
    """
    return _native.namespace_digest(json.dumps({"model": model, "page_size": page_size, **fields}))


def page_keys(namespace: bytes, tokens: npt.NDArray[np.uint32] | Sequence[int], page_size: int) -> Bytes:
    """The page keys of the whole pages of a prompt, one per row. They are the same keys that the scheduler uses."""
    prompt = np.ascontiguousarray(tokens, dtype=np.uint32)
    return np.frombuffer(_native.page_keys(namespace, prompt, page_size), np.uint8).reshape(-1, 16)


@dataclass(frozen=True)
class Batch:
    """The results of a call, one per object."""

    codes: npt.NDArray[np.uint8]
    """A number for each object: 255 if it failed. Otherwise: where it is (``exists``, ``get``), whether it was already
    stored (``put``), or 1 (other calls)."""
    errors: dict[int, _native.StoreError]
    """The errors of objects that failed, by their index in the batch."""

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """For each object, whether it succeeded."""
        ok: npt.NDArray[np.bool_] = self.codes != FAILED
        return ok

    def check(self) -> Batch:
        """Returns the batch itself if no object failed.

        :raises StoreError: the first error.
        """
        for error in self.errors.values():
            raise error
        return self


class Memory:
    """Registered memory that a store may access, divided into pages of one size.

    The memory is kept alive while it is registered or a transfer uses it. Until a call has returned, do not change the pages
    that it reads, and neither read nor change the pages that it writes. Other calls with pages in use are rejected.
    """

    def __init__(self, native: _native.Memory, array: Any, staging: Staging | None = None) -> None:
        self._native = native
        self._staging = staging
        self.array = array
        """The array or tensor that was registered."""

    @property
    def pages(self) -> int:
        """The number of pages."""
        return self._native.pages

    @property
    def page_bytes(self) -> int:
        """The size of a page in bytes."""
        return self._native.page_bytes

    def is_lent(self, page: int) -> bool:
        """Whether a transfer uses the page, including abandoned transfers."""
        return self._native.is_lent(page)

    def _before_put(self, pages: npt.NDArray[np.uint32]) -> None:
        if self._staging is None:
            return
        # The store refuses pages in use too, but only after they were copied to the host, which
        # would be too late.
        for page in pages.tolist():
            if self._native.is_lent(page):
                raise _native.StoreError(f"page {page} is in use by another call: wait for its end")
        self._staging.fetch(pages)

    def _after_get(self, pages: npt.NDArray[np.uint32], got: Batch) -> Batch:
        if self._staging is not None:
            self._staging.bring(pages[got.ok])
        return got

    def close(self) -> None:
        """Ends the registration. Transfers in flight are not affected."""
        self._native.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store:
    """A store of objects of up to some megabytes each. Each has a namespace and a key of 16 bytes.

    ``place`` is ``memory``, ``disk:FOLDER``, ``nodes://HOST:PORT,HOST:PORT``, ``mooncake://HOST:PORT``,
    ``s3://BUCKET/PREFIX`` (or ``gs://``, ``az://``) or ``bucket:file:///FOLDER``. ``capacity`` and ``object_max`` (the
    maximum size of an object) are bytes or text like ``64MiB``; for nodes they are set on the nodes. ``memory`` is the
    size of a memory cache on top of a disk store, and ``reserve`` the free space that it leaves on its file system. With
    ``write_behind``, objects count as stored once the memory cache has them, and are written to disk in the background:
    those that have not been written are lost if the process dies; :meth:`flush` and :meth:`close` wait for them.
    ``guard`` adds deadlines, a circuit breaker and a negative cache, so that a slow or failing store does not block the
    caller: True, or settings of ``GuardConfig``. Other settings are those of the crate's configuration, such as
    ``lease_ttl_ms``; ``library`` for Mooncake; ``secret_file``, ``client`` and ``copies`` for nodes. For a feature
    store in a Mooncake cluster, set ``for_features=True``.

    Every object is verified when it is read. An object that does not verify is missing, so wrong bytes are never
    returned. Each call is for a batch of objects and returns one result per object. Methods that end in ``_async`` are for
    ``asyncio``; the others block and release the GIL. After :func:`os.fork`, open a new store.

    :raises ConfigError: if the store cannot be opened with these settings.
    """

    def __init__(
        self,
        place: str,
        *,
        capacity: int | str = 0,
        object_max: int | str = 0,
        memory: int | str = 0,
        write_behind: bool = False,
        reserve: int | str | None = None,
        guard: bool | Mapping[str, int] = False,
        for_features: bool = False,
        **settings: Any,
    ) -> None:
        told: dict[str, Any] = {
            "capacity_bytes": size(capacity),
            "object_bytes_max": size(object_max),
            "memory_bytes": size(memory),
            "write_behind": write_behind,
            "for_features": for_features,
            **settings,
        }
        if reserve is not None:
            told["reserve_bytes"] = size(reserve)
        if guard is not False:
            told["guard"] = {} if guard is True else dict(guard)
        self._native = _native.Store(place, json.dumps(told))
        self.place = place
        """Where the store is."""

    def register(self, memory: Any, pages: int | None = None) -> Memory:
        """Registers memory with the store: a NumPy array, a PyTorch tensor on the host (pinned or not), or any object with
        DLPack or the buffer protocol. The memory is divided into ``pages`` pages of one size; by default, as many as
        ``len(memory)``.

        A tensor on a GPU gets a pinned staging buffer of the same size on the host. A put copies its pages there first,
        after the work that is queued on the current stream. A get copies them to the GPU at the end.

        :raises ValueError: if the memory is not contiguous, or cannot be divided into this number of pages.
        """
        pages = len(memory) if pages is None else pages
        if is_torch(memory) and memory.is_cuda:
            staging = Staging(memory, pages)
            return Memory(self._native.register(as_bytes(staging.host), pages), memory, staging)
        return Memory(self._native.register(as_bytes(memory, writable=True), pages), memory)

    def put(
        self,
        namespace: bytes,
        keys: Keys,
        memory: Memory,
        pages: Pages,
        *,
        lengths: Sequence[int] | None = None,
        generations: Sequence[int] | None = None,
        pin: str | None = None,
        durable: bool = False,
    ) -> Batch:
        """Stores pages. Objects that are ``ok`` can be read when the call returns; with ``durable`` they also survive a crash.
        ``pin`` is ``soft`` (evicted last) or ``hard:OWNER`` (not evicted until it is unpinned)."""
        objects, places = _objects(namespace, keys, generations), _pages(pages)
        memory._before_put(places)
        return _batch(self._native.put(objects, memory._native, places, _lengths(lengths), pin, durable, None))

    async def put_async(
        self,
        namespace: bytes,
        keys: Keys,
        memory: Memory,
        pages: Pages,
        *,
        lengths: Sequence[int] | None = None,
        generations: Sequence[int] | None = None,
        pin: str | None = None,
        durable: bool = False,
    ) -> Batch:
        """Like :meth:`put`, for ``asyncio``."""
        objects, places = _objects(namespace, keys, generations), _pages(pages)
        memory._before_put(places)

        def start(then: Then) -> None:
            self._native.put(objects, memory._native, places, _lengths(lengths), pin, durable, then)

        return _batch(await awaited(start))

    def get(
        self,
        namespace: bytes,
        keys: Keys,
        memory: Memory,
        pages: Pages,
        *,
        lengths: Sequence[int] | None = None,
        generations: Sequence[int] | None = None,
    ) -> Batch:
        """Reads objects into pages. The length of each object must be the page size, or as given in ``lengths``. Objects that are
        ``ok`` are complete and verified; the content of the other pages is undefined."""
        objects, places = _objects(namespace, keys, generations), _pages(pages)
        got = self._native.get(objects, memory._native, places, _lengths(lengths), None)
        return memory._after_get(places, _batch(got))

    async def get_async(
        self,
        namespace: bytes,
        keys: Keys,
        memory: Memory,
        pages: Pages,
        *,
        lengths: Sequence[int] | None = None,
        generations: Sequence[int] | None = None,
    ) -> Batch:
        """Like :meth:`get`, for ``asyncio``."""
        objects, places = _objects(namespace, keys, generations), _pages(pages)

        def start(then: Then) -> None:
            self._native.get(objects, memory._native, places, _lengths(lengths), then)

        return memory._after_get(places, _batch(await awaited(start)))

    def exists(
        self,
        namespace: bytes,
        keys: Keys,
        *,
        generations: Sequence[int] | None = None,
        lease: bool = False,
        prefetch_to_memory: bool = False,
    ) -> Batch:
        """Looks up which objects exist, and where: 0 absent, 1 in memory, 2 on disk. ``lease`` protects the objects that are
        found from eviction for a fixed time. ``prefetch_to_memory`` starts to copy objects from disk to memory."""
        objects = _objects(namespace, keys, generations)
        return _batch(self._native.exists(objects, lease, prefetch_to_memory, None))

    async def exists_async(
        self,
        namespace: bytes,
        keys: Keys,
        *,
        generations: Sequence[int] | None = None,
        lease: bool = False,
        prefetch_to_memory: bool = False,
    ) -> Batch:
        """Like :meth:`exists`, for ``asyncio``."""
        objects = _objects(namespace, keys, generations)
        return _batch(await awaited(lambda then: self._native.exists(objects, lease, prefetch_to_memory, then)))

    def remove(
        self,
        namespace: bytes,
        keys: Keys,
        *,
        generations: Sequence[int] | None = None,
        removal: Literal["plain", "forced", "final"] = "plain",
    ) -> Batch:
        """Removes objects. ``forced`` ignores leases, ``final`` ignores leases and pins."""
        return _batch(self._native.remove(_objects(namespace, keys, generations), removal, None))

    async def remove_async(
        self,
        namespace: bytes,
        keys: Keys,
        *,
        generations: Sequence[int] | None = None,
        removal: Literal["plain", "forced", "final"] = "plain",
    ) -> Batch:
        """Like :meth:`remove`, for ``asyncio``."""
        objects = _objects(namespace, keys, generations)
        return _batch(await awaited(lambda then: self._native.remove(objects, removal, then)))

    def pin(
        self, namespace: bytes, keys: Keys, pin: str = "soft", *, generations: Sequence[int] | None = None
    ) -> Batch:
        """Protects objects from eviction: ``soft``, or ``hard:OWNER``."""
        return _batch(self._native.pin(_objects(namespace, keys, generations), pin, True, None))

    def unpin(
        self, namespace: bytes, keys: Keys, pin: str = "soft", *, generations: Sequence[int] | None = None
    ) -> Batch:
        """Removes pins."""
        return _batch(self._native.pin(_objects(namespace, keys, generations), pin, False, None))

    def flush(self) -> None:
        """Waits until all earlier puts, pins and removals are durable."""
        self._native.flush(None)

    async def flush_async(self) -> None:
        """Like :meth:`flush`, for ``asyncio``."""
        await awaited(self._native.flush)

    def close(self) -> None:
        """Rejects new calls, waits for calls in flight, and makes everything durable. Nodes do the latter by themselves, a
        moment after a put; :meth:`flush` waits for them."""
        self._native.shutdown(None)

    async def close_async(self) -> None:
        """Like :meth:`close`, for ``asyncio``."""
        await awaited(self._native.shutdown)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges."""
        stats: dict[str, Any] = json.loads(self._native.stats())
        return stats

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _objects(
    namespace: bytes, keys: Keys, generations: Sequence[int] | None
) -> tuple[bytes, Bytes, npt.NDArray[np.uint64] | None]:
    if isinstance(keys, np.ndarray):
        flat = np.ascontiguousarray(keys).reshape(-1).view(np.uint8)
    else:
        flat = np.frombuffer(keys if isinstance(keys, bytes) else b"".join(keys), np.uint8)
    return namespace, flat, _lengths(generations)


def _pages(pages: Pages) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(pages, dtype=np.uint32)


def _lengths(lengths: Sequence[int] | None) -> npt.NDArray[np.uint64] | None:
    return None if lengths is None else np.ascontiguousarray(lengths, dtype=np.uint64)


def _batch(told: tuple[bytes, list[tuple[int, _native.StoreError]]]) -> Batch:
    codes, errors = told
    return Batch(np.frombuffer(codes, np.uint8), dict(errors))
