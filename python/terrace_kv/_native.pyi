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
    """Whatever Terrace refuses to do."""

class ConfigError(TerraceError):
    """Settings that cannot work."""

class SubmitError(TerraceError):
    """A request that cannot be taken."""

class QueueFull(SubmitError):
    """Too many requests are alive: submit again later."""

class UnknownRequest(TerraceError):
    """A request that is not there."""

class EventError(TerraceError):
    """Something that cannot have happened."""

class StepsInFlight(TerraceError):
    """Weights cannot be replaced under a step."""

class Broken(TerraceError):
    """Terrace has broken one of its own rules. The object is of no use any more; please report it."""

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
    """There is no such object, or it was removed."""

class DamagedObject(StoreError):
    """The object did not verify; it counts as missing from now on."""

class StoreFull(StoreError):
    """Everything in the store is pinned, leased or in use."""

class StoreUnavailable(StoreError):
    """The store, or the node that would hold the object, does not answer: try again later."""

class FeatureError(TerraceError):
    """Why a sample could not be put, read or released."""

class Gone(FeatureError):
    """The sample was released, aborted, superseded, or freed because nobody released it in time."""

class Superseded(FeatureError):
    """A later put of the same sample won, or it was aborted while it was put."""

class OverBudget(FeatureError):
    """Too much is waiting to be consumed."""

class Damaged(FeatureError):
    """A tensor is short or damaged, and with it the sample."""

class Forged(FeatureError):
    """A ref, a tensor or a note was not made by somebody who knows the secret."""

_Objects = tuple[bytes, npt.NDArray[np.uint8], npt.NDArray[np.uint64] | None]

# What takes time answers at once with None if it is told whom to call when it is done, with a value or an exception.

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
    def register(self, address: int, bytes: int, page_bytes: int, owner: Any) -> int: ...
    def unregister(self, region: int) -> None: ...
    def put(self, keys: Any, places: Any, durable: bool, wait: bool) -> Any: ...
    def get(self, keys: Any, places: Any, wait: bool) -> Any: ...
    def exists(self, keys: Any, lease: bool, prefetch_to_memory: bool, wait: bool) -> Any: ...
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
    def lookup(self, key: bytes, _context: Any) -> Any: ...
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
    def stats(self) -> str: ...

def promise_feature(store: str, owner: int, sample: str, specs: str, retain: bool) -> str: ...
def namespace_digest(fields: str) -> bytes: ...
def page_keys(namespace: bytes, tokens: npt.NDArray[np.uint32], page_size: int) -> bytes: ...
class TraceError(TerraceError):
    """A trace that cannot be read or made up."""

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
    """A prefix cache over the pages of a device, for engines that have a scheduler of their own. It knows pages by
    their numbers, below `device_pages`; what is in them is the engine's."""

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
        """Finds the pages of a prompt, all but that of its last token, and holds them; with `room`, further pages
        too, so that there is room for so many tokens in all. Others that nobody holds are evicted for that."""

    def cached(self, prompt: npt.NDArray[np.uint32] | Sequence[int], *, adapter: str = "", salt: str = "") -> int:
        """How many pages of a prompt would be found. Changes nothing."""

    def clear(self) -> int:
        """Forgets every page that nobody holds: how many there were."""

    @property
    def device_pages(self) -> int:
        """All pages."""

    @property
    def free_pages(self) -> int:
        """Pages that are neither held nor cached."""

    @property
    def evictable_pages(self) -> int:
        """Cached pages that nobody holds: they go when room is needed."""

    @property
    def evicted_pages(self) -> int:
        """Pages that had to go so far."""

@final
class HeldPages:
    """The pages that a request holds: nobody else gets them, and none of them is evicted, until this is closed."""

    @property
    def found_pages(self) -> int:
        """How many pages were found."""

    @property
    def pages(self) -> npt.NDArray[np.uint32]:
        """The numbers of all pages that are held, by their place in the request: a copy."""

    def reserve(self, tokens: int) -> None:
        """Holds further pages, so that there is room for so many tokens in all."""

    def append(self, tokens: npt.NDArray[np.uint32] | Sequence[int]) -> None:
        """Further tokens of the request: what the model produced."""

    def publish(self, tokens: int) -> int | None:
        """The KV of the first `tokens` tokens is written: others find their whole pages from here on. Tells the
        place of the first page that others had published meanwhile, if there is one: from there on, `pages` has
        theirs, and those that they replace are free."""

    def close(self) -> None:
        """Gives all pages back: those that were published stay cached, the others are free."""

    def __enter__(self) -> HeldPages: ...
    def __exit__(self, _kind: object, _error: object, _trace: object) -> None: ...
