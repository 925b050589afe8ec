"""The dynamic tree on the device: all depths of a draft, as part of one program.

Per sequence: the head's output at the last true pair proposes `width` children of the root; these
are the first frontier. Then, once per further depth, the head runs on the frontier (each node's
token with its parent's output state) under ancestor bits; every node proposes `top_k` children
scored parent + log-softmax; the best `width` of them all are the next frontier, and all are
candidates. A tree for the next round is as wide as `top_k`; one grown ahead of its round is wider,
since its root is several tokens behind where it is used.

Levels are grown one after the other while the sequences want more and the frontier is likely
enough to be reached (draft_service/levels.py); what was not grown is no candidate.

What the head computes for tree nodes lives in this program alone: it never enters the pages.
Axes: B sequences, F width of the frontier, K top_k, C candidates, H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from common.types import TreeShape
from draft_service.scoring import best_tokens, own_targets, score
from draft_service.shared_noise import SharedNoise, with_noise
from draft_service.sizes import ancestor_words, num_tree_rows
from kernels.backend import Backend
from kernels.build_tree.api import build_tree
from kernels.build_tree.types import BuiltTree
from kernels.chips import Chip
from kernels.tree_attention.api import tree_attention
from models.eagle3 import HeadConfig, head_embed, head_forward
from models.layers import Params


class Prefix(NamedTuple):
    """The committed pairs in pages. `kv_lens` int32 [B]; `num_live` int32 scalar: slots in use."""

    pages: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    num_live: jax.Array


class Growth(NamedTuple):
    """How far to grow. max_levels int32 [B]: levels that a sequence wants, at least 1; the step
    grows what any of them wants. least_reach float32 [B]: chances of the frontier; no further level
    is grown once the mean of what is reached is below the mean of these.
    """

    max_levels: jax.Array
    least_reach: jax.Array


class Frontier(NamedTuple):
    """The nodes to expand next.

    tokens int32 [B, F], target ids; scores float32 [B, F]; pool_index int32 [B, F]; states [B, F,
    H] of their parents; bits uint32 [B, F, W]: rows of the tree that each sees, itself included.
    """

    tokens: jax.Array
    scores: jax.Array
    pool_index: jax.Array
    states: jax.Array
    bits: jax.Array


class Level(NamedTuple):
    """What one level hands to the next. rows [L, B, (D-1)·F, kv_heads, 2·head_dim]: of the tree's
    nodes so far, level after level; zero beyond.
    """

    frontier: Frontier
    rows: jax.Array


class Place(NamedTuple):
    """Where a level is: its number from 1, its first row, and its nodes' position int32 [B]."""

    level: jax.Array
    first_row: jax.Array
    positions: jax.Array


class Candidates(NamedTuple):
    """A level's children. scores float32, parents and tokens int32; [B, F·K]."""

    scores: jax.Array
    parents: jax.Array
    tokens: jax.Array


class Grown(NamedTuple):
    """Where growing stands: the next level from 1, what it starts from, and the children of all
    levels, [D-1, B, F·K].
    """

    level: jax.Array
    carry: Level
    below: Candidates


def expand(
    config: HeadConfig,
    params: Params,
    prefix: Prefix,
    last_states: jax.Array,
    last_logits: jax.Array,
    root_tokens: jax.Array,
    *,
    shape: TreeShape,
    width: int | None = None,
    backend: Backend,
    chip: Chip | None,
    noise: SharedNoise | None = None,
    growth: Growth | None = None,
) -> BuiltTree:
    """B trees of up to shape.max_nodes nodes; `growth`: None for shape.max_depth levels.

    `width`: at least top_k, children of the root and nodes expanded per level; None: top_k.
    last_states [B, H] and last_logits float32 [B, draft vocabulary]: of each sequence's last pair;
    root_tokens int32 [B]; `noise`: that the target will pick with. Slots at num_live and beyond
    give trees that mean nothing.
    """
    batch, k = last_states.shape[0], shape.top_k
    f = k if width is None else width
    num_rows, words = num_tree_rows(shape, f), ancestor_words(shape, f)
    last_logits = with_noise(last_logits, own_targets(config, params), noise, 0)
    scores, tokens = best_tokens(config, params, last_logits, f)
    frontier = Frontier(
        tokens=tokens,
        scores=scores,
        pool_index=jnp.broadcast_to(jnp.arange(f, dtype=jnp.int32), (batch, f)),
        states=jnp.broadcast_to(last_states[:, None], (batch, f, last_states.shape[1])),
        bits=jnp.broadcast_to(_own_bits(0, f, words), (batch, f, words)),
    )
    spec = config.local_attention
    rows_shape = (config.num_layers, batch, num_rows, spec.num_kv_heads, 2 * spec.head_dim)

    def next_level(state: Grown) -> Grown:
        level = state.level
        at = Place(level, (level - 1) * f, prefix.kv_lens + (level - 1))
        carry, children = _expand_level(
            config, params, prefix, state.carry, at, noise, k, backend, chip
        )
        below = jax.tree.map(
            lambda all_levels, new: lax.dynamic_update_index_in_dim(all_levels, new, level - 1, 0),
            state.below,
            children,
        )
        return Grown(level + 1, carry, below)

    # A loop and not an unrolled chain: one level is compiled, however deep the tree.
    rows = jnp.zeros(rows_shape, last_states.dtype)
    below = _no_candidates(shape.max_depth - 1, batch, f * k)
    if shape.max_depth > 1:
        live = jnp.arange(batch, dtype=jnp.int32) < prefix.num_live
        start = Grown(jnp.int32(1), Level(frontier, rows), below)
        more = partial(_pays, shape.max_depth, live, growth)
        below = lax.while_loop(more, next_level, start).below

    def pool(first: jax.Array, rest: jax.Array) -> jax.Array:
        """[B, C] of [B, F] and [D-1, B, F·K]."""
        return jnp.concatenate([first, rest.transpose(1, 0, 2).reshape(batch, -1)], axis=1)

    return build_tree(
        pool(scores, below.scores),
        pool(jnp.full((batch, f), -1, jnp.int32), below.parents),
        pool(tokens, below.tokens),
        root_tokens,
        num_nodes=shape.max_nodes,
        max_depth=shape.max_depth,
        backend=backend,
    )


