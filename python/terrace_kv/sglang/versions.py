"""Tested versions of SGLang."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger(__name__)

# The version that the tests with the real SGLang use.
TESTED = ("0.5.23",)


def check_version() -> None:
    """Logs a warning for an untested version, which is used all the same: the interface has been
    stable."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return
    if found.split("+")[0] not in TESTED:
        log.warning("terrace: SGLang %s is not tested, %s is; please report it if pages are not found again", found, TESTED[-1])
