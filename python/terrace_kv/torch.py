"""For trainers in PyTorch: a dataset of samples that others produce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ._native import Gone
from .features import FeatureRef, FeatureStore


class FeatureDataset(IterableDataset[dict[str, torch.Tensor]]):
    """The samples of refs, each released when the next one is asked for; those that are gone are left out.

    ``open_features`` opens the feature store: each worker of a ``DataLoader`` opens its own, so both must be such as
    other processes can call (a function of a module). ``refs`` says where the refs come from: it is called with the
    number of the worker and how many there are, and each ref must come to one worker alone. A queue that all workers
    read does that by itself; of a list, worker ``w`` of ``n`` takes ``refs[w::n]``. Samples that were promised are
    waited for, ``wait`` seconds each.
    """

    def __init__(
        self,
        open_features: Callable[[], FeatureStore],
        refs: Callable[[int, int], Iterable[FeatureRef]],
        *,
        releases: bool = True,
        wait: float = 0,
    ) -> None:
        self.open_features = open_features
        self.refs = refs
        self.releases = releases
        self.wait = wait

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker: Any = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        features = self.open_features()
        for ref in self.refs(number, workers):
            try:
                sample = features.get_torch(ref, wait=self.wait)
            except Gone:
                continue
            yield sample
            if self.releases:
                features.release(ref)
