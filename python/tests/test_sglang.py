"""The SGLang backend without SGLang, of which a few types are substituted. tests/engines has the
real one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import terrace_kv as terrace

KEYS = [f"{number:064x}" for number in range(64)]


class HiCacheStorage:
    """Methods that SGLang's class provides for subclasses."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


COMMIT = "0123456789" * 4


class Server(SimpleNamespace):
    """The parts of the server that the backend reads."""

    model_path: str
    revision: str | None
    weight_version: str


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    types = {"dtype": "bfloat16", "kv_cache_dtype": "auto"}
    server = Server(model_path="a-model", revision=COMMIT, weight_version="default", **types)
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolTransferResult": PoolTransferResult,
        },
        "sglang.srt.observability": {},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
        "sglang.srt.runtime_context": {"get_server_args": lambda: server, "get_serving": lambda: server},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    yield server
    for name in [name for name in sys.modules if name.startswith("terrace_kv.sglang")]:
        del sys.modules[name]


def config(folder: Path, **more: Any) -> Any:
    """A rank's configuration in SGLang's form, with settings of the backend."""
    settings = more.pop("settings", {})
    told = {"interface_v1": 1, "store": f"disk:{folder}", "capacity": "64MiB", "reserve": 0, **settings}
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "dp_rank": 0}
    kind = {"is_mla_model": False, "should_split_heads": False, "enable_storage_metrics": False, "model_name": "m"}
    return SimpleNamespace(**{**ranks, **kind, "extra_config": told, **more})


class Pool:
    """A host pool of keys and values."""

    def __init__(self, layout: str = "page_first", pages: int = 64, page_size: int = 16, layers: int = 4) -> None:
        self.layout, self.page_size, self.size = layout, page_size, pages * page_size
        self.layer_num, self.head_num, self.head_dim, self.dtype = layers, 2, 64, torch.bfloat16
        first, second = (layers, self.size) if layout == "layer_first" else (self.size, layers)
        self.kv_buffer = torch.randn((2, first, second, self.head_num, self.head_dim)).to(self.dtype)

    @property
    def page_bytes(self) -> int:
        return self.get_dummy_flat_data_page().numel() * 2

    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        starts = indices[:: self.page_size].tolist()
        if self.layout == "layer_first":
            runs = [self.kv_buffer[kind, layer] for layer in range(self.layer_num) for kind in range(2)]
        elif self.layout == "page_first":
            runs = [self.kv_buffer[0], self.kv_buffer[1]]
        else:
            raise ValueError(f"Unsupported layout: {self.layout}")
        size = runs[0][: self.page_size].numel() * 2
        return [run[start].data_ptr() for start in starts for run in runs], [size] * (len(starts) * len(runs))

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        if self.layout == "layer_first":
            page = self.kv_buffer[:, :, index : index + self.page_size]
        elif self.layout == "page_first":
            page = self.kv_buffer[:, index : index + self.page_size]
        else:
            raise ValueError(f"Unsupported layout: {self.layout}")
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * self.page_size * self.layer_num * self.head_num * self.head_dim, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))


class MLATokenToKVPoolHost(Pool):
    """A pool whose name means that all ranks have the same pages."""


class Anchor:
    """A pool without memory, whose pages belong to other pools."""

    layout, page_size, size, dtype, kv_buffer = "page_first", 16, 64 * 16, torch.uint8, None

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None


