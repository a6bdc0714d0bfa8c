"""The examples in the documents and beside them run."""

from __future__ import annotations

import inspect
import re
import runpy
from functools import cached_property
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import terrace_kv

PYTHON = Path(__file__).parent.parent


@pytest.mark.parametrize(("file", "blocks_min"), [("docs/python.md", 3), ("python/README.md", 1)])
def test_document_examples_run(file: str, blocks_min: int) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (PYTHON.parent / file).read_text(), re.M | re.S)
    assert len(blocks) >= blocks_min
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, file, "exec"), names)


def test_pure_python_engine_answers_from_all_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PYTHON / "examples" / "engine.py"), run_name="__main__")
    told = re.findall(r"(\d+) of (\d+) tokens computed", capsys.readouterr().out)
    (first, asked), (second, _) = [(int(computed), int(all_)) for computed, all_ in told]
    assert second < first < asked, "what is shared is computed once, and found again"


def test_notebook_runs() -> None:
    notebook = nbformat.read(PYTHON / "examples" / "sizing.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept: they are old one day"
    NotebookClient(notebook, timeout=120).execute()
    told = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "% of the prompt tokens could be reused" in told and "Take host 256GiB: " in told


@pytest.mark.parametrize("name", terrace_kv.__all__)
def test_all_public_names_have_docstrings(name: str) -> None:
    public = getattr(terrace_kv, name)
    assert public.__doc__ and not public.__doc__.startswith(f"{name}("), "Python makes up some of its own"
    for member, value in vars(public).items() if inspect.isclass(public) else ():
        is_told = inspect.isfunction(value) or isinstance(value, (classmethod, property, cached_property))
        if is_told and not member.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{member}"

