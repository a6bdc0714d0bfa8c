"""Terrace: a radix-tree scheduler for LLM inference with a KV cache on device, host and L3.

An engine tells a :class:`Scheduler` what has happened and asks it for a :class:`Plan`: what to compute in the
next step, and which KV pages to move. ``examples/engine.py`` is a whole engine.
"""

from ._native import (
    Broken,
    ConfigError,
    EventError,
    HeldPages,
    OutOfPages,
    PrefixCache,
    QueueFull,
    StepsInFlight,
    SubmitError,
    TerraceError,
    UnknownRequest,
)
from .events import Cleared, KvEvents, Removed, Stored
from .plan import Ended, Plan, PlanError
from .scheduler import Hits, Passage, Scheduler

__all__ = [
    "Broken",
    "Cleared",
    "ConfigError",
    "Ended",
    "EventError",
    "HeldPages",
    "Hits",
    "KvEvents",
    "OutOfPages",
    "Passage",
    "Plan",
    "PlanError",
    "PrefixCache",
    "QueueFull",
    "Removed",
    "Scheduler",
    "StepsInFlight",
    "Stored",
    "SubmitError",
    "TerraceError",
    "UnknownRequest",
]
