"""Copies between an engine's blocks and staging memory on the host, beside the stream that the engine computes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from .._native import ConfigError

# Device memory in which blocks are gathered, for each direction: the amount of one copy over the
# link.
BOUNCE_BYTES = 64 << 20
# Types as which blocks are copied: the widest one that divides all sizes is used.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class Stream(Protocol):
    """Work that a device does in the order in which it is given."""

    def run(self, work: Callable[[], None], after: Event) -> Event:
        """Queues ``work`` behind ``after``, without waiting. Returns the event of its end."""


class Device(Protocol):
    """The device with the engine's blocks. All methods concern the calling thread and its current
    stream."""

    def enter(self) -> None:
        """Makes this the thread's device. Otherwise the first call would allocate memory on another
        one."""

    def mark(self) -> Event:
        """Records an event behind all queued work."""

    def hold(self, event: Event) -> None:
        """Makes later work wait for the event."""

    def stream(self) -> Stream:
        """Creates another stream."""


class _Passed:
    def query(self) -> bool:
        return True


class Host:
    """A host runs everything synchronously."""

    def enter(self) -> None:
        return

    def mark(self) -> Event:
        return _Passed()

    def hold(self, event: Event) -> None:
        return

    def stream(self) -> Stream:
        return self

    def run(self, work: Callable[[], None], after: Event) -> Event:
        work()
        return _Passed()


class Accelerator:
    """A device with streams, through PyTorch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def enter(self) -> None:
        self._module.set_device(self._device)

    def mark(self) -> Event:
        event: Event = self._module.current_stream(self._device).record_event()
        return event

    def hold(self, event: Event) -> None:
        self._module.current_stream(self._device).wait_event(event)

    def stream(self) -> Stream:
        return _AcceleratorStream(self._module, self._module.Stream(device=self._device))


class _AcceleratorStream:
    def __init__(self, module: Any, stream: Any) -> None:
        self._module, self._stream = module, stream

    def run(self, work: Callable[[], None], after: Event) -> Event:
        with self._module.stream(self._stream):
            self._stream.wait_event(after)
            work()
            event: Event = self._stream.record_event()
        return event


def device_of(tensor: torch.Tensor) -> Device:
    """The device of a tensor."""
    return Host() if tensor.device.type == "cpu" else Accelerator(tensor.device)


class Layers:
    """The memory of an engine's blocks: one tensor for each layer, whose first dimension is the block. A block's bytes are
    those of its layers in this order, each in the order of its tensor's shape, however the tensor lies in memory.

    :raises ConfigError: if the bytes of a block cannot be addressed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        self.block_bytes = sum(sizes)
        """Bytes of a block in all layers."""
        self.device = tensors[0].device
        """Device of the tensors."""
        for word in _WORDS:
            try:
                self._tensors = [tensor.view(word) for tensor in tensors]
            except RuntimeError:
                continue
            if all(size % word.itemsize == 0 for size in sizes):
                self._word = word
                break
        else:
            raise ConfigError(
                f"the KV cache has an unknown layout (strides {tensors[0].stride()}): use the tier, and please report it"
            )
        self._sizes = [size // self._word.itemsize for size in sizes]

    def gather(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies blocks into the first rows, on the device."""
        for tensor, part in self._parts(rows[: len(blocks)]):
            part.copy_(tensor.index_select(0, blocks))

    def scatter(self, rows: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copies the first rows into blocks, on the device."""
        for tensor, part in self._parts(rows[: len(blocks)]):
            tensor.index_copy_(0, blocks, part)

    def _parts(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        words = rows.view(self._word)
        for tensor, size in zip(self._tensors, self._sizes):
            yield tensor, words[:, at : at + size].view(len(rows), *tensor.shape[1:])
            at += size


class Copies:
    """Copies in one direction, on a separate stream. Blocks are gathered on the device, so that
    transfers over the link are few and large."""

    def __init__(self, layers: Layers, staging: torch.Tensor, stream: Stream) -> None:
        self._layers, self._staging, self._stream = layers, staging, stream
        # Half of a direction's pages, so that one copy runs while the pages of another are stored
        # or read.
        self.blocks_max = max(1, min(BOUNCE_BYTES // layers.block_bytes, len(staging) // 4))
        """Largest number of blocks per call."""
        self._bounce = torch.empty((self.blocks_max, layers.block_bytes), dtype=torch.uint8, device=layers.device)

    def to_staging(self, blocks: list[int], pages: list[int], after: Event) -> Event:
        """Copies blocks to pages of the staging memory."""

        def work() -> None:
            self._layers.gather(self._index(blocks), self._bounce)
            for at, page, count in _runs(pages):
                self._staging[page : page + count].copy_(self._bounce[at : at + count], non_blocking=True)

        return self._stream.run(work, after)

    def to_blocks(self, pages: list[int], blocks: list[int], after: Event) -> Event:
        """Copies pages of the staging memory to blocks."""

        def work() -> None:
            for at, page, count in _runs(pages):
                self._bounce[at : at + count].copy_(self._staging[page : page + count], non_blocking=True)
            self._layers.scatter(self._bounce, self._index(blocks))

        return self._stream.run(work, after)

    def _index(self, blocks: list[int]) -> torch.Tensor:
        # A copy from pageable memory would wait for the stream.
        is_away = self._layers.device.type != "cpu"
        return torch.tensor(blocks, pin_memory=is_away).to(self._layers.device, non_blocking=True)


def _runs(pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive pages: the place in the list, the first page, and the count."""
    start = 0
    for at in range(1, len(pages) + 1):
        if at == len(pages) or pages[at] != pages[at - 1] + 1:
            yield start, pages[start], at - start
            start = at
