#!/usr/bin/env python3
"""Stands in for `terrace` in the commands of documents: servers are started, waited for and left running.

A second server on the same port takes the place of the first, as if that had been stopped. check.py ends all of them.
DOCS_PROGRAM names the real program, DOCS_STATE a folder with the process ids.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_TIMEOUT_S = 90
QUIET_S = 0.3
"""A server that has printed nothing for so long has printed what it says at its start."""
VARIABLES = {"serve": "TERRACE_LISTEN", "node": "TERRACE_NODE_LISTEN", "route": "TERRACE_ROUTE_LISTEN"}


def main() -> int:
    program, arguments = os.environ["DOCS_PROGRAM"], sys.argv[1:]
    stays = arguments[:1] and arguments[0] in VARIABLES
    if not stays or {"--help", "-h", "--print-config"} & set(arguments):
        os.execv(program, [program, *arguments])
    state = Path(os.environ["DOCS_STATE"])
    place = argument_of(arguments, "--listen") or os.environ.get(f"DOCS_LISTEN_{arguments[0].upper()}", "")
    port = int(place.rpartition(":")[2])
    stop_at(state, port)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DOCS_")}
    environment[VARIABLES[arguments[0]]] = place
    log = state / f"{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [program, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    (state / f"{server.pid}.{port}.pid").touch()
    ready = wait_until_it_answers(server, port)
    wait_until_quiet(log)
    print(log.read_text(errors="replace"), end="", flush=True)
    if not ready:
        print(f"terrace {arguments[0]} did not listen on port {port}: exit status {server.poll()}", file=sys.stderr)
        return server.poll() or 1
    return 0


def argument_of(arguments: list[str], flag: str) -> str | None:
    """Returns the value of a flag."""
    for index, argument in enumerate(arguments):
        if argument == flag:
            return arguments[index + 1]
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


def stop_at(state: Path, port: int) -> None:
    """Stops the server that has this port, if this document has started one."""
    for file in state.glob(f"*.{port}.pid"):
        stop(int(re.match(r"\d+", file.name)[0]))
        file.unlink()


def stop(pid: int, patience_s: float = 20) -> None:
    """Ends a process, and returns when it has ended."""
    try:
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + patience_s
        while runs(pid):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                end = float("inf")
            time.sleep(0.02)
    except ProcessLookupError:
        pass


def runs(pid: int) -> bool:
    """Says whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_it_answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until the port accepts connections; False if the server ends or takes too long."""
    end = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


def wait_until_quiet(log: Path) -> None:
    size, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        if log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
