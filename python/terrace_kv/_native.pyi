"""The native part: flat memory in, flat memory out. See the classes of the package for what it means."""

from collections.abc import Callable
from os import PathLike
from typing import Any, final
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

__all__ = [
    "PLAN_HEAD_BYTES",
    "Scheduler",
    "TerraceError",
    "ConfigError",
    "SubmitError",
    "QueueFull",
    "UnknownRequest",
    "EventError",
    "StepsInFlight",
    "Broken",
    "StoreError",
    "MissingObject",
    "DamagedObject",
    "StoreFull",
    "StoreUnavailable",
    "FeatureError",
    "Fenced",
    "Gone",
    "Superseded",
    "OverBudget",
    "Damaged",
    "Forged",
    "Store",
    "Memory",
    "Transfers",
    "Lookups",
    "TRANSFER_BUCKETS",
    "FeatureStore",
    "promise_feature",
    "namespace_digest",
    "page_keys",
    "TraceError",
    "Trace",
    "fit_costs",
    "replay",
    "sweep",
    "OutOfPages",
    "PrefixCache",
    "HeldPages",
]

PLAN_HEAD_BYTES: int
TRANSFER_BUCKETS: list[float]

class TerraceError(Exception):
    """Base class of all errors of Terrace."""

class ConfigError(TerraceError):
    """Settings that cannot work."""

class SubmitError(TerraceError):
    """A request that cannot be accepted."""

class QueueFull(SubmitError):
    """The maximum number of requests is reached: submit again later."""

class UnknownRequest(TerraceError):
    """An unknown request."""

class EventError(TerraceError):
    """An event that is not possible in this state."""

class StepsInFlight(TerraceError):
    """Weights cannot be replaced while a step is in flight."""

class Broken(TerraceError):
    """A bug in Terrace. The object can no longer be used; please report it."""

@final
class Scheduler:
    def __new__(cls, config: str) -> Scheduler: ...
    def config(self) -> str: ...
    def submit(
        self,
        now: int,
        id: int,
        prompt: npt.NDArray[np.uint32],
        max_new_tokens: int,
        priority: int,
        adapter: str,
        salt: str,
        wishes: str | None,
    ) -> None: ...
    def abort(self, now: int, id: int) -> None: ...
    def set_priority(self, id: int, priority: int) -> None: ...
    def plan(self, now: int) -> bytearray: ...
    def step_done(
        self,
        now: int,
        step: int,
        requests: npt.NDArray[np.uint64],
        tokens: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint32] | None,
        finished: npt.NDArray[np.bool_] | None,
        failed: list[int],
    ) -> None: ...
    def step_failed(self, now: int, step: int) -> None: ...
    def operation(self, now: int, op: int, rank: int, outcome: str, pages: int) -> None: ...
    def deadline(self) -> int | None: ...
    def stats(self) -> str: ...
    def tokens(self, id: int) -> bytearray | None: ...
    def state(self, id: int) -> str | None: ...
    def hits(self, id: int) -> tuple[int, int, int] | None: ...
    def cached(self, prompt: npt.NDArray[np.uint32], adapter: str, salt: str) -> tuple[int, int]: ...
    def adapter(self, adapter: int) -> str | None: ...
    def namespace(self, adapter: str, salt: str) -> bytes: ...
    def replace_weights(self, now: int, fingerprint: str) -> None: ...
    def clear_cache(self) -> tuple[int, int]: ...
    def kv_events(
        self, snapshot: bool
    ) -> tuple[bool, int, int, list[tuple[str] | tuple[str, str, bytes, bytes] | tuple[str, str, bytes, bytes, bytes, bytes, list[tuple[int, bytes]]]]]: ...

class StoreError(TerraceError):
    """Why an object could not be stored, read or removed."""

class MissingObject(StoreError):
    """The object does not exist, or it was removed."""

class DamagedObject(StoreError):
    """The object did not verify; it counts as missing from now on."""

class StoreFull(StoreError):
    """Everything in the store is pinned, leased or in use."""

class StoreUnavailable(StoreError):
    """The store, or the node that would hold the object, does not answer: try again later."""

class FeatureError(TerraceError):
    """Why a sample could not be put, read or released."""

class Fenced(FeatureError):
    """Another process has taken the number of this producer."""

