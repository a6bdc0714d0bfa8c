"""Bytes of NumPy arrays, PyTorch tensors, and objects with the buffer protocol or DLPack."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

# Names of types in refs (as in safetensors files), in PyTorch and in NumPy. NumPy has those from
# BF16 on only with ``ml_dtypes``.
_NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_NAMES = {numpy: name for name, numpy in _NUMPY.items()}
_SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def is_torch(array: object) -> bool:
    """Whether it is a PyTorch tensor, without importing PyTorch."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(array).__mro__)


def as_bytes(array: Any, *, writable: bool = False) -> Bytes:
    """The bytes of an array, without a copy; they keep the array alive."""
    if is_torch(array):
        if array.device.type != "cpu":
            raise TypeError(f"this tensor is on {array.device}: use a tensor on the host")
        if not array.is_contiguous():
            raise ValueError("this tensor is not contiguous (gaps or transposed): use .contiguous()")
        import torch

        view = array.detach().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(array, np.ndarray):
        view = array
    elif hasattr(array, "__dlpack__"):
        view = np.from_dlpack(array)
    else:
        view = np.frombuffer(array, np.uint8)
    if not view.flags.c_contiguous:
        raise ValueError("this array is not contiguous (gaps or transposed): use np.ascontiguousarray(...)")
    if writable and not view.flags.writeable:
        raise ValueError("this array cannot be written to")
    flat: Bytes = view.reshape(-1).view(np.uint8)
    return flat


def kind_of(array: Any) -> tuple[str, list[int]]:
    """The type of an array, as named in refs, and its shape."""
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype not in _NAMES:
        raise TypeError(f"tensors of {dtype} cannot be stored: convert them, or store their bytes")
    return _NAMES[dtype], [int(size) for size in array.shape]


def empty_numpy(dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    """Uninitialised memory for such a tensor."""
    name = _NUMPY.get(dtype)
    try:
        return np.empty(shape, np.dtype(name))
    except TypeError:
        pass
    try:
        import ml_dtypes  # type: ignore[import-not-found,import-untyped,unused-ignore]

        return np.empty(shape, np.dtype(getattr(ml_dtypes, str(name))))
    except (ImportError, AttributeError):
        raise TypeError(
            f"NumPy has no type {dtype}: read the sample with get_torch, or install ml_dtypes"
        ) from None


def empty_torch(dtype: str, shape: list[int], *, pin: bool = False) -> torch.Tensor:
    """Uninitialised memory for such a tensor, pinned or not."""
    import torch

    known = getattr(torch, _NUMPY.get(dtype, ""), None)
    if known is None:
        raise TypeError(f"this PyTorch has no type {dtype}")
    return torch.empty(shape, dtype=known, pin_memory=pin)


def on_host(array: Any) -> Any:
    """The tensor itself, or a pinned copy on the host if it is on a device."""
    if not is_torch(array):
        return np.ascontiguousarray(array)
    if array.device.type == "cpu":
        return array.detach().contiguous()
    import torch

    staged = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
    staged.copy_(array.detach(), non_blocking=True)
    torch.cuda.current_stream(array.device).synchronize()
    return staged


class Staging:
    """Pinned host memory that the pages of a GPU tensor pass through on their way to and from a
    store."""

    def __init__(self, tensor: torch.Tensor, pages: int) -> None:
        import torch

        if not tensor.is_contiguous():
            raise ValueError("this tensor is not contiguous (gaps or transposed): use .contiguous()")
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        if pages < 1 or len(flat) % pages:
            raise ValueError(f"{len(flat)} bytes cannot be {pages} pages of one size")
        self._pages = flat.reshape(pages, -1)
        self.host = torch.empty(self._pages.shape, dtype=torch.uint8, pin_memory=True)
        """The staging pages."""

    def fetch(self, pages: npt.NDArray[np.uint32]) -> None:
        """Copies pages from the GPU, after the work queued on its current stream."""
        self._copy(self.host, self._pages, pages)

    def bring(self, pages: npt.NDArray[np.uint32]) -> None:
        """Copies pages to the GPU."""
        self._copy(self._pages, self.host, pages)

    def _copy(self, to: torch.Tensor, of: torch.Tensor, pages: npt.NDArray[np.uint32]) -> None:
        import torch

        for page in pages.tolist():
            to[page].copy_(of[page], non_blocking=True)
        torch.cuda.current_stream(self._pages.device).synchronize()


def size(value: int | str) -> int:
    """Bytes, given as a number or as text like ``64MiB``."""
    if isinstance(value, int):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?\s*", value, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{value!r} is not a size: write it like 64MiB, or as a number of bytes")
    number, unit = found.groups()
    return int(float(number) * (_SIZES[unit.lower()] if unit else 1))
