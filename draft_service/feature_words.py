"""Feature rows as 32-bit words, so that they travel in a step's one packed buffer.

float32: a word each. bfloat16: a word has a value of the row's first half in its low bits and the
one half a row behind it in its high bits, so that the device puts two halves side by side and
interleaves nothing (a last axis of two would be padded to a whole TPU tile).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax


def num_words(feature_size: int, dtype: npt.DTypeLike) -> int:
    """Words of one row. Raises ValueError for what does not fill them."""
    size = feature_size * np.dtype(dtype).itemsize
    if np.dtype(dtype).itemsize not in (2, 4) or size % 4:
        raise ValueError(f"features: rows of {feature_size} {np.dtype(dtype)} do not fill words")
    return size // 4


def put_rows(rows: npt.NDArray[Any], words: npt.NDArray[np.uint32]) -> None:
    """Fills words [n, W] with rows [n, F], on the host."""
    bits = np.ascontiguousarray(rows)
    if bits.dtype.itemsize == 4:
        words[:] = bits.view(np.uint32)
        return
    low, high = np.split(bits.view(np.uint16), 2, axis=1)
    halves = words.view(np.uint16)
    halves[:, 0::2] = low  # little-endian, as all that travels (common/tensors.py)
    halves[:, 1::2] = high


def take_rows(words: jax.Array, dtype: npt.DTypeLike) -> jax.Array:
    """[n, F] of words int32 [n, W], on the device."""
    if np.dtype(dtype).itemsize == 4:
        return lax.bitcast_convert_type(words, jnp.dtype(dtype))
    bits = lax.bitcast_convert_type(words, jnp.uint32)
    low = lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)
    high = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.concatenate([low, high], axis=1).astype(jnp.dtype(dtype))
