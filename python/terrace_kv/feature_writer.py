"""Puts promised samples into a feature store, on background threads.

The response of an engine is ready before the hidden states have been copied out of its memory, and it must not wait for a
store. So the engine promises the sample (:meth:`FeatureRef.promise`), and a :class:`FeatureWriter` puts it: one thread copies
out of the engine's memory and never waits for the store; other threads put. The queue between them is limited in bytes, and each
sample has a deadline after which it is not put any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._native import Fenced, TerraceError
from .features import FeatureRef, FeatureStore

Tensors = Mapping[str, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriterStatus:
    """The status of a writer. It can be pickled and sent to another process."""

    backlog_bytes: int = 0
    """Bytes that were submitted and are not in the store yet."""
    backlog_samples: int = 0
    """Number of their samples."""
    resident_bytes: int = 0
    """Bytes of the store taken by samples that are stored or being put, and not consumed yet."""
    error: str | None = None
    """Why the store fails, or None."""
    owner: int | None = None
    """The number of the producer."""


@dataclass
class WriterCounts:
    """Counts since the last call of :meth:`FeatureWriter.take_counts`."""

    samples: int = 0
    bytes: int = 0
    failures: int = 0
    put_seconds: list[float] = field(default_factory=list)
    """For each sample, the seconds from the promise to the end of the put."""


@dataclass
class _Job:
    key: Hashable
    promise: FeatureRef
    copy: Callable[[], Tensors] | None
    bytes: int
    promised_at: float
    """By the monotonic clock of this process."""
    deadline: float
    tensors: Tensors | None = None
    put_since: float | None = None


class FeatureWriter:
    """Puts promised samples.

    ``features`` is the producer's feature store. At most ``backlog_max`` bytes may be submitted and not yet stored; further
    samples are dropped, so callers check :attr:`status` before they promise a sample. After a failure, :attr:`status` has an
    error for ``retry_s`` seconds, or until a put succeeds. :meth:`FeatureStore.gc` is called every ``gc_s`` seconds.
    """

    def __init__(
        self,
        features: FeatureStore,
        *,
        backlog_max: int,
        threads: int = 2,
        retry_s: float = 5,
        gc_s: float = 1,
    ) -> None:
        self._features = features
        self._owner = features.owner
        self._backlog_max = backlog_max
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._to_copy: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._to_put: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs: dict[Hashable, _Job] = {}
        self._copied: set[Hashable] = set()
        self._backlog_bytes = 0
        self._failure: tuple[float, str] | None = None
        self._counts = WriterCounts()
        self._closing = threading.Event()
        self._drained = threading.Condition(self._lock)
        start = [(self._copy_all, "copy")] + [(self._put_all, f"put-{number}") for number in range(threads)]
        start.append((lambda: self._collect(gc_s), "gc"))
        self._threads = threads
        for run, name in start:
            # Daemon threads: a store that hangs must not keep the process alive.
            threading.Thread(target=run, name=f"terrace-features-{name}", daemon=True).start()

    def submit(
        self, key: Hashable, promise: FeatureRef, copy: Callable[[], Tensors], nbytes: int, within_s: float
    ) -> bool:
        """Submits a promised sample that must be put within ``within_s`` seconds. ``copy`` is called once, on a thread of the
        writer, and returns the tensors in memory of their own. After that, :meth:`take_copied` returns ``key``. Returns False if
        the sample was dropped because the backlog is full; then ``key`` is not returned later."""
        now = time.monotonic()
        job = _Job(key, promise, copy, nbytes, now, now + within_s)
        with self._lock:
            if self._closing.is_set() or self._backlog_bytes + nbytes > self._backlog_max or key in self._jobs:
                self._counts.failures += 1
                return False
            self._jobs[key] = job
            self._backlog_bytes += nbytes
        self._to_copy.put(job)
        return True

    def take_copied(self) -> set[Hashable]:
        """The keys of samples that were copied since the last call, so their memory may be reused."""
        with self._lock:
            copied, self._copied = self._copied, set()
            return copied

    @property
    def status(self) -> WriterStatus:
        """The current status."""
        now = time.monotonic()
        resident = self._features.stats()["resident_bytes"]
        with self._lock:
            error = None
            if self._failure is not None and now - self._failure[0] < self._retry_s:
                error = self._failure[1]
            begun = [job.put_since for job in self._jobs.values() if job.put_since is not None and now > job.deadline]
            if begun:
                error = f"the store has not answered for {now - min(begun):.0f} s"
            return WriterStatus(self._backlog_bytes, len(self._jobs), resident, error, self._owner)

    def take_counts(self) -> WriterCounts:
        """Counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, WriterCounts()
            return counts

    def close(self, timeout: float) -> bool:
        """Rejects new samples and waits for submitted ones. Returns False if that takes longer than ``timeout`` seconds."""
        self._closing.set()
        deadline = time.monotonic() + timeout
        with self._drained:
            while self._jobs and (left := deadline - time.monotonic()) > 0:
                self._drained.wait(left)
            is_drained = not self._jobs
        self._to_copy.put(None)
        for _ in range(self._threads):
            self._to_put.put(None)
        return is_drained

    def _copy_all(self) -> None:
        while (job := self._to_copy.get()) is not None:
            copy, job.copy = job.copy, None
            assert copy is not None, "a job is copied once"
            error: BaseException | None = None
            try:
                job.tensors = copy()
            except Exception as caught:  # noqa: BLE001
                error = caught
            # The caller's memory must not be referenced by the rest of the job.
            del copy
            with self._lock:
                self._copied.add(job.key)
            if error is None:
                self._to_put.put(job)
            else:
                self._end(job, f"hidden states could not be copied: {error}")

    def _put_all(self) -> None:
        while (job := self._to_put.get()) is not None:
            assert job.tensors is not None, "a job is copied before it is put"
            if time.monotonic() > job.deadline:
                self._end(job, "the store is too slow: a sample waited for longer than within_s")
                continue
            with self._lock:
                job.put_since = time.monotonic()
            try:
                self._features.keep(job.promise, job.tensors)
            except TerraceError as error:
                self._end(job, str(error))
                continue
            if time.monotonic() > job.deadline:
                # The holder of the ref has already got the promised failure.
                self._discard(job)
                self._end(job, "the store is too slow: storing a sample took longer than within_s")
                continue
            self._end(job, None)

    def _discard(self, job: _Job) -> None:
        try:
            if self._features.release(job.promise) == "retained":
                self._features.abort(job.promise.sample)
        except TerraceError:
            # It is freed when it has been held for too long.
            pass

    def _end(self, job: _Job, error: str | None) -> None:
        job.tensors = None
        now = time.monotonic()
        if error is not None:
            logger.warning("The promised sample %s was not stored: %s", job.promise.sample, error)
        with self._drained:
            del self._jobs[job.key]
            self._backlog_bytes -= job.bytes
            if error is None:
                self._failure = None
                self._counts.samples += 1
                self._counts.bytes += job.bytes
                self._counts.put_seconds.append(now - job.promised_at)
            else:
                self._failure = (now, error)
                self._counts.failures += 1
            self._drained.notify_all()

    def _collect(self, gc_s: float) -> None:
        while not self._closing.wait(gc_s):
            try:
                self._features.gc()
            except Fenced as error:
                # From now on no put can succeed.
                with self._lock:
                    self._failure = (float("inf"), str(error))
                return
            except TerraceError:
                # Failures of the store show in puts; what could not be freed is retried.
                pass
