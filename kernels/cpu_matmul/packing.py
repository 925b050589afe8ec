"""How a matrix lies for the product: blocks of WIDTH columns, each read from front to back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

WIDTH = 48
"""Columns of a block: three AVX-512 registers. A block of 576 or 1,536 rows stays in the second
level of cache while tile after tile of x passes over it."""


def packed_shape(k: int, n: int) -> tuple[int, int, int]:
    """[blocks, K, WIDTH] of a matrix [K, N]."""
    return -(-n // WIDTH), k, WIDTH


def pack(matrix: jax.Array) -> jax.Array:
    """[ceil(N / WIDTH), K, WIDTH] of a matrix [K, N], int8 if that is, else float32; zeros behind
    column N.
    """
    k, n = matrix.shape
    blocks = packed_shape(k, n)[0]
    kept = matrix if matrix.dtype == jnp.int8 else matrix.astype(jnp.float32)
    whole = jnp.pad(kept, ((0, 0), (0, blocks * WIDTH - n)))
    return whole.reshape(k, blocks, WIDTH).transpose(1, 0, 2)
