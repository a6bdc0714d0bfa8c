"""Samples of hidden states: their tensors, how to read them, and the settings of their producer.

A sample has the tensors ``hidden_states``, with one row per token and the states of the chosen layers, and ``token_ids``. If
``hidden_states`` is larger than the maximum object size of the store, it is split into ``hidden_states.000`` and so on;
:func:`read_hidden_states` joins the parts without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arrays import empty_torch, size
from .features import FeatureRef, FeatureStore, TensorSpec
from .store import Store

if TYPE_CHECKING:
    import torch

HIDDEN_STATES = "hidden_states"
TOKEN_IDS = "token_ids"
# A sample has no more tensors than this, with the token ids.
_TENSORS_MAX = 128
_TOKEN_BYTES = 8
# Beside its tensors, a sample has a record and a claim in the store.
_NOTES = 2


@dataclass(frozen=True)
class Shape:
    """Shape and type of the hidden states of one token."""

    layers: int
    hidden_size: int
    dtype: str
    """As in refs: ``BF16``, ``F32``."""
    itemsize: int

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return self.layers * self.hidden_size * self.itemsize

    def sample_bytes(self, tokens: int) -> int:
        """Bytes of a sample, including its token ids."""
        return tokens * (self.token_bytes + _TOKEN_BYTES)

    def stored_bytes(self, tokens: int, object_max: int) -> int:
        """What a sample takes of a store whose slots have ``object_max`` bytes."""
        rows = max(object_max // self.token_bytes, 1)
        return (-(-max(tokens, 1) // rows) + 1 + _NOTES) * object_max


def parts_of(shape: Shape, tokens: int, object_max: int) -> list[TensorSpec]:
    """The tensors of a sample, with the token ids last.

    :raises ValueError: if a sample cannot have that many tensors.
    """
    rows = min(max(tokens, 1), object_max // shape.token_bytes)
    parts = -(-tokens // rows) if rows else _TENSORS_MAX
    if parts >= _TENSORS_MAX or tokens * _TOKEN_BYTES > object_max:
        needed = max(-(-tokens // (_TENSORS_MAX - 1)) * shape.token_bytes, tokens * _TOKEN_BYTES)
        raise ValueError(f"hidden states of {tokens} tokens need an object_max of {needed} bytes, it is {object_max}")
    ids = TensorSpec(TOKEN_IDS, "I64", [tokens])
    if parts <= 1:
        return [TensorSpec(HIDDEN_STATES, shape.dtype, [tokens, shape.layers, shape.hidden_size]), ids]
    begins = range(0, tokens, rows)
    sizes = [[min(rows, tokens - begin), shape.layers, shape.hidden_size] for begin in begins]
    return [TensorSpec(f"{HIDDEN_STATES}.{part:03}", shape.dtype, size) for part, size in enumerate(sizes)] + [ids]


def read_hidden_states(
    features: FeatureStore, ref: FeatureRef, *, wait: float = 0, pin: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the hidden states ``(tokens, layers, size)`` of a sample, and its token ids.

    :raises Gone: if the sample is gone, or was not put within ``wait`` seconds.
    """
    into: dict[str, Any] = {}
    parts = [tensor for tensor in ref.tensors if tensor.name.partition(".")[0] == HIDDEN_STATES]
    whole = empty_torch(parts[0].dtype, [sum(part.shape[0] for part in parts), *parts[0].shape[1:]], pin=pin)
    begin = 0
    for part in parts:
        into[part.name] = whole[begin : begin + part.shape[0]]
        begin += part.shape[0]
    (ids,) = [tensor for tensor in ref.tensors if tensor.name == TOKEN_IDS]
    into[TOKEN_IDS] = empty_torch(ids.dtype, ids.shape, pin=pin)
    features.get(ref, into, wait=wait)
    return whole, into[TOKEN_IDS]


def hidden_states_of(
    cache: torch.Tensor,
    blocks: list[int],
    tokens: int,
    stream: torch.cuda.Stream | None = None,
    ready: torch.cuda.Event | None = None,
) -> torch.Tensor:
    """Copies hidden states from blocks of vLLM's cache, ``(blocks, layers, tokens per block, size)``, to a tensor on the host,
    ``(tokens, layers, size)``. From a GPU they are copied on ``stream``, after ``ready``."""
    import torch

    by_token = cache.transpose(1, 2)
    if stream is None:
        return by_token[torch.tensor(blocks)].flatten(0, 1)[:tokens]
    with torch.cuda.stream(stream):
        if ready is not None:
            stream.wait_event(ready)
        places = torch.tensor(blocks).pin_memory().to(cache.device, non_blocking=True)
        found = by_token[places].flatten(0, 1)[:tokens]
        on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
    # Waits on this thread, without the GIL.
    stream.synchronize()
    return on_host


