"""Tree building with one top-k over the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.build_tree.types import BuiltTree


def _path_minimum(scores: jax.Array, parents: jax.Array, max_depth: int) -> jax.Array:
    """Smallest score between the root and each candidate; NaN counts as -inf. [B, C].

    Pointer doubling: after i rounds a candidate has looked 2^i - 1 ancestors up. The root is
    an extra last column of score 0 that is its own parent.
    """
    batch, pool = scores.shape
    low = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    low = jnp.where(low == 0, 0.0, low)  # the top-k puts 0 above -0
    low = jnp.concatenate([low, jnp.zeros((batch, 1), jnp.float32)], axis=1)
    up = jnp.concatenate([parents, jnp.full((batch, 1), -1, jnp.int32)], axis=1)
    up = jnp.where(up < 0, pool, up)
    for _ in range(max_depth.bit_length()):
        low = jnp.minimum(low, jnp.take_along_axis(low, up, axis=1))
        up = jnp.take_along_axis(up, up, axis=1)
    return low[:, :pool]


def build_tree_xla(
    pool_scores: jax.Array,
    pool_parents: jax.Array,
    pool_tokens: jax.Array,
    root_tokens: jax.Array,
    *,
    num_nodes: int,
    max_depth: int,
) -> BuiltTree:
    """As `api.build_tree`.

    A child's path minimum is never above its parent's and its index never below, and the top-k puts
    the lower index first among equals: so parents come before children, whatever ties there are.
    """
    batch, pool = pool_scores.shape
    path = _path_minimum(pool_scores, pool_parents, max_depth)
    taken = min(num_nodes - 1, pool)
    scores, chosen = jax.lax.top_k(path, taken)
    chosen = chosen.astype(jnp.int32)
    valid = scores > -jnp.inf
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    nodes = jnp.arange(1, taken + 1, dtype=jnp.int32)[None]
    # Column `pool` answers for the root: parents -1 read it from the end.
    node_of = jnp.zeros((batch, pool + 1), jnp.int32).at[rows, chosen].set(nodes)
    above = jnp.take_along_axis(pool_parents, chosen, axis=1)
    parents = jnp.take_along_axis(node_of, jnp.where(above < 0, pool, above), axis=1)
    tokens = jnp.take_along_axis(pool_tokens, chosen, axis=1)

    def with_root(column: jax.Array, below: jax.Array, padding: float | int) -> jax.Array:
        filler = jnp.asarray(padding, below.dtype)
        below = jnp.where(valid, below, filler)
        spare = jnp.full((batch, num_nodes - 1 - taken), filler, below.dtype)
        return jnp.concatenate([column[:, None], below, spare], axis=1)

    none = jnp.full((batch,), -1, jnp.int32)
    return BuiltTree(
        tokens=with_root(root_tokens, tokens, 0),
        parents=with_root(none, parents, -1),
        scores=with_root(jnp.zeros((batch,), jnp.float32), scores, -jnp.inf),
        pool_index=with_root(none, chosen, -1),
        num_valid=1 + jnp.sum(valid, axis=1, dtype=jnp.int32),
    )
