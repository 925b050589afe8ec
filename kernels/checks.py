"""Trace-time checks that kernels' public functions share. Errors show the value and what it must
be."""

from __future__ import annotations

import jax


def check_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError if `array` has another shape."""
    if tuple(array.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(array.shape)} must be {shape}")


def check_dtype(name: str, array: jax.Array, *dtypes: str) -> None:
    """Raises ValueError if `array` has none of `dtypes`."""
    if array.dtype.name not in dtypes:
        raise ValueError(f"{name}: dtype {array.dtype.name} must be {' or '.join(dtypes)}")
