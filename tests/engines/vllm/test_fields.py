"""The table of the configuration's fields in docs/engine-namespaces.md is that of the installed version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_every_field_of_the_configuration_is_in_the_table() -> None:
    # In a separate process: importing an engine leaves threads and settings behind.
    script = "import fields, json; print(json.dumps([[*field, answer] for field, answer in fields.unknown('vllm').items()]))"
    folder = str(Path(__file__).parents[1])
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    told = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "[]", (
        "decide for each whether it belongs to the namespace (python/terrace_kv/left_out), and run tests/engines/fields.py vllm"
    )
