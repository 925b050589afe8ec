"""Many small host arrays as one int32 buffer: a device step costs one transfer, not a dozen.

The host fills views of the buffer by name; the device program slices the same names out again.
Pure numpy: the device side works on anything that slices and reshapes (`unpack`'s caller bitcasts).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_DTYPES = {"int32": np.int32, "uint32": np.uint32, "float32": np.float32}


@dataclass(frozen=True, slots=True)
class Field:
    """One array of the buffer: name, shape, and a dtype of 4 bytes (int32, uint32, float32)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "int32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Packing:
    """The places of the fields, one behind the other, in a buffer of `size` int32 values."""

    def __init__(self, *fields: Field) -> None:
        """Raises ValueError for a dtype that is not 4 bytes wide, or a name that stands twice."""
        self.fields = fields
        names = [field.name for field in fields]
        if len(set(names)) != len(names):
            raise ValueError(f"fields: a name stands twice in {names}")
        for field in fields:
            if field.dtype not in _DTYPES:
                raise ValueError(f"{field.name}: dtype {field.dtype} must be one of {[*_DTYPES]}")
        self.size = sum(field.size for field in fields)

    def views(self, buffer: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.generic]]:
        """Writable views into `buffer` [size], by name."""
        return {
            field.name: buffer[span].view(_DTYPES[field.dtype]).reshape(field.shape)
            for field, span in self.spans()
        }

    def spans(self) -> Iterator[tuple[Field, slice]]:
        """Each field and its place in the buffer."""
        start = 0
        for field in self.fields:
            yield field, slice(start, start + field.size)
            start += field.size
