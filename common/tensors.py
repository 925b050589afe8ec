"""Arrays as bytes: raw little-endian values, row-major, with dtype and shape beside them.

Pure numpy. Codecs copy a `FeaturePiece` into a `FeatureBlock` field by field.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import numpy.typing as npt

from common.types import FeatureRows

MAX_PIECE_BYTES = 1 << 20
"""Larger pieces would hold up the small frames beside them (20 ms behind 16 MiB, measured)."""

if sys.byteorder != "little":
    raise ImportError("canopy puts arrays on the wire as they lie in memory: little-endian only")


class FeatureDtype(enum.IntEnum):
    """Values equal `canopy.v1.FeatureDtype`."""

    FLOAT32 = 1
    BFLOAT16 = 2

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return _NUMPY_DTYPES[self]

    @staticmethod
    def of(dtype: npt.DTypeLike) -> FeatureDtype:
        """Raises ValueError for anything but float32 and bfloat16."""
        for candidate, numpy_dtype in _NUMPY_DTYPES.items():
            if numpy_dtype == np.dtype(dtype):
                return candidate
        raise ValueError(f"features of dtype {np.dtype(dtype)}; must be float32 or bfloat16")


_NUMPY_DTYPES: dict[FeatureDtype, np.dtype[np.generic]] = {
    FeatureDtype.FLOAT32: np.dtype(np.float32),
    FeatureDtype.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class FeaturePiece:
    """Consecutive feature rows of one sequence, ready for the wire; at most MAX_PIECE_BYTES."""

    sequence_id: bytes
    epoch: int
    position: int  # of the first row
    num_rows: int
    row_width: int  # values
    dtype: FeatureDtype
    data: bytes = field(repr=False)  # num_rows * row_width values


def split_rows(block: FeatureRows, max_bytes: int = MAX_PIECE_BYTES) -> Iterator[FeaturePiece]:
    """Cuts feature rows [num_rows, F] into pieces of whole rows, in order; copies each row once.

    Raises ValueError if a single row is larger than `max_bytes`, or on a dtype that cannot travel.
    """
    if block.rows.ndim != 2:
        raise ValueError(f"features have shape {block.rows.shape}; must be [num_rows, F]")
    num_rows, row_width = block.rows.shape
    dtype = FeatureDtype.of(block.rows.dtype)
    row_bytes = row_width * dtype.numpy_dtype.itemsize
    if not 0 < row_bytes <= max_bytes:
        raise ValueError(f"a feature row has {row_bytes} bytes; must be 1 to {max_bytes}")
    step = max_bytes // row_bytes
    for start in range(0, num_rows, step):
        rows = block.rows[start : start + step]
        yield FeaturePiece(
            sequence_id=block.sequence_id,
            epoch=block.epoch,
            position=block.position + start,
            num_rows=int(rows.shape[0]),
            row_width=int(row_width),
            dtype=dtype,
            data=rows.tobytes(),
        )


def join_piece(piece: FeaturePiece, row_width: int | None = None) -> FeatureRows:
    """The rows of a piece that came from outside, as a read-only view of its bytes.

    Raises ValueError naming the field that is wrong. `row_width`: what the receiver expects.
    """
    if row_width is not None and piece.row_width != row_width:
        raise ValueError(f"row_width: {piece.row_width} does not fit; must be {row_width}")
    if piece.num_rows < 1 or piece.row_width < 1:
        raise ValueError(
            f"num_rows, row_width: {piece.num_rows} x {piece.row_width}; both must be at least 1"
        )
    expected = piece.num_rows * piece.row_width * piece.dtype.numpy_dtype.itemsize
    if expected > MAX_PIECE_BYTES:
        raise ValueError(f"data: {expected} bytes in a piece; at most {MAX_PIECE_BYTES}")
    if len(piece.data) != expected:
        raise ValueError(f"data: {len(piece.data)} bytes; num_rows and row_width say {expected}")
    values = np.frombuffer(piece.data, piece.dtype.numpy_dtype)
    rows = values.reshape(piece.num_rows, piece.row_width)
    return FeatureRows(piece.sequence_id, piece.epoch, piece.position, rows)


_EXPONENT_32, _EXPONENT_16 = np.uint32(0x7F80_0000), np.uint16(0x7F80)


def is_finite(rows: npt.NDArray[np.generic]) -> bool:
    """Whether float32 or bfloat16 `rows` hold neither NaN nor infinity: their exponents tell.

    numpy's own test takes ten times as long on bfloat16.
    """
    if rows.itemsize == 4:
        return not ((rows.view(np.uint32) & _EXPONENT_32) == _EXPONENT_32).any()
    return not ((rows.view(np.uint16) & _EXPONENT_16) == _EXPONENT_16).any()
