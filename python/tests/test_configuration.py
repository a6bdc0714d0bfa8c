"""Engine configurations as text: every field counts except those in a list."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from terrace_kv import configuration
from terrace_kv.configuration import configuration_text, environment
from terrace_kv.left_out import sglang, vllm

DOCS = Path(__file__).parents[2] / "docs" / "engine-namespaces.md"


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass
class Inner:
    backend: str = "a"
    sizes: list[int] = field(default_factory=list)
    port: int = 1


@dataclass
class Config:
    inner: Inner = field(default_factory=Inner)
    names: set[str] = field(default_factory=set)
    level: Level = Level.LOW
    other: Any = None


def text(**fields: Any) -> str:
    return configuration_text(Config(**fields), {"Inner": {"port": "an address"}})


def test_all_fields_count_except_excluded_ones() -> None:
    class Model:
        def __init__(self, name: str, width: int) -> None:
            self.name, self.width = name, width

        def to_dict(self) -> dict[str, Any]:
            return {"_name_or_path": self.name, "width": self.width}

    usual = text()
    assert usual == text(inner=Inner(port=2))
    others = [
        text(inner=Inner(backend="b")),
        text(inner=Inner(sizes=[1])),
        text(names={"x"}),
        text(level=Level.HIGH),
        text(other=0),
        text(other=False),
        text(other="0"),
        text(other=b"0"),
        text(other=Inner),
        text(other=Model("a", 1)),
        text(other=Model("a", 2)),
        text(other={"deep": [{"er": 1}]}),
    ]
    assert len({usual, *others}) == len(others) + 1
    assert text(names={"x", "y", "z"}) == text(names={"z", "y", "x"})
    assert text(other=Model("a", 1)) == text(other=Model("b", 1)), "wherever it was read from"


@pytest.mark.parametrize("make", [object, lambda: lambda: 1, lambda: functools.partial(max, 1)])
def test_incomparable_values_are_unique(make: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    value = make()
    assert text(other=value) != text(other=value)
    assert "Config.other" in caplog.text


def test_cyclic_configurations_have_a_text() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert text(other=loop) != text(other=loop)


def test_files_count_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text("1")
    two.write_text("1")
    usual = text(other=str(one))
    assert usual == text(other=two)
    two.write_text("2")
    assert usual != text(other=two)
    monkeypatch.setattr("terrace_kv.namespaces._WHOLE_MAX", 0)
    assert text(other=str(one)) not in (usual, text(other=two)), "parts of large files"
    (tmp_path / "adapter").mkdir()
    bare = text(other=str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_model.bin").write_text("weights")
    assert text(other=str(tmp_path / "adapter")) != bare


def test_the_environment_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KERNEL", "fast")
    monkeypatch.setenv("ENGINE_HTTP_PORT", "1")
    monkeypatch.setenv("OTHER", "1")
    assert environment("ENGINE_", {"ENGINE_*_PORT": "an address"}) == {"ENGINE_KERNEL": "fast"}
    assert "torch" in configuration.libraries()


@pytest.mark.parametrize(
    ("engine", "left_out"),
    [("vLLM", vllm.LEFT_OUT), ("SGLang", {"ServerArgs": sglang.LEFT_OUT})],
)
def test_document_has_the_reasons_of_the_code(engine: str, left_out: dict[str, dict[str, str]]) -> None:
    [section] = re.findall(rf"^## Fields of {engine}$(.*?)(?=^## |\Z)", DOCS.read_text(), re.M | re.S)
    written: dict[str, dict[str, str]] = {}
    for kind, names, answer in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", section, re.M):
        if answer != "yes":
            fields = written.setdefault(kind, {})
            fields |= {name: answer.removeprefix("no: ") for name in re.findall(r"`(\w+)`", names)}
    nested = {kind: fields for kind, fields in written.items() if kind not in left_out}
    assert {kind: fields for kind, fields in written.items() if kind in left_out} == left_out
    # Configurations that are excluded as a whole.
    wholes = {reason for reason in left_out.get("VllmConfig", {}).values()}
    assert all(set(fields.values()) <= wholes for fields in nested.values())
