"""A PyTorch dataset of samples from a feature store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ._native import Gone
from .features import FeatureRef, FeatureStore


class FeatureDataset(IterableDataset[dict[str, torch.Tensor]]):
    """Reads the samples of refs. Each sample is released when the next one is requested; samples that are gone are skipped.

    ``open_features`` opens the feature store; each worker of a ``DataLoader`` opens its own. ``refs`` returns the refs; it is
    called with the number of the worker and the number of workers, and each ref must go to exactly one worker. A queue that all
    workers read from ensures this; with a list, worker ``w`` of ``n`` takes ``refs[w::n]``. Both must be functions that other
    processes can call (functions of a module). For a promised sample, the dataset waits up to ``wait`` seconds.
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
