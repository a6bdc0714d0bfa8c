"""Installs a wheel into an environment of its own and uses it as its users do, on a machine that seems to have no Rust.

    tests/packaging/wheel.py WHEEL [PYTHON]     a wheel of scripts/python-wheel
    tests/packaging/wheel.py --use WHEEL        one of another build: only that it can be used
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from check import Running, free_port  # noqa: E402

# A wheel much larger than this has debug information, or something twice.
SIZE_MAX = 40 << 20
GLIBC_MAX = (2, 17)

MODULE = """
import sys
import sysconfig
from importlib.metadata import entry_points
from terrace_kv import ConfigError, Scheduler, Store, Trace, replay
Scheduler().plan()
assert replay(Trace.synthetic(requests=10))["reuse"]["total"] >= 0
has_buckets = len(sys.argv) < 2
try:
    Store("s3://a-bucket/kv", capacity="1GiB", object_max="1MiB")
except ConfigError as error:
    assert not has_buckets or "--features" not in str(error), f"buckets are missing: {error}"
assert entry_points(group="vllm.general_plugins", name="terrace")
is_gil_enabled = getattr(sys, "_is_gil_enabled", lambda: True)()
assert is_gil_enabled != bool(sysconfig.get_config_var("Py_GIL_DISABLED")), "the module turned the GIL on"
print(f"Python {sys.version.split()[0]}, GIL {'on' if is_gil_enabled else 'off'}")
"""


def check_files(wheel: Path) -> None:
    size = wheel.stat().st_size
    assert size < SIZE_MAX, f"{wheel.name} has {size >> 20} MiB"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        [program] = [told for told in archive.infolist() if told.filename.endswith(".data/scripts/terrace")]
        assert program.external_attr >> 16 & 0o111, "the program cannot be executed"
        [metadata] = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    licences = {Path(name).name for name in names if "/licenses/" in name}
    assert licences == {"LICENSE-APACHE", "LICENSE-MIT", "THIRD-PARTY-NOTICES"}, licences
    assert all(f"License-File: {name}\n" in metadata for name in licences), metadata
    print(f"{wheel.name}: {size / (1 << 20):.1f} MiB, program {program.file_size / (1 << 20):.1f} MiB")


def check_platform(wheel: Path) -> None:
    """The platform of the wheel's name is that of its libraries and of its program."""
    told = subprocess.run(["auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    found = re.search(rf'"manylinux_(\d+)_(\d+)_{platform.machine()}"', told.stdout)
    assert found and tuple(map(int, found.groups())) <= GLIBC_MAX, f"auditwheel says: {told.stdout}"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".data/scripts/terrace")]
        path = archive.extract(name, folder)
        symbols = subprocess.run(["readelf", "--version-info", path], capture_output=True, text=True, check=True)
    needed = max(tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols.stdout))
    assert needed <= GLIBC_MAX, f"the program needs glibc {needed}"
    print(f"auditwheel: {found[0]}; the program needs glibc {'.'.join(map(str, needed))}")


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def ask(port: int) -> str:
    prompt = "Row 7: figs, kept by Ada Finch.\nRow 3: flax, kept by Otto Reed.\nWho keeps row 3?\n"
    body = json.dumps({"prompt": prompt, "temperature": 0}).encode()
    address = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


def check_use(home: Path, scratch: Path, *, is_release: bool) -> None:
    # Neither cargo nor rustc: what a fresh container has.
    environment = {"PATH": f"{home}/bin:/usr/bin:/bin", "HOME": str(scratch), "LANG": "C.UTF-8"}
    for tool in ("cargo", "rustc"):
        assert shutil.which(tool, path=environment["PATH"]) is None, f"{tool} is on the PATH of the test"
    python, terrace = f"{home}/bin/python", f"{home}/bin/terrace"
    print(run([python, "-c", MODULE, *([] if is_release else ["--use"])], environment).strip())
    version = run([terrace, "--version"], environment)
    assert version.startswith("terrace ") and run([python, "-m", "terrace_kv", "--version"], environment) == version
    trace = scratch / "trace.jsonl"
    run([terrace, "trace", "generate", "--requests", "50", "--output", str(trace)], environment)
    report = json.loads(run([terrace, "replay", str(trace), "--json"], environment))
    assert report, "the replay has no report"
    for command in ([terrace, "serve"], [python, "-m", "terrace_kv", "serve"]):
        port = free_port()
        own = ["--listen", f"127.0.0.1:{port}", "--l3", f"disk:{scratch}/l3", "--l3-reserve", "0"]
        with Running([*command, *own], environment, port):
            answer = ask(port)
            assert "Otto Reed" in answer, answer
        print(f"{' '.join(map(str, command[-2:]))}: {answer.strip()}")
    print(version.strip())


def main(wheel: Path, python: str | None, *, is_release: bool) -> None:
    if is_release:
        check_files(wheel)
    if is_release and sys.platform == "linux":
        check_platform(wheel)
    with tempfile.TemporaryDirectory() as name:
        home, scratch = Path(name) / "environment", Path(name) / "home"
        scratch.mkdir()
        if python is None:
            venv.create(home, with_pip=True)
        else:
            subprocess.run([python, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, str(wheel.resolve())], check=True)
        check_use(home, scratch, is_release=is_release)


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--use"]
    main(Path(arguments[0]), arguments[1] if len(arguments) > 1 else None, is_release="--use" not in sys.argv)
