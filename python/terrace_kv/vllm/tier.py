"""Terrace's store as a secondary tier of vLLM's offloading connector."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ..adapters import open_store
from ..namespaces import private_namespace
from ..transfers import Completed, Transfers
from . import metrics, versions
from .naming import caller_vllm_config, tier_namespace

# The logger name that vLLM configures.
logger = logging.getLogger("vllm.terrace")

# Settings of the tier, beside those of the store.
_KNOWN = ("weights", "salt", "locality")
# Longest wait, at the end of an engine, for a store that still uses the engine's memory.
_PATIENCE_S = 60.0
# Largest number of used chunks reported to the store in a step; others follow when they are used
# again.
_TOUCHED_MAX = 1 << 14


class _Job(NamedTuple):
    number: int
    keys: tuple[bytes, ...]
    is_promotion: bool


class TerraceTier(SecondaryTierManager):
    """A secondary tier. All methods run on the scheduler's thread and do not block: transfers and lookups run on native threads
    that do not need the GIL.

    One row of the host cache is one object. If the store does not have it, does not answer in time or cannot read it, that is a
    miss, and the engine computes the KV; no request fails.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        versions.check(vllm.__version__)
        # Versions without such detectors do not have the argument.
        more = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        row_bytes = self.block_size_bytes
        rows = primary_kv_view.nbytes // row_bytes
        offloading = offloading_spec.config
        namespace = tier_namespace(offloading, row_bytes, caller_vllm_config(), settings)
        self._shared = open_store(settings, object_bytes=row_bytes, known=_KNOWN)
        self._transfers = Transfers(self._shared.store, namespace)
        # Registered by address: the engine releases its view at its end, which a referencing array
        # would prevent. The view's owner keeps the memory alive for a late store.
        address = np.frombuffer(primary_kv_view, np.uint8).ctypes.data
        self._region = self._transfers.register_address(address, rows * row_bytes, row_bytes, primary_kv_view.obj)
        self._look_up_anew()
        self._jobs: dict[int, _Job] = {}
        self._touched: set[bytes] = set()
        self._figures = metrics.TierFigures(tier_type)
        is_local = settings["store"].startswith(("disk:", "memory"))
        self.locality = Locality(settings["locality"]) if "locality" in settings else _locality(is_local)
        self._events: list[OffloadingEvent] | None = [] if offloading.enable_kv_cache_events else None
        logger.info("Terrace stores KV in %s: objects of %d bytes, namespace %s", settings["store"], row_bytes, namespace.hex())

    def _look_up_anew(self) -> None:
        """Drops cached lookup results."""
        self._lookups = self._transfers.lookups(
            hit=LookupResult.HIT, miss=LookupResult.MISS, retry=LookupResult.RETRY
        )
        # Called for every chunk, so it is bound without a wrapper.
        self.lookup = self._lookups.lookup  # type: ignore[method-assign, assignment]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the store has a chunk; unknown until the step after the first lookup."""
        found: LookupResult = self._lookups.lookup(key, req_context)
        return found

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = tuple(job_metadata.keys)
        number = self._transfers.submit_put(keys, self._region.pages(_rows(job_metadata)))
        self._jobs[number] = _Job(job_metadata.job_id, keys, False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = tuple(job_metadata.keys)
        number = self._transfers.submit_get(keys, self._region.pages(_rows(job_metadata)))
        self._jobs[number] = _Job(job_metadata.job_id, keys, True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Ended jobs. A job ends when the store has released its rows, even if it failed long
        before."""
        if not self._jobs:
            return ()
        return [self._ended(self._jobs.pop(completed.job), completed) for completed in self._transfers.drain()]

    def _ended(self, job: _Job, completed: Completed) -> JobResult:
        self._figures.note(completed)
        is_whole = completed.all_ok
        done = job.keys if is_whole else tuple(key for key, ok in zip(job.keys, completed.ok) if ok)
        if not is_whole:
            what = "read" if job.is_promotion else "stored"
            log = logger.debug if completed.error is None else logger.warning
            log("%d of %d chunks were not %s: %s", len(job.keys) - len(done), len(job.keys), what, completed.error)
        if not job.is_promotion:
            self._lookups.forget(done)
            self._tell(done)
        elif not is_whole:
            kept = set(done)
            self._lookups.missed([key for key in job.keys if key not in kept])
        return JobResult(
            job_id=job.number,
            success=is_whole,
            successful_keys=done if job.is_promotion and not is_whole and done else None,
            transfer_time=completed.seconds,
            transfer_bytes=completed.bytes,
        )

    def _tell(self, keys: tuple[bytes, ...]) -> None:
        if self._events is not None and keys:
            told = [OffloadKey(key) for key in keys]
            event = OffloadingEvent(keys=told, medium=self.medium, removed=False, locality=self.locality)
            self._events.append(event)

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            events, self._events = self._events, []
            return events
        return ()

    def has_pending_work(self) -> bool:
        return bool(self._jobs) or self._lookups.pending()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Chunks that vLLM finds in its own memory are not read from the store. Their use is
        reported, because otherwise the most used prefixes would be evicted first."""
        if len(self._touched) < _TOUCHED_MAX:
            self._touched.update(keys)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()
        if self._touched:
            self._transfers.touch(self._touched)
            self._touched = set()

    def drain_jobs(self) -> None:
        """Called when vLLM resets its caches: it sleeps, or has new weights. Earlier KV must not be
        found again, so later jobs use a namespace that is unique to this process."""
        self._transfers.wait_idle()
        self._touched.clear()
        self._transfers.move_to(private_namespace(self._transfers.namespace))
        self._look_up_anew()
        logger.info(
            "Terrace: the cache was reset, so KV of before is not read any more; the namespace is %s, of this process only",
            self._transfers.namespace.hex(),
        )

    def shutdown(self) -> None:
        """Waits for jobs in flight. Does not raise: vLLM would not clean up its memory then. If the
        store has not released that memory in time, it stays mapped until it is."""
        try:
            is_idle = self._transfers.wait_idle(_PATIENCE_S)
            self._transfers.close()
            if is_idle:
                self._shared.close()
                return
            logger.error(
                "the store has not released the engine's memory within %.0f s, which stays mapped until it does: check "
                "whether its disk or network hangs",
                _PATIENCE_S,
            )
        except Exception:
            logger.exception("the store was not closed")

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def get_stats(self) -> Any:
        return self._figures.take(self._transfers, self._shared.store)


def _rows(job: TransferJob) -> Any:
    """The rows of a job; versions before 0.30 used the same name for them."""
    return job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids


def _locality(is_local: bool) -> Locality:
    return Locality.LOCAL if is_local else Locality.REMOTE
