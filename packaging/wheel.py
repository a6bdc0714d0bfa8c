"""Adds the program `terrace` and licence notices to a wheel, in place.

    packaging/wheel.py WHEEL --program target/release/terrace --notices NOTICES

Installers put the program on the PATH. The wheel keeps its name: the program must run on the platforms that its tag names.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import zipfile
from pathlib import Path

NOTICES = "THIRD-PARTY-NOTICES"
# The earliest time that a zip file can have: the same input gives the same wheel.
TIME = (1980, 1, 1, 0, 0, 0)


def entry(name: str, mode: int) -> zipfile.ZipInfo:
    told = zipfile.ZipInfo(name, TIME)
    told.compress_type = zipfile.ZIP_DEFLATED
    told.external_attr = (0o100000 | mode) << 16
    return told


def recorded(name: str, content: bytes) -> tuple[str, str, str]:
    """A line of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return name, f"sha256={digest}", str(len(content))


def with_notices(metadata: bytes) -> bytes:
    """METADATA that names the file with the notices, besides the licences that are there."""
    head, _, description = metadata.partition(b"\n\n")
    return head + f"\nLicense-File: {NOTICES}\n\n".encode() + description


def complete(wheel: Path, program: bytes, notices: bytes) -> None:
    """Rewrites a wheel with a program and notices in it."""
    with zipfile.ZipFile(wheel) as archive:
        contents = [(told, archive.read(told)) for told in archive.infolist() if not told.is_dir()]
    [record] = [told.filename for told, _ in contents if told.filename.endswith(".dist-info/RECORD")]
    info = record.rpartition("/")[0]
    release = info.removesuffix(".dist-info")
    added = [
        (entry(f"{release}.data/scripts/terrace", 0o755), program),
        (entry(f"{info}/licenses/{NOTICES}", 0o644), notices),
    ]
    names = {told.filename for told, _ in contents}
    if any(told.filename in names for told, _ in added):
        raise ValueError(f"{wheel} is complete already: build it again")
    rewritten = io.StringIO()
    lines = csv.writer(rewritten, lineterminator="\n")
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        # RECORD comes last, and has no digest of itself.
        for told, content in [*contents, *added]:
            if told.filename == record:
                continue
            if told.filename == f"{info}/METADATA":
                content = with_notices(content)
            archive.writestr(told, content)
            lines.writerow(recorded(told.filename, content))
        lines.writerow((record, "", ""))
        archive.writestr(entry(record, 0o644), rewritten.getvalue())
    os.replace(new, wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--notices", type=Path, required=True)
    arguments = parser.parse_args()
    complete(arguments.wheel, arguments.program.read_bytes(), arguments.notices.read_bytes())


if __name__ == "__main__":
    main()
