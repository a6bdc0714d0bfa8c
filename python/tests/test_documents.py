"""Examples run, in the documents and beside them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PYTHON = Path(__file__).parent.parent


def test_the_examples_of_the_documents_run() -> None:
    text = (PYTHON.parent / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)


def test_an_engine_in_pure_python_answers_from_all_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PYTHON / "examples" / "engine.py"), run_name="__main__")
    told = re.findall(r"(\d+) of (\d+) tokens computed", capsys.readouterr().out)
    (first, asked), (second, _) = [(int(computed), int(all_)) for computed, all_ in told]
    assert second < first < asked, "what is shared is computed once, and found again"
