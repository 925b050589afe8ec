"""Who sees whom: the masks of the tree attention kernel, as numbers added to scores.

0 where a row sees a key, MASKED elsewhere. Whole KV blocks of the prefix have no mask at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kernels.tree_attention.blocks import BLOCK_PIECE
from kernels.tree_attention.compute import MASKED
from kernels.tree_attention.refs import Item


@dataclass(frozen=True)
class Masks:
    """`bits` of the methods: per word of ancestor bits, uint32 [tile, 128], equal over lanes."""

    group: int
    window: int | None
    page_size: int

    def prefix_bias(
        self, item: Item, base: jax.Array, keys: int, lowest: jax.Array | None
    ) -> jax.Array:
        """[1 or rows, keys]: keys before the end of the prefix and within the rows' windows."""
        key = base + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        visible = key < item.num_keys
        if lowest is not None:
            visible = visible & (key >= lowest)
        return jnp.where(visible, 0.0, MASKED).astype(jnp.float32)

    def lowest_keys(self, item: Item, bits: list[jax.Array], tile: int) -> jax.Array | None:
        """[rows, 1]: the first prefix key of each row's window, counted from the first page's."""
        if self.window is None:
            return None
        row = item.first_row + lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        depth = jnp.zeros((tile, 1), jnp.int32)
        for column in bits:
            depth = depth + lax.population_count(column[:, :1]).astype(jnp.int32)
        offset = jnp.where(row < item.num_causal, row, item.num_causal - 1 + depth)
        lowest = item.kv_len + offset - (self.window - 1) - item.first_page * self.page_size
        return jnp.concatenate([lowest] * self.group, axis=0)

    def block_bias(
        self, item: Item, bits: list[jax.Array], piece: jax.Array, tile: int
    ) -> jax.Array:
        """[rows, 128]: which keys of a piece of the block each row sees."""
        row = item.first_row + lax.broadcasted_iota(jnp.int32, (tile, BLOCK_PIECE), 0)
        lane = lax.broadcasted_iota(jnp.int32, (tile, BLOCK_PIECE), 1)
        key = piece * BLOCK_PIECE + lane - item.block_shift
        causal = (key >= 0) & (key <= row) & ((row < item.num_causal) | (key < item.num_causal))
        node = key - item.num_causal
        named = jnp.zeros((tile, BLOCK_PIECE), jnp.int32)
        for word, column in enumerate(bits):
            bit = lax.bitcast_convert_type(column, jnp.int32) >> (node & 31)
            named = jnp.where((node >> 5) == word, bit & 1, named)
        visible = causal | ((row >= item.num_causal) & (named == 1))
        if self.window is not None:
            visible = visible & self.block_window(item, bits, key, node, tile)
        bias = jnp.where(visible, 0.0, MASKED).astype(jnp.float32)
        return jnp.concatenate([bias] * self.group, axis=0)

    def block_window(
        self, item: Item, bits: list[jax.Array], key: jax.Array, node: jax.Array, tile: int
    ) -> jax.Array:
        """[tile, 128]: block keys less than `window` positions before the row.

        The distance is the number of visible block rows behind the key up to the row itself.
        """
        assert self.window is not None
        row = item.first_row + lax.broadcasted_iota(jnp.int32, (tile, BLOCK_PIECE), 0)
        behind = jnp.zeros((tile, BLOCK_PIECE), jnp.int32)
        for word, column in enumerate(bits):
            shift = jnp.clip(node + 1 - 32 * word, 0, 32)  # bits of this word up to the key
            above = jnp.where(
                shift < 32, column >> jnp.minimum(shift, 31).astype(jnp.uint32), jnp.uint32(0)
            )
            behind = behind + lax.population_count(above).astype(jnp.int32)
        tree_distance = behind + jnp.maximum(item.num_causal - 1 - key, 0)
        return jnp.where(row < item.num_causal, row - key, tree_distance) < self.window
