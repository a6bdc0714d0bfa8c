"""The native part: flat memory in, flat memory out. See the classes of the package for what it means."""

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
