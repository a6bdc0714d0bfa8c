"""Definitions shared by both sides of the connector: settings, names of blocks, and messages."""

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

# Settings of the connector, beside those of the store.
_KNOWN = ("weights", "salt", "load", "staging")
# Kinds of KV of which vLLM keeps all blocks while a request runs.
_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
# Staging memory by default: room for the blocks of two steps, one half for loads and one for saves, within these bounds.
_STAGING_BYTES_MIN, _STAGING_BYTES_MAX = 256 << 20, 2 << 30


@dataclass
class Run:
    """Consecutive blocks of a request."""

    request: str
    """Id of the request."""
    first: int
    """Number of the first block in the request."""
    hashes: list[bytes]
    """Names of the blocks."""
    blocks: list[int]
    """Places of the blocks in the engine's memory."""


@dataclass
class Steps(KVConnectorMetadata):
    """Work for the workers in a step."""

    number: int = 0
    """Number of the step, from 1."""
    loads: list[Run] = field(default_factory=list)
    """Blocks to load, one run per request."""
    saves: list[Run] = field(default_factory=list)
    """Blocks to save, which are complete after this step."""
    abandoned: set[str] = field(default_factory=set)
    """Requests whose blocks may be overwritten from this step on: blocks that were not copied yet
    are not saved."""
    leaving: set[str] = field(default_factory=set)
    """Ended requests whose blocks vLLM keeps until all workers have copied them."""


@dataclass
class Progress(KVConnectorWorkerMetadata):
    """Report of workers to the scheduler after a step."""

    step: int
    """Number of the step."""
    over: dict[str, int] = field(default_factory=dict)
    """By request: parts of blocks whose save no longer needs the engine's memory, summed over
    ranks."""
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
    """The blocks of an engine, as objects of the store."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Mapping[str, Any]) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"this model has {len(groups)} KV cache groups, but TerraceConnector supports only one: use the tier "
                "(OffloadingConnector with TerraceTier)"
            )
        self._settings = settings
        self.tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        """Tokens per block."""
        if self.tokens != hash_tokens:
            raise ConfigError(
                f"blocks have {self.tokens} tokens but block hashes {hash_tokens}: start vLLM without "
                "--prefix-match-unit, or use the tier"
            )
        spec, layers = groups[0].kv_cache_spec, groups[0].layer_names
        is_of_layers = hasattr(spec, "kv_cache_specs")
        self.bytes: int = spec.page_size_bytes if is_of_layers else spec.page_size_bytes * len(layers)
        """Bytes of a rank's part of a block."""
        specs = list(spec.kv_cache_specs.values()) if is_of_layers else [spec]
        self.is_windowed = any(type(each).__name__ not in _WHOLE for each in specs)
        """Whether vLLM reclaims blocks of running requests."""
        told = {name: str(spec.kv_cache_specs[name] if is_of_layers else spec) for name in layers}
        self.namespace = connector_namespace(vllm_config, told, self.tokens, settings)
        """Namespace; ranks are part of keys."""
        self.ranks = int(vllm_config.parallel_config.world_size)
        """Number of parts of a block."""
        load = settings.get("load", "async")
        if load not in ("async", "sync"):
            raise ConfigError(f'"load" must be "async" or "sync", not {load!r}')
        self.is_async = load == "async"
        """Whether a request waits for its loads while other requests run."""
        scheduler = vllm_config.scheduler_config
        self.per_step = -(-scheduler.max_num_batched_tokens // self.tokens) + scheduler.max_num_seqs
        """Largest number of blocks completed in a step."""
        self.in_engine = int(kv_cache_config.num_blocks)
        """Number of blocks of the engine."""
        staging = settings.get("staging")
        by_default = min(max(2 * self.per_step * self.bytes, _STAGING_BYTES_MIN), _STAGING_BYTES_MAX)
        self.staging_pages = max(2, (by_default if staging is None else size(staging)) // self.bytes)
        """Number of blocks that fit into the staging memory."""

    def __str__(self) -> str:
        """Settings of the store; nodes must be started for objects of that size."""
        return f"{self._settings.get('store')}: objects of {self.bytes} bytes, namespace {self.namespace.hex()}"

    def open(self) -> SharedStore:
        """Opens the store; both sides share it if they are in one process."""
        return open_store(self._settings, object_bytes=self.bytes, known=_KNOWN)


def keys_of(hashes: Iterable[bytes], rank: int) -> list[bytes]:
    """The keys of a rank's parts."""
    suffix = rank.to_bytes(4, "big")
    return [bytes(one) + suffix for one in hashes]
