"""Terrace: a radix-tree scheduler for LLM inference with a KV cache on device, host and L3.

An engine tells a :class:`Scheduler` what has happened and asks it for a :class:`Plan`: what to compute in the
next step, and which KV pages to move. ``examples/engine.py`` is a whole engine.

:func:`replay` and :func:`sweep` tell what a :class:`Trace` of requests would do on a configuration, in virtual time.
"""

from ._native import (
    Broken,
    ConfigError,
    EventError,
    QueueFull,
    StepsInFlight,
    SubmitError,
    TerraceError,
    TraceError,
    UnknownRequest,
)
from .events import Cleared, KvEvents, Removed, Stored
from .plan import Ended, Plan, PlanError
from .scheduler import Hits, Passage, Scheduler
from .traces import Ceiling, Sweep, Trace, fit_costs, replay, sweep

__all__ = [
    "Broken",
    "Cleared",
    "ConfigError",
    "Ended",
    "EventError",
    "Hits",
    "KvEvents",
    "Passage",
    "Plan",
    "PlanError",
    "QueueFull",
    "Removed",
    "Scheduler",
    "StepsInFlight",
    "Stored",
    "SubmitError",
    "TerraceError",
    "UnknownRequest",
    "Ceiling",
    "Sweep",
    "Trace",
    "TraceError",
    "fit_costs",
    "replay",
    "sweep",
]
