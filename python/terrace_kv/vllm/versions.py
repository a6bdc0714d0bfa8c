"""Tested versions of vLLM."""

from __future__ import annotations

import logging
import re

# The logger name that vLLM configures.
logger = logging.getLogger("vllm.terrace")

# The versions that tests/engines/vllm uses.
TESTED = ("0.32.0", "0.33.0")
# The first version with this tier interface.
_FIRST = (0, 30)

_warned: set[str] = set()


def check(version: str) -> None:
    """Warns once of an untested version.

    :raises RuntimeError: if it is known not to work.
    """
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None or version in _warned:
        return
    released = ".".join(part or "0" for part in numbers.groups())
    if tuple(int(part) for part in numbers.groups()[:2]) < _FIRST:
        raise RuntimeError(
            f"vLLM {version} has a different interface for tiers and connectors: use {_FIRST[0]}.{_FIRST[1]} or later, "
            f"preferably {TESTED[-1]}"
        )
    if released not in TESTED:
        _warned.add(version)
        logger.warning(
            "Terrace is tested with vLLM %s; this is %s. If something fails, please report it with both versions.",
            ", ".join(TESTED),
            version,
        )
