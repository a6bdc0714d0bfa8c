"""The feature store: samples of tensors, from those who produce them to those who consume them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _native
from .arrays import Bytes, as_bytes, empty_numpy, empty_torch, kind_of, on_host, size
from .calls import awaited
from .store import Store

if TYPE_CHECKING:
    import asyncio

    import torch


class TensorSpec(NamedTuple):
    """What a tensor is."""

    name: str
    """Different from those of the sample's other tensors."""
    dtype: str
    """As in safetensors files: ``F32``, ``BF16``, ``F8_E4M3`` and so on."""
    shape: list[int]
    """The slowest dimension first."""


class FeatureRef:
    """Names a sample in a store and says what its tensors are.

    It is small, pickles, and can be copied and sent anywhere, as :attr:`text` too; having it does not keep the sample.
    """

    __slots__ = ("text", "sample", "generation", "tensors", "is_promised")

    def __init__(self, text: str) -> None:
        told = json.loads(text)
        self.text = text
        """The whole ref, as JSON."""
        self.sample: str = told["sample"]
        """The sample's name."""
        self.generation: int = told["generation"]
        """Which put of the sample it is."""
        self.tensors = [TensorSpec(**tensor) for tensor in told["tensors"]]
        """The tensors, in the order in which they were put."""
        self.is_promised: bool = told.get("promised", False)
        """Whether it was given out before the sample was put, so that a reader may have to wait."""

    @staticmethod
    def promise(
        name: str, owner: int, sample: str, tensors: Sequence[TensorSpec], *, retain: bool = False
    ) -> FeatureRef:
        """The ref of a sample that the producer of that number is about to put in the feature store of that name, by
        :meth:`FeatureStore.keep`: for those who must answer before the bytes are where they belong. Until it is put,
        and if it never is, the sample is :class:`Gone`. Feature stores with a secret refuse such refs, since they
        cannot be bound to the bytes.

        :raises FeatureError: if no such sample can be put.
        """
        specs = json.dumps([tensor._asdict() for tensor in tensors])
        return FeatureRef(_native.promise_feature(name, owner, sample, specs, retain))

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

    A producer puts a sample, a few tensors that belong together, and sends the ref to a consumer, by any queue;
    the consumer gets the tensors and releases the ref, which frees their memory at once. ``docs/feature-store.md`` has
    the contract. Producers have a number of their own, ``owner``, and the same one when they are started again; who
    only consumes has none. ``max_resident`` bounds what waits to be consumed, ``when_full`` says for how many seconds
    a put waits then (0: it fails at once), and after ``max_hold`` seconds :meth:`gc` frees what nobody has released.

    :raises ConfigError: if it cannot be opened so.
    """

    def __init__(
        self,
        store: Store,
        name: str = "features",
        *,
        owner: int | None = None,
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
            "owner": owner,
            "max_resident_bytes": size(max_resident),
            "when_full": {"wait-ms": round(when_full * 1000)} if when_full > 0 else "refuse",
            "samples_max": samples_max,
            "max_hold_ms": None if max_hold is None else round(max_hold * 1000),
            "retain_on_release": retain,
            "durable": durable,
        }
        self._native = _native.FeatureStore.open(store._native, json.dumps(settings), secret, None)
        self.store = store
        """The store that it is in."""

    def put(self, sample: str, tensors: Mapping[str, Any]) -> FeatureRef:
        """Puts a sample of NumPy arrays and tensors of PyTorch's; those on a GPU come by way of pinned memory. Earlier
        generations of it can no longer be read when this returns. Do not change the tensors until it does.

        :raises OverBudget: if too much is waiting to be consumed.
        """
        specs, arrays = _given(tensors)
        return FeatureRef(self._native.put(sample, specs, arrays, None))

    async def put_async(self, sample: str, tensors: Mapping[str, Any]) -> FeatureRef:
        """As :meth:`put`."""
        specs, arrays = _given(tensors)
        return FeatureRef(await awaited(lambda then: self._native.put(sample, specs, arrays, then)))

    def keep(self, promise: FeatureRef, tensors: Mapping[str, Any]) -> None:
        """Puts the sample whose ref was promised, as :meth:`put` would.

        :raises ConfigError: if the promise is another's, or one of other tensors.
        """
        specs, arrays = _given(tensors)
        self._native.keep(promise.text, specs, arrays, None)

    async def keep_async(self, promise: FeatureRef, tensors: Mapping[str, Any]) -> None:
        """As :meth:`keep`."""
        specs, arrays = _given(tensors)
        await awaited(lambda then: self._native.keep(promise.text, specs, arrays, then))

    def get(self, ref: FeatureRef, into: Mapping[str, Any] | None = None, *, wait: float = 0) -> dict[str, Any]:
        """Reads a sample: into memory of the caller's, or into new arrays of NumPy's. One that was promised is waited
        for so many seconds.

        :raises Gone: after a release, an abort, a supersession, or when it was held for too long.
        :raises Damaged: if any tensor is; nothing half-written is ever read.
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
        """As :meth:`get`."""
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
        """As :meth:`get`, into new tensors of PyTorch's, on a device if one is named."""
        found = _torch_targets(ref, pin=pin or _is_cuda(device))
        self.get(ref, found, wait=wait)
        return _on_device(found, device)

    async def get_torch_async(
        self, ref: FeatureRef, *, device: str | torch.device | None = None, pin: bool = False, wait: float = 0
    ) -> dict[str, torch.Tensor]:
        """As :meth:`get_torch`."""
        found = _torch_targets(ref, pin=pin or _is_cuda(device))
        await self.get_async(ref, found, wait=wait)
        return _on_device(found, device)

    def release(self, ref: FeatureRef) -> str:
        """Consumes the sample: no process can read it from now on, and its memory is freed at once.
        Answers ``freed``, ``lingering`` if some of its bytes could not be removed yet, ``already-gone`` or
        ``retained``."""
        return str(json.loads(self._native.release(ref.text, None)))

    async def release_async(self, ref: FeatureRef) -> str:
        """As :meth:`release`."""
        return str(json.loads(await awaited(lambda then: self._native.release(ref.text, then))))

    def abort(self, sample: str) -> int:
        """Aborts a sample of any producer. Returns how many generations of it there were."""
        return int(json.loads(self._native.abort(sample, None)))

    async def abort_async(self, sample: str) -> int:
        """As :meth:`abort`."""
        return int(json.loads(await awaited(lambda then: self._native.abort(sample, then))))

    def gc(self) -> dict[str, int]:
        """Frees what others have consumed, what nobody has released in time, and what could not be freed before. To be
        called every second or so."""
        report: dict[str, int] = json.loads(self._native.gc(None))
        return report

    async def gc_async(self) -> dict[str, int]:
        """As :meth:`gc`."""
        report: dict[str, int] = json.loads(await awaited(self._native.gc))
        return report

    def consumed(self) -> None:
        """Waits until all samples of this producer are consumed or expired."""
        self._native.consumed(None)

    async def consumed_async(self) -> None:
        """As :meth:`consumed`."""
        await awaited(self._native.consumed)

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
        """Each sample with its ref, in the order of the refs; those that are gone are left out, and those that were
        promised are waited for. ``ahead`` further ones are read meanwhile, and each is released when the next one is
        asked for."""
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
    """How long to wait after each try to read a sample that may not be there yet; None after the last."""
    deadline = time.monotonic() + wait
    pause = 0.002
    while ref.is_promised and (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.5, 0.1)
    yield None


def _given(tensors: Mapping[str, Any]) -> tuple[str, list[Bytes]]:
    """What tensors are, and their bytes."""
    on_hosts = {name: on_host(tensor) for name, tensor in tensors.items()}
    kinds = {name: kind_of(tensor) for name, tensor in on_hosts.items()}
    specs = [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape) in kinds.items()]
    return json.dumps(specs), [as_bytes(tensor) for tensor in on_hosts.values()]


def _targets(ref: FeatureRef, into: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where the tensors of a sample go."""
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
