"""Changes of a document's commands that let them run here: the built program, free ports, servers that are waited for."""

from __future__ import annotations

import re

CARGO_RUN = re.compile(r"\bcargo run (?:--release )?-- ")
_PLACE = re.compile(r"(?:127\.0\.0\.1|localhost):(\d{4,5})\b")
_COMMAND = re.compile(r"(?:[^\n\\]|\\.|\\\n)+", re.S)
_SERVER = re.compile(r"^\s*terrace (?:serve|node|route)\b")
_DEFAULTS = (8000, 8080)
"""Ports that servers and routers listen on if nothing else is said."""


def ports_of(texts: list[str]) -> list[int]:
    """Returns the ports on this machine that commands name, and those that servers have by default."""
    named = {int(port) for text in texts for port in _PLACE.findall(text)}
    return sorted(named | set(_DEFAULTS))


def with_ports(text: str, ports: dict[int, int]) -> str:
    """Replaces ports: behind a colon or ``--port``, and in the list of a loop."""

    def replaced(match: re.Match[str]) -> str:
        return str(ports.get(int(match[0]), match[0]))

    numbers = re.compile(r"\b\d{4,5}\b")
    lines = []
    for line in text.splitlines(keepends=True):
        if re.match(r"\s*for \w+ in ", line):
            lines.append(numbers.sub(replaced, line))
        else:
            lines.append(re.sub(r"(?<=:)\d{4,5}\b|(?<=--port )\d{4,5}\b", replaced, line))
    return "".join(lines)


def runnable(text: str, ports: dict[int, int]) -> str:
    """Returns the commands as they run here.

    A server does not go to the background: the program that stands in for `terrace` returns when the server answers.
    """
    text = CARGO_RUN.sub("terrace ", text)

    def waited_for(match: re.Match[str]) -> str:
        command = match[0]
        return re.sub(r"\s*&\s*(#.*)?$", "", command) if _SERVER.match(command) else command

    return with_ports(_COMMAND.sub(waited_for, text), ports)
