"""The table of all fields of an engine's configuration, and whether they are part of namespaces, for docs/engine-namespaces.md.

    python tests/engines/fields.py vllm|sglang            writes the part of the document for the installed version

A test of each engine compares the document with the version that is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from terrace_kv.configuration import fields_of
from terrace_kv.left_out import sglang as sglangs
from terrace_kv.left_out import vllm as vllms

DOCUMENT = Path(__file__).parents[2] / "docs" / "engine-namespaces.md"
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
Answers = dict[tuple[str, str], str]
"""By class and field: ``yes``, or ``no`` and the reason."""


def of_vllm() -> list[Answers]:
    """All configuration classes of vLLM, each separately."""
    import vllm.config

    for module in pkgutil.iter_modules(vllm.config.__path__):
        importlib.import_module(f"vllm.config.{module.name}")
    modules = [module for name, module in sys.modules.items() if name.startswith("vllm.config.")]
    kinds = {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__.startswith("vllm.config")
    }
    found: dict[str, Answers] = {}

    def visit(kind: str, answer: str) -> None:
        if kind in found and (answer != "yes" or all(told == "yes" for told in found[kind].values())):
            return
        answers: Answers = {}
        found[kind] = answers
        for field in dataclasses.fields(kinds[kind]):
            reason = vllms.LEFT_OUT.get(kind, {}).get(field.name)
            its = f"no: {reason}" if reason and answer == "yes" else answer
            answers[kind, field.name] = its
            for word in re.findall(r"\w+", str(field.type)):
                if word in kinds and word != kind:
                    visit(word, its)

    visit("VllmConfig", "yes")
    return list(found.values())


def of_sglang() -> list[Answers]:
    """The arguments of SGLang's server, by group."""
    from sglang.srt.arg_groups import fields
    from sglang.srt.server_args import ServerArgs

    def answers(names: Iterable[str]) -> Answers:
        reasons = {name: sglangs.LEFT_OUT.get(name) for name in names}
        return {("ServerArgs", name): f"no: {reason}" if reason else "yes" for name, reason in reasons.items()}

    left = dict.fromkeys(fields_of(ServerArgs) or ())
    groups = []
    for module in pkgutil.iter_modules(fields.__path__):
        declared = vars(importlib.import_module(f"{fields.__name__}.{module.name}"))
        for kind in declared.values():
            if inspect.isclass(kind) and kind.__module__ == f"{fields.__name__}.{module.name}":
                names = [name for name in kind.__annotations__ if name in left]
                groups.append(answers(names))
                for name in names:
                    del left[name]
    return [*groups, answers(left)]


def of_engine(engine: str) -> list[Answers]:
    """The fields of the installed version."""
    return {"vllm": of_vllm, "sglang": of_sglang}[engine]()


def of_document(engine: str) -> Answers:
    """The fields that the document has."""
    answers: Answers = {}
    for kind, names, answer in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", _section(engine), re.M):
        answers |= {(kind, name): answer for name in re.findall(r"`(\w+)`", names)}
    return answers


def unknown(engine: str) -> dict[tuple[str, str], str]:
    """The fields of the installed version that the document lacks or describes differently."""
    document = of_document(engine)
    return {
        field: answer for answers in of_engine(engine) for field, answer in answers.items() if document.get(field) != answer
    }


def table(groups: list[Answers]) -> str:
    """The rows of the document: fields of a class that have the same answer are in one."""
    rows = ["| class | fields | in the namespace |", "|---|---|---|"]
    for answers in groups:
        by_answer = sorted(answers.items(), key=lambda told: (told[0][0], told[1] != "yes", told[1]))
        for (kind, answer), fields in groupby(by_answer, key=lambda told: (told[0][0], told[1])):
            rows.append(f"| `{kind}` | {', '.join(f'`{field}`' for (_, field), _ in fields)} | {answer} |")
    return "\n".join(rows)


def _section(engine: str) -> str:
    found = re.search(rf"^## Fields of {NAMES[engine]}$(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.M | re.S)
    return found[1] if found else ""


def write(engine: str) -> None:
    """Writes the part of the document that is about an engine."""
    text = DOCUMENT.read_text()
    section = _section(engine)
    prose = section.partition("| class |")[0]
    DOCUMENT.write_text(text.replace(section, f"{prose}{table(of_engine(engine))}\n\n"))


if __name__ == "__main__":
    write(sys.argv[1])
