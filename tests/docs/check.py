"""Runs the blocks of documents; `scripts/test-docs` starts it."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import stand_in
from blocks import PROGRAMS, SHELL, Block, BlockError, blocks, matches
from commands import ports_of, runnable, with_ports
from links import broken

REPOSITORY = Path(__file__).parents[2]
BLOCK_TIMEOUT_S = 120
PORTS = range(20_000, 32_000)
"""Below those that the system gives to connections, which could take a port before its server does."""
AT_ONCE = 2
"""Documents that run at a time."""
_ports_lock = threading.Lock()
_ports_given: set[int] = set()


@dataclass
class Result:
    """What was found in a document."""

    document: str
    checked: int = 0
    not_run: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Shell:
    """A bash that runs the blocks of a document one after the other; variables and folders stay as they are."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.number = 0
        self.report, theirs = os.pipe()
        self.channel = theirs
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            cwd=folder,
            env=environment,
            pass_fds=[theirs],
            start_new_session=True,
            text=True,
        )
        os.close(theirs)

    def run(self, commands: str) -> tuple[bool, str]:
        """Runs commands until one fails, and returns whether all have succeeded and what they have printed."""
        self.number += 1
        script = self.folder / ".docs" / f"{self.number}.sh"
        output = script.with_suffix(".out")
        script.write_text(f"set -eo pipefail\n{commands}\nset +e\n")
        order = f". {script} > {output} 2>&1 < /dev/null {self.channel}>&-; echo done >&{self.channel}\n"
        try:
            self.process.stdin.write(order)
            self.process.stdin.flush()
        except BrokenPipeError:
            return False, "the shell has ended: a command before failed"
        timer = threading.Timer(BLOCK_TIMEOUT_S, self._kill)
        timer.start()
        succeeded = bool(os.read(self.report, 16))
        late = not timer.is_alive()
        timer.cancel()
        printed = output.read_text(errors="replace") if output.exists() else ""
        return succeeded, printed + (f"\n(ended after {BLOCK_TIMEOUT_S} s)" if late else "")

    def close(self) -> None:
        """Ends the shell with everything that it has left running."""
        self._kill()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait()
        os.close(self.report)

    def _kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def free_ports(wanted: list[int]) -> dict[int, int]:
    """Returns a free port in place of each one, in the same order; no two documents get the same."""
    held: list[socket.socket] = []
    with _ports_lock:
        found: list[int] = []
        while len(found) < len(wanted):
            port = random.choice(PORTS)
            held.append(socket.socket())
            try:
                held[-1].bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _ports_given:
                _ports_given.add(port)
                found.append(port)
        for one in held:
            one.close()
    return dict(zip(sorted(wanted), sorted(found)))


def check(document: Path, program: Path, has_package: bool) -> Result:
    """Checks the links and the blocks of a document."""
    began = time.monotonic()
    result = Result(str(document.relative_to(REPOSITORY)))
    result.failures += [f"{result.document}: the link {target} leads nowhere" for target in broken(document)]
    try:
        found = blocks(document.read_text())
    except BlockError as error:
        result.failures.append(f"{result.document}: {error}")
        return result
    with tempfile.TemporaryDirectory(prefix="terrace-docs-") as name:
        folder = Path(name)
        prepare(folder)
        try:
            Run(result, folder, program, has_package, found).all()
        finally:
            for file in (folder / ".docs").glob("*.pid"):
                stand_in.stop(int(file.name.partition(".")[0]))
    result.seconds = time.monotonic() - began
    return result


def prepare(folder: Path) -> None:
    """Makes a folder look like a checkout; nothing is built there, and homes and caches are inside."""
    (folder / ".docs" / "bin").mkdir(parents=True)
    (folder / ".docs" / "home").mkdir()
    (folder / ".docs" / "bin" / "terrace").symlink_to(Path(stand_in.__file__))
    for entry in REPOSITORY.iterdir():
        if entry.is_dir() and not entry.name.startswith(".") and entry.name != "target":
            (folder / entry.name).symlink_to(entry)


