"""Namespaces for adapters to other engines: everything that KV depends on besides the tokens.

Engines name blocks by hashes of tokens. The KV of the same tokens is different for another model, other weights, another
data type or layout. So all of these are part of the namespace, which is verified in the header of every object that is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ._native import ConfigError
from .transfers import key_of

# The version of how namespaces are computed.
_VERSION = "terrace-kv engine namespace 1"
_BYTES = 16


def engine_namespace(
    *,
    engine: str,
    hash_algorithm: str,
    model: str,
    weights: str,
    dtype: str,
    kv_dtype: str,
    layout: str,
    block_tokens: int,
    parallelism: Mapping[str, int] | None,
    rank: int | None,
    adapter: str = "",
    salt: str = "",
    **more: str | int | bool,
) -> bytes:
    """The namespace (16 bytes) of the objects of an engine.

    ``engine`` and ``hash_algorithm`` say which engine computes the block hashes, and how. ``weights`` is a revision or a
    fingerprint (:func:`weights_of`). ``layout`` describes the bytes of an object completely: shape, order, strides.
    ``parallelism`` has the degree of each kind (tensor, pipeline, context), and ``rank`` is the rank that an object belongs
    to. Both are None only if objects do not depend on them. Pass everything else that KV depends on as further keyword
    arguments.
    """
    fields: dict[str, Any] = {
        "engine": engine,
        "hash_algorithm": hash_algorithm,
        "model": model,
        "weights": weights,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "layout": layout,
        "block_tokens": block_tokens,
        "rank": "any" if rank is None else rank,
        "adapter": adapter,
        "salt": salt,
    }
    degrees = {"any": 1} if parallelism is None else parallelism
    fields |= {f"parallel {name}": size for name, size in degrees.items()}
    clashes = fields.keys() & more.keys()
    if clashes:
        raise TypeError(f"{sorted(clashes)} are given twice")
    fields |= more
    parts: list[str | int] = [_VERSION]
    for name in sorted(fields):
        value = fields[name]
        if not isinstance(value, str | int):
            raise TypeError(f"{name} must be a string or an integer, not {value!r}")
        parts += [name, int(value) if isinstance(value, bool) else value]
    return hashlib.sha256(key_of(*parts)).digest()[:_BYTES]


def private_namespace(namespace: bytes) -> bytes:
    """A unique namespace for KV that depends on state of this process alone."""
    return hashlib.sha256(key_of(namespace, os.urandom(_BYTES))).digest()[:_BYTES]


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Further files of a model's folder that affect results: configurations, including quantization, and
# custom code.
_BESIDE = ("*.json", "*.py")
_SAMPLE = 4096
_STRIDE = 1 << 20
# Smaller files are hashed completely.
_WHOLE_MAX = 64 << 20


def weights_of(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """An identifier of the weights of a model: the commit in Hugging Face's cache, or a fingerprint of a folder or file.

    ``cache`` is the folder of that cache, if it is not the usual one. The fingerprint covers the names and lengths of all weight
    files, some kilobytes in the middle of every tensor of safetensors files, or of every megabyte of other files, and the
    whole of configurations and code beside them. Training changes a whole tensor, so it changes the fingerprint. If you edit
    single numbers of a tensor, give the weights a name of your own.

    :raises ConfigError: if nothing here identifies the weights: a branch that may move, an object store, a folder without
        weights.
    """
    place = Path(model)
    if place.is_file():
        return digest_of_file(place)
    if not place.is_dir():
        commit = None if "://" in model else _commit_of(model, revision, cache)
        if commit is None and revision is not None and _is_commit(revision):
            commit = revision
        if commit is None:
            raise ConfigError(f"nothing identifies the weights of {model} (revision {revision}): no commit of it is cached here")
        return key_of("revision", commit).hex()
    if place.parent.name == "snapshots" and _is_commit(place.name):
        return key_of("revision", place.name).hex()
    weights = _files(place, _WEIGHTS)
    if not weights:
        raise ConfigError(f"the folder {model} has no weights: no file there is like {', '.join(_WEIGHTS)}")
    parts: list[str | int | bytes] = ["folder"]
    for file in weights:
        parts += [file.name, file.stat().st_size, _samples(file)]
    for file in _files(place, _BESIDE):
        parts += ["beside", file.name, digest_of_file(file)]
    return hashlib.sha256(key_of(*parts)).hexdigest()


def digest_of_file(file: Path) -> str:
    """A digest of a file: of all of it, or of samples if it is large."""
    if file.stat().st_size > _WHOLE_MAX:
        return hashlib.sha256(key_of(file.stat().st_size, _samples(file))).hexdigest()
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _is_commit(revision: str) -> bool:
    return len(revision) == 40 and set(revision) <= set("0123456789abcdef")


def _samples(file: Path) -> bytes:
    """A digest of samples of a file."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(min(length, size))
            digest.update(header)
            tensors = [told["data_offsets"] for name, told in json.loads(header).items() if name != "__metadata__"]
            middles = [8 + length + max(start, (start + end - _SAMPLE) // 2) for start, end in tensors]
            digest.update(b"".join(_at(opened, place) for place in sorted(middles)))
            return digest.digest()
        for place in range(0, size, _STRIDE):
            digest.update(_at(opened, place))
        digest.update(_at(opened, max(0, size - _SAMPLE)))
    return digest.digest()


def _at(opened: BinaryIO, place: int) -> bytes:
    opened.seek(place)
    return opened.read(_SAMPLE)


def _commit_of(model: str, revision: str | None, cache: str | None) -> str | None:
    """The commit in Hugging Face's cache of a branch or tag."""
    try:
        from huggingface_hub import try_to_load_from_cache  # type: ignore[import-not-found,unused-ignore]

        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except Exception:  # invalid repository names, or an unreadable cache.
        return None
    commit = Path(found).parent.name if isinstance(found, str) else ""
    return commit if _is_commit(commit) else None


def canonical(value: Any) -> str:
    """Canonical text of a nested value of plain types: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
