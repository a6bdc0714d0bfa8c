"""Substitutes for the parts of vLLM that Terrace's connector imports, for tests without vLLM."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"


class _Role:
    SCHEDULER, WORKER = 0, 1


class KVConnectorBase:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


class _Factory:
    """As vLLM's factories: names with functions that import their classes, each of which can be registered once."""

    _registry: dict[str, Callable[[], Any]]

    def __init_subclass__(cls) -> None:
        cls._registry = {}

    @classmethod
    def _register(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"{name!r} is already registered.")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)


class KVConnectorFactory(_Factory):
    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        cls._register(name, module_path, class_name)


class SecondaryTierFactory(_Factory):
    @classmethod
    def register_tier(cls, name: str, module_path: str, class_name: str) -> None:
        cls._register(name, module_path, class_name)

    @classmethod
    def get_tier_class(cls, tier_config: dict[str, Any]) -> Any:
        return cls._registry[tier_config["type"]]()


class SecondaryTierManager:
    def __init__(self, spec: Any, view: memoryview, tier_type: str) -> None:
        assert view.strides is not None
        self.block_size_bytes = view.strides[0]


def install() -> None:
    """Makes modules that need vLLM importable."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return

    def a(name: str) -> type:
        return type(name, (), {})

    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        f"{_BASE}.base": {
            "KVConnectorBase_V1": KVConnectorBase,
            "KVConnectorMetadata": a("KVConnectorMetadata"),
            "KVConnectorWorkerMetadata": a("KVConnectorWorkerMetadata"),
            "KVConnectorRole": _Role,
        },
        f"{_BASE}.metrics": {"KVConnectorPromMetrics": a("KVConnectorPromMetrics"), "KVConnectorStats": a("KVConnectorStats")},
        "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": KVConnectorFactory},
        "vllm.v1.core.kv_cache_utils": {"resolve_kv_cache_block_sizes": None},
        "vllm.v1.kv_offload.base": {
            "Locality": lambda name: name,
            "LookupResult": SimpleNamespace(HIT="hit", MISS="miss", RETRY="retry"),
            "Medium": SimpleNamespace(STORAGE="storage"),
            **{name: a(name) for name in ("OffloadingEvent", "OffloadingMetricMetadata", "ReqContext")},
            **{name: a(name) for name in ("RequestOffloadingContext", "ScheduleEndContext")},
            "OffloadKey": bytes,
        },
        "vllm.v1.kv_offload.tiering.factory": {"SecondaryTierFactory": SecondaryTierFactory},
        "vllm.v1.kv_offload.tiering.base": {
            "JobResult": SimpleNamespace,
            "SecondaryTierManager": SecondaryTierManager,
            "TransferJob": a("TransferJob"),
        },
    }
    modules["vllm.v1.kv_offload.base"]["Locality"] = SimpleNamespace(LOCAL="local", REMOTE="remote")
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(content)
