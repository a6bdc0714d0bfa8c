"""``python -m terrace_kv`` runs the program ``terrace``, which wheels of this package contain."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_NOT_FOUND = (
    "terrace: the program `terrace` is not installed with this package. Packages that were built from source contain only the "
    "Python module. Install a wheel of terrace-kv, or the program alone: cargo install terrace"
)


def find_program() -> Path | None:
    """The program that was installed with this package, else one on the ``PATH``."""
    for candidate in _candidates():
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    return None


def _candidates() -> Iterator[Path]:
    # The installer's own record is right for environments, user installs and prefixes.
    try:
        recorded = files("terrace-kv") or []
    except PackageNotFoundError:
        recorded = []
    for file in recorded:
        if file.name == "terrace" and file.parent.name == "bin":
            yield Path(str(file.locate()))
    # With `pip install --target`, programs are beside packages, and the record names another place.
    yield Path(__file__).parent.parent / "bin" / "terrace"
    yield Path(sysconfig.get_path("scripts")) / "terrace"
    on_path = shutil.which("terrace")
    if on_path is not None:
        yield Path(on_path)


def main() -> None:
    """Replaces this process by the program, so that signals and exit statuses are the program's own."""
    program = find_program()
    if program is None:
        sys.exit(_NOT_FOUND)
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    main()
