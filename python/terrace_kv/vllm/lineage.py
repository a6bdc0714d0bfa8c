"""Names of blocks: the identity of the model that computes them, and the hashes of their tokens."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from typing import Any

from ..transfers import key_of

# The logger name that vLLM configures.
logger = logging.getLogger("vllm.terrace")


class Lineage:
    """Identity of the model that computes an engine's blocks. It changes when vLLM resets its
    caches, because the weights may change then."""

    def __init__(self, identity: str) -> None:
        self._suffix = hashlib.sha256(identity.encode()).digest()[:16]
        self._pool: Any = None
        self._cached: Any = None
        logger.info("Terrace: engines that share KV with this one have the identity %s", self)

    def watch(self, pool: Any) -> None:
        """Watches vLLM's own prefix cache: it can be reset without a notice to connectors."""
        self._pool, self._cached = pool, _cached(pool)

    def was_reset(self) -> bool:
        """Whether vLLM has reset its own prefix cache since the last call."""
        if self._pool is None:
            return False
        before, self._cached = self._cached, _cached(self._pool)
        return self._cached is not before

    def reset(self) -> None:
        """Changes the names of blocks to unique ones from now on."""
        self._suffix = hashlib.sha256(key_of(self._suffix, os.urandom(16))).digest()[:16]
        self._cached = _cached(self._pool)
        logger.info("Terrace: the cache was reset, so KV of before is not read any more, and what follows is not shared")

    def names(self, hashes: Iterable[bytes]) -> list[bytes]:
        """The names of blocks with these hashes."""
        suffix = self._suffix
        return [one + suffix for one in hashes]

    def __str__(self) -> str:
        return self._suffix.hex()


def _cached(pool: Any) -> Any:
    """vLLM's map of cached blocks, which a reset replaces."""
    return getattr(pool, "cached_block_hash_to_block", None)
