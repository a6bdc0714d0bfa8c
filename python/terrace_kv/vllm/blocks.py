"""What both sides of the connector agree on: settings, names of blocks, and what they tell each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from .._native import ConfigError
from ..adapters import SharedStore, open_store
from ..arrays import size
from .naming import connector_namespace

# Settings of the connector's own, beside those of the store.
_KNOWN = ("weights", "salt", "load", "staging")
# Kinds of KV of which vLLM keeps all blocks as long as a request runs.
_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
# Staging memory by default: room for the blocks of two steps, one half for loads and one for saves, within these bounds.
_STAGING_BYTES_MIN, _STAGING_BYTES_MAX = 256 << 20, 2 << 30


@dataclass
class Run:
    """Consecutive blocks of a request."""

    request: str
    """Its id."""
    first: int
    """The number of the first block in the request."""
    hashes: list[bytes]
    """What names the blocks."""
    blocks: list[int]
    """Where they are in the engine's memory."""


@dataclass
class Steps(KVConnectorMetadata):
    """What workers do in a step."""

    number: int = 0
    """Of the step; the first one is 1."""
    loads: list[Run] = field(default_factory=list)
    """Blocks to load, one run per request."""
    saves: list[Run] = field(default_factory=list)
    """Blocks to save, which are whole after this step."""
    abandoned: set[str] = field(default_factory=set)
    """Requests whose blocks may be overwritten from this step on: what was not copied yet is not saved."""
    leaving: set[str] = field(default_factory=set)
    """Requests that have ended, and whose blocks vLLM keeps until all workers have copied them."""


@dataclass
class Progress(KVConnectorWorkerMetadata):
    """What workers tell the scheduler after a step."""

    step: int
    """The number of the step."""
    over: dict[str, int] = field(default_factory=dict)
    """By request: parts of blocks whose save does not need the engine's memory any more, summed over ranks."""
    missing: dict[str, int] = field(default_factory=dict)
    """By request: the first block that could not be loaded."""
    failed: dict[str, int] = field(default_factory=dict)
    """By request: the first block that could not be saved."""
    unsaved: list[bytes] = field(default_factory=list)
    """Names of blocks that could not be saved."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Progress)
        self.step = max(self.step, other.step)
        for name, parts in other.over.items():
            self.over[name] = self.over.get(name, 0) + parts
        for mine, its in ((self.missing, other.missing), (self.failed, other.failed)):
            for name, block in its.items():
                mine[name] = min(mine.get(name, block), block)
        self.unsaved += other.unsaved
        return self


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
        specs = list(spec.kv_cache_specs.values()) if is_of_layers else [spec]
        self.is_windowed = any(type(each).__name__ not in _WHOLE for each in specs)
        """Whether vLLM takes blocks back from requests that still run."""
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
        scheduler = vllm_config.scheduler_config
        self.per_step = -(-scheduler.max_num_batched_tokens // self.tokens) + scheduler.max_num_seqs
        """How many blocks become whole in a step at most."""
        self.in_engine = int(kv_cache_config.num_blocks)
        """How many blocks the engine has."""
        staging = settings.get("staging")
        by_default = min(max(2 * self.per_step * self.bytes, _STAGING_BYTES_MIN), _STAGING_BYTES_MAX)
        self.staging_pages = max(2, (by_default if staging is None else size(staging)) // self.bytes)
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
