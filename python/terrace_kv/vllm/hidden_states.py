"""A vLLM connector that puts hidden states into a feature store, for training.

vLLM's speculative method ``extract_hidden_states`` keeps the hidden states of chosen layers beside the KV cache. For each
request that finishes normally, this connector puts them into a :class:`~terrace_kv.FeatureStore`, with the request's token ids.
The response contains a ref::

    "kv_transfer_params": {"hidden_states_ref": "{...}", "hidden_states_within_s": 30.0}

The ref is a promise: the sample is put within that time, or never. If it is already known that it cannot be put (the store is
full, unreachable, or hangs), the response has ``hidden_states_error`` instead. The request itself never fails because of it.
``docs/vllm-hidden-states.md`` has the settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.request import RequestStatus

from .._native import TerraceError
from ..arrays import kind_of
from ..feature_writer import FeatureWriter, WriterStatus
from ..features import FeatureRef
from ..hidden_states import HiddenStatesSettings, Shape, hidden_states_of, parts_of
from .hidden_states_stats import HiddenStatesMetrics, HiddenStatesStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

REF = "hidden_states_ref"
WITHIN = "hidden_states_within_s"
ERROR = "hidden_states_error"

_ENDED_BADLY = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)

# If the writer has not reported for this time, a new request waits for a step with a report.
_NEWS_S = 1.0
# Upper bound of that wait.
_NEWS_PATIENCE_S = 5.0


@dataclass
class Save:
    """Hidden states that were promised."""

    request: str
    ref: str
    token_ids: list[int]
    blocks: list[int]
    bytes: int


@dataclass
class Saves(KVConnectorMetadata):
    """Message of the scheduler to the worker in a step."""

    saves: list[Save] = field(default_factory=list)


@dataclass
class News(KVConnectorWorkerMetadata):
    """Status of the writer: message of the worker that has it to the scheduler in a step."""

    status: WriterStatus

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        # Only one worker has a writer.
        return self


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Puts the hidden states of finished requests into a feature store."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise ValueError(
                "HiddenStatesConnector needs hidden states: start vLLM with --speculative-config "
                '\'{"method": "extract_hidden_states", "num_speculative_tokens": 1, ...}\''
            )
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        # Data-parallel engines need distinct producer numbers.
        settings = HiddenStatesSettings.of(extra, engine=vllm_config.parallel_config.data_parallel_index)
        shape, group = shape_of(vllm_config), group_of(kv_cache_config)
        block_size = kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        self._scheduler: _Scheduler | None = None
        self._worker: _Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = _Scheduler(settings, shape, group, block_size)
        else:
            self._worker = _Worker(settings, shape, block_size)

    # Called on the scheduler side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return (0 if self._scheduler.admits(request) else None), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.take_saves()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        if isinstance(connector_output.kv_connector_worker_meta, News):
            self._scheduler.hear(connector_output.kv_connector_worker_meta.status)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids)

    def get_finished_count(self) -> int:
        # One worker saves every request, whatever their number.
        return 1

    # Called on workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        assert self._worker is not None
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        # All tensor-parallel ranks have the same hidden states, and pipeline stages before the last
        # have none.
        if layers and get_tensor_model_parallel_rank() == 0:
            (name,) = layers
            self._worker.open(kv_caches[name])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        saves = self._get_connector_metadata() if self.has_connector_metadata() else Saves()
        assert isinstance(saves, Saves)
        return self._worker.save(saves.saves) or None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        status = self._worker.status()
        return None if status is None else News(status)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # Metrics.

    def get_kv_connector_stats(self) -> HiddenStatesStats | None:
        if self._worker is not None:
            return self._worker.stats()
        return self._scheduler.stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HiddenStatesStats:
        return HiddenStatesStats(data=data) if data is not None else HiddenStatesStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> HiddenStatesMetrics:
        return HiddenStatesMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # The hidden states of a token are contiguous, as in a sample. Other layouts work with a
        # slower copy.
        return "LBNHC"


class _Scheduler:
    """State of the scheduler side: the promised samples, and the last report of the writer."""

    def __init__(self, settings: HiddenStatesSettings, shape: Shape, group: int, block_size: int) -> None:
        self._settings = settings
        self._shape = shape
        self._group = group
        self._block_size = block_size
        self._status = WriterStatus()
        self._heard_at = time.monotonic()
        # Store space reserved for running requests; 0 for those that have waited too long for it.
        self._reserved: dict[str, int] = {}
        self._held_since: dict[str, float] = {}
        self._secret = settings.secret()
        self._saves: list[Save] = []
        # Bytes sent to the worker since its last report.
        self._told_bytes = 0
        # The store space that they take.
        self._told_stored = 0
        self._refused = 0

    def admits(self, request: Request) -> bool:
        """Whether the request may start. It waits for a report if the last one is old, and for
        space in the store."""
        if request.request_id in self._reserved or not _wants(request):
            return True
        now = time.monotonic()
        waited = now - self._held_since.setdefault(request.request_id, now)
        is_old = self._owner() is None or now - self._heard_at > _NEWS_S
        if is_old and waited < _NEWS_PATIENCE_S:
            return False
        tokens = _tokens_most(request)
        nbytes = self._shape.stored_bytes(tokens, self._settings.object_max)
        has_room = self._why_no_room(tokens, sum(self._reserved.values())) is None
        if not has_room and self._status.error is None and waited < self._settings.hold_s:
            return False
        del self._held_since[request.request_id]
        # The promise is made at the end; until then the space stays reserved.
        self._reserved[request.request_id] = nbytes if has_room else 0
        return True

    def take_saves(self) -> Saves:
        saves, self._saves = self._saves, []
        self._told_bytes += sum(save.bytes for save in saves)
        self._told_stored += sum(self._stored(save) for save in saves)
        return Saves(saves)

    def hear(self, status: WriterStatus) -> None:
        # The report includes the samples sent in the same step.
        self._status, self._heard_at = status, time.monotonic()
        self._told_bytes = self._told_stored = 0

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        self._held_since.pop(request.request_id, None)
        has_room = self._reserved.pop(request.request_id, 0) > 0
        if request.status in _ENDED_BADLY or not _wants(request):
            return False, None
        try:
            # Space reserved for other requests is not used.
            save = self._promise(request, block_ids, 0 if has_room else sum(self._reserved.values()))
        except Exception as error:  # noqa: BLE001
            # Whatever the error, the request gets its response.
            self._refused += 1
            return False, {ERROR: str(error)}
        self._saves.append(save)
        return True, {REF: save.ref, WITHIN: self._settings.within_s}

    def stats(self) -> HiddenStatesStats | None:
        refused, self._refused = self._refused, 0
        return HiddenStatesStats.of(refused=refused) if refused else None

    def _promise(self, request: Request, block_ids: tuple[list[int], ...], reserved: int) -> Save:
        params = request.kv_transfer_params or {}
        if request.prompt_token_ids is None:
            raise ValueError("a prompt of embeddings has no token ids to store hidden states with")
        token_ids = list(request.prompt_token_ids)
        if params.get("include_output_tokens", False):
            # The last token was not an input, so it has no hidden state.
            token_ids = list(request.all_token_ids)[:-1]
        blocks = list(block_ids[self._group]) if self._group < len(block_ids) else []
        if len(blocks) * self._block_size < len(token_ids):
            raise ValueError(f"vLLM has kept hidden states of {len(blocks)} blocks only, for {len(token_ids)} tokens")
        nbytes = self._shape.sample_bytes(len(token_ids))
        if self._status.error is not None:
            raise ValueError(self._status.error)
        if (why := self._why_no_room(len(token_ids), reserved)) is not None:
            raise ValueError(why)
        if (owner := self._owner()) is None:
            raise ValueError("the store is not open yet")
        sample = params.get("sample", request.request_id)
        if not isinstance(sample, str):
            raise ValueError(f"the name of a sample is text, not {sample!r}")
        settings = self._settings
        specs = parts_of(self._shape, len(token_ids), settings.object_max)
        ref = FeatureRef.promise(settings.name, owner, sample, specs, retain=settings.retain, secret=self._secret)
        return Save(request.request_id, ref.text, token_ids, blocks, nbytes)

    def _owner(self) -> int | None:
        """The number of the producer. Without a configured one, the worker takes a free one."""
        return self._status.owner if self._settings.owner is None else self._settings.owner

    def _stored(self, save: Save) -> int:
        return self._shape.stored_bytes(len(save.token_ids), self._settings.object_max)

    def _why_no_room(self, tokens: int, reserved: int) -> str | None:
        settings = self._settings
        promised = self._told_bytes + sum(save.bytes for save in self._saves) + self._shape.sample_bytes(tokens)
        if (waiting := self._status.backlog_bytes + promised) > settings.backlog:
            return f"the store is slow: {waiting} bytes would wait for it, and backlog is {settings.backlog}"
        # Upper bound: a sample ends with a partial slot, and has its token ids and its notes in
        # separate slots. Samples that are being put count twice for a moment.
        stored = self._status.backlog_bytes + 4 * settings.object_max * self._status.backlog_samples
        stored += self._told_stored + sum(self._stored(save) for save in self._saves)
        stored += self._shape.stored_bytes(tokens, settings.object_max)
        if (resident := self._status.resident_bytes + stored + reserved) > settings.max_resident:
            return (
                f"samples that wait to be consumed would take {resident} bytes of the store, and max_resident is "
                f"{settings.max_resident}: release consumed samples, or consume faster"
            )
        return None


class _Worker:
    """State of the worker that saves: the cache of hidden states, and the writer."""

    def __init__(self, settings: HiddenStatesSettings, shape: Shape, block_size: int) -> None:
        self._settings = settings
        self._shape = shape
        self._block_size = block_size
        self._writer: FeatureWriter | None = None
        self._cache = torch.empty(0)
        self._stream: torch.cuda.Stream | None = None

    def open(self, cache: torch.Tensor) -> None:
        found = (*cache.shape[1:], kind_of(cache)[0])
        expected = (self._shape.layers, self._block_size, self._shape.hidden_size, self._shape.dtype)
        if found != expected:
            # The scheduler side promises by the expected shape.
            raise ValueError(f"vLLM keeps hidden states as {found}, and {expected} was expected of this model")
        self._cache = cache
        if cache.is_cuda:
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        self._features = self._settings.open()
        self._writer = FeatureWriter(
            self._features, backlog_max=self._settings.backlog, threads=self._settings.threads
        )

    def save(self, saves: list[Save]) -> set[str]:
        """Accepts saves, and returns the requests whose blocks are no longer needed."""
        if self._writer is None:
            return set()
        done = set()
        for save in saves:
            promise = FeatureRef(save.ref)
            copy = self._copy_of(promise, save.token_ids, save.blocks)
            if not self._writer.submit(save.request, promise, copy, save.bytes, self._settings.within_s):
                logger.warning("Hidden states of %s are dropped: too much data waits for the store", save.request)
                done.add(save.request)
        return done | {str(request) for request in self._writer.take_copied()}

    def status(self) -> WriterStatus | None:
        return None if self._writer is None else self._writer.status

    def stats(self) -> HiddenStatesStats | None:
        if self._writer is None:
            return None
        counts = self._writer.take_counts()
        if counts.samples + counts.failures == 0:
            return None
        return HiddenStatesStats.of(counts.samples, counts.bytes, counts.failures, seconds=counts.put_seconds)

    def close(self) -> None:
        if self._writer is None:
            return
        if self._writer.close(self._settings.within_s):
            try:
                self._features.close()
            except TerraceError as error:
                logger.warning("The number of this producer was not given back: %s", error)
            self._features.store.close()
        else:
            logger.warning("The store does not answer: some promised hidden states are not stored")
        self._writer = None

    def _copy_of(
        self, promise: FeatureRef, token_ids: list[int], blocks: list[int]
    ) -> Callable[[], Mapping[str, torch.Tensor]]:
        """Returns a function that copies hidden states out of the cache, on another thread."""
        ready = None
        if self._stream is not None:
            # After the work that the model has queued.
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()

        def copy() -> Mapping[str, torch.Tensor]:
            found = hidden_states_of(self._cache, blocks, len(token_ids), self._stream, ready)
            rows = [tensor.shape[0] for tensor in promise.tensors[:-1]]
            parts = [*torch.split(found, rows), torch.tensor(token_ids, dtype=torch.int64)]
            return {tensor.name: part for tensor, part in zip(promise.tensors, parts, strict=True)}

        return copy


def group_of(kv_cache_config: KVCacheConfig) -> int:
    """vLLM's cache group with the hidden states: a separate one, or the only one."""
    groups = kv_cache_config.kv_cache_groups
    found = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) == 1:
        return 0
    raise ValueError(
        f"vLLM keeps hidden states of this model in {len(found)} of {len(groups)} cache groups: exactly one is needed"
    )


def shape_of(vllm_config: VllmConfig) -> Shape:
    """Shape and type of vLLM's hidden states per token."""
    hidden = vllm_config.speculative_config.draft_model_config.hf_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    # Hidden states are not quantised, whatever the type of the KV.
    known = cache_dtype if cache_dtype in ("bfloat16", "float16") else "auto"
    dtype = kv_cache_dtype_str_to_dtype(known, vllm_config.model_config)
    name, _ = kind_of(torch.empty(0, dtype=dtype))
    layers = len(hidden.eagle_aux_hidden_state_layer_ids)
    return Shape(layers, vllm_config.model_config.get_hidden_size(), name, dtype.itemsize)


def _wants(request: Request) -> bool:
    return bool((request.kv_transfer_params or {}).get("hidden_states", True))


def _tokens_most(request: Request) -> int:
    """The largest number of tokens in a sample of the request."""
    with_output = (request.kv_transfer_params or {}).get("include_output_tokens", False)
    tokens = int(request.num_prompt_tokens)
    return tokens + int(request.max_tokens) if with_output else tokens
