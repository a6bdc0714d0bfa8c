"""What both sides of the connector agree on: settings, names of blocks, and what is to be moved in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from .._native import ConfigError
from ..adapters import SharedStore, open_store
from ..arrays import size
from .naming import connector_namespace

# Settings of the connector's own, beside those of the store.
_KNOWN = ("weights", "salt", "load", "staging")
_STAGING = "256MiB"


@dataclass
class Steps(KVConnectorMetadata):
    """What workers are to move in a step."""

    loads: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)
    """By request: hashes of blocks, and where they go."""
    saves: list[tuple[bytes, int]] = field(default_factory=list)
    """Hashes of blocks that are whole after this step, and where they are."""


class Blocks:
    """The blocks of an engine, as the store knows them."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Mapping[str, Any]) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"this model has {len(groups)} KV cache groups, but TerraceConnector supports only one: use the tier "
                "(OffloadingConnector with TerraceTier)"
            )
        self._settings = settings
        self.tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        """In a block."""
        if self.tokens != hash_tokens:
            raise ConfigError(
                f"blocks have {self.tokens} tokens but block hashes {hash_tokens}: start vLLM without "
                "--prefix-match-unit, or use the tier"
            )
        spec, layers = groups[0].kv_cache_spec, groups[0].layer_names
        is_of_layers = hasattr(spec, "kv_cache_specs")
        self.bytes: int = spec.page_size_bytes if is_of_layers else spec.page_size_bytes * len(layers)
        """In the part of a block that a rank has."""
        told = {name: str(spec.kv_cache_specs[name] if is_of_layers else spec) for name in layers}
        self.namespace = connector_namespace(vllm_config, told, self.tokens, settings)
        """What they are named in; ranks are in keys."""
        self.ranks = int(vllm_config.parallel_config.world_size)
        """How many parts a block has."""
        load = settings.get("load", "async")
        if load not in ("async", "sync"):
            raise ConfigError(f'"load" must be "async" or "sync", not {load!r}')
        self.is_async = load == "async"
        """Whether a request waits for its blocks beside the steps of others."""
        self.staging_pages = max(2, size(settings.get("staging", _STAGING)) // self.bytes)
        """How many blocks fit into the memory that they pass through."""

    def __str__(self) -> str:
        """Where they are stored; nodes have to be started for objects of that size."""
        return f"{self._settings.get('store')}: objects of {self.bytes} bytes, namespace {self.namespace.hex()}"

    def open(self) -> SharedStore:
        """The store; the same one for both sides if they are in one process."""
        return open_store(self._settings, object_bytes=self.bytes, known=_KNOWN)


def keys_of(hashes: Iterable[bytes], rank: int) -> list[bytes]:
    """What the part of a rank is called."""
    suffix = rank.to_bytes(4, "big")
    return [bytes(one) + suffix for one in hashes]
