"""Tree building as one Pallas TPU kernel: node after node, many sequences side by side.

A turn takes, in every sequence, the best candidate whose parent was taken (among equals the lowest
index), and opens its children with the smaller of their own score and its. So no parent has to be
looked up, nothing is sorted, and a child can come after its parent only. Candidates lie along the
lanes, sequences along the sublanes: a turn is two dependent reductions over the lanes and a few
operations a register, all sequences' latencies overlapping.

Grid: up to 32 sequences at a time. HBM bytes: the pool's 12 a candidate, the tree's 16 a node.
VMEM: about 40 bytes a candidate of those sequences. Numbers are float32 throughout, exact up to
2**24, since reductions of int32 over lanes are slower.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.build_tree.types import BuiltTree

LANES = 128
MAX_ROWS = 32
MOST = 2**24
"""Tokens and candidates that float32 tells apart."""


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _body(
    roots_ref: Any,  # float32 [R, 1]
    scores_ref: Any,  # float32 [R, C], lanes from C on hold anything
    parents_ref: Any,  # int32 [R, C]
    tokens_ref: Any,  # int32 [R, C]
    out_tokens_ref: Any,  # int32 [R, N], as the next three
    out_parents_ref: Any,
    out_scores_ref: Any,  # float32
    out_index_ref: Any,
    *,
    pool: int,
    num_nodes: int,
) -> None:
    shape, out_shape = scores_ref.shape, out_scores_ref.shape
    ids = lax.broadcasted_iota(jnp.int32, shape, 1).astype(jnp.float32)
    places = lax.broadcasted_iota(jnp.int32, out_shape, 1).astype(jnp.float32)
    own = scores_ref[...]
    # Not a number is no candidate, nor is a lane beyond the pool.
    own = jnp.where((own > -jnp.inf) & (ids < pool), jnp.minimum(own, 0.0), -jnp.inf)
    parents = parents_ref[...].astype(jnp.float32)
    tokens = tokens_ref[...].astype(jnp.float32)

    def over_lanes(combine: Any, values: jax.Array) -> jax.Array:
        reduced: jax.Array = combine(values, axis=1, keepdims=True)
        return reduced

    def turn(node: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """`open_` [R, C]: the scores of candidates that may be taken, else -inf. `above` [R, C]:
        the node of each open candidate's parent. Then the tree so far."""
        open_, above, *tree = state
        number = node.astype(jnp.float32)
        best = over_lanes(jnp.max, open_)
        found = best > -jnp.inf
        index = over_lanes(jnp.min, jnp.where(open_ == best, ids, jnp.float32(MOST)))
        index = jnp.where(found, index, -2.0)  # nobody's index and nobody's parent
        chosen = ids == index
        token = over_lanes(jnp.sum, jnp.where(chosen, tokens, 0.0))
        parent = over_lanes(jnp.sum, jnp.where(chosen, above, 0.0))
        opened = parents == index
        open_ = jnp.where(chosen, -jnp.inf, jnp.where(opened, jnp.minimum(own, best), open_))
        above = jnp.where(opened, number, above)
        here = (places == number) & found
        row = (token, parent, best, index)
        values = [jnp.where(here, x, so_far) for x, so_far in zip(row, tree, strict=True)]
        return (open_, above, *values)

    root = places == 0
    nothing = jnp.full(out_shape, -1, jnp.float32)
    start = (
        jnp.where(parents < 0, own, -jnp.inf),
        jnp.zeros(shape, jnp.float32),
        jnp.where(root, roots_ref[...], 0.0),
        nothing,
        jnp.where(root, 0.0, -jnp.inf),
        nothing,
    )
    _, _, out_tokens, out_parents, out_scores, out_index = lax.fori_loop(
        jnp.int32(1), jnp.int32(num_nodes), turn, start
    )
    out_tokens_ref[...] = out_tokens.astype(jnp.int32)
    out_parents_ref[...] = out_parents.astype(jnp.int32)
    out_scores_ref[...] = out_scores
    out_index_ref[...] = out_index.astype(jnp.int32)


def build_tree_pallas(
    pool_scores: jax.Array,  # float32 [B, C]
    pool_parents: jax.Array,  # int32 [B, C]
    pool_tokens: jax.Array,  # int32 [B, C]
    root_tokens: jax.Array,  # int32 [B]
    *,
    num_nodes: int,
    interpret: Any = False,
) -> BuiltTree:
    """As `api.build_tree`, for pools of any depth."""
    batch, pool = pool_scores.shape
    rows = min(_up(batch, 8), MAX_ROWS)
    width, out_width = _up(pool, LANES), _up(num_nodes, LANES)
    candidates = pl.BlockSpec((rows, width), lambda i: (i, 0))
    nodes = pl.BlockSpec((rows, out_width), lambda i: (i, 0))

    def result(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            (batch, num_nodes), dtype
        )

    call = pl.pallas_call(
        functools.partial(_body, pool=pool, num_nodes=num_nodes),
        out_shape=[result(dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32, jnp.int32)],
        grid=(-(-batch // rows),),
        in_specs=[pl.BlockSpec((rows, 1), lambda i: (i, 0)), *[candidates] * 3],
        out_specs=[nodes] * 4,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="build_tree",
    )
    roots = root_tokens.astype(jnp.float32)[:, None]
    tokens, parents, scores, index = call(roots, pool_scores, pool_parents, pool_tokens)
    valid = jnp.sum(scores > -jnp.inf, axis=1, dtype=jnp.int32)
    return BuiltTree(tokens, parents, scores, index, valid)
