"""The namespaces of a vLLM engine's objects."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._native import ConfigError
from ..configuration import configuration_text, digest, environment, libraries
from ..left_out import vllm as left_out
from ..namespaces import canonical, engine_namespace, weights_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def tier_namespace(
    offloading: Any, row_bytes: int, vllm_config: VllmConfig | None, settings: Mapping[str, Any]
) -> bytes:
    """The namespace of rows of vLLM's host cache, as ``OffloadingConfig`` describes them: a row has
    all ranks of an engine."""
    parallel, is_canonical = offloading.parallel, getattr(offloading, "canonical_layout", False)
    # Bytes that are the same for any number of ranks: vLLM has checked the layout of each layer
    # then.
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
        **_model(offloading.model.name, vllm_config, settings, is_for_any=is_for_any),
    )


def connector_namespace(
    vllm_config: VllmConfig, layers: Mapping[str, str], block_tokens: int, settings: Mapping[str, Any]
) -> bytes:
    """The namespace of blocks of one rank, which is part of every key; ``layers`` describe the
    layout of each layer's KV in a block. The identity of the model is in the names of blocks
    (:func:`connector_identity`), which the scheduler sends to workers: loading a model may
    change a worker's configuration."""
    parallel = vllm_config.parallel_config
    degrees = {
        "world_size": parallel.world_size,
        "tp_size": parallel.tensor_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "pcp_size": getattr(parallel, "prefill_context_parallel_size", 1),
        "dcp_size": getattr(parallel, "decode_context_parallel_size", 1),
    }
    return engine_namespace(
        engine="vllm connector",
        hash_algorithm="in names",
        model="in names",
        weights="in names",
        dtype="in names",
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        layout=canonical(dict(layers)),
        block_tokens=block_tokens,
        parallelism=degrees,
        rank=None,
        salt=str(settings.get("salt", "")),
    )


def connector_identity(vllm_config: VllmConfig, settings: Mapping[str, Any]) -> str:
    """The identity of the model that computes KV, as known in the scheduler's process."""
    return canonical(_model(vllm_config.model_config.model, vllm_config, settings))


def _model(name: str, vllm_config: VllmConfig | None, settings: Mapping[str, Any], *, is_for_any: bool = False) -> dict[str, Any]:
    """The dependencies common to both kinds of objects."""
    told = settings.get("weights")
    if told is not None and not isinstance(told, str):
        raise ConfigError(f'"weights" must be a name for the weights, not {told!r}')
    salt = {"salt": str(settings.get("salt", ""))}
    if vllm_config is None:
        # The engine's arguments are unknown then, so every possible difference must be configured.
        if told is None:
            raise ConfigError(
                "this version of vLLM does not pass the loaded weights to tiers: name them, like "
                '"weights": "their revision", and change the name whenever the weights or how they are loaded change'
            )
        return {"hash_algorithm": "", "model": name, "weights": f"told {told}", "dtype": "", **salt}
    model = vllm_config.model_config
    return {
        "hash_algorithm": f"{vllm_config.cache_config.prefix_caching_hash_algo} from {_hash_seed()}",
        # Weights are identified by content, so the same ones may be in another folder elsewhere.
        "model": "by weights",
        "weights": _weights(vllm_config, told),
        "dtype": str(model.dtype),
        "configuration": _configuration(vllm_config, is_for_any=is_for_any),
        **salt,
    }


def _configuration(vllm_config: VllmConfig, *, is_for_any: bool) -> str:
    """The engine, its arguments, and its hardware."""
    import vllm

    kept_out = left_out.LEFT_OUT
    if is_for_any:
        names = {*kept_out, *left_out.FOR_ANY_RANKS}
        kept_out = {name: {**kept_out.get(name, {}), **left_out.FOR_ANY_RANKS.get(name, {})} for name in names}
    return digest(
        str(vllm.__version__),
        configuration_text(vllm_config, kept_out, kind="vLLM"),
        canonical(environment("VLLM_", left_out.ENVIRONMENT)),
        canonical(libraries()),
        canonical(_hardware()),
    )


def _hardware() -> list[str]:
    """The processors, which affect the choice of kernels."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return ["cpu", platform.machine(), torch.backends.cpu.get_cpu_capability()]
    return [
        type(current_platform).__name__,
        str(current_platform.get_device_name()),
        str(current_platform.get_device_capability()),
    ]


# Formats that load the model by its name: a folder, or a Hugging Face model.
_LOADS_THE_MODEL = (
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "safetensors", "sharded_state",
)  # fmt: skip


def _weights(vllm_config: VllmConfig, told: str | None) -> str:
    """Identifies the weights: by their files, and by the operator's setting.

    :raises ConfigError: if neither identifies them.
    """
    seen: list[str] = []
    try:
        seen.append(_weights_seen(vllm_config.model_config, vllm_config.load_config))
        speculative = vllm_config.speculative_config
        draft = getattr(speculative, "draft_model_config", None)
        # KV of draft models is stored with the rest.
        if draft is not None and draft.model != vllm_config.model_config.model:
            load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
            seen.append(_weights_seen(draft, load))
        if vllm_config.lora_config is not None:
            raise ConfigError("vLLM names LoRA adapters by name and path, whatever their files are")
    except ConfigError as error:
        if told is None:
            raise ConfigError(
                f'{error}. Name them in the settings of Terrace, like "weights": "mine, version 3", and change the name '
                "whenever their content changes"
            ) from error
    if vllm_config.weight_transfer_config is not None:
        # A trainer sends weights without an identity, and vLLM does not report when.
        seen.append(os.urandom(16).hex())
    return canonical([seen, told])


def _weights_seen(model: Any, load: Any) -> str:
    load_format = str(load.load_format)
    if load_format not in _LOADS_THE_MODEL:
        raise ConfigError(f"the weights of {model.model} cannot be seen, because --load-format is {load_format}")
    if getattr(model, "model_weights", ""):
        raise ConfigError(f"the weights are in an object store: {model.model_weights}")
    if not Path(model.model).exists():
        from vllm import envs

        if envs.VLLM_USE_MODELSCOPE:
            raise ConfigError(f"the weights of {model.model} come from ModelScope")
    return weights_of(model.model, model.revision, load.download_dir)


def caller_vllm_config() -> VllmConfig | None:
    """The configuration of the engine that is being built, which vLLM passes to connectors but not
    to their tiers: it is a local variable of the connector that builds the tier. None if there
    is no such variable."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if found is not None and hasattr(found, "model_config") and hasattr(found, "cache_config"):
            config: VllmConfig = found
            return config
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _hash_seed() -> str:
    """The start of the chain of block hashes."""
    from vllm.v1.core import kv_cache_utils

    seed = getattr(kv_cache_utils, "get_none_hash_seed", None)
    return str(seed()) if seed is not None else ""


def _canonical_format(offloading: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

    return str(canonical_format_id(offloading.kv_cache_layout))
