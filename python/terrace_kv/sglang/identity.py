"""The namespace of an SGLang server: everything that its pages depend on besides the tokens.

SGLang names a page by a hash of all tokens up to its end, of the LoRA adapter and of the salt of its request. This module adds
everything else that KV depends on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .._native import ConfigError
from ..configuration import configuration_text, digest, environment, fields_of, libraries
from ..left_out import sglang as left_out
from ..namespaces import canonical, engine_namespace, weights_of
from ..transfers import key_of
from .pages import Form

# Pools whose pages are the same on all tensor-parallel ranks, if they hold the model's KV. Heads,
# and with them all other pools, are divided among ranks.
SAME_ON_ALL_RANKS = {"MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool"}
# Formats that load the weights at --model-path: a folder, or a Hugging Face model.
_LOADS_THE_MODEL = (
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "instanttensor", "layered", "mistral", "npcache", "pt", "runai_streamer",
    "safetensors", "sharded_state",
)  # fmt: skip


class Identity:
    """Identifies the server that stores pages. ``revision`` names the weights, if neither their files nor the server's ``--revision``
    identify them. ``salt`` separates the pages of this server from those of others for any other reason."""

    def __init__(self, storage_config: Any, revision: str | None = None, salt: str | None = None) -> None:
        self._config = storage_config
        self._salt = salt or ""
        arguments = server_arguments()
        self._arguments = _resolved(arguments)
        self._weights = _weights(self._arguments, revision)
        self._hardware = canonical(_hardware())
        self._cleared = 0

    def namespace(self, name: str, pool: Any, form: Form) -> bytes:
        """The namespace of a pool's pages."""
        config = self._config
        parallelism = {"pipeline": config.pp_size, "context": config.attn_cp_size}
        parallelism["decode context"] = _dcp(config, "size")
        is_shared = self._is_same_on_all_ranks(pool)
        if not is_shared:
            parallelism["tensor"] = config.tp_size
        shape = {
            attribute: str(getattr(pool, attribute, None))
            for attribute in ("layout", "head_num", "head_dim", "v_head_dim", "layer_num", "start_layer", "end_layer")
        }
        return engine_namespace(
            engine="sglang",
            hash_algorithm="sha256 of pages",
            model="by weights",
            weights=self._weights,
            dtype="in configuration",
            kv_dtype=str(pool.dtype),
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
            configuration=self._configuration(is_for_any=is_shared),
        )

    def _configuration(self, *, is_for_any: bool) -> str:
        """The server, its arguments, and its hardware."""
        kept_out = left_out.LEFT_OUT | (left_out.FOR_ANY_RANKS if is_for_any else {})
        counted = {name: value for name, value in self._arguments.items() if name not in kept_out}
        return digest(
            _version(),
            configuration_text(counted, {}, kind="SGLang"),
            canonical(environment("SGLANG_", left_out.ENVIRONMENT)),
            canonical(libraries()),
            self._hardware,
        )

    def _is_same_on_all_ranks(self, pool: Any) -> bool:
        kinds = {kind.__name__ for kind in type(pool).__mro__}
        return bool(self._config.is_mla_model) and not kinds.isdisjoint(SAME_ON_ALL_RANKS)

    def lineage(self) -> bytes:
        """The current identity of the weights, which changes when a running server replaces them or
        its cache is cleared."""
        return hashlib.sha256(key_of(weight_version(), self._cleared, *self._life())).digest()

    def reset(self) -> None:
        """Makes all pages stored so far unknown."""
        self._cleared += 1

    def _life(self) -> tuple[str, ...]:
        """An identifier of this run of the server, once its cache was cleared: all ranks on a
        machine have the same parent. Pages of another run with the same number of clears do not
        match."""
        if not self._cleared:
            return ()
        parent = os.getppid()
        return socket.gethostname(), str(parent), _started(parent)


def server_arguments() -> Any:
    """The arguments of the running server.

    :raises ConfigError: if this version of SGLang does not publish them.
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
    """The name of the weights, as set by the operator or by an update of a running server."""
    try:
        from sglang.srt.runtime_context import get_serving
    except ImportError:
        return str(getattr(server_arguments(), "weight_version", "default"))
    return str(get_serving().weight_version)


def _resolved(arguments: Any) -> dict[str, Any]:
    """All arguments of the server, with SGLang's choices for unset ones."""
    if hasattr(arguments, "resolved_dict"):
        resolved: dict[str, Any] = arguments.resolved_dict()
        return resolved
    names = fields_of(type(arguments))
    return {name: getattr(arguments, name, None) for name in (sorted(vars(arguments)) if names is None else names)}


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def _hardware() -> list[str]:
    """The processors, which affect the choice of kernels."""
    import torch

    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(), str(torch.cuda.get_device_capability())]
    return ["cpu", platform.machine(), torch.backends.cpu.get_cpu_capability()]


def _weights(arguments: Mapping[str, Any], said: str | None) -> str:
    """Identifies the weights: by their files, and by the operator's setting.

    :raises ConfigError: if neither identifies them.
    """
    seen: list[str] = []
    try:
        seen.append(_weights_seen(arguments))
        drafts = {"speculative_draft_model_path": arguments.get("speculative_draft_model_revision"), "uno_lora_path": None}
        for name, revision in drafts.items():
            # KV of draft models is stored with the rest.
            if arguments.get(name):
                seen.append(weights_of(str(arguments[name]), revision))
        # Names of adapters that are loaded later are never reused.
        for adapter in arguments.get("lora_paths") or ():
            seen.append(weights_of(_path_of(adapter)))
    except ConfigError as error:
        if said is None:
            raise ConfigError(
                f'{error}. Start the server with --revision COMMIT, or name the weights in the settings of the backend, like '
                '"revision": "mine, version 3", and change the name whenever their content changes'
            ) from error
    return canonical([seen, said])


def _weights_seen(arguments: Mapping[str, Any]) -> str:
    path = str(arguments.get("model_path") or "")
    load_format = str(arguments.get("load_format") or "auto")
    if load_format not in _LOADS_THE_MODEL:
        raise ConfigError(f"the weights of {path} cannot be seen, because --load-format is {load_format}")
    for name in ("custom_weight_loader", "checkpoint_engine_wait_weights_before_ready", "modelopt_checkpoint_restore_path"):
        if arguments.get(name):
            raise ConfigError(f"the weights of {path} cannot be seen, because of --{name.replace('_', '-')}")
    if arguments.get("weight_cache_mode") not in (None, "off"):
        raise ConfigError(f"the weights of {path} cannot be seen, because --weight-cache-mode is not off")
    if not Path(path).exists() and os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise ConfigError(f"the weights of {path} come from ModelScope")
    return weights_of(path, arguments.get("revision"), arguments.get("download_dir"))


def _path_of(adapter: Any) -> str:
    """The path of a LoRA adapter in each of SGLang's forms: ``NAME=PATH``, a mapping, an object."""
    if isinstance(adapter, str):
        return adapter.partition("=")[2] or adapter
    return str(adapter["lora_path"] if isinstance(adapter, Mapping) else adapter.lora_path)


def _started(process: int) -> str:
    """The start time of a process, in the system's units."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _dcp(config: Any, what: str) -> int:
    return int(getattr(config, f"dcp_{what}", 1 if what == "size" else 0))
