"""Starts and stops the program as the units and the Dockerfile in `packaging/` do, and checks the
metadata of published crates.

No daemon is needed: the lines are read from the files and carried out here, with temporary folders
and free ports in place of those of a machine.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

PACKAGING = Path("packaging")
PATIENCE_S = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def is_well(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


class Running:
    """A program that is healthy when the block starts, and must exit when it is asked to stop."""

    def __init__(self, command: list[str], variables: dict[str, str], health_port: int) -> None:
        # Variables of the test's environment are not set where the package runs.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TERRACE_")}
        self.command = command
        self.process = subprocess.Popen(command, env=clean | variables, stderr=subprocess.PIPE, text=True)
        self.health_port = health_port

    def __enter__(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_well(self.health_port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                sys.exit(f"{shlex.join(self.command)} does not answer:\n{self.process.stderr.read()}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            _, said = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            sys.exit(f"{shlex.join(self.command)} does not stop when it is told to")
        if self.process.returncode != 0:
            sys.exit(f"{shlex.join(self.command)} ended with {self.process.returncode}:\n{said}")


def settings_of(unit: Path) -> dict[str, list[str]]:
    """The settings of a unit by name; a name may occur several times."""
    settings: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            settings.setdefault(name, []).append(value)
    return settings


def check_unit(unit: Path, terrace: str, files: dict[str, Path], own: list[str], health_port: int) -> None:
    settings = settings_of(unit)
    (line,) = settings["ExecStart"]
    for credential in settings.get("LoadCredential", []):
        name, path = credential.split(":")
        assert f"%d/{name}" in line, f"{unit}: nothing reads the credential {name}"
        line = line.replace(f"%d/{name}", str(files[path]))
    for path, stand_in in files.items():
        line = line.replace(path, str(stand_in))
    assert "%" not in line and "/etc/" not in line, f"{unit}: nobody provides what {line} names"
    program, *arguments = shlex.split(line)
    assert program == "/usr/local/bin/terrace", f"{unit} starts {program}"
    with Running([terrace, *arguments, *own], {}, health_port):
        print(f"{unit}: {shlex.join(arguments)}")


def check_folder(unit: Path, setting: str, root: str, configured: str) -> None:
    """Checks that the folder in a configuration is created by its unit and writable."""
    folders = [f"{root}/{name}" for name in settings_of(unit)[setting]]
    assert any(configured == folder or configured.startswith(f"{folder}/") for folder in folders), (
        f"{unit} may not write to {configured}"
    )


def verify_by_systemd(terrace: str, scratch: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        print("systemd-analyze is not installed: nothing but this test has read the units")
        return
    for unit in sorted(PACKAGING.glob("*.service")):
        copy = scratch / unit.name
        copy.write_text(unit.read_text().replace("/usr/local/bin/terrace", terrace))
        verified = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
        )
        assert verified.returncode == 0 and not verified.stderr, f"{unit}: {verified.stderr}"
        print(f"{unit}: systemd understands all of it")


def check_image(terrace: str, scratch: Path) -> None:
    text = re.sub(r"\\\n\s*", "", (PACKAGING / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]

    def last(instruction: str) -> str:
        return [line for line in lines if line.startswith(f"{instruction} ")][-1].removeprefix(f"{instruction} ")

    variables = dict(pair.split("=", 1) for pair in shlex.split(last("ENV")))
    assert variables["TERRACE_L3"].startswith(f"disk:{last('VOLUME')}/"), "L3 is not in the volume"
    assert variables["TERRACE_LISTEN"].endswith(f":{last('EXPOSE')}"), "another port is exposed"
    assert not last("USER").startswith(("0", "root")), "it runs as root"

    workspace = tomllib.loads(Path("Cargo.toml").read_text())
    defaults = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if line.startswith("ARG ") and "=" in line)
    assert defaults["PROFILE"] in workspace["profile"], f"there is no profile {defaults['PROFILE']}"
    released = subprocess.run(["scripts/release/program", "--features"], stdout=subprocess.PIPE, text=True, check=True)
    assert defaults["FEATURES"] == released.stdout.strip(), f"releases have {released.stdout}"
    features = tomllib.loads(Path("cli/Cargo.toml").read_text())["features"]
    for feature in defaults["FEATURES"].split(","):
        assert feature in features, f"there is no feature {feature}"
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert defaults["PROGRAM"] in stages and "released" in stages, f"the stages are {stages}"
    rust = workspace["workspace"]["package"]["rust-version"]
    assert f"FROM rust:{rust}-" in text, f"it is not built with Rust {rust}"

    port = free_port()
    variables |= {"TERRACE_LISTEN": f"127.0.0.1:{port}", "TERRACE_L3": f"disk:{scratch}/image"}
    health = json.loads(last("HEALTHCHECK").split("CMD ", 1)[1])
    entry, *arguments = json.loads(last("ENTRYPOINT")) + json.loads(last("CMD"))
    assert entry == "terrace", f"it starts {entry}"

    def health_status() -> int:
        asked = subprocess.run(health, env=os.environ | variables, capture_output=True, timeout=PATIENCE_S, check=False)
        return asked.returncode

    with Running([terrace, *arguments, "--l3-reserve", "0"], variables, port):
        assert health_status() == 0, "the health check of a server that is well fails"
    assert health_status() != 0, "the health check of a server that is gone succeeds"
    print(f"packaging/Dockerfile: {shlex.join([entry, *arguments])}, and its health check")


def check_crates() -> None:
    """Checks metadata of published crates that cargo does not require and users need."""
    published = 0
    for member in tomllib.loads(Path("Cargo.toml").read_text())["workspace"]["members"]:
        folder = Path(member)
        package = tomllib.loads((folder / "Cargo.toml").read_text())["package"]
        if package.get("publish") is False:
            continue
        published += 1
        for field in ("description", "keywords", "categories"):
            assert package.get(field), f"{folder}/Cargo.toml has no {field}"
        assert package.get("documentation") == f"https://docs.rs/{package['name']}", f"{folder}: where is it documented?"
        for file in ("README.md", "LICENSE-APACHE", "LICENSE-MIT"):
            assert (folder / file).is_file(), f"{folder}/{file} is not there"
        for source in folder.glob("src/**/*.rs"):
            for included in re.findall(r'include_(?:str|bytes)!\("([^"]+)"\)', source.read_text()):
                path = (source.parent / included).resolve()
                inside = path.is_relative_to(folder.resolve())
                assert inside, f"{source} includes {included}, which its package does not have"
    print(f"{published} crates have what they are published with")


def main(terrace: str) -> None:
    check_crates()
    terrace = str(Path(terrace).resolve())
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        secret = scratch / "secret"
        secret.write_text("for this test alone, and long enough for it\n")
        files = {
            "/etc/terrace/serve.toml": PACKAGING / "serve.toml",
            "/etc/terrace/node.toml": PACKAGING / "node.toml",
            "/etc/terrace/secret": secret,
        }
        port = free_port()
        own = ["--listen", f"127.0.0.1:{port}", "--l3", f"disk:{scratch}/serve", "--l3-reserve", "0"]
        check_unit(PACKAGING / "terrace-serve.service", terrace, files, own, port)
        port = free_port()
        own = ["--listen", f"127.0.0.1:{free_port()}", "--metrics", f"127.0.0.1:{port}", "--memory", "64MiB"]
        own += ["--disk", f"{scratch}/node", "--disk-capacity", "64MiB", "--disk-reserve", "0"]
        check_unit(PACKAGING / "terrace-node.service", terrace, files, own, port)

        serve, node = (tomllib.loads((PACKAGING / f"{name}.toml").read_text()) for name in ("serve", "node"))
        l3 = serve["l3"].removeprefix("disk:")
        check_folder(PACKAGING / "terrace-serve.service", "CacheDirectory", "/var/cache", l3)
        check_folder(PACKAGING / "terrace-node.service", "StateDirectory", "/var/lib", node["disk"])
        verify_by_systemd(terrace, scratch)
        check_image(terrace, scratch)


if __name__ == "__main__":
    main(sys.argv[1])
