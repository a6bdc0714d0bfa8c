"""Terrace: a radix-tree scheduler for LLM inference with a KV cache on device, host and L3.

An engine reports events to a :class:`Scheduler` and requests a :class:`Plan`: what to compute in the next step, and which
KV pages to copy. ``examples/engine.py`` is a complete engine. A :class:`Store` is an L3 store for KV pages; other requests
and processes can read them. A :class:`FeatureStore` uses a store to pass tensors from producers to consumers.

:func:`replay` and :func:`sweep` simulate a :class:`Trace` of requests on one or many configurations, in virtual time.
"""

from ._native import (
    Broken,
    ConfigError,
    Damaged,
    DamagedObject,
    EventError,
    FeatureError,
    Forged,
    Fenced,
    Gone,
    HeldPages,
    MissingObject,
    OutOfPages,
    OverBudget,
    PrefixCache,
    QueueFull,
    StepsInFlight,
    StoreError,
    StoreFull,
    StoreUnavailable,
    SubmitError,
    Superseded,
    TerraceError,
    TraceError,
    UnknownRequest,
)
from .events import Cleared, KvEvents, Removed, Stored
from .features import FeatureRef, FeatureStore, TensorSpec
from .plan import Ended, Plan, PlanError
from .scheduler import Hits, Passage, Scheduler
from .store import Batch, Memory, Store, namespace, page_keys
from .traces import Ceiling, Sweep, Trace, fit_costs, replay, sweep

__all__ = [
    "Batch",
    "Broken",
    "Ceiling",
    "Cleared",
    "ConfigError",
    "Damaged",
    "DamagedObject",
    "Ended",
    "EventError",
    "FeatureError",
    "FeatureRef",
    "FeatureStore",
    "Forged",
    "Fenced",
    "Gone",
    "HeldPages",
    "Hits",
    "KvEvents",
    "Memory",
    "MissingObject",
    "OutOfPages",
    "OverBudget",
    "Passage",
    "Plan",
    "PlanError",
    "PrefixCache",
    "QueueFull",
    "Removed",
    "Scheduler",
    "StepsInFlight",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "Stored",
    "SubmitError",
    "Superseded",
    "Sweep",
    "TensorSpec",
    "TerraceError",
    "Trace",
    "TraceError",
    "UnknownRequest",
    "fit_costs",
    "namespace",
    "page_keys",
    "replay",
    "sweep",
]
