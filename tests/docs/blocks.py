"""Fenced blocks of Markdown, and the comments that say how to check them.

A comment stands on a line of its own before a block; several can follow each other:

    <!-- not run: REASON -->    the block cannot run here; a Python block is compiled nevertheless
    <!-- output -->             the output of the shell block before: `...` stands for any text, a line `...` for any lines
    <!-- smaller: 6000 by 200 --> the commands run with the second text in place of the first, because the first takes too long here
    <!-- file: NAME -->         the block is written to this file, for the commands that follow; TOML is not taken for settings of `serve`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

SHELL = {"sh", "bash", "console"}
PROGRAMS = SHELL | {"python", "rust", "toml", "json"}
"""Languages of which every block must be checked, or have a reason."""

_COMMENT = re.compile(r"^\s*<!--\s*(not run|output|file|smaller)\s*(?::\s*(.*?))?\s*-->\s*$")
_FENCE = re.compile(r"^(\s*)(`{3,})\s*([\w+-]*)(.*)$")


class BlockError(Exception):
    """A comment or a fence that is wrong."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    line: int
    """Number of the line of its first fence, from 1."""
    language: str
    """The first word after the fence, in lower case."""
    attributes: str
    """The rest of that line, like ``,no_run``."""
    text: str
    not_run: str | None = None
    is_output: bool = False
    file: str | None = None
    smaller: tuple[str, str] | None = None


def blocks(text: str) -> list[Block]:
    """Returns the blocks of a document, in order.

    Raises BlockError if a comment precedes no block or lacks its value, or if fences do not match.
    """
    found: list[Block] = []
    comments: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        comment = _COMMENT.match(line)
        fence = _FENCE.match(line)
        if comment:
            name, value = comment[1], comment[2] or ""
            if (name != "output") != bool(value):
                raise BlockError(f"line {number}: the comment '{name}' {'takes no value' if value else 'needs a value'}")
            comments[name] = value
        elif fence:
            found.append(_block(number, fence, lines, comments))
            comments = {}
        elif line.strip() and comments:
            raise BlockError(f"line {number}: the comment '{next(iter(comments))}' before it belongs to no block")
    if comments:
        raise BlockError(f"the comment '{next(iter(comments))}' at the end belongs to no block")
    return found


def _block(number: int, fence: re.Match[str], lines: Iterator[tuple[int, str]], comments: dict[str, str]) -> Block:
    indent, ticks, language, attributes = fence.groups()
    content: list[str] = []
    for _, line in lines:
        if line.strip() == ticks:
            break
        if _COMMENT.match(line) or re.match(rf"\s*{ticks}\w", line):
            raise BlockError(f"line {number}: the block contains '{line.strip()}': is a fence missing or one too many?")
        content.append(line.removeprefix(indent))
    else:
        raise BlockError(f"line {number}: the fence is not closed")
    smaller = None
    if "smaller" in comments:
        before, _, after = comments["smaller"].partition(" by ")
        if not after or before not in "".join(content):
            raise BlockError(f"line {number}: the comment 'smaller' needs 'BEFORE by AFTER', and BEFORE in the block")
        smaller = before, after
    return Block(
        line=number,
        language=language.lower(),
        attributes=attributes.strip(),
        text="".join(f"{line}\n" for line in content),
        not_run=comments.get("not run"),
        is_output="output" in comments,
        file=comments.get("file"),
        smaller=smaller,
    )


def matches(expected: str, output: str) -> bool:
    """Says whether output is as expected: `...` stands for any text in a line, a line `...` for any lines."""
    pattern = ""
    for line in expected.rstrip("\n").splitlines():
        line = line.rstrip()
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in line.split("...")) + "\n"
    actual = "".join(f"{line.rstrip()}\n" for line in output.rstrip().splitlines())
    return re.fullmatch(pattern, actual) is not None