class Gone(FeatureError, KeyError):
    """The sample was released, aborted, superseded, or freed because nobody released it in time."""

class Superseded(FeatureError):
    """A later put of the same sample won, or it was aborted while it was put."""

class OverBudget(FeatureError):
    """Too many samples are not consumed yet."""

class Damaged(FeatureError):
    """A tensor of the sample is truncated or damaged."""

class Forged(FeatureError):
    """A ref, a tensor or a record was not created with the secret."""

_Objects = tuple[bytes, npt.NDArray[np.uint8], npt.NDArray[np.uint64] | None]

# Long calls return None at once if they get a callback, which is called with a value or an
# exception.

@final
class Store:
    def __new__(cls, place: str, settings: str) -> Store: ...
    def register(self, array: npt.NDArray[np.uint8], pages: int) -> Memory: ...
    def put(
        self,
        objects: _Objects,
        memory: Memory,
        pages: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint64] | None,
        pin: str | None,
        durable: bool,
        then: Any,
    ) -> Any: ...
    def get(
        self,
        objects: _Objects,
        memory: Memory,
        pages: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint64] | None,
        then: Any,
    ) -> Any: ...
    def exists(self, objects: _Objects, lease: bool, prefetch_to_memory: bool, then: Any) -> Any: ...
    def remove(self, objects: _Objects, removal: str, then: Any) -> Any: ...
    def pin(self, objects: _Objects, pin: str, on: bool, then: Any) -> Any: ...
    def flush(self, then: Any) -> Any: ...
    def shutdown(self, then: Any) -> Any: ...
    def stats(self) -> str: ...

@final
class Memory:
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    def is_lent(self, page: int) -> bool: ...
    def close(self) -> None: ...

@final
class Transfers:
    def __new__(cls, store: Store, namespace: bytes) -> Transfers: ...
    def move_to(self, namespace: bytes) -> None: ...
    def register(self, address: int, bytes: int, page_bytes: int, owner: Any) -> int: ...
    def unregister(self, region: int) -> None: ...
    def put(self, keys: Any, places: Any, durable: bool, wait: bool) -> Any: ...
    def get(self, keys: Any, places: Any, wait: bool) -> Any: ...
    def exists(self, keys: Any, parts: int, lease: bool, prefetch_to_memory: bool, wait: bool) -> Any: ...
    def touch(self, keys: Any, parts: int) -> None: ...
    def remove(self, keys: Any, wait: bool) -> Any: ...
    def drain(self) -> list[tuple[int, Any, bytes, int, float, str | None]]: ...
    def wait_idle(self, seconds: float | None) -> bool: ...
    def pending(self) -> int: ...
    def event_fd(self) -> int: ...
    def close(self) -> None: ...
    def stats(self) -> str: ...

@final
class Lookups:
    def __new__(cls, transfers: Transfers, hit: Any, miss: Any, retry: Any, seconds: float) -> Lookups: ...
    @property
    def lookup(self) -> Callable[[bytes, Any], Any]: ...
    def flush(self) -> None: ...
    def missed(self, keys: Any) -> None: ...
    def forget(self, keys: Any) -> None: ...
    def pending(self) -> bool: ...

@final
class FeatureStore:
    @staticmethod
    def open(store: Store, settings: str, secret: bytes | None, then: Any) -> Any: ...
    def put(self, sample: str, specs: str, arrays: list[npt.NDArray[np.uint8]], then: Any) -> Any: ...
    def keep(self, promise: str, specs: str, arrays: list[npt.NDArray[np.uint8]], then: Any) -> Any: ...
    def get_into(self, reference: str, arrays: list[npt.NDArray[np.uint8]], then: Any) -> Any: ...
    def release(self, reference: str, then: Any) -> Any: ...
    def abort(self, sample: str, then: Any) -> Any: ...
    def gc(self, then: Any) -> Any: ...
    def consumed(self, then: Any) -> Any: ...
    def close(self, then: Any) -> Any: ...
    def owner(self) -> int | None: ...
    def stats(self) -> str: ...

def promise_feature(
    store: str, owner: int, sample: str, specs: str, retain: bool, secret: bytes | None
) -> str: ...
def namespace_digest(fields: str) -> bytes: ...
def page_keys(namespace: bytes, tokens: npt.NDArray[np.uint32], page_size: int) -> bytes: ...
class TraceError(TerraceError):
    """A trace that cannot be read or generated."""

