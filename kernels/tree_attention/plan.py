"""Who sees whom inside the blocks of a step: computed once, used by all layers.

Ancestor bits, causal chains and sequence borders become one boolean matrix of the step's rows.
That is T*T bytes, small for the rows of a step, and says nothing of the prefix, which every row
sees whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Plan:
    """What all layers of a step share, so that XLA computes it once.

    `visible` bool [Tq + pad, Tk + pad]: row sees block row. `positions` int32 [Tq + pad]: of the
    rows, for the window.
    """

    visible: jax.Array
    positions: jax.Array


def row_owners(starts: jax.Array, num_rows: int) -> jax.Array:
    """int32 [num_rows]: the sequence of each row; B for rows beyond the last."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.sum(rows[:, None] >= starts[None, 1:], axis=1, dtype=jnp.int32)


def make_plan(
    q_starts: jax.Array,
    block_starts: jax.Array,
    kv_lens: jax.Array,
    num_causal: jax.Array,
    ancestors: jax.Array,
    q_offsets: jax.Array,
    *,
    num_keys: int,
    padding: int,
    window: int | None,
) -> Plan:
    """Visibility inside the blocks; arguments as in `api.tree_attention`."""
    num_rows, num_words = ancestors.shape
    batch = kv_lens.shape[0]
    q_owner = row_owners(q_starts, num_rows)
    k_owner = row_owners(block_starts, num_keys)
    q_seq, k_seq = jnp.minimum(q_owner, batch - 1), jnp.minimum(k_owner, batch - 1)
    q_row = jnp.arange(num_rows, dtype=jnp.int32) - q_starts[q_seq] + q_offsets[q_seq]
    k_row = jnp.arange(num_keys, dtype=jnp.int32) - block_starts[k_seq]
    causal = num_causal[q_seq]
    node = k_row - num_causal[k_seq]  # below 0: a causal row
    word = jnp.clip(node // 32, 0, num_words - 1)
    bits = (ancestors[:, word] >> (node % 32).astype(jnp.uint32)) & jnp.uint32(1)
    named = (bits > 0) & (node // 32 < num_words)[None]
    in_tree = q_row[:, None] >= causal[:, None]
    visible = jnp.where(
        in_tree, (node < 0)[None] | named, (k_row[None] <= q_row[:, None]) & (node < 0)[None]
    )
    visible &= (q_owner[:, None] == k_owner[None]) & (q_owner < batch)[:, None]
    # A tree node's depth below the root is the number of its bits.
    depth = jnp.sum(lax.population_count(ancestors), axis=1).astype(jnp.int32)
    positions = kv_lens[q_seq] + jnp.where(q_row < causal, q_row, causal - 1 + depth)
    if window is not None:
        key_position = jnp.where(node < 0, kv_lens[k_seq] + k_row, jnp.int32(2**30))
        visible &= key_position[None] > positions[:, None] - window
    return Plan(
        visible=jnp.pad(visible, ((0, padding), (0, padding))),
        positions=jnp.pad(positions, (0, padding)),
    )
