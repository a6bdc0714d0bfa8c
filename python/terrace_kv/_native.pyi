"""The native part: flat memory in, flat memory out. See the classes of the package for what it means."""

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
    "OutOfPages",
    "PrefixCache",
    "HeldPages",
]

PLAN_HEAD_BYTES: int

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
