"""Writes the licences of all crates that are linked into given packages, as their licences ask of those who distribute programs.

    packaging/notices.py --target x86_64-unknown-linux-gnu cli/Cargo.toml:full,buckets python/Cargo.toml:s3 > NOTICES

Each argument is a manifest with its Cargo features. Cargo says which crates are linked for the target, and the texts are read from
the sources of the crates, which a build has downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LICENCE_FILE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
STANDARD_LIBRARY = """\
The Rust standard library is linked, too: MIT OR Apache-2.0, Copyright (c) The Rust Project Contributors. Both texts are below
for other crates. It contains further software, which https://github.com/rust-lang/rust/blob/main/COPYRIGHT lists.
"""


class Crate(NamedTuple):
    name: str
    version: str


def cargo(*arguments: str) -> str:
    done = subprocess.run(["cargo", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def linked(manifest: str, features: str, target: str) -> set[Crate]:
    """The crates that are linked into a package, itself included. Procedural macros run only while it is built."""
    # fmt: off
    tree = cargo(
        "tree", "--locked", "--quiet", "--manifest-path", manifest, "--features", features, "--target", target,
        "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}",
    )
    # fmt: on
    found = (line.split() for line in tree.splitlines() if line)
    return {Crate(words[0], words[1].removeprefix("v")) for words in found}


def packages() -> dict[Crate, dict[str, object]]:
    """What Cargo knows of every package of the lockfile."""
    metadata = json.loads(cargo("metadata", "--locked", "--format-version", "1", "--all-features"))
    return {Crate(package["name"], package["version"]): package for package in metadata["packages"]}


def licence_texts(folder: Path) -> list[str]:
    files = [path for path in sorted(folder.iterdir()) if LICENCE_FILE.match(path.name)]
    files = [inner for path in files for inner in (sorted(path.iterdir()) if path.is_dir() else [path])]
    readable = (path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file())
    return [text.strip() for text in readable]


def general_texts(licence: str, authors: str) -> list[str]:
    """The text of a licence for a crate that has none of its own."""
    if "Apache-2.0" in licence:
        return [(ROOT / "LICENSE-APACHE").read_text().strip()]
    if "MIT" in licence and authors:
        text = (ROOT / "LICENSE-MIT").read_text().strip()
        return [re.sub(r"^Copyright .*$", f"Copyright (c) {authors}", text, count=1, flags=re.MULTILINE)]
    return []


def report(crates: dict[Crate, dict[str, object]]) -> str:
    """The notices of crates.

    :raises ValueError: if a crate has neither a licence text nor a licence with a general one.
    """
    numbers: dict[str, int] = {}
    # Copies of one text differ in their spaces.
    copies: dict[str, str] = {}
    lines = []
    missing = []
    for crate, package in sorted(crates.items()):
        licence = str(package["license"])
        authors = ", ".join(re.sub(r" <.*?>", "", author) for author in package["authors"])  # type: ignore[attr-defined]
        texts = licence_texts(Path(str(package["manifest_path"])).parent) or general_texts(licence, authors)
        if not texts:
            missing.append(f"{crate.name} {crate.version} ({licence})")
        texts = [copies.setdefault(" ".join(text.split()), text) for text in texts]
        told = ", ".join(str(numbers.setdefault(text, len(numbers) + 1)) for text in texts)
        lines.append(f"{crate.name} {crate.version}: {licence}. Texts: {told}." + (f" Authors: {authors}." if authors else ""))
    if missing:
        raise ValueError(f"no licence text: {', '.join(missing)}")
    texts = [f"---- Text {number} ----\n\n{text}\n" for text, number in numbers.items()]
    head = f"This distribution contains {len(lines)} third-party crates under these licences.\n"
    return "\n".join([head, STANDARD_LIBRARY, *lines, "", *texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True, help="the platform, as Cargo names it")
    parser.add_argument("packages", nargs="+", metavar="MANIFEST:FEATURES")
    arguments = parser.parse_args()
    wanted: set[Crate] = set()
    for package in arguments.packages:
        manifest, _, features = package.partition(":")
        wanted |= linked(manifest, features, arguments.target)
    known = packages()
    # Crates of the workspace have no source: they are our own.
    others = {crate: known[crate] for crate in wanted if known[crate]["source"] is not None}
    try:
        print(report(others))
    except ValueError as error:
        sys.exit(f"packaging/notices.py: {error}")


if __name__ == "__main__":
    main()
