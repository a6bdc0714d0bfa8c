"""The feature store: passes samples of tensors from producers to consumers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _native
from .arrays import Bytes, as_bytes, empty_numpy, empty_torch, kind_of, on_host, size
from .calls import awaited
from .store import Store

if TYPE_CHECKING:
    import asyncio

    import torch


class TensorSpec(NamedTuple):
    """Name, type and shape of a tensor."""

    name: str
    """The name of the tensor, unique in its sample."""
    dtype: str
    """As in safetensors files: ``F32``, ``BF16``, ``F8_E4M3`` and so on."""
    shape: list[int]
    """The slowest-varying dimension first (row-major)."""


class FeatureRef:
    """Names one generation of a sample in a feature store and describes its tensors.

    A ref is small, can be pickled, and can be sent to other processes, also as :attr:`text`. It does not keep the sample alive.
    """

    __slots__ = ("text", "sample", "generation", "tensors", "is_promised")

    def __init__(self, text: str) -> None:
        told = json.loads(text)
        self.text = text
        """The whole ref, as JSON."""
        self.sample: str = told["sample"]
        """The sample's name."""
        self.generation: int = told["generation"]
        """The generation of the sample: each put of the same name has a new one."""
        self.tensors = [TensorSpec(**tensor) for tensor in told["tensors"]]
        """The tensors, in the order in which they were put."""
        self.is_promised: bool = told.get("promised", False)
        """Whether the ref was created before the sample was put, so that a reader may have to wait."""

    @staticmethod
    def promise(
        name: str,
        owner: int,
        sample: str,
        tensors: Sequence[TensorSpec],
        *,
        retain: bool = False,
        secret: bytes | None = None,
    ) -> FeatureRef:
        """Creates the ref of a sample that will be put later with :meth:`FeatureStore.keep`. Use it if a response must be
        sent before the bytes are stored. ``name`` is the name of the feature store, ``owner`` the number of the producer. Until the
        sample is put, reading it raises :class:`Gone`. In a feature store with a secret, the ref needs the same ``secret``.

        :raises FeatureError: if such a sample cannot be put.
        """
        specs = json.dumps([tensor._asdict() for tensor in tensors])
        return FeatureRef(_native.promise_feature(name, owner, sample, specs, retain, secret))

    def __reduce__(self) -> tuple[type[FeatureRef], tuple[str]]:
        return FeatureRef, (self.text,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FeatureRef) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{tensor.name}: {tensor.dtype} {tensor.shape}" for tensor in self.tensors)
        return f"FeatureRef({self.sample!r}, generation {self.generation}, {tensors})"