def indices(*pages: int, page_size: int = 16) -> torch.Tensor:
    """The slots of pages in a pool."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def opened(told: Any, pool: Any, **beside: Any) -> Any:
    """Opens a backend as SGLang does."""
    from terrace_kv.sglang import TerraceStorage

    storage = TerraceStorage(told, {})
    storage.register_mem_pool_host(pool)
    for name, each in {"kv": pool, **beside}.items():
        storage.register_mem_host_pool_v2(each, name)
    storage.on_host_pools_registered()
    return storage


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_survive_their_server(server: Server, tmp_path: Path, layout: str) -> None:
    pool = Pool(layout)
    storage = opened(config(tmp_path), pool)
    assert storage.batch_exists(KEYS[:4]) == 0
    assert storage.batch_set_v1(KEYS[:4], indices(7, 3, 5, 60)) == [True] * 4
    assert storage.batch_set_v1(KEYS[:1], indices(7)) == [True], "what is there is stored"
    storage.close()

    other = Pool(layout)
    storage = opened(config(tmp_path), other)
    assert storage.batch_exists(KEYS[:8]) == 4 and not storage.exists(KEYS[5])
    before = other.get_data_page(0)
    assert storage.batch_get_v1(KEYS[:4], indices(1, 2, 3, 4)) == [True] * 4
    for ours, theirs in zip((7, 3, 5, 60), (1, 2, 3, 4)):
        assert torch.equal(pool.get_data_page(ours * 16), other.get_data_page(theirs * 16))
    assert torch.equal(before, other.get_data_page(0)), "nothing else has changed"
    assert storage.batch_get_v1([KEYS[0], KEYS[9], KEYS[1]], indices(5, 6, 7))[:2] == [True, False]
    storage.close()


def test_copied_pages_are_the_same_objects(server: Server, tmp_path: Path) -> None:
    pool = Pool()
    storage = opened(config(tmp_path), pool)
    pages = [pool.get_data_page(page * 16) for page in range(3)]
    assert storage.batch_set(KEYS[:2], pages[:2]) and storage.set(KEYS[2], pages[2])
    assert storage.batch_get_v1(KEYS[:3], indices(10, 11, 12)) == [True] * 3
    targets = [pool.get_dummy_flat_data_page() for _ in range(4)]
    got = storage.batch_get(KEYS[:4], targets)
    assert got[3] is None and all(torch.equal(page, target) for page, target in zip(pages, targets))
    assert torch.equal(storage.get(KEYS[1], pool.get_dummy_flat_data_page()), pages[1])
    assert storage.get(KEYS[5], pool.get_dummy_flat_data_page()) is None
    with pytest.raises(ValueError, match="a page has"):
        storage.set(KEYS[6], pages[0][:100])
    storage.close()


def test_a_layout_that_cannot_be_stored_is_refused_with_the_flag_to_set(server: Server, tmp_path: Path) -> None:
    with pytest.raises(terrace.ConfigError, match="--hicache-mem-layout page_first"):
        opened(config(tmp_path), Pool("inside_out"))
    with pytest.raises(terrace.ConfigError, match="tp_lcm_size"):
        opened(config(tmp_path, should_split_heads=True), Pool())
    with pytest.raises(terrace.ConfigError, match="Did you mean 'capacity'"):
        opened(config(tmp_path, settings={"capasity": "1GiB"}), Pool())


def test_mismatched_places_are_refused(server: Server, tmp_path: Path) -> None:
    storage = opened(config(tmp_path), Pool())
    assert storage.batch_set_v1(KEYS[:3], indices(1, 2)) == [False] * 3
    assert storage.batch_get_v1(KEYS[:3], None) == [False] * 3
    assert storage.batch_set_v1([], indices(1)[:0]) == []
    storage.close()


def test_pools_beside_kv_have_pages_of_their_own(server: Server, tmp_path: Path) -> None:
    kv, window = Pool(), Pool(layers=2)
    storage = opened(config(tmp_path), kv, swa=window)

    def transfer(name: str, keys: list[str], *pages: int, policy: str = "all_pages", **more: Any) -> Any:
        at = indices(*pages) if pages else None
        return SimpleNamespace(name=name, keys=keys, host_indices=at, hit_policy=policy, **more)

    stored = storage.batch_set_v2([transfer("kv", KEYS[:4], 0, 1, 2, 3), transfer("swa", KEYS[2:4], 8, 9)])
    assert stored == {"kv": [True] * 4, "swa": [True] * 2}
    found = storage.batch_exists_v2(KEYS[:6], [transfer("swa", KEYS[:2], policy="trailing_pages")])
    assert found == PoolTransferResult(4, {"kv": 4, "swa": 4}, [4])
    found = storage.batch_exists_v2(KEYS[:6], [transfer("swa", [], policy="all_pages")])
    assert found == PoolTransferResult(0, {"kv": 4}, [])
    blocks = transfer("swa", [], policy="block_groups", block_pages=4, group_pages=2)
    assert storage.batch_exists_v2(KEYS[:6], [blocks]) == PoolTransferResult(4, {"kv": 4, "swa": 4}, [1, 2, 3, 4])
    assert storage.batch_get_v2([transfer("swa", KEYS[2:5], 20, 21, 22)]) == {"swa": [True, True, False]}
    assert torch.equal(window.get_data_page(20 * 16), window.get_data_page(8 * 16))
    storage.close()


def test_a_pool_without_memory_is_always_there(server: Server, tmp_path: Path) -> None:
    beside = Pool(layers=2)
    storage = opened(config(tmp_path), Anchor(), c4=beside)
    assert storage.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    all_pages = SimpleNamespace(name="c4", keys=KEYS[:1], host_indices=indices(3), hit_policy="all_pages")
    assert storage.batch_set_v2([all_pages]) == {"c4": [True]}
    assert storage.batch_exists_v2(KEYS[:4], [all_pages]).kv_hit_pages == 1, "what the others have decides"
    storage.close()


def test_weights_and_what_was_cleared(server: Server, tmp_path: Path) -> None:
    storage = opened(config(tmp_path), Pool())
    storage.batch_set_v1(KEYS[:2], indices(0, 1))
    server.weight_version = "step 2"
    assert storage.batch_exists(KEYS[:2]) == 0, "others have computed these"
    storage.batch_set_v1(KEYS[:1], indices(2))
    server.weight_version = "default"
    assert storage.batch_exists(KEYS[:2]) == 2
    storage.clear()
    assert storage.batch_exists(KEYS[:2]) == 0
    assert storage.batch_set_v1(KEYS[:1], indices(3)) == [True] and storage.batch_exists(KEYS[:2]) == 1
    storage.close()


def test_three_threads_at_a_time(server: Server, tmp_path: Path) -> None:
    pool = Pool()
    storage = opened(config(tmp_path), pool)
    failed: list[str] = []

    def store() -> None:
        for turn in range(0, 32, 4):
            if not all(storage.batch_set_v1(KEYS[turn : turn + 4], indices(*range(turn, turn + 4)))):
                failed.append(f"put {turn}")

    def look() -> None:
        for _ in range(50):
            storage.batch_exists(KEYS[:32])

    def load() -> None:
        for turn in range(0, 32, 4):
            while storage.batch_exists(KEYS[turn : turn + 4]) < 4:
                pass
            if not all(storage.batch_get_v1(KEYS[turn : turn + 4], indices(*range(32 + turn, 36 + turn)))):
                failed.append(f"get {turn}")

    threads = [threading.Thread(target=work) for work in (store, look, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    half = 32 * 16
    assert torch.equal(pool.kv_buffer[:, :half], pool.kv_buffer[:, half:])
    storage.close()


def test_sglangs_metrics(server: Server, tmp_path: Path) -> None:
    storage = opened(config(tmp_path), Pool())
    assert storage.get_stats() is None
    storage.close()
    prometheus = pytest.importorskip("prometheus_client")
    storage = opened(config(tmp_path, enable_storage_metrics=True), Pool())
    storage.batch_set_v1(KEYS[:3], indices(0, 1, 2))
    storage.batch_get_v1(KEYS[:4], indices(0, 1, 2, 3))
    told = storage.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([3], [3]) and told.backup_bandwidth[0] > 0
    assert storage.get_stats() == StorageMetrics(), "each is told once"
    labels = {"pool": "kv", "operation": "get", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0", "attn_cp_rank": "0"}
    value = prometheus.REGISTRY.get_sample_value
    assert value("terrace_l3_objects_total", {**labels, "outcome": "hit"}) == 6
    assert value("terrace_l3_objects_total", {**labels, "outcome": "miss"}) == 2
    storage.close()


def namespace_of(told: Any, pool: Any, name: str = "kv", **said: Any) -> bytes:
    from terrace_kv.sglang.identity import Identity
    from terrace_kv.sglang.pages import form_of

    namespace: bytes = Identity(told, **said).namespace(name, pool, form_of(name, pool))
    return namespace


def test_namespaces_name_what_kv_depends_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args", "quantization_param_path", "attention_backend")
    for name in (*told, "a_field_of_a_later_version", "port", "mem_fraction_static"):
        setattr(server, name, None)
    usual = namespace_of(config(tmp_path), Pool())
    assert usual == namespace_of(config(tmp_path / "elsewhere"), Pool())
    others = {
        "tensor ranks": namespace_of(config(tmp_path, tp_size=2), Pool()),
        "rank": namespace_of(config(tmp_path, tp_size=2, tp_rank=1), Pool()),
        "pipeline": namespace_of(config(tmp_path, pp_size=2), Pool()),
        "stage": namespace_of(config(tmp_path, pp_size=2, pp_rank=1), Pool()),
        "context": namespace_of(config(tmp_path, attn_cp_size=2), Pool()),
        "context rank": namespace_of(config(tmp_path, attn_cp_size=2, attn_cp_rank=1), Pool()),
        "layout": namespace_of(config(tmp_path), Pool("layer_first")),
        "page size": namespace_of(config(tmp_path), Pool(page_size=32)),
        "layers": namespace_of(config(tmp_path), Pool(layers=5)),
        "pool": namespace_of(config(tmp_path), Pool(), "swa"),
        "salt": namespace_of(config(tmp_path), Pool(), salt="other"),
        "said revision": namespace_of(config(tmp_path), Pool(), revision="other"),
        "kind of pool": namespace_of(config(tmp_path), MLATokenToKVPoolHost()),
    }
    scales = tmp_path / "scales.json"
    scales.write_text("1")
    changes = {"revision": "f" * 40, "dtype": "float16", "kv_cache_dtype": "fp8_e5m2", "attention_backend": "triton"}
    unheard_of = {"a_field_of_a_later_version": 1, "quantization_param_path": str(scales)}
    for name, value in {**changes, **unheard_of, "quantization": "fp8", "json_model_override_args": "{}"}.items():
        before = getattr(server, name, None)
        setattr(server, name, value)
        others[name] = namespace_of(config(tmp_path), Pool())
        setattr(server, name, before)
    server.quantization_param_path = str(scales)
    scales.write_text("2")
    others["content of a file"] = namespace_of(config(tmp_path), Pool())
    server.quantization_param_path = None
    monkeypatch.setenv("SGLANG_KERNEL_OF_A_LATER_VERSION", "1")
    others["environment"] = namespace_of(config(tmp_path), Pool())
    monkeypatch.delenv("SGLANG_KERNEL_OF_A_LATER_VERSION")
    assert len({usual, *others.values()}) == 1 + len(others)
    server.port, server.mem_fraction_static = 30001, 0.5
    assert namespace_of(config(tmp_path), Pool()) == usual


def test_replicated_pages_are_shared_by_ranks(server: Server, tmp_path: Path) -> None:
    def of(pool: Any, **ranks: int) -> bytes:
        return namespace_of(config(tmp_path, is_mla_model=True, **ranks), pool)

    latent = MLATokenToKVPoolHost()
    assert of(latent, tp_size=4, tp_rank=3) == of(latent, tp_size=2) == of(latent)
    assert of(latent, pp_size=2) != of(latent, pp_size=2, pp_rank=1)
    assert of(Pool(), tp_size=2) != of(Pool(), tp_size=2, tp_rank=1), "a pool that is divided stays so"


def test_each_rank_has_a_folder_of_its_own(server: Server, tmp_path: Path) -> None:
    from terrace_kv.sglang.folders import place_of

    def place(store: str, **ranks: Any) -> str:
        return place_of(store, config(tmp_path, **ranks), server)

    assert place("disk:/kv") == "disk:/kv" and place("nodes://a:1", tp_size=2) == "nodes://a:1"
    places = {place("disk:/kv", tp_size=2, tp_rank=rank, dp_rank=dp) for rank in (0, 1) for dp in (0, 1)}
    assert len(places) == 4 and all(each.startswith("disk:/kv/") for each in places)
    with pytest.raises(terrace.ConfigError, match="terrace node"):
        place("disk:/kv", tp_size=2, is_mla_model=True)


@pytest.mark.parametrize("is_mla_model", [False, True])
def test_ranks_of_data_parallel_attention_store_side_by_side(server: Server, tmp_path: Path, is_mla_model: bool) -> None:
    """Each rank has the whole attention, so only the number of its group separates them."""
    server.dp_size, server.enable_dp_attention = 2, True
    ranks = [config(tmp_path, is_mla_model=is_mla_model, dp_rank=rank) for rank in range(2)]
    stores = [opened(each, Pool()) for each in ranks]
    for store in stores:
        assert store.batch_set_v1(KEYS[:1], indices(2)) == [True]
    for store in stores:
        store.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"tp0of1-pp0of1-cp0of1-dp{rank}" for rank in range(2)]


def test_replicas_of_a_model_have_folders_or_are_refused(server: Server, tmp_path: Path) -> None:
    from terrace_kv.sglang.folders import place_of

    server.dp_size, server.enable_dp_attention = 2, False
    with pytest.raises(terrace.ConfigError, match="terrace node"):
        place_of("disk:/kv", config(tmp_path), server)
    context: Any = sys.modules["sglang.srt.runtime_context"]
    places = set()
    for replica in range(2):
        context.get_parallel = lambda replica=replica: SimpleNamespace(dp_rank=replica, num_dp_ranks=2)
        places.add(place_of("disk:/kv", config(tmp_path), server))
    assert len(places) == 2 and "disk:/kv" not in places

    def unpublished() -> Any:
        raise RuntimeError("not published")

    context.get_parallel = unpublished
    server.dp_size = 1
    assert place_of("disk:/kv", config(tmp_path), server) == "disk:/kv"


def test_weights_must_be_known(server: Server, tmp_path: Path) -> None:
    for revision in (None, "main", "v1.0"):
        server.revision = revision
        with pytest.raises(terrace.ConfigError, match="--revision COMMIT"):
            namespace_of(config(tmp_path), Pool())
    assert namespace_of(config(tmp_path), Pool(), revision="mine")
    server.model_path = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(terrace.ConfigError, match="has no weights"):
        namespace_of(config(tmp_path), Pool())
    (tmp_path / "model.bin").write_text("weights")
    ours = namespace_of(config(tmp_path), Pool())
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert namespace_of(config(tmp_path), Pool()) != ours
    unseen = {"load_format": "dummy", "custom_weight_loader": ["mine"], "weight_cache_mode": "daemon"}
    for name, value in {**unseen, "speculative_draft_model_path": "a-draft", "lora_paths": [{"lora_path": "an-adapter"}]}.items():
        setattr(server, name, value)
        with pytest.raises(terrace.ConfigError, match='"revision"'):
            namespace_of(config(tmp_path), Pool())
        assert namespace_of(config(tmp_path), Pool(), revision="mine")
        setattr(server, name, None if name != "weight_cache_mode" else "off")


def test_adapters_of_the_start_are_named_by_their_content(server: Server, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.bin").write_text("one")
    server.lora_paths = [{"lora_name": "a", "lora_path": str(adapter)}]
    ours = namespace_of(config(tmp_path), Pool())
    (adapter / "adapter_model.bin").write_text("two")
    assert namespace_of(config(tmp_path), Pool()) != ours


def test_restorable_prefix_lengths(server: Server) -> None:
    from terrace_kv.sglang.prefixes import Beside, leading, restorable_prefix

    yes, no = True, False
    assert [leading(found) for found in ([], [no], [yes, yes], [yes, no, yes])] == [0, 0, 2, 1]
    assert restorable_prefix(3, []).restorable == [1, 2, 3] and restorable_prefix(0, []).pages == 0

    def lengths(kv_pages: int, *pools: Beside) -> list[int]:
        return restorable_prefix(kv_pages, pools).restorable

    every = Beside("indexer", "all_pages", [yes, yes, no, yes])
    assert lengths(4, every) == [1, 2]
    ends = Beside("mamba", "trailing_pages", [no, yes, no, yes])
    assert lengths(4, ends) == [2, 4] and lengths(3, ends) == [2], "states lie at some lengths only"
    window = Beside("swa", "trailing_pages", [yes, no, yes, yes, yes], trailing_pages=2)
    assert lengths(5, window) == [1, 4, 5], "a window is no longer than the prefix"
    assert lengths(4, every, ends) == [2] and lengths(4, every, window) == [1]
    told = restorable_prefix(4, [every, ends])
    assert (told.pages, told.by_pool) == (2, {"indexer": 2, "mamba": 4})
    blocks = Beside("blocks", "block_groups", [no, yes, no, yes, no, no], block_pages=2, group_pages=1)
    told = restorable_prefix(1, [blocks])
    assert (told.pages, told.by_pool) == (1, {"blocks": 4}), "blocks are another form, which nobody has to have"
    with pytest.raises(ValueError, match="newer"):
        lengths(1, Beside("odd", "some_day", [yes]))
