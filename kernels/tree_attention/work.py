"""The list of query tiles that one call of the tree attention kernel walks.

Computed by XLA from the step's lengths: it does not depend on the layer, so it is computed once a
step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Work(NamedTuple):
    """Query tiles in the order of their rows, all on the device, all int32.

    Entries beyond the last tile repeat the last sequence and are never walked.
    """

    sequence: jax.Array  # [num_work] the tile's sequence
    row: jax.Array  # [num_work] the tile's first q row, counted from its sequence's first
    bounds: jax.Array  # [num_cores + 1] first tile of each core, then the number of tiles


def max_work(num_sequences: int, num_rows: int, tile: int) -> int:
    """How many tiles `num_rows` rows of `num_sequences` sequences can make at most."""
    return num_sequences + num_rows // tile


def plan_work(
    q_starts: jax.Array, kv_lens: jax.Array, *, num_rows: int, tile: int, num_cores: int
) -> Work:
    """Cuts every sequence's q rows into tiles and shares the tiles out over the cores.

    `q_starts` int32 [B+1], `kv_lens` int32 [B]. Cores get consecutive tiles of about equal KV
    tokens.
    """
    num_sequences = kv_lens.shape[0]
    tiles = (q_starts[1:] - q_starts[:-1] + (tile - 1)) // tile  # [B]
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(max_work(num_sequences, num_rows, tile), dtype=jnp.int32)
    before = (ends[None, :] <= index[:, None]).astype(jnp.int32)
    sequence = jnp.minimum(jnp.sum(before, axis=1, dtype=jnp.int32), num_sequences - 1)
    row = (index - (ends - tiles)[sequence]) * tile
    total = ends[-1:]
    if num_cores == 1:
        return Work(sequence, row, jnp.concatenate([jnp.zeros_like(total), total]))
    # A tile costs its prefix, and a constant that keeps empty prefixes from all falling on one
    # core.
    cost = jnp.where(index < total, kv_lens[sequence] + 4 * tile, 0).astype(jnp.float32)
    share = jnp.cumsum(cost) / jnp.maximum(jnp.sum(cost), 1.0)  # inclusive
    cuts = [
        jnp.sum((share * num_cores < core).astype(jnp.int32), keepdims=True, dtype=jnp.int32)
        for core in range(1, num_cores)
    ]
    cuts = [jnp.minimum(cut, total) for cut in cuts]
    return Work(sequence, row, jnp.concatenate([jnp.zeros_like(total), *cuts, total]))