class FeatureStore:
    """Samples of tensors in a :class:`Store`.

    A producer puts a sample (tensors that belong together) and sends its ref to a consumer, by any queue. The consumer gets
    the tensors and releases the ref, which frees their memory at once. ``docs/feature-store.md`` describes the guarantees.

    Each producer has a number, ``owner``, and uses the same number after a restart; a process that only consumes needs none. If two
    processes use one number, the later one takes it, and puts of the other raise :class:`Fenced`. ``owner="free"`` takes a number
    that no process uses. ``max_resident`` limits what samples that wait to be consumed take of the store: whole slots, with two
    notes per sample. If the limit is reached or the store is full, a put waits up to ``when_full`` seconds (0: it fails at once).
    :meth:`gc` frees samples that were not released within ``max_hold`` seconds.

    :raises ConfigError: if the feature store cannot be opened with these settings.
    """

    def __init__(
        self,
        store: Store,
        name: str = "features",
        *,
        owner: int | Literal["free"] | None = None,
        max_resident: int | str = "4GiB",
        when_full: float = 600,
        samples_max: int = 4096,
        max_hold: float | None = 1800,
        retain: bool = False,
        durable: bool = False,
        secret: bytes | None = None,
    ) -> None:
        settings = {
            "store": name,
            "owner": None if owner == "free" else owner,
            "find_owner": owner == "free",
            "max_resident_bytes": size(max_resident),
            "when_full": {"wait-ms": round(when_full * 1000)} if when_full > 0 else "refuse",
            "samples_max": samples_max,
            "max_hold_ms": None if max_hold is None else round(max_hold * 1000),
            "retain_on_release": retain,
            "durable": durable,
        }
        self._native = _native.FeatureStore.open(store._native, json.dumps(settings), secret, None)
        self.store = store
        """The underlying store."""

    def put(self, sample: str, tensors: Mapping[str, Any]) -> FeatureRef:
        """Puts a sample of NumPy arrays and PyTorch tensors. Tensors on a GPU are copied through pinned host memory. When the call
        returns, earlier generations of the sample can no longer be read. Do not change the tensors before it returns.

        :raises OverBudget: if too many bytes wait to be consumed, or the store is full.
        :raises Fenced: if another process has taken the number of this producer.
        """
        specs, arrays = _given(tensors)
        return FeatureRef(self._native.put(sample, specs, arrays, None))

    async def put_async(self, sample: str, tensors: Mapping[str, Any]) -> FeatureRef:
        """Like :meth:`put`, for ``asyncio``."""
        specs, arrays = _given(tensors)
        return FeatureRef(await awaited(lambda then: self._native.put(sample, specs, arrays, then)))

    def keep(self, promise: FeatureRef, tensors: Mapping[str, Any]) -> None:
        """Puts the sample of a promised ref (:meth:`FeatureRef.promise`), like :meth:`put`.

        :raises ConfigError: if another producer made the promise, or its tensors differ.
        """
        specs, arrays = _given(tensors)
        self._native.keep(promise.text, specs, arrays, None)

    async def keep_async(self, promise: FeatureRef, tensors: Mapping[str, Any]) -> None:
        """Like :meth:`keep`, for ``asyncio``."""
        specs, arrays = _given(tensors)
        await awaited(lambda then: self._native.keep(promise.text, specs, arrays, then))

    def get(self, ref: FeatureRef, into: Mapping[str, Any] | None = None, *, wait: float = 0) -> dict[str, Any]:
        """Reads a sample into ``into``, or into new NumPy arrays. If the ref was promised, waits up to ``wait`` seconds for the
        sample.

        :raises Gone: if the sample was released, aborted, replaced by a later generation, or freed after ``max_hold``.
        :raises Damaged: if a tensor is incomplete or corrupt. Partly written samples are never returned.
        """
        found = _targets(ref, into)
        for pause in _pauses(ref, wait):
            try:
                self._native.get_into(ref.text, _writable(found), None)
                return found
            except _native.Gone:
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("the last try has no pause after it")

    async def get_async(
        self, ref: FeatureRef, into: Mapping[str, Any] | None = None, *, wait: float = 0
    ) -> dict[str, Any]:
        """Like :meth:`get`, for ``asyncio``."""
        import asyncio

        found = _targets(ref, into)
        for pause in _pauses(ref, wait):
            try:
                await awaited(lambda then: self._native.get_into(ref.text, _writable(found), then))
                return found
            except _native.Gone:
                if pause is None:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("the last try has no pause after it")

    def get_torch(
        self, ref: FeatureRef, *, device: str | torch.device | None = None, pin: bool = False, wait: float = 0
    ) -> dict[str, torch.Tensor]:
        """Like :meth:`get`, into new PyTorch tensors, on ``device`` if given."""
        found = _torch_targets(ref, pin=pin or _is_cuda(device))
        self.get(ref, found, wait=wait)
        return _on_device(found, device)

    async def get_torch_async(
        self, ref: FeatureRef, *, device: str | torch.device | None = None, pin: bool = False, wait: float = 0
    ) -> dict[str, torch.Tensor]:
        """Like :meth:`get_torch`, for ``asyncio``."""
        found = _torch_targets(ref, pin=pin or _is_cuda(device))
        await self.get_async(ref, found, wait=wait)
        return _on_device(found, device)

    def release(self, ref: FeatureRef) -> str:
        """Consumes the sample: no process can read it any more, and its memory is freed at once.
        Returns ``freed``, ``lingering`` if some of its bytes could not be removed yet, ``already-gone`` or
        ``retained``."""
        return str(json.loads(self._native.release(ref.text, None)))

    async def release_async(self, ref: FeatureRef) -> str:
        """Like :meth:`release`, for ``asyncio``."""
        return str(json.loads(await awaited(lambda then: self._native.release(ref.text, then))))

    def abort(self, sample: str) -> int:
        """Aborts a sample of any producer. Returns the number of generations that were aborted."""
        return int(json.loads(self._native.abort(sample, None)))

    async def abort_async(self, sample: str) -> int:
        """Like :meth:`abort`, for ``asyncio``."""
        return int(json.loads(await awaited(lambda then: self._native.abort(sample, then))))

    def gc(self) -> dict[str, int]:
        """Frees samples that were consumed by other processes, that were not released in time, or that could not be freed
        before. Call it about once per second. It notices within some seconds what others have consumed.

        :raises Fenced: if another process has taken the number of this producer.
        """
        report: dict[str, int] = json.loads(self._native.gc(None))
        return report

    async def gc_async(self) -> dict[str, int]:
        """Like :meth:`gc`, for ``asyncio``."""
        report: dict[str, int] = json.loads(await awaited(self._native.gc))
        return report

    def consumed(self) -> None:
        """Waits until all samples of this producer are consumed or expired."""
        self._native.consumed(None)

    async def consumed_async(self) -> None:
        """Like :meth:`consumed`, for ``asyncio``."""
        await awaited(self._native.consumed)

    @property
    def owner(self) -> int | None:
        """The number of this producer, or None."""
        number: int | None = self._native.owner()
        return number

    def close(self) -> None:
        """Ends the work as a producer. If none of its samples is left, its number is free for other processes."""
        self._native.close(None)

    async def close_async(self) -> None:
        """Like :meth:`close`, for ``asyncio``."""
        await awaited(self._native.close)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges."""
        stats: dict[str, Any] = json.loads(self._native.stats())
        return stats

    async def consume(
        self,
        refs: AsyncIterable[FeatureRef] | Iterable[FeatureRef],
        *,
        ahead: int = 2,
        as_torch: bool = False,
        wait: float = 0,
    ) -> AsyncIterator[tuple[FeatureRef, dict[str, Any]]]:
        """Yields each ref with its sample, in the order of the refs. Samples that are gone are skipped. For promised samples it
        waits up to ``wait`` seconds. It reads ``ahead`` samples in advance, and releases each sample when the next one is
        requested."""
        import asyncio

        reading: deque[tuple[FeatureRef, asyncio.Task[dict[str, Any]]]] = deque()
        source = aiter(_each(refs))
        is_over = False
        try:
            while True:
                while not is_over and len(reading) <= ahead:
                    try:
                        ref = await anext(source)
                    except StopAsyncIteration:
                        is_over = True
                        break
                    get = self.get_torch_async(ref, wait=wait) if as_torch else self.get_async(ref, wait=wait)
                    reading.append((ref, asyncio.create_task(get)))
                if not reading:
                    return
                ref, task = reading.popleft()
                try:
                    found = await task
                except _native.Gone:
                    continue
                yield ref, found
                await self.release_async(ref)
        finally:
            for _, task in reading:
                task.cancel()


async def _each(refs: AsyncIterable[FeatureRef] | Iterable[FeatureRef]) -> AsyncIterator[FeatureRef]:
    if isinstance(refs, AsyncIterable):
        async for ref in refs:
            yield ref
    else:
        for ref in refs:
            yield ref


def _pauses(ref: FeatureRef, wait: float) -> Iterator[float | None]:
    """Pauses after each attempt to read a sample that may not be there yet; None after the last."""
    deadline = time.monotonic() + wait
    pause = 0.002
    while ref.is_promised and (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.5, 0.1)
    yield None


def _given(tensors: Mapping[str, Any]) -> tuple[str, list[Bytes]]:
    """The specs of tensors, and their bytes."""
    on_hosts = {name: on_host(tensor) for name, tensor in tensors.items()}
    kinds = {name: kind_of(tensor) for name, tensor in on_hosts.items()}
    specs = [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape) in kinds.items()]
    return json.dumps(specs), [as_bytes(tensor) for tensor in on_hosts.values()]


def _targets(ref: FeatureRef, into: Mapping[str, Any] | None) -> dict[str, Any]:
    """Target arrays for the tensors of a sample."""
    if into is None:
        return {tensor.name: empty_numpy(tensor.dtype, tensor.shape) for tensor in ref.tensors}
    for name, dtype, shape in ref.tensors:
        if name not in into:
            raise ValueError(f"the sample has a tensor {name!r}, but there is no memory for it")
        if kind_of(into[name]) != (dtype, shape):
            raise ValueError(f"{name!r} is {dtype} {shape}, its memory is {' '.join(map(str, kind_of(into[name])))}")
    return {tensor.name: into[tensor.name] for tensor in ref.tensors}


def _torch_targets(ref: FeatureRef, *, pin: bool) -> dict[str, torch.Tensor]:
    return {tensor.name: empty_torch(tensor.dtype, tensor.shape, pin=pin) for tensor in ref.tensors}


def _writable(tensors: Mapping[str, Any]) -> list[Bytes]:
    return [as_bytes(tensor, writable=True) for tensor in tensors.values()]


def _is_cuda(device: str | torch.device | None) -> bool:
    return device is not None and str(device).startswith("cuda")


def _on_device(tensors: dict[str, torch.Tensor], device: str | torch.device | None) -> dict[str, torch.Tensor]:
    if device is None:
        return tensors
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
