"""Prompts of a trace: one JSON object a line with `input_length` and `hash_ids`, one id for each block of 512 tokens.

Token j of block h is a fixed function of both, the same as in `terrace-bench`, so that all caches see the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK_TOKENS = 512
VOCABULARY = 128_000


def splitmix64(places: np.ndarray) -> np.ndarray:
    """Returns a pseudo-random word for each place. Overflow is intended."""
    words = places + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def prompts(path: Path) -> Iterator[np.ndarray]:
    """Yields the tokens of each request, in order."""
    within_block = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    for line in path.open():
        record = json.loads(line)
        first_places = np.array(record["hash_ids"], dtype=np.uint64) * np.uint64(BLOCK_TOKENS)
        places = (first_places[:, None] + within_block).ravel()[: record["input_length"]]
        yield (splitmix64(places) % np.uint64(VOCABULARY)).astype(np.int64)