class Run:
    """The blocks of one document, in order."""

    def __init__(self, result: Result, folder: Path, program: Path, has_package: bool, found: list[Block]) -> None:
        self.result, self.folder, self.program, self.has_package, self.found = result, folder, program, has_package, found
        self.ports = free_ports(ports_of([block.text for block in found if block.language in SHELL and not block.not_run]))
        self.shell: Shell | None = None
        self.printed: str | None = None
        self.python: list[Block] = []

    def all(self) -> None:
        """Checks every block, and notes what is wrong."""
        try:
            for block in self.found:
                self.one(block)
        finally:
            if self.shell:
                self.shell.close()
        if self.python and self.has_package:
            self.run_python()

    def one(self, block: Block) -> None:
        """Checks a block."""
        if block.not_run:
            if block.language == "python":
                self.compile(block)
            self.result.not_run.append(f"{self.result.document}:{block.line}: {block.not_run}")
            return
        if block.file:
            text = with_ports(block.text, self.ports)
            (self.folder / block.file).write_text(text)
        if block.is_output:
            self.compare(block)
        elif block.language in SHELL:
            self.run_shell(block)
        elif block.language == "python":
            self.compile(block)
            self.python.append(block)
        elif block.language == "toml":
            self.configure(block)
        elif block.language == "json":
            self.parse(block)
        elif block.language == "rust":
            self.find_doc_test(block)
        if block.language in PROGRAMS or block.is_output or block.file:
            self.result.checked += 1

    def fail(self, block: Block, message: str) -> None:
        """Notes a failure."""
        self.result.failures.append(f"{self.result.document}:{block.line}: {message.strip()}")

    def run_shell(self, block: Block) -> None:
        """Runs commands; those that follow run in the same shell."""
        if not self.shell:
            self.shell = Shell(self.folder, self.environment())
        text = block.text
        if block.language == "console":
            text = "".join(line[2:] for line in text.splitlines(keepends=True) if line.startswith("$ "))
        if block.smaller:
            text = text.replace(*block.smaller)
        succeeded, self.printed = self.shell.run(runnable(text, self.ports))
        if not succeeded:
            self.fail(block, f"a command failed. It printed:\n{self.printed[-2000:]}")

    def compare(self, block: Block) -> None:
        """Compares output with what the document says."""
        expected = with_ports(block.text, self.ports)
        if self.printed is None:
            self.fail(block, "there is no command before this output")
        elif not matches(expected, self.printed):
            self.fail(block, f"the document says\n{expected}\nand the command printed\n{self.printed[-4000:]}")

    def compile(self, block: Block) -> None:
        """Compiles Python."""
        try:
            compile(block.text, f"{self.result.document}:{block.line}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            self.fail(block, f"the example does not compile: {error}")

    def run_python(self) -> None:
        """Runs the Python blocks of the document, one after the other, in one process."""
        lines = {block.line: block.text for block in self.python}
        script = "import json, sys\nnames = {}\nfor line, text in json.load(sys.stdin).items():\n    exec(compile(text, f'line {line}', 'exec'), names)\n"
        try:
            ended = subprocess.run(
                [sys.executable, "-c", script],
                input=json.dumps(lines),
                cwd=self.folder,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=BLOCK_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            self.fail(self.python[0], f"the examples take more than {BLOCK_TIMEOUT_S} s")
            return
        if ended.returncode != 0:
            self.fail(self.python[0], f"an example failed:\n{ended.stderr[-2000:]}")

    def configure(self, block: Block) -> None:
        """Lets the program check settings."""
        file = self.folder / ".docs" / f"line-{block.line}.toml"
        file.write_text(block.text)
        try:
            tomllib.loads(block.text)
        except tomllib.TOMLDecodeError as error:
            self.fail(block, f"this is not TOML: {error}")
            return
        if block.file:
            return
        ended = subprocess.run(
            [self.program, "config", file], env=self.environment(), cwd=self.folder, capture_output=True, text=True, timeout=BLOCK_TIMEOUT_S
        )
        if ended.returncode != 0:
            self.fail(block, f"terrace config refuses these settings:\n{ended.stderr[-2000:]}")

    def parse(self, block: Block) -> None:
        """Parses JSON, or one value per line."""
        try:
            json.loads(block.text)
        except ValueError as first:
            try:
                for line in block.text.splitlines():
                    json.loads(line)
            except ValueError:
                self.fail(block, f"this is not JSON: {first}")

    def find_doc_test(self, block: Block) -> None:
        """Checks that cargo compiles the Rust example."""
        tested = (REPOSITORY / "tests/src/lib.rs").read_text()
        if f'include_str!("../../{self.result.document}")' not in tested:
            self.fail(block, "no doc test compiles this example: include the document in tests/src/lib.rs")
        elif "ignore" in block.attributes:
            self.fail(block, "the doc test ignores this example: say why in a comment `not run`")

    def environment(self) -> dict[str, str]:
        """Variables of the commands: those of this process without Terrace's, and a home of their own."""
        kept = {name: value for name, value in os.environ.items() if not re.match(r"TERRACE|XDG_|CARGO_TARGET", name)}
        state = self.folder / ".docs"
        return kept | {
            "PATH": f"{state / 'bin'}{os.pathsep}{kept.get('PATH', '')}",
            "HOME": str(state / "home"),
            "DOCS_STATE": str(state),
            "DOCS_PROGRAM": str(self.program),
            "DOCS_LISTEN_SERVE": f"127.0.0.1:{self.ports[8000]}",
            "DOCS_LISTEN_ROUTE": f"127.0.0.1:{self.ports[8080]}",
        }


def documents(names: list[str]) -> list[Path]:
    """Returns the documents of these names, or all that git knows."""
    if names:
        return [(Path.cwd() / name).resolve() for name in names]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [REPOSITORY / name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists() and name != "CHANGELOG.md"]


def main() -> int:
    program = Path(os.environ.get("TERRACE") or REPOSITORY / "target/debug/terrace").resolve()
    if not shutil.which(program):
        print(f"scripts/test-docs: there is no program {program}. Build it, or name one with TERRACE", file=sys.stderr)
        return 2
    imports = subprocess.run([sys.executable, "-c", "import terrace_kv"], capture_output=True, cwd="/")
    has_package = imports.returncode == 0
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda document: check(document, program, has_package), documents(sys.argv[1:])))
    for result in results:
        if result.checked or result.not_run:
            print(f"{result.document:32} {result.checked:3} checked, {len(result.not_run):3} not run, {result.seconds:5.1f} s")
    print("\nNot run:")
    for line in (line for result in results for line in result.not_run):
        print(f"  {line}")
    failures = [failure for result in results for failure in result.failures]
    for failure in failures:
        print(f"\nFAILED {failure}")
    checked, not_run = sum(result.checked for result in results), sum(len(result.not_run) for result in results)
    examples = "run" if has_package else "compiled only: terrace_kv cannot be imported"
    print(
        f"\n{checked} blocks checked (Python: {examples}), {not_run} not run, {len(failures)} failures, {time.monotonic() - began:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
