"""Where tokens stand in a vocabulary that is split over a mesh axis, inside `shard_map`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def share_start(size: int, axis: str | None) -> jax.Array:
    """int32 scalar: the first of the `size` tokens that this chip holds; 0 where `axis` is None."""
    index: jax.Array = jnp.zeros((), jnp.int32) if axis is None else lax.axis_index(axis)
    first: jax.Array = index * size
    return first


def place_in_share(tokens: jax.Array, size: int, axis: str | None) -> jax.Array:
    """int32, shaped as `tokens`: where each stands among this chip's `size`.

    `size` where it is another chip's, or negative: that a scatter with mode="drop" leaves out.
    """
    own = tokens - share_start(size, axis)
    return jnp.where((tokens >= 0) & (own >= 0) & (own < size), own, jnp.int32(size))
