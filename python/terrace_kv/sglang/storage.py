"""HiCache storage backend for SGLang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from .._native import ConfigError
from ..adapters import SharedStore, open_store
from ..transfers import Transfers
from .folders import place_of
from .identity import Identity, server_arguments
from .metrics import Metrics
from .pages import Form, Pages, form_of
from .prefixes import Beside, leading, restorable_prefix
from .versions import check_version

log = logging.getLogger(__name__)

KV = "kv"
# SGLang's own settings, which are passed along.
SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")
# Settings of the pages' identity, not of their store.
IDENTITYS = ("revision", "salt")


class TerraceStorage(HiCacheStorage):  # type: ignore[misc]
    """A backend for ``--hicache-storage-backend dynamic``. It transfers pages between SGLang's host pools and a store, and
    verifies them. Pages that lie in one or two contiguous pieces of memory are transferred without a copy.

    SGLang creates one backend per rank and calls it from background threads, so its methods block. The settings are those of
    :func:`terrace_kv.adapters.open_store`, and ``revision`` and ``salt`` (see :class:`Identity`).

    :raises ConfigError: if the store cannot be opened with these settings, or if the pages of this server cannot be distinguished
        from those of other servers.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        check_version()
        settings = {**(storage_config.extra_config or {}), **(kwargs or {})}
        if not settings.get("interface_v1"):
            log.warning('terrace: SGLang copies every page; set "interface_v1": 1 to avoid this')
        if storage_config.should_split_heads:
            raise ConfigError(
                "pages cannot be split by heads: leave out tp_lcm_size. Servers with different --tp-size do not share "
                "pages, unless the model's KV is the same on all ranks (MLA)"
            )
        self._settings = settings
        self._config = storage_config
        self._identity = Identity(storage_config, **{name: settings.get(name) for name in IDENTITYS})
        self._metrics = Metrics(storage_config)
        self._forms: dict[str, tuple[Any, Form]] = {}
        self._pages: dict[str, Pages] = {}
        self._store: SharedStore | None = None
        self._lock = threading.Lock()

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Called by SGLang to register the KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._forms[KV] = mem_pool_host, form_of(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Called by SGLang to register each further pool, and the KV pool once more."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name not in self._forms or self._forms[name][0] is not host_pool:
            self._forms[name] = host_pool, form_of(name, host_pool)

    def on_host_pools_registered(self) -> None:
        """Called by SGLang after all pools are registered. A problem with the store stops the start of the server here."""
        for name in list(self._forms):
            self._of(name)

    def _of(self, name: str) -> Pages:
        """The pages of a pool. The store is opened when the sizes of pages are known."""
        with self._lock:
            if name in self._pages:
                return self._pages[name]
            pool, form = self._forms[name]
            if self._store is None:
                sizes = [size for _, form in self._forms.values() for size in form.sizes]
                place = place_of(str(self._settings.get("store", "")), self._config, server_arguments())
                settings = {**self._settings, "store": place}
                self._store = open_store(settings, object_bytes=max(sizes, default=1), known=SGLANGS + IDENTITYS)
            store = self._store.store
            transfers = Transfers(store, self._identity.namespace(name, pool, form))
            pages = self._pages[name] = Pages(pool, form, transfers, self._identity.lineage)
            log.info("terrace: pages of %s: %s of %s bytes in %s", name, form.kind, form.sizes, store.place)
            return pages

    # Called by SGLang with interface_v1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """The number of leading pages that exist."""
        return leading(self._of(KV).exists(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Reads pages into the KV pool."""
        return self._load(KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the KV pool."""
        return self._save(KV, keys, host_indices)

    # Called by SGLang with further pools beside KV

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How much of the prefix can be restored, including the data that other pools have for it."""
        kv_pages = leading(self._of(KV).exists(keys))
        beside = [
            Beside(
                name=transfer.name,
                policy=str(getattr(transfer.hit_policy, "value", transfer.hit_policy)),
                found=self._of(str(transfer.name)).exists(keys),
                trailing_pages=max(1, len(transfer.keys or ())),
                block_pages=getattr(transfer, "block_pages", 0),
                group_pages=getattr(transfer, "group_pages", 0),
            )
            for transfer in pool_transfers or ()
        ]
        prefix = restorable_prefix(kv_pages, beside)
        by_pool = {KV: kv_pages, **prefix.by_pool} if kv_pages else prefix.by_pool
        return PoolTransferResult(prefix.pages, by_pool, prefix.restorable)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Reads pages of several pools."""
        return {each.name: self._load(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Stores pages of several pools."""
        return {each.name: self._save(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def _load(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        pages, since = self._of(name), time.perf_counter()
        loaded = pages.get(keys, host_indices)
        self._metrics.loaded(sum(loaded), sum(loaded) * pages.form.page_bytes, time.perf_counter() - since)
        return loaded

    def _save(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        pages, since = self._of(name), time.perf_counter()
        stored = pages.put(keys, host_indices)
        self._metrics.stored(sum(stored), sum(stored) * pages.form.page_bytes, time.perf_counter() - since)
        return stored

    # Called by SGLang without interface_v1

    def exists(self, key: str) -> bool:
        """Whether a page exists."""
        return self._of(KV).exists([key])[0]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Reads a page into a tensor."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Reads pages into tensors."""
        got = self._of(KV).get_tensors(keys, target_locations)
        return [page if is_there else None for page, is_there in zip(target_locations, got)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a page from a tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores pages from tensors. Returns whether all are stored."""
        return all(self._of(KV).put_tensors(keys, values))

    # Other calls

    def clear(self) -> None:
        """Makes everything that was stored so far invisible to this server until it restarts. Other servers that share the store
        still see it."""
        self._identity.reset()

    def get_stats(self) -> Any:
        """Values for SGLang's own metrics, since the last call."""
        return self._metrics.drain({name: pages.transfers.stats for name, pages in list(self._pages.items())})

    def close(self) -> None:
        """Waits for calls in flight, and closes the store, which makes what is on disk durable."""
        with self._lock:
            pages, self._pages = list(self._pages.values()), {}
            store, self._store = self._store, None
        for each in pages:
            each.close()
        if store is not None:
            store.close()