@final
class Trace:
    @staticmethod
    def read(
        path: str | PathLike[str],
        block_tokens: int | None,
        skip_bad_lines: bool,
        format: str | None,
        arrivals: tuple[float, int],
        tokenise: Callable[[str], Sequence[int]] | None,
    ) -> Trace: ...
    @staticmethod
    def synthetic(kind: str, requests: int, rate: float, seed: int, block_tokens: int) -> Trace: ...
    @staticmethod
    def of_blocks(
        arrival_us: npt.NDArray[np.uint64],
        input_tokens: npt.NDArray[np.uint32],
        output_tokens: npt.NDArray[np.uint32],
        blocks: npt.NDArray[np.uint64],
        block_ids: npt.NDArray[np.uint64],
        block_tokens: int,
    ) -> Trace: ...
    def __len__(self) -> int: ...
    def lines(self) -> bytes: ...
    def block_tokens(self) -> int: ...
    def skipped(self) -> tuple[int, list[str]]: ...
    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def ceiling(self, page_size: int) -> tuple[int, int, int, npt.NDArray[np.int64]]: ...
    def describe(self, page_size: int) -> str: ...

def fit_costs(measurements: str) -> str: ...
def replay(trace: Trace, settings: list[tuple[str, str]], measurements: str | None) -> str: ...
def sweep(
    trace: Trace,
    settings: list[tuple[str, str]],
    measurements: str | None,
    axes: list[tuple[str, list[str]]],
    threads: int | None,
    progress: Callable[[int, int], object] | None,
) -> str: ...
class OutOfPages(TerraceError):
    """Too many pages are held: close others, then try again."""

@final
class PrefixCache:
    """A prefix cache for the pages of a device, for engines with their own scheduler. It manages page numbers below
    `device_pages`; the engine owns the memory of the pages."""

    def __new__(cls, device_pages: int, *, page_size: int = 16, eviction: str = "lru") -> PrefixCache: ...
    def hold(
        self,
        prompt: npt.NDArray[np.uint32] | Sequence[int],
        room: int = 0,
        *,
        adapter: str = "",
        salt: str = "",
        priority: int = 0,
    ) -> HeldPages:
        """Finds the cached pages of a prompt, without its last token, and holds them. With `room`, allocates further pages, so
        that there is space for this number of tokens in total. Pages that no request holds are evicted if needed."""

    def cached(self, prompt: npt.NDArray[np.uint32] | Sequence[int], *, adapter: str = "", salt: str = "") -> int:
        """The number of cached pages of a prompt. Changes nothing."""

    def clear(self) -> int:
        """Removes all pages that no request holds from the cache. Returns their number."""

    @property
    def device_pages(self) -> int:
        """The total number of pages."""

    @property
    def free_pages(self) -> int:
        """The number of pages that are neither held nor cached."""

    @property
    def evictable_pages(self) -> int:
        """The number of cached pages that no request holds, so they can be evicted."""

    @property
    def evicted_pages(self) -> int:
        """The number of pages evicted so far."""

@final
class HeldPages:
    """The pages that a request holds. They are not evicted or given to other requests until this is closed."""

    @property
    def found_pages(self) -> int:
        """The number of pages that were found in the cache."""

    @property
    def pages(self) -> npt.NDArray[np.uint32]:
        """A copy of the page numbers of all held pages, in the order of the request's tokens."""

    def reserve(self, tokens: int) -> None:
        """Allocates further pages, so that there is space for this number of tokens in total."""

    def append(self, tokens: npt.NDArray[np.uint32] | Sequence[int]) -> None:
        """Appends tokens to the request, such as those that the model has produced."""

    def publish(self, tokens: int) -> int | None:
        """Reports that the KV of the first `tokens` tokens is written, so that other requests can find their whole pages. If
        another request has published some of these pages in the meantime, returns the index of the first one. From that
        index on, `pages` has the other request's pages, and the replaced pages are free."""

    def close(self) -> None:
        """Releases all pages. Published pages stay cached, the others become free."""

    def __enter__(self) -> HeldPages: ...
    def __exit__(self, _kind: object, _error: object, _trace: object) -> None: ...
