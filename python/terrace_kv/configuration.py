"""An engine's configuration as text, for namespaces: everything in it except what a list leaves out.

What changes the bytes of KV is not known in advance, and every version of an engine adds fields. So all fields count, and each
field that does not has a reason: ``terrace_kv/left_out``. A field too many is a
cache miss; a field too few is wrong KV.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

from ._native import ConfigError
from .namespaces import canonical, digest_of_file, weights_of

logger = logging.getLogger(__name__)

LeftOut = Mapping[str, Mapping[str, str]]
"""Reasons why fields are not part of the namespace, by class and field."""

# Libraries whose kernels compute KV, or which select kernels.
_LIBRARIES = (
    "aiter", "amd-aiter", "bitsandbytes", "compressed-tensors", "deep-gemm", "flash-attn", "flash-attn-4", "flash-linear-attention",
    "flashinfer-python", "mamba-ssm", "sgl-kernel", "sglang-kernel", "transformers", "triton", "xformers",
)  # fmt: skip
# Longer strings are not paths.
_PATH_MAX = 4096
# Fields of a model's configuration that describe its origin.
_ORIGIN = ("_name_or_path", "transformers_version")


def configuration_text(config: Any, left_out: LeftOut, *, kind: str | None = None) -> str:
    """Canonical text of a configuration. Equal configurations of two processes have equal texts.

    A file or a folder of weights that a field names counts by its content, wherever it is. A value that cannot be compared
    across processes makes the text unique: the server then shares with no other one.
    """
    unnamed: list[str] = []
    plain = _Plain(left_out, unnamed).of(config, kind or type(config).__name__, ())
    if unnamed:
        logger.warning(
            "Terrace cannot compare %s with the configuration of other servers: this server shares KV with none of them, "
            "nor with its own later runs",
            ", ".join(unnamed),
        )
        plain = [plain, os.urandom(16).hex()]
    return canonical(plain)


def environment(prefix: str, left_out: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of an engine, except those that match a pattern of ``left_out``."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefix) and not any(fnmatchcase(name, pattern) for pattern in left_out)
    }


def libraries() -> dict[str, str]:
    """Versions of the installed libraries that compute KV."""
    import torch

    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "hip": str(torch.version.hip)}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _Plain:
    """Converts values to JSON types."""

    def __init__(self, left_out: LeftOut, unnamed: list[str]) -> None:
        self._left_out = left_out
        self._unnamed = unnamed

    def of(self, value: Any, place: str, around: tuple[int, ...]) -> Any:
        """Converts a value at a place of the configuration, nested in the values ``around``."""
        if isinstance(value, Enum):
            return f"{type(value).__name__}.{value.name}"
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return _text(value)
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, PurePath):
            return _text(str(value))
        if id(value) in around:
            return self._cannot(place)
        around = (*around, id(value))
        if isinstance(value, Mapping):
            return {str(name): self.of(each, f"{place}.{name}", around) for name, each in value.items() if name not in _ORIGIN}
        if isinstance(value, Set):
            return sorted(canonical(self.of(each, place, around)) for each in value)
        if isinstance(value, Sequence):
            return [self.of(each, f"{place}[{at}]", around) for at, each in enumerate(value)]
        if type(value).__module__.partition(".")[0] == "torch":
            return str(value) if type(value).__name__ in ("device", "dtype") else self._cannot(place)
        if isinstance(value, type) or callable(value):
            name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '<unknown>')}"
            return self._cannot(place) if "<" in name else name
        if hasattr(value, "to_dict"):
            return self.of(value.to_dict(), place, around)
        return self._fields(value, place, around)

    def _fields(self, value: Any, place: str, around: tuple[int, ...]) -> Any:
        kind = type(value)
        names = fields_of(kind)
        if names is None:
            if not hasattr(value, "__dict__") or any(vars(base).get("__slots__") for base in kind.__mro__):
                return self._cannot(place)
            names = sorted(vars(value))
        left_out = self._left_out.get(kind.__name__, {})
        counted = [name for name in names if name not in left_out]
        return {
            "class": kind.__name__,
            **{name: self.of(getattr(value, name, None), f"{place}.{name}", around) for name in counted},
        }

    def _cannot(self, place: str) -> None:
        self._unnamed.append(place)


def fields_of(kind: type) -> list[str] | None:
    """The fields that a class declares, None if it declares none."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    names: Iterable[str] | None = getattr(kind, "__struct_fields__", None)
    return None if names is None else list(names)


def _text(value: str) -> str:
    """Converts a string; a path becomes a digest of its content."""
    if not value or len(value) > _PATH_MAX or "\0" in value or "\n" in value:
        return value
    try:
        path = Path(value)
        if path.is_file():
            return f"file {digest_of_file(path)}"
        return f"folder {weights_of(value)}" if path.is_dir() else value
    except (ConfigError, OSError):
        return value


def digest(*texts: str) -> str:
    """A short name for texts."""
    whole = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        whole.update(len(encoded).to_bytes(8, "little") + encoded)
    return whole.hexdigest()
