"""LMCache storage plug-in: a client for its adapter ``native_plugin``.

::

    --l2-adapter '{"type": "native_plugin", "module_path": "terrace_kv.lmcache", "class_name": "TerraceClient",
                   "adapter_params": {"store": "disk:/var/cache/kv", "object_max": "32MiB", "weights": "...", ...}}'

LMCache's keys contain the model, the world size, the rank, the group of layers, a hash of the chunk's tokens and the
salt. They do not contain the weights, the data type and layout of the KV, the number of tokens per chunk, or the degrees of tensor
and pipeline parallelism. So these are settings of the plug-in. All of them are part of the namespace, which is verified for every
object. ``docs/lmcache.md`` has the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._native import ConfigError
from .adapters import open_store
from .arrays import size
from .namespaces import canonical, engine_namespace, weights_of
from .transfers import Buffers, Transfers

_NEEDED = {
    "weights": "the revision of the model's weights, or anything that changes with them. If the model is in a folder of this "
    "machine, model_folder will do instead",
    "kv_dtype": "the data type of the KV, like bfloat16 or fp8_e4m3",
    "layout": "the engine's KV layout: its name and version, and the attention backend if layouts differ",
    "chunk_tokens": "LMCache's --chunk-size",
    "parallelism": 'parallelism of the engine, like {"tensor": 2, "pipeline": 1}',
}
_OWN = (*_NEEDED, "model_folder", "hash_algorithm", "namespace")

# LMCache's own default.
_HASH_ALGORITHM = "blake3"
# Longest wait for batches in flight on close.
_CLOSE_S = 10.0


class TerraceClient:
    """A store with the interface of LMCache's native connectors: batches are submitted, and a file descriptor signals their end.

    Only :meth:`close` blocks. Failures are reported for each key and are misses for LMCache, so no request fails because the
    store is slow, full or unreachable.

    :raises ConfigError: if a setting is missing that distinguishes the KV of one model from that of another.
    """

    def __init__(self, **adapter_params: Any) -> None:
        namespace = _namespace(adapter_params)
        self._shared = open_store(adapter_params, object_bytes=_object_bytes(adapter_params), known=_OWN)
        self._opened: Transfers | None = Transfers(self._shared.store, namespace)

    @property
    def _transfers(self) -> Transfers:
        if self._opened is None:
            raise ValueError("this client is closed")
        return self._opened

    def event_fd(self) -> int:
        """A file descriptor that is readable while there are completions to drain."""
        return self._transfers.event_fd()

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Reads objects. Each object must have exactly the length of its buffer."""
        return self._transfers.submit_get(_encoded(keys), Buffers(buffers))

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Stores buffers."""
        return self._transfers.submit_put(_encoded(keys), Buffers(buffers))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Looks up which objects exist. Objects that are found get a lease, because LMCache is about to read them."""
        return self._transfers.submit_exists(_encoded(keys), lease=True)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Removes objects."""
        return self._transfers.submit_remove(_encoded(keys))

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool]]]:
        """The batches that have ended: number, whether all keys succeeded, error message, and success of each key."""
        told = []
        for done in self._transfers.drain():
            # A lookup of a missing object is not a failure.
            is_ok = done.all_ok if done.kind in ("put", "get") else done.error is None
            told.append((done.job, is_ok, done.error or "", done.ok))
        return told

    def stats(self) -> Mapping[str, Any]:
        """Hits, misses, failures, bytes and times, by operation."""
        return self._transfers.stats()

    def close(self) -> None:
        """Waits for batches in flight, and makes stored objects durable."""
        if self._opened is None:
            return
        is_idle = self._opened.wait_idle(_CLOSE_S)
        # The folder can be opened again only after the last reference to the store is gone.
        self._opened = None
        if is_idle:
            self._shared.close()
        del self._shared


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _object_bytes(params: Mapping[str, Any]) -> int:
    place = str(params.get("store", ""))
    if not place or place.startswith("nodes://"):
        # Nodes are configured on the server, and without a store there is nothing to size: opening
        # it reports the error.
        return 0
    if "object_max" not in params:
        raise ConfigError(
            'the setting "object_max" is missing: the size of a chunk of one worker, that is chunk_tokens times the KV '
            'of a token, like "32MiB". LMCache does not provide it'
        )
    return size(params["object_max"])


def _namespace(params: Mapping[str, Any]) -> bytes:
    told = dict(params)
    if "model_folder" in told and "weights" not in told:
        told["weights"] = weights_of(str(told["model_folder"]))
    missing = [f"{name} ({what})" for name, what in _NEEDED.items() if name not in told]
    if missing:
        raise ConfigError(
            f"LMCache's keys do not cover all that KV depends on. Add to adapter_params: {'; '.join(missing)}"
        )
    degrees = told["parallelism"]
    if not isinstance(degrees, Mapping) or not all(isinstance(degree, int) for degree in degrees.values()):
        raise ConfigError(f'parallelism must have a number for each kind, like {{"tensor": 2, "pipeline": 1}}, not {degrees!r}')
    return engine_namespace(
        engine="lmcache",
        hash_algorithm=str(told.get("hash_algorithm", _HASH_ALGORITHM)),
        # The model's name, the rank, the group and the salt are in every key.
        model="in keys",
        weights=str(told["weights"]),
        dtype=str(told["kv_dtype"]),
        kv_dtype=str(told["kv_dtype"]),
        layout=canonical(told["layout"]),
        block_tokens=int(told["chunk_tokens"]),
        parallelism={str(name): int(degree) for name, degree in degrees.items()},
        rank=None,
        salt=str(told.get("namespace", "")),
    )
