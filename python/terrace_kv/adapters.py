"""Common code of the adapters to engines: opens the store that an engine's configuration describes."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from ._native import ConfigError
from .arrays import size
from .store import Store

# Default capacities of stores on disk and in memory.
DISK_CAPACITY = "64GiB"
MEMORY_CAPACITY = "4GiB"

# Engines wait for lookups in the next step and not in this one, and request pieces of up to 16 MiB
# at a time.
GUARD = {
    "exists_timeout_ms": 500,
    "get_timeout_ms": 3_000,
    "put_timeout_ms": 10_000,
    "failures_to_open": 3,
}

_EVERY = {
    "store": "where KV is kept: disk:FOLDER, nodes://HOST:PORT,HOST:PORT, mooncake://HOST:PORT, s3://BUCKET/PREFIX, memory",
    "guard": "deadlines, circuit breaker and negative cache, as settings of GuardConfig",
}
_SIZES = {
    "capacity": "capacity of the store, like 64GiB",
    "object_max": "maximum size of an object; default: the engine's chunk size",
}
_SETTINGS: dict[str, dict[str, str]] = {
    "memory": _EVERY | _SIZES,
    "disk": _EVERY
    | _SIZES
    | {
        "memory": "memory cache on top of the disk, like 8GiB",
        "write_behind": "true: store into the memory cache, and write to the disk in the background",
        "reserve": "free space that the store leaves on its file system, like 10GiB; default: 5 %, at most 16GiB",
    },
    "nodes": _EVERY
    | {
        "secret_file": "the file with the secret of the nodes",
        "client": "the name of this client in the nodes' list of clients",
        "copies": "number of nodes that store each object",
        "rdma": "auto, never, or the name of a device",
        "exists_timeout_ms": "timeout of a lookup",
        "get_timeout_ms": "timeout of a read",
        "put_timeout_ms": "timeout of a write",
    },
    "mooncake": _EVERY
    | _SIZES
    | {
        "library": "the file of Mooncake's library",
        "metadata_server": "address of the metadata server",
        "protocol": "tcp or rdma",
        "device": "its RDMA devices",
        "prefix": "prefix of the object names",
        "segment_bytes": "memory that this client contributes to the cluster",
        "replicas": "number of replicas of each object",
    },
    "bucket": _EVERY | _SIZES,
}


def open_store(config: Mapping[str, Any], *, object_bytes: int, known: Iterable[str] = ()) -> SharedStore:
    """Opens the store that an engine's configuration describes, with a guard (deadlines, circuit breaker,
    negative cache).

    ``object_bytes`` is the size of the objects that the engine stores, and ``known`` are settings that the adapter itself
    reads. Several adapters in one process share one open store; the last one closes it.

    :raises ConfigError: if the settings are invalid; the message says what to change.
    """
    place = config.get("store")
    if not isinstance(place, str) or not place:
        raise ConfigError(f'the setting "store" is missing: for example "store": "disk:/var/cache/kv". {_list(_SETTINGS["disk"])}')
    kind = _kind(place)
    settings = {name: value for name, value in config.items() if name not in set(known)}
    _refuse_unknown(settings, kind, known)
    told: dict[str, Any] = {name: value for name, value in settings.items() if name not in ("store", "guard")}
    if kind != "nodes":
        told["object_max"] = max(size(told.get("object_max", 0)), object_bytes)
        told.setdefault("capacity", MEMORY_CAPACITY if kind == "memory" else DISK_CAPACITY)
    told["for_engines"] = True
    guard = GUARD | dict(settings.get("guard", {}))
    return SharedStore.open(place, told, guard)


class SharedStore:
    """A store that several adapters of a process share. Each adapter must close it once."""

    _opened: dict[str, SharedStore] = {}
    _turn = threading.Lock()

    def __init__(self, name: str, store: Store) -> None:
        self._name = name
        self._users = 0
        self.store = store
        """The store itself."""

    @classmethod
    def open(cls, place: str, settings: Mapping[str, Any], guard: Mapping[str, int]) -> SharedStore:
        """Returns the store if it is already open, or opens it."""
        # A fork has none of the threads that a store needs, so it opens its own.
        name = repr((os.getpid(), place, sorted(settings.items()), sorted(guard.items())))
        with cls._turn:
            if name not in cls._opened:
                cls._opened[name] = cls(name, Store(place, guard=guard, **settings))
            shared = cls._opened[name]
            shared._users += 1
            return shared

    def close(self) -> None:
        """Closes the store if no other adapter uses it. A store on disk makes stored objects durable first; nodes do so by
        themselves a moment after they are stored. Close all transfers before."""
        with self._turn:
            self._users -= 1
            if self._users > 0:
                return
            self._opened.pop(self._name, None)
            self.store.close()
            # Its files are closed with the last reference.
            del self.store


def _kind(place: str) -> str:
    kind = place.partition(":")[0]
    if kind in _SETTINGS:
        return kind
    if kind in ("s3", "gs", "az"):
        return "bucket"
    raise ConfigError(
        f"there is no store {place!r}: use memory, disk:FOLDER, nodes://HOST:PORT,..., mooncake://HOST:PORT, "
        "s3://BUCKET/PREFIX or bucket:URL"
    )


def _refuse_unknown(settings: Mapping[str, Any], kind: str, known: Iterable[str]) -> None:
    allowed = _SETTINGS[kind]
    names = [*allowed, *known]
    for name in settings:
        if name in allowed:
            continue
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        elsewhere = [other for other, its in _SETTINGS.items() if name in its]
        if elsewhere:
            hint = f" It is a setting of {' and '.join(elsewhere)} stores."
        raise ConfigError(f"there is no setting {name!r} for a {kind} store.{hint} {_list(allowed)}")


def _list(allowed: Mapping[str, str]) -> str:
    return "Settings are: " + "; ".join(f"{name} ({what})" for name, what in allowed.items()) + "."