def _no_candidates(num_levels: int, batch: int, num_children: int) -> Candidates:
    shape = (num_levels, batch, num_children)
    return Candidates(
        scores=jnp.full(shape, -jnp.inf, jnp.float32),
        parents=jnp.full(shape, -1, jnp.int32),
        tokens=jnp.zeros(shape, jnp.int32),
    )


def _pays(max_depth: int, live: jax.Array, growth: Growth | None, state: Grown) -> jax.Array:
    """Whether a further level is grown; `live` bool [B]."""
    pays = state.level < max_depth
    if growth is None:
        return pays
    wanted = state.level < jnp.where(live, growth.max_levels, 0).max()
    reach = jnp.exp(state.carry.frontier.scores).sum(axis=1)
    spare = jnp.where(live, reach - growth.least_reach, 0.0).sum()
    return pays & wanted & (spare > 0)


def _expand_level(
    config: HeadConfig,
    params: Params,
    prefix: Prefix,
    carry: Level,
    at: Place,
    noise: SharedNoise | None,
    top_k: int,
    backend: Backend,
    chip: Chip | None,
) -> tuple[Level, Candidates]:
    """One level: the frontier through the head, its F·K children, and the best of them."""
    frontier, k = carry.frontier, top_k
    batch, f = frontier.tokens.shape
    outs, rows = _run(config, params, prefix, carry, at, backend, chip)
    logits = score(config, params, outs.reshape(batch * f, -1))
    logits = with_noise(logits, own_targets(config, params), noise, at.level)
    logps, tokens = best_tokens(config, params, logits, k)
    scores = frontier.scores[:, :, None] + logps.reshape(batch, f, k)
    children = Candidates(
        scores.reshape(batch, f * k),
        jnp.repeat(frontier.pool_index, k, axis=1),
        tokens.reshape(batch, f * k),
    )
    return Level(_next_frontier(frontier, children, outs, at), rows), children


def _run(
    config: HeadConfig,
    params: Params,
    prefix: Prefix,
    carry: Level,
    at: Place,
    backend: Backend,
    chip: Chip | None,
) -> tuple[jax.Array, jax.Array]:
    """The head on the frontier: states [B, F, H], and the tree's rows with the frontier's among
    them.
    """
    frontier = carry.frontier
    batch, f = frontier.tokens.shape
    num_rows = carry.rows.shape[2]
    live = jnp.minimum(jnp.arange(batch + 1, dtype=jnp.int32), prefix.num_live)
    zeros = jnp.zeros((batch,), jnp.int32)
    first = at.first_row

    def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        own = block_kv.reshape(batch, f, *block_kv.shape[1:])
        block = lax.dynamic_update_slice_in_dim(carry.rows[layer], own, first, axis=1)
        return tree_attention(
            q,
            block.reshape(batch * num_rows, *block.shape[2:]),
            prefix.pages,
            layer,
            prefix.page_table,
            prefix.kv_lens,
            live * f,  # slots that are not in use have no rows
            live * num_rows,
            zeros,
            frontier.bits.reshape(batch * f, -1),
            zeros + first,
            scale=config.attention_scale,
            window=config.windows[layer],
            backend=backend,
            chip=chip,
        )

    embed = head_embed(config, params, frontier.tokens.reshape(-1))
    # A node at depth d stands at position kv_len + d - 1: the pair behind the last one
    # belongs to the root's children.
    positions = jnp.repeat(at.positions, f)
    states = frontier.states.reshape(batch * f, -1)
    outs, block_kv = head_forward(config, params, embed, states, positions, attend)
    own = block_kv.reshape(config.num_layers, batch, f, *block_kv.shape[2:])
    rows = lax.dynamic_update_slice_in_dim(carry.rows, own, first, axis=2)
    return outs.reshape(batch, f, -1), rows


def _next_frontier(
    frontier: Frontier, children: Candidates, outs: jax.Array, at: Place
) -> Frontier:
    """The best F of the frontier's F·K children; they stand behind all earlier ones in the pool."""
    f = frontier.tokens.shape[1]
    num_children = children.scores.shape[1]
    scores, chosen = lax.top_k(children.scores, f)
    parent = chosen // (num_children // f)
    above = jnp.take_along_axis(frontier.bits, parent[:, :, None], axis=1)
    own = _own_bits(at.first_row + f, f, above.shape[2])
    return Frontier(
        tokens=jnp.take_along_axis(children.tokens, chosen, axis=1),
        scores=scores,
        pool_index=chosen + f + (at.level - 1) * num_children,
        states=jnp.take_along_axis(outs, parent[:, :, None], axis=1),
        bits=above | own,
    )


def _own_bits(first_row: jax.Array | int, num_rows: int, num_words: int) -> jax.Array:
    """uint32 [num_rows, W]: row i names tree row first_row + i."""
    row = first_row + jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    word = jnp.arange(num_words, dtype=jnp.int32)[None]
    bit = jnp.uint32(1) << (row % 32).astype(jnp.uint32)
    return jnp.where(row // 32 == word, bit, jnp.uint32(0))
