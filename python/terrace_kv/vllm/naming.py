"""The namespace of what a vLLM engine stores."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._native import ConfigError
from ..namespaces import canonical, engine_namespace, weights_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def tier_namespace(
    offloading: Any, row_bytes: int, vllm_config: VllmConfig | None, settings: Mapping[str, Any]
) -> bytes:
    """Of rows of vLLM's host cache, as ``OffloadingConfig`` describes them: a row has all ranks of an engine."""
    parallel, is_canonical = offloading.parallel, getattr(offloading, "canonical_layout", False)
    # Bytes that are the same for any number of ranks: vLLM has checked each layer's layout for it then.
    is_for_any = bool(is_canonical and parallel.is_parallelism_agnostic)
    layout: dict[str, Any] = {
        "row_bytes": row_bytes,
        "groups": [
            [getattr(group, "group_id", place), group.tokens_per_block, list(group.layer_names)]
            for place, group in enumerate(offloading.groups)
        ],
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "kv_cache_layout": getattr(offloading, "kv_cache_layout", None),
        "replicated": getattr(offloading, "replicated_layout", False),
        "canonical": _canonical_format(offloading) if is_canonical else None,
    }
    degrees = {
        name: getattr(parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    }
    return engine_namespace(
        engine="vllm tier",
        kv_dtype=offloading.model.dtype,
        layout=canonical(layout),
        block_tokens=offloading.cache.tokens_per_hash,
        parallelism=None if is_for_any else degrees,
        rank=None,
        **_model(offloading.model.name, vllm_config, settings),
    )


def connector_namespace(
    vllm_config: VllmConfig, layers: Mapping[str, str], block_tokens: int, settings: Mapping[str, Any]
) -> bytes:
    """Of blocks of one rank, which is named in every key; ``layers`` say how the KV of each lies in a block."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    degrees = {
        "world_size": parallel.world_size,
        "tp_size": parallel.tensor_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "pcp_size": getattr(parallel, "prefill_context_parallel_size", 1),
        "dcp_size": getattr(parallel, "decode_context_parallel_size", 1),
    }
    return engine_namespace(
        engine="vllm connector",
        kv_dtype=str(cache.cache_dtype),
        layout=canonical(dict(layers)),
        block_tokens=block_tokens,
        parallelism=degrees,
        rank=None,
        **_model(vllm_config.model_config.model, vllm_config, settings),
    )


def _model(name: str, vllm_config: VllmConfig | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What both kinds of objects depend on alike."""
    told = settings.get("weights")
    if told is not None and not isinstance(told, str):
        raise ConfigError(f'"weights" must be the name of a revision, not {told!r}')
    salt = {"salt": str(settings.get("salt", ""))}
    if vllm_config is None:
        # How the engine was started is not known then, so whatever may differ must be said.
        if told is None:
            raise ConfigError(
                "this version of vLLM does not pass the loaded weights to tiers: name them, like "
                '"weights": "their revision", and change the name whenever the weights or how they are loaded change'
            )
        return {"hash_algorithm": "", "model": name, "weights": f"told {told}", "dtype": "", **salt}
    model = vllm_config.model_config
    weights = told or weights_of(name, getattr(model, "revision", None))
    return {
        "hash_algorithm": f"{vllm_config.cache_config.prefix_caching_hash_algo} from {_hash_seed()}",
        # Weights that are named by what they are may lie in another folder elsewhere.
        "model": "" if _is_folder(name) else name,
        "weights": weights,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        # With whatever the command line has changed of it, such as how positions are scaled.
        "architecture": canonical(_without_origin(model.hf_config.to_dict())),
        "code": str(getattr(model, "code_revision", None)),
        **salt,
    }


def _without_origin(config: Any) -> Any:
    """A configuration without the folder and the library that it was read from and by."""
    if not isinstance(config, Mapping):
        return config
    origin = ("_name_or_path", "transformers_version")
    return {name: _without_origin(value) for name, value in config.items() if name not in origin}


def caller_vllm_config() -> VllmConfig | None:
    """The configuration of the engine that is being built, which vLLM hands to connectors but not to their tiers: it is
    a variable of the connector that builds the tier. None where there is no such variable."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if found is not None and hasattr(found, "model_config") and hasattr(found, "cache_config"):
            config: VllmConfig = found
            return config
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_folder(name: str) -> bool:
    from pathlib import Path

    return Path(name).is_dir()


def _hash_seed() -> str:
    """What the chain of block hashes begins with."""
    from vllm.v1.core import kv_cache_utils

    seed = getattr(kv_cache_utils, "get_none_hash_seed", None)
    return str(seed()) if seed is not None else ""


def _canonical_format(offloading: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

    return str(canonical_format_id(offloading.kv_cache_layout))