@dataclass(frozen=True)
class HiddenStatesSettings:
    """Settings of a producer that stores the hidden states of an engine in a feature store."""

    store: str
    """The store, as ``place`` of a :class:`Store`."""
    object_max: int
    """Maximum size of an object. For nodes, the value that the nodes were started with."""
    store_settings: Mapping[str, Any]
    """Other settings of the :class:`Store`, like ``capacity`` or ``secret_file``."""
    name: str
    """Name of the feature store, the same for all producers and consumers."""
    owner: int | None
    """Number of the producer. Each engine at the same store needs a different one, and the same one after a restart. None:
    takes a number that no other process uses."""
    max_resident: int
    """Maximum of what samples that wait to be consumed take of the store, in bytes of whole slots."""
    samples_max: int
    """Maximum number of samples that wait to be consumed."""
    max_hold_s: float | None
    """A sample that was not released after this time is freed."""
    retain: bool
    """Keep samples after they are released, for further epochs."""
    durable: bool
    """Make a sample readable only when it is durable, so that it survives a crash of the store."""
    within_s: float
    """A promised sample is put within this time, or never."""
    hold_s: float
    """How long a request waits for free space in the store before it starts."""
    backlog: int
    """Maximum number of bytes that wait in memory to be put."""
    threads: int
    """Number of samples that are put concurrently."""
    secret_file: str | None
    """File with the secret that authenticates refs, tensors and records, or None."""

    @staticmethod
    def of(told: Mapping[str, Any], *, engine: int = 0) -> HiddenStatesSettings:
        """Settings from parsed JSON. ``engine`` is added to the producer number, so that several engines with the same settings
        have different ones.

        :raises ValueError: if a setting is missing or unknown.
        """
        known = {field.name for field in fields(HiddenStatesSettings)}
        if unknown := sorted(set(told) - known):
            raise ValueError(f"unknown settings: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        for needed in ("store", "object_max"):
            if needed not in told:
                raise ValueError(
                    f"the setting {needed} is missing: store is where hidden states are stored, object_max the maximum "
                    "size of an object there"
                )
        hold = told.get("max_hold_s", 1800)
        return HiddenStatesSettings(
            store=str(told["store"]),
            object_max=size(told["object_max"]),
            store_settings=dict(told.get("store_settings", {})),
            name=str(told.get("name", "hidden states")),
            owner=None if told.get("owner") is None else int(told["owner"]) + engine,
            max_resident=size(told.get("max_resident", "4GiB")),
            samples_max=int(told.get("samples_max", 4096)),
            max_hold_s=None if hold is None else float(hold),
            retain=bool(told.get("retain", False)),
            durable=bool(told.get("durable", False)),
            within_s=float(told.get("within_s", 30)),
            hold_s=float(told.get("hold_s", 10)),
            backlog=size(told.get("backlog", "1GiB")),
            threads=int(told.get("threads", 2)),
            secret_file=None if told.get("secret_file") is None else str(told["secret_file"]),
        )

    def secret(self) -> bytes | None:
        """The secret of the feature store.

        :raises OSError: if its file cannot be read.
        """
        return None if self.secret_file is None else Path(self.secret_file).read_bytes().rstrip()

    def open_store(self) -> Store:
        """Opens the underlying store, for producers and consumers.

        :raises ConfigError: if it cannot be opened with these settings.
        """
        settings = dict(self.store_settings)
        # Nodes are configured on the server.
        if not self.store.startswith("nodes://"):
            settings["object_max"] = self.object_max
        if self.store.startswith("mooncake://"):
            settings.setdefault("for_features", True)
        return Store(self.store, **settings)

    def open(self) -> FeatureStore:
        """Opens the feature store, for the producer.

        :raises ConfigError: if it cannot be opened with these settings.
        """
        return FeatureStore(
            self.open_store(),
            self.name,
            owner="free" if self.owner is None else self.owner,
            max_resident=self.max_resident,
            when_full=self.within_s,
            samples_max=self.samples_max,
            max_hold=self.max_hold_s,
            retain=self.retain,
            durable=self.durable,
            secret=self.secret(),
        )
