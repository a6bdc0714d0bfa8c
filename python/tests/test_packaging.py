"""What an installed package offers to others: the names that vLLM finds by itself, and the program."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest

fake_vllm.install()

from terrace_kv import __main__ as program  # noqa: E402
from terrace_kv.vllm import plugin  # noqa: E402


def factories() -> tuple[Any, Any]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    return KVConnectorFactory, SecondaryTierFactory


def test_vllm_finds_the_names_of_connectors_and_tier() -> None:
    [entry] = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "terrace"]
    for _ in range(2):
        entry.load()()
    connectors, tiers = factories()
    assert connectors._registry["TerraceConnector"]().__module__ == "terrace_kv.vllm.connector"
    assert tiers.get_tier_class({"type": "TerraceTier"}).__module__ == "terrace_kv.vllm.tier"
    assert "TerraceHiddenStatesConnector" in connectors._registry


def test_a_vllm_that_cannot_register_names_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    connectors, tiers = factories()

    def refuse(*_: Any) -> None:
        raise RuntimeError("another version")

    for factory, method in ((connectors, "register_connector"), (tiers, "register_tier")):
        monkeypatch.setattr(factory, "_registry", {})
        monkeypatch.setattr(factory, method, refuse)
    plugin.register()
    assert not connectors._registry and not tiers._registry
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.factory", None)
    plugin.register()


def test_metadata_names_licences_and_extras() -> None:
    told = metadata("terrace-kv")
    assert told["License-Expression"] == "MIT OR Apache-2.0"
    assert {"LICENSE-APACHE", "LICENSE-MIT"} <= {Path(file).name for file in told.get_all("License-File") or ()}
    assert {"vllm", "sglang", "lmcache"} <= set(told.get_all("Provides-Extra") or ())


def test_the_module_runs_the_program_or_says_how_to_install_it() -> None:
    command = [sys.executable, "-m", "terrace_kv", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if program.find_program() is None:
        assert ran.returncode == 1 and "cargo install terrace" in ran.stderr
    else:
        assert ran.returncode == 0 and ran.stdout.startswith("terrace ")


def a_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_program_of_the_package_comes_before_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name / "bin" / "terrace" for name in ("recorded", "scripts", "on_path")}
    recorded = SimpleNamespace(name="terrace", parent=SimpleNamespace(name="bin"), locate=lambda: places["recorded"])
    other = SimpleNamespace(name="terrace", parent=SimpleNamespace(name="man"), locate=lambda: Path("/bin/sh"))
    monkeypatch.setattr(program, "files", lambda _: [other, recorded])
    monkeypatch.setattr(program, "__file__", str(tmp_path / "site-packages" / "terrace_kv" / "__main__.py"))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(places["scripts"].parent))
    monkeypatch.setenv("PATH", str(places["on_path"].parent))
    assert program.find_program() is None
    for name in ("on_path", "scripts", "recorded"):
        assert program.find_program() != places[name]
        a_program(places[name])
        assert program.find_program() == places[name]


def test_the_program_takes_the_place_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = a_program(tmp_path / "terrace")
    called: list[tuple[str | Path, list[str]]] = []
    monkeypatch.setattr(program, "find_program", lambda: found)
    monkeypatch.setattr("os.execv", lambda path, arguments: called.append((path, arguments)))
    monkeypatch.setattr(sys, "argv", ["__main__.py", "serve", "--help"])
    program.main()
    assert called == [(found, [str(found), "serve", "--help"])]
