"""Which SGLang this was tried with."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger(__name__)

# What the tests against the real SGLang run with.
TESTED = ("0.5.23",)


def check_version() -> None:
    """Says so where nobody has tried this version. It is used all the same: the interface has been steady."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return
    if found.split("+")[0] not in TESTED:
        log.warning("terrace: SGLang %s is not tested, %s is; please report it if pages are not found again", found, TESTED[-1])
