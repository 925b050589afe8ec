"""Writes model directories: safetensors files tensor by tensor, and JSON beside them.

A file appears under its name only when whole: it is written beside it and renamed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint import SAFETENSORS_DTYPES, HostArray

_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor made when it is written, so that only one is in memory at a time."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    make: Callable[[], HostArray]

    @staticmethod
    def of(array: HostArray) -> LazyTensor:
        return LazyTensor(array.dtype, array.shape, lambda: array)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes `tensors` in their order; `progress` gets (bytes written, bytes in all).

    Raises ValueError when a tensor turns out not to be what it was announced as; OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        written = 0
        for name, tensor in tensors.items():
            array = np.ascontiguousarray(tensor.make())
            if array.dtype != tensor.dtype or array.shape != tensor.shape:
                raise ValueError(
                    f"{name}: made {array.dtype} {array.shape}, announced {tensor.dtype}"
                    f" {tensor.shape}"
                )
            stream.write(array.view(np.uint8).data if array.ndim else array.tobytes())
            written += array.nbytes
            if progress is not None:
                progress(written, offset)
    os.replace(partial, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Indented UTF-8 JSON."""
    partial = path.with_name(path.name + ".partial")
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
