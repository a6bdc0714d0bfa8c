"""A process with SGLang's own cache: its radix tree, its controller with its threads, and its host
pools, on the CPU.

Nothing is stubbed but what needs a GPU: pinning memory, and the kernels that copy between device
and host. It reads commands as lines of JSON and answers each with a line, so that SGLang is
imported once for all tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
import traceback
import unittest
from array import array
from typing import Any

# No model is loaded.
os.environ["HF_HUB_OFFLINE"] = "1"

import prometheus_client
import sglang.srt.mem_cache.pool_host.common as host_memory
import sglang.test.kits.unified_radix_cache.fixtures as fixtures
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from terrace_kv.sglang import TerraceStorage

# A string with the form of a commit.
REVISION = "1" * 40
POOLS = {"kv": ComponentType.FULL, "swa": ComponentType.SWA, "mamba": ComponentType.MAMBA}


def rows(pool: Any, buffer: torch.Tensor, layer: int, indices: torch.Tensor) -> tuple[Any, ...]:
    """The slices of a layer's tokens in a host buffer of keys or values."""
    page, offset = indices // pool.page_size, indices % pool.page_size
    return {
        "layer_first": (layer, indices),
        "page_first": (indices, layer),
        "page_first_direct": (page, layer, offset),
        "page_head": (page, slice(None), offset, layer),
    }[pool.layout]


def to_host(self: Any, pool: Any, host_indices: Any, device_indices: Any, *_: Any, **__: Any) -> None:
    for layer in range(self.layer_num):
        at = rows(self, self.k_buffer, layer, host_indices)
        self.k_buffer[at] = self.device_k_buffers[layer][device_indices]
        self.v_buffer[at] = self.device_v_buffers[layer][device_indices]


def to_device(self: Any, pool: Any, host_indices: Any, device_indices: Any, layer: int, *_: Any, **__: Any) -> None:
    at = rows(self, self.k_buffer, layer, host_indices)
    self.device_k_buffers[layer][device_indices] = self.k_buffer[at]
    self.device_v_buffers[layer][device_indices] = self.v_buffer[at]


def states_to_host(self: Any, pool: Any, host_indices: Any, device_indices: Any, *_: Any, **__: Any) -> None:
    parts = [(self.buffer_info.temporal, self.temporal_buffer), *zip(self.buffer_info.conv, self.conv_buffer)]
    for device, host in parts:
        for layer in range(self.num_mamba_layers):
            host[host_indices, layer, 0] = device[layer][device_indices]


MHATokenToKVPoolHost.backup_from_device_all_layer = to_host
MHATokenToKVPoolHost.load_to_device_per_layer = to_device
MambaPoolHost.backup_from_device_all_layer = states_to_host
host_memory._cuda_host_register = lambda *_, **__: None
fixtures.get_device = lambda: "cpu"


