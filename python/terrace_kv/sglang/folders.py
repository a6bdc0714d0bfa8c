"""Disk folders of an SGLang server's processes: each process needs a separate folder."""

from __future__ import annotations

from typing import Any

from .._native import ConfigError


def place_of(store: str, config: Any, arguments: Any) -> str:
    """The store of one process: a separate folder if other processes of the server have the same
    setting. ``config`` is SGLang's ``HiCacheStorageConfig``, ``arguments`` are those of the
    server.

    :raises ConfigError: if processes need the same folder, or cannot be distinguished.
    """
    if not store.startswith("disk:"):
        return store
    ranks = config.tp_size * config.pp_size * config.attn_cp_size
    replicas, replica = _replica(config, arguments)
    if ranks * replicas == 1:
        return store
    if ranks > 1 and config.is_mla_model:
        raise ConfigError(
            f"all {ranks} ranks read what one of them stores, but only one process can use a folder: start "
            '`terrace node` on that folder, and set "store": "nodes://HOST:PORT"'
        )
    rank = f"tp{config.tp_rank}of{config.tp_size}-pp{config.pp_rank}of{config.pp_size}"
    rank += f"-cp{config.attn_cp_rank}of{config.attn_cp_size}-dp{config.dp_rank}"
    return f"{store}/{rank}" + ("" if replica == config.dp_rank else f"-replica{replica}")


def _replica(config: Any, arguments: Any) -> tuple[int, int]:
    """The number of replicas that serve different requests, and the index of this one. For
    data-parallel attention SGLang passes both to its backends; for replicas of the whole model
    they are published elsewhere."""
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        replicas = int(parallel.num_dp_ranks)
        number = parallel.dp_rank if replicas > 1 else None
        return replicas, int(config.dp_rank if number is None else number)
    except (ImportError, AttributeError, RuntimeError, ValueError):
        # Another version, or a process in which SGLang has not published it.
        pass
    replicas = int(getattr(arguments, "dp_size", 1))
    if replicas > 1 and not getattr(arguments, "enable_dp_attention", False):
        raise ConfigError(
            f"{replicas} replicas (--dp-size) cannot use the same folder, and this SGLang does not tell them apart: start "
            '`terrace node` on that folder, and set "store": "nodes://HOST:PORT"'
        )
    return replicas, int(config.dp_rank)
