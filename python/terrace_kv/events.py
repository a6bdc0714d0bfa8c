"""KV events for routers: which pages were stored in a tier or removed from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .plan import KEY


@dataclass(frozen=True)
class Stored:
    """Pages were stored in a tier."""

    tier: str
    """``device``, ``host`` or ``l3``."""
    namespace: bytes
    """The namespace digest: model, LoRA adapter, tenant and everything else that KV depends on."""
    parent: bytes
    """The key of the page before the first one; the namespace digest if there is none."""
    keys: npt.NDArray[np.void]
    """The page keys, 16 bytes each."""
    tokens: npt.NDArray[np.uint32]
    """The tokens of the pages, ``page_size`` for each."""
    contents: list[tuple[int, bytes]]
    """Multimodal content of some pages: the index of the page in this event, and a digest."""


@dataclass(frozen=True)
class Removed:
    """Pages were removed from a tier."""

    tier: str
    namespace: bytes
    keys: npt.NDArray[np.void]


@dataclass(frozen=True)
class Cleared:
    """Device and host were cleared. They contain only pages of later :class:`Stored` events."""


@dataclass(frozen=True)
class KvEvents:
    """Events in order, or a snapshot of everything in the cache."""

    is_snapshot: bool
    """Whether this is a snapshot: a reader must then discard what it knew before."""
    first: int
    """The number of the first event."""
    next: int
    """The number of the next event after the last one."""
    events: list[Stored | Removed | Cleared]


def _event(told: tuple[Any, ...]) -> Stored | Removed | Cleared:
    match told:
        case ("stored", tier, namespace, parent, keys, tokens, contents):
            pages = np.frombuffer(keys, KEY)
            return Stored(tier, namespace, parent, pages, np.frombuffer(tokens, "<u4"), contents)
        case ("removed", tier, namespace, keys):
            return Removed(tier, namespace, np.frombuffer(keys, KEY))
        case _:
            return Cleared()
