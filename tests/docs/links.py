"""Links between documents: every file and every heading that a link names exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^(\s*)(`{3,}).*?^\1\2\s*$|`[^`\n]*`", re.M | re.S)


def broken(document: Path) -> list[str]:
    """Returns the links of a document that lead nowhere."""
    targets = _LINK.findall(_CODE.sub("", document.read_text()))
    return [target for target in targets if "://" not in target and not _exists(document, target)]


def _exists(document: Path, target: str) -> bool:
    path, _, heading = target.partition("#")
    file = (document.parent / path).resolve() if path else document
    return file.exists() and (not heading or file.suffix != ".md" or heading in _anchors(file))


@cache
def _anchors(document: Path) -> set[str]:
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "", document.read_text(), flags=re.M | re.S)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def anchor(heading: str) -> str:
    """Returns the name by which a link finds a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
