"""Installs peers: pinned versions from PyPI, each in a separate folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class NotInstalled(Exception):
    """A peer that cannot be installed here, and why."""


def install(name: str, folder: Path) -> Path:
    """Returns the interpreter of an environment with the packages of `requirements/NAME.txt` and
    `NAME-alone.txt`, the latter without their dependencies. It is installed once and reused."""
    home = folder / name
    python = home / "bin" / "python"
    requirements = HERE / "requirements" / f"{name}.txt"
    alone = HERE / "requirements" / f"{name}-alone.txt"
    wanted = "".join(file.read_text() for file in (requirements, alone) if file.exists())
    done = home / "installed.txt"
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"Installing {name} into {home}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    _run(name, [_interpreter(name), "-m", "venv", "--clear", str(home)])
    _run(name, [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"])
    uv = [str(home / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(python)]
    if requirements.exists():
        _run(name, [*uv, "--requirement", str(requirements)])
    if alone.exists():
        _run(name, [*uv, "--no-deps", "--requirement", str(alone)])
    done.write_text(wanted)
    return python


def _interpreter(name: str) -> str:
    """Wheels of SGLang and TokenSpeed are for one Python version; these are for 3.11."""
    interpreter = os.environ.get("PYTHON", "python3.11")
    try:
        subprocess.run([interpreter, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalled(f"{name}: there is no {interpreter}; install Python 3.11, or set PYTHON to it") from error
    return interpreter


def _run(name: str, command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip()[-2000:]
        raise NotInstalled(f"{name}: `{' '.join(command)}` failed:\n{said}")
