"""KV events: which pages came and went, for routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .plan import KEY


@dataclass(frozen=True)
class Stored:
    """Pages became available in a tier."""

    tier: str
    """``device``, ``host`` or ``l3``."""
    namespace: bytes
    """The digest of model, adapter and tenant."""
    parent: bytes
    """The key of the page before the first of them; the namespace's digest if there is none."""
    keys: npt.NDArray[np.void]
    """The pages' keys, 16 bytes each."""
    tokens: npt.NDArray[np.uint32]
    """Their tokens, as many for each page as a page has."""
    contents: list[tuple[int, bytes]]
    """What stands on some of the pages besides tokens: the page's place among these, and a digest."""


@dataclass(frozen=True)
class Removed:
    """Pages are gone from a tier."""

    tier: str
    namespace: bytes
    keys: npt.NDArray[np.void]


@dataclass(frozen=True)
class Cleared:
    """Device and host hold nothing except what is reported as stored from here on."""


@dataclass(frozen=True)
class KvEvents:
    """Events in their order, or everything that is held."""

    is_snapshot: bool
    """Whether it is the latter: what was heard before is to be forgotten."""
    first: int
    """The number of the first event."""
    next: int
    """The number of the event that follows the last."""
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
