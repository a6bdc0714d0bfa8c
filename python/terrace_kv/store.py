"""The stores of L3: in memory, on disk, on nodes, in a Mooncake cluster, in a bucket."""

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

# What :attr:`Batch.codes` says of an object that could not be had.
FAILED = 255
# Where an object is, as :meth:`Store.exists` and :meth:`Store.get` say it.
ABSENT, IN_MEMORY, ON_DISK = 0, 1, 2

Keys = npt.NDArray[Any] | bytes | Sequence[bytes]
Pages = npt.NDArray[Any] | Sequence[int]


def namespace(model: str, page_size: int, **fields: Any) -> bytes:
    """The digest that everything computed by a model begins with: 16 bytes. Change ``model`` whenever the weights
    change. Other fields are ``layout``, ``dtype``, ``tensor_ranks``, ``adapter``, ``salt`` and
    ``secret``.

    :raises ConfigError: if there is no such field.
    """
    return _native.namespace_digest(json.dumps({"model": model, "page_size": page_size, **fields}))


def page_keys(namespace: bytes, tokens: npt.NDArray[np.uint32] | Sequence[int], page_size: int) -> Bytes:
    """The keys of the whole pages of a prompt, one in each row: what the scheduler calls them too."""
    prompt = np.ascontiguousarray(tokens, dtype=np.uint32)
    return np.frombuffer(_native.page_keys(namespace, prompt, page_size), np.uint8).reshape(-1, 16)


@dataclass(frozen=True)
class Batch:
    """What a call came to, object by object."""

    codes: npt.NDArray[np.uint8]
    """A number for each object: 255 if it failed; else where it is (``exists``, ``get``), whether it was there already
    (``put``), or 1."""
    errors: dict[int, _native.StoreError]
    """Why objects failed, by their place in the batch."""

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Which objects did not fail."""
        ok: npt.NDArray[np.bool_] = self.codes != FAILED
        return ok

    def check(self) -> Batch:
        """Itself, if nothing failed.

        :raises StoreError: the first that did.
        """
        for error in self.errors.values():
            raise error
        return self


class Memory:
    """Memory that a store may use, as pages of one size.

    It is kept as long as it is registered or a transfer uses it. Until a call has ended, leave the pages alone that it
    reads, and neither read nor write those that it fills; pages that are in use are refused to other calls.
    """

    def __init__(self, native: _native.Memory, array: Any, staging: Staging | None = None) -> None:
        self._native = native
        self._staging = staging
        self.array = array
        """What was registered."""

    @property
    def pages(self) -> int:
        """How many there are."""
        return self._native.pages

    @property
    def page_bytes(self) -> int:
        """The size of one."""
        return self._native.page_bytes

    def is_lent(self, page: int) -> bool:
        """Whether a transfer uses the page, including abandoned transfers."""
        return self._native.is_lent(page)

    def _before_put(self, pages: npt.NDArray[np.uint32]) -> None:
        if self._staging is None:
            return
        # The store refuses pages in use, but only when they have been copied to the host: that would be too late.
        for page in pages.tolist():
            if self._native.is_lent(page):
                raise _native.StoreError(f"page {page} is in use by another call: wait for its end")
        self._staging.fetch(pages)

    def _after_get(self, pages: npt.NDArray[np.uint32], got: Batch) -> Batch:
        if self._staging is not None:
            self._staging.bring(pages[got.ok])
        return got

    def close(self) -> None:
        """Takes it back from the store. Transfers that have begun end as they would have."""
        self._native.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store:
    """A store of objects of up to some megabytes each, named by a namespace and a key of 16 bytes.

    ``place`` is ``memory``, ``disk:FOLDER``, ``nodes://HOST:PORT,HOST:PORT``, ``mooncake://HOST:PORT``,
    ``s3://BUCKET/PREFIX`` (or ``gs://``, ``az://``) or ``bucket:file:///FOLDER``. ``capacity`` and ``object_max``, the
    largest object, are bytes or text like ``64MiB``; nodes have theirs already. A store on disk may have ``memory``
    over it. ``guard`` bounds what an unwell store may cost: True, or settings of
    ``GuardConfig``. Other settings are those of the crate's configuration, such as ``lease_ttl_ms``; ``library`` for
    Mooncake, ``secret_file``, ``client``, ``copies`` for nodes. A Mooncake cluster that a feature store is to be in
    wants ``for_features=True``.

    What is read is exactly what was stored under that name: every object is verified, and what does not verify is
    missing. Each call is for a batch, and each object has a result of its own. All calls that end in ``_async`` are
    for ``asyncio``; the others wait without the interpreter's lock. After :func:`os.fork` open another one.

    :raises ConfigError: if it cannot be opened so.
    """

    def __init__(
        self,
        place: str,
        *,
        capacity: int | str = 0,
        object_max: int | str = 0,
        memory: int | str = 0,
        guard: bool | Mapping[str, int] = False,
        for_features: bool = False,
        **settings: Any,
    ) -> None:
        told: dict[str, Any] = {
            "capacity_bytes": size(capacity),
            "object_bytes_max": size(object_max),
            "memory_bytes": size(memory),
            "for_features": for_features,
            **settings,
        }
        if guard is not False:
            told["guard"] = {} if guard is True else dict(guard)
        self._native = _native.Store(place, json.dumps(told))
        self.place = place
        """Where it is."""

    def register(self, memory: Any, pages: int | None = None) -> Memory:
        """Lets the store use memory: a NumPy array, a tensor of PyTorch's on the host (pinned or not), or whatever has
        DLPack or the buffer protocol. It is so many pages of one size; as many as it is long if that is not said.

        The pages of a tensor on a GPU pass through as much pinned memory of the host: they are copied there when they
        are put, after what the current stream has begun, and from there when they were read.

        :raises ValueError: if its bytes do not lie side by side, or are not so many pages.
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
        """Stores pages. Objects that are ``ok`` can be read from now on; with ``durable`` even after a crash. ``pin`` is
        ``soft``, or ``hard:OWNER`` for what must not be evicted until it is unpinned."""
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
        """As :meth:`put`."""
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
        """Reads objects into pages, each exactly as long as its page, or as ``lengths`` says. What is ``ok`` is there,
        verified; all else of those pages is undefined."""
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
        """As :meth:`get`."""
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
        """Which objects exist, and where: 0 if not at all, 1 in memory, 2 on disk. ``lease`` protects
        what is found from eviction for a while."""
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
        """As :meth:`exists`."""
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
        """Removes objects; ``forced`` ignores leases, ``final`` pins as well."""
        return _batch(self._native.remove(_objects(namespace, keys, generations), removal, None))

    async def remove_async(
        self,
        namespace: bytes,
        keys: Keys,
        *,
        generations: Sequence[int] | None = None,
        removal: Literal["plain", "forced", "final"] = "plain",
    ) -> Batch:
        """As :meth:`remove`."""
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
        """Takes back pins."""
        return _batch(self._native.pin(_objects(namespace, keys, generations), pin, False, None))

    def flush(self) -> None:
        """Waits until everything that was put, pinned or removed before would survive a crash."""
        self._native.flush(None)

    async def flush_async(self) -> None:
        """As :meth:`flush`."""
        await awaited(self._native.flush)

    def close(self) -> None:
        """Refuses new calls, waits for those in flight, and makes everything durable."""
        self._native.shutdown(None)

    async def close_async(self) -> None:
        """As :meth:`close`."""
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
