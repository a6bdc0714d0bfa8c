"""The namespace of an SGLang server: everything that its pages depend on besides the tokens.

SGLang names a page by a hash of all tokens up to its end, of the LoRA adapter and of the salt of its request. This module adds
everything else that KV depends on.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

from .._native import ConfigError
from ..namespaces import canonical, engine_namespace, weights_of
from ..transfers import key_of
from .pages import Form

# Pools whose pages are the same on all tensor-parallel ranks, where the model's KV is. Heads, and with them all other
# pools, are divided among ranks.
SAME_ON_ALL_RANKS = {"MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool"}
# Arguments of the server that change what is computed.
ARGUMENTS = ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args", "load_format")
DRAFTS = ("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision")


class Identity:
    """Identifies the server that stores pages. ``revision`` names the weights, if neither their files nor the server's ``--revision``
    identify them. ``salt`` separates the pages of this server from those of others for any other reason."""

    def __init__(self, storage_config: Any, revision: str | None = None, salt: str | None = None) -> None:
        self._config = storage_config
        self._salt = salt or ""
        arguments = server_arguments()
        self._arguments = {name: str(getattr(arguments, name, None)) for name in ARGUMENTS}
        self._drafts = {name: str(getattr(arguments, name, None)) for name in DRAFTS}
        path = str(getattr(arguments, "model_path", None) or storage_config.model_name or "")
        self._model = "a folder" if Path(path).is_dir() else path
        self._weights = _weights(path, getattr(arguments, "revision", None), revision)
        self._cleared = 0

    def namespace(self, name: str, pool: Any, form: Form) -> bytes:
        """The namespace of a pool's pages."""
        config = self._config
        parallelism = {"pipeline": config.pp_size, "context": config.attn_cp_size}
        parallelism["decode context"] = _dcp(config, "size")
        is_shared = self._is_same_on_all_ranks(pool)
        if not is_shared:
            parallelism["tensor"] = config.tp_size
        layers = getattr(pool, "layer_num", 0)
        has_drafts = name.startswith("draft") or getattr(pool, "target_layer_num", layers) != layers
        shape = {
            attribute: str(getattr(pool, attribute, None))
            for attribute in ("layout", "head_num", "head_dim", "v_head_dim", "layer_num", "start_layer", "end_layer")
        }
        return engine_namespace(
            engine="sglang",
            hash_algorithm="sha256 of pages",
            model=self._model,
            weights=self._weights,
            dtype=self._arguments["dtype"],
            kv_dtype=f"{pool.dtype} of {self._arguments['kv_cache_dtype']}",
            layout=canonical([type(pool).__name__, shape, form.kind, form.sizes]),
            block_tokens=getattr(pool, "logical_page_size", pool.page_size),
            parallelism=parallelism,
            rank=None if is_shared else config.tp_rank,
            salt=self._salt,
            pool=name,
            format=str(getattr(pool, "storage_format_tag", None)),
            pipeline_rank=config.pp_rank,
            context_rank=config.attn_cp_rank,
            decode_context_rank=_dcp(config, "rank"),
            arguments=canonical(self._arguments),
            drafts=canonical(self._drafts) if has_drafts else "",
        )

    def _is_same_on_all_ranks(self, pool: Any) -> bool:
        kinds = {kind.__name__ for kind in type(pool).__mro__}
        return bool(self._config.is_mla_model) and not kinds.isdisjoint(SAME_ON_ALL_RANKS)

    def lineage(self) -> bytes:
        """What the weights are called now, which changes when a running server gets others; and what came before was
        to be forgotten."""
        return hashlib.sha256(key_of(weight_version(), self._cleared, *self._life())).digest()

    def begin_anew(self) -> None:
        """What was stored so far is not known any more."""
        self._cleared += 1

    def _life(self) -> tuple[str, ...]:
        """This run of the server, if anything was to be forgotten: all ranks on a machine have the same parent. What
        another run stored after forgetting as often is not meant."""
        if not self._cleared:
            return ()
        parent = os.getppid()
        return socket.gethostname(), str(parent), _started(parent)

    def place(self, store: str) -> str:
        """Where this rank's pages are kept: a folder is for one process, so each rank has its own."""
        config = self._config
        ranks = config.tp_size * config.pp_size * config.attn_cp_size
        if not store.startswith("disk:") or ranks == 1:
            return store
        if config.is_mla_model:
            raise ConfigError(
                f"all {ranks} ranks read what one of them stores, but only one process can use a folder: start "
                '`terrace node` on that folder, and set "store": "nodes://HOST:PORT"'
            )
        rank = f"tp{config.tp_rank}of{config.tp_size}-pp{config.pp_rank}of{config.pp_size}"
        return f"{store}/{rank}-cp{config.attn_cp_rank}of{config.attn_cp_size}-dp{config.dp_rank}"


def server_arguments() -> Any:
    """The arguments that the server was started with.

    :raises ConfigError: if this SGLang does not tell.
    """
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    try:
        return get_server_args()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot find out which model SGLang serves ({error})") from error


def weight_version() -> str:
    """What the operator, or whoever gave the running server other weights, calls them."""
    try:
        from sglang.srt.runtime_context import get_serving
    except ImportError:
        return str(getattr(server_arguments(), "weight_version", "default"))
    return str(get_serving().weight_version)


def _weights(path: str, revision: str | None, said: str | None) -> str:
    """What names the weights: what is seen of them, and what the operator has said.

    :raises ConfigError: if that tells nothing.
    """
    seen = weights_of(path, revision)
    if said is None and revision is None and seen == key_of("revision", "main").hex():
        raise ConfigError(
            f"the revision of {path} is unknown: set it (--revision, or \"revision\" in the settings of the backend), so "
            "that pages of other weights are never read"
        )
    return canonical([seen, said])


def _started(process: int) -> str:
    """When a process was started, as the system counts."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _dcp(config: Any, what: str) -> int:
    return int(getattr(config, f"dcp_{what}", 1 if what == "size" else 0))