class Server(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """The server's hierarchical cache, and the operations of its scheduler."""

    def __init__(self) -> None:
        unittest.TestCase.__init__(self)
        self._open: contextlib.ExitStack | None = None
        self._requests = 0

    def join(self, rank: int, ranks: int, meet: str) -> None:
        """Makes this process one of several ranks."""
        torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)

    def start(
        self,
        settings: dict[str, Any],
        config: dict[str, Any] | None = None,
        layout: str = "page_first",
        rank: int = 0,
        ranks: int = 1,
        has_metrics: bool = False,
        policy: str = "wait_complete",
        environment: dict[str, float] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Starts a server with an empty cache on a store."""
        config = dict(config or {})
        config["components"] = tuple(POOLS[name] for name in config.pop("pools", ["kv"]))
        self.cfg = CacheConfig(**{"page_size": 16, "num_layers": 4, "kv_size": 1024, **config})
        self._open = contextlib.ExitStack()
        for name, value in (environment or {}).items():
            self._open.enter_context(getattr(envs, name).override(value))
        parts = [f"{part}tp" for part in ("", "attn_", "moe_")]
        tensor = {f"{part}_rank": rank for part in parts} | {f"{part}_size": ranks for part in parts}
        self._open.enter_context(get_parallel().override(**tensor, pp_rank=0, pp_size=1))
        self.cache, self.allocator, self.requests = fixtures.build_fixture(self.cfg)
        self.cache._enable_metrics_flag = has_metrics
        if ranks > 1:
            self.cache.cache_init_params.tp_cache_group = self.cache.tp_group = torch.distributed.group.WORLD
            self.cache.tp_world_size = ranks
        terrace = {"backend_name": "terrace", "module_path": "terrace_kv.sglang", "class_name": "TerraceStorage"}
        told = {**terrace, "interface_v1": 1, "prefetch_threshold": 1, **settings}
        arguments = {"model_path": "dummy", "revision": REVISION, **arguments}
        server_arguments = ServerArgs(
            page_size=self.cfg.page_size,
            hicache_io_backend="kernel",
            hicache_mem_layout=layout,
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(told),
            hicache_storage_prefetch_policy=policy,
            **arguments,
        )
        server_arguments._mamba_cache_chunk_size = max(fixtures.FLA_CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(server_arguments)
        self.cache.init_hicache(server_arguments, self.cache.cache_init_params)
        fixtures.drop_hicache_atexit_pin(self.cache)
        self.cache.write_through_threshold, self.cache.load_back_threshold = 1 << 30, 0
        controller = self.cache.cache_controller
        for entry in self._entries():
            # Copied pages would each be pinned.
            entry.host_pool.pin_memory = False
        controller.prefetch_capacity_limit = controller.mem_pool_host.size
        return {"backend": type(controller.storage_backend).__name__, "pools": [str(e.name) for e in self._entries()]}

    def stop(self) -> None:
        """Ends the server."""
        self.cache.cache_controller.detach_storage_backend()
        self.cache.release_host_resources()
        assert self._open is not None
        self._open.close()

    def compute(self, first: int, pages: int, seed: int = 0) -> dict[str, Any]:
        """Computes a prompt, from the cache's view, and has it stored."""
        tokens = self._make_seq(first, pages)
        self._fill(seed)
        self._insert(self.cache, self.allocator, self.requests, tokens)
        leaf = fixtures.match_prefix(self.cache, tokens).last_device_node
        self._backup_node(self.cache, leaf)
        since = time.monotonic()
        self._write_path_to_l3(self.cache, leaf)
        self._flush_l3_backups(self.cache, timeout=60)
        return {"seconds": time.monotonic() - since, "pages": self._pages(leaf)}

    def restore(self, first: int, pages: int) -> dict[str, Any]:
        """Requests a prompt; returns the part that comes from the store, and the waiting time."""
        tokens = array("q", self._make_seq(first, pages))
        self._requests += 1
        request = CacheRequestHandle(f"request {self._requests}", 0)
        since = time.monotonic()
        self.cache.prefetch_from_storage(request, self.cache.root_node_handle(), tokens, None, None)
        self._run_prefetch_to_completion(self.cache, request, timeout=60)
        seconds = time.monotonic() - since
        match = fixtures.match_prefix(self.cache, tokens)
        return {"seconds": seconds, "tokens": match.host_hit_length, "pages": self._pages(match.last_host_node)}

    def load(self, first: int, pages: int) -> dict[str, Any]:
        """Loads the host's part of a prompt to the device, and returns its digest there."""
        tokens = self._make_seq(first, pages)
        match = fixtures.match_prefix(self.cache, tokens)
        path = self._path_chain(self.cache, match.last_host_node)
        return {"device": self._digest_device(torch.cat([self._load_back_node(self.cache, node) for node in path]))}

    def device(self, first: int, pages: int) -> dict[str, Any]:
        """Returns a digest of the device's part of a prompt."""
        match = fixtures.match_prefix(self.cache, self._make_seq(first, pages))
        return {"device": self._digest_device(self.cache.path_device_indices(match.last_device_node))}

    def forge(self, first: int, pages: int) -> dict[str, Any]:
        """Replaces stored pages by other bytes under the same names: they verify."""
        match = fixtures.match_prefix(self.cache, self._make_seq(first, pages))
        keys = self._all_page_hashes(self.cache, match.last_host_node)
        stored = self.cache.cache_controller.storage_backend._of("kv")
        stored.transfers.remove(stored._names(keys))
        zeros = [torch.zeros_like(stored.pool.get_dummy_flat_data_page()) for _ in keys]
        return {"forged": stored.put_tensors(keys, zeros)}

    def weights(self, version: str) -> None:
        """Runs the scheduler's steps for new weights of a running server."""
        get_context().override("scheduler.weight_version", weight_version=version)

    def latent(
        self, settings: dict[str, Any], layout: str, rank: int, ranks: int, seed: int | None = None
    ) -> dict[str, Any]:
        """Stores pages of a model whose KV is the same on all ranks if there is a seed, and loads
        them otherwise. Calls the backend directly, on a pool of SGLang's."""
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", revision=REVISION))
        kind = {"dtype": torch.bfloat16, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "layer_num": 3, "device": "cpu"}
        device = MLATokenToKVPool(size=64, page_size=16, enable_memory_saver=False, **kind)
        layers = {"start_layer": 0, "end_layer": 3, "target_layer_num": 3, "override_kv_cache_dim": device.kv_cache_dim}
        told = device.get_device_pool_infos()[0].buffer_info
        pool = MLATokenToKVPoolHost(
            told, 1.0, 0, 16, layout, pin_memory=False, device_capacity_tokens=64, host_token_capacity=256, **layers
        )
        config = HiCacheStorageConfig(
            rank, ranks, 0, 1, 0, 1, True, False, True, "dummy", extra_config={"interface_v1": 1, **settings}
        )
        backend = TerraceStorage(config, {})
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        keys, places = [f"{page:064x}" for page in range(4)], torch.arange(64, 128)
        pool.kv_buffer.zero_()
        if seed is not None:
            pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
            done = backend.batch_set_v1(keys, places)
        else:
            done = backend.batch_get_v1(keys, places)
        pages = [pool.get_data_page(at).contiguous().view(torch.uint8).numpy() for at in range(64, 128, 16)]
        backend.close()
        return {"done": done, "pages": [hashlib.sha256(page).hexdigest() for page in pages]}

    def clear(self) -> dict[str, Any]:
        """Runs the operator's command to clear the storage."""
        return {"cleared": self.cache.cache_controller.clear_storage_backend()}

    def lose(self, key: str) -> None:
        """Removes a page from the store."""
        stored = self.cache.cache_controller.storage_backend._of("kv")
        stored.transfers.remove(stored._names([key]))

    def figures(self) -> dict[str, Any]:
        """The backend's report for SGLang's metrics, and the exported metrics."""
        told = self.cache.cache_controller.storage_backend.get_stats()
        if told is None:
            return {"told": None}
        seen: dict[str, dict[str, float]] = {}
        for family in prometheus_client.REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("terrace") and sample.name.endswith("_total"):
                    labels = [sample.labels[label] for label in ("operation", "outcome") if label in sample.labels]
                    seen.setdefault(sample.name, {})[" ".join(labels)] = sample.value
        return {"told": dataclasses.asdict(told), "prometheus": seen}

    def _entries(self) -> list[Any]:
        return list(self.cache.cache_controller.mem_pool_host.entries)

    def _fill(self, seed: int) -> None:
        """Fills the whole device with distinct contents."""
        random = torch.Generator().manual_seed(seed)
        pool = self.allocator.get_kvcache()
        parts = [one for one in (getattr(pool, "full_kv_pool", None), getattr(pool, "swa_kv_pool", None)) if one]
        for part in parts or [pool]:
            for buffer in (*part.k_buffer, *part.v_buffer):
                buffer.copy_(torch.randn(buffer.shape, generator=random))
        if self.cfg.has_mamba:
            states = self.requests.mamba_pool.mamba_cache
            for buffer in (states.temporal, *states.conv):
                buffer.copy_(torch.randn(buffer.shape, generator=random))

    def _pages(self, leaf: Any) -> dict[str, dict[str, str]]:
        """Digests of the host's part of the path to a node: for each pool, by the key of the
        page."""
        told: dict[str, dict[str, str]] = {}
        pools = {str(entry.name): entry.host_pool for entry in self._entries()}
        for node in self._path_chain(self.cache, leaf):
            keys = self.cache.tree_core.get_hash_values(node)
            for name, pool in pools.items():
                indices = fixtures.node_host_value(self.cache, node, POOLS[name])
                if indices is None:
                    continue
                starts = indices[:: pool.page_size].tolist()
                for key, start in zip(keys[-len(starts) :], starts):
                    page = pool.get_data_page(start).contiguous().view(torch.uint8)
                    told.setdefault(name, {})[key] = hashlib.sha256(page.numpy()).hexdigest()
        return told

    def _digest_device(self, indices: torch.Tensor) -> str:
        pool = self._get_full_kv_pool(self.allocator)
        digest = hashlib.sha256()
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            digest.update(buffer[indices].contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()


def main() -> None:
    # SGLang's output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(server, order.pop("do"))(**order) or {}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
