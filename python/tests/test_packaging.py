"""What an installed package offers to others: the names that vLLM finds by itself, and the program."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points, metadata
from pathlib import Path
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


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "terrace_kv", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_the_module_runs_the_program(tmp_path: Path) -> None:
    fake = tmp_path / "terrace"
    fake.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    fake.chmod(0o755)
    if program.find_program() is not None:
        pytest.skip("this environment has the real program")
    ran = run("serve", "--help", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert (ran.stdout, ran.returncode) == ("serve --help\n", 7)


def test_without_the_program_the_module_says_how_to_install_it() -> None:
    if program.find_program() is not None:
        pytest.skip("this environment has the real program")
    ran = run("--version")
    assert ran.returncode == 1 and "cargo install terrace" in ran.stderr
