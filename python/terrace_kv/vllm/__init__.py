"""KV offloading for vLLM: a secondary tier for vLLM's offloading connector, and a separate KV connector.

``TerraceTier`` works where vLLM can offload KV to host memory (CUDA, XPU); ``TerraceConnector`` works everywhere. Both are used
by configuration only: see docs/vllm.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import TerraceConnector
    from .tier import TerraceTier

__all__ = ["TerraceConnector", "TerraceTier"]


def __getattr__(name: str) -> Any:
    # Imported separately: a version of vLLM with an incompatible tier interface still has
    # connectors.
    if name == "TerraceTier":
        from .tier import TerraceTier

        return TerraceTier
    if name == "TerraceConnector":
        from .connector import TerraceConnector

        return TerraceConnector
    raise AttributeError(f"terrace_kv.vllm has no {name!r}")
