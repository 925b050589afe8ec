"""Adjusted logits in plain XLA: one pass over the rows, then the few tokens of each node's path.

What a sequence has committed is looked up as whole rows of `seen`; tokens on a node's own path are
at most `max_depth` more, and their logits are computed once again with the path counted in. Each
part runs only in steps that hold a request for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.adjust_logits.types import LogitOptions, SlotState
from kernels.vocabulary import place_in_share


def _penalised(
    logits: jax.Array, seen: jax.Array, presence: jax.Array, frequency: jax.Array, by: jax.Array
) -> jax.Array:
    """Elementwise; `seen` as in `SlotState`, `by` the repetition penalty."""
    count = seen // 2
    repeated = jnp.where(logits > 0, logits / by, logits * by)
    out = jnp.where(seen > 0, repeated, logits)
    out = out - frequency * count.astype(jnp.float32)
    return out - jnp.where(count > 0, presence, jnp.float32(0.0))


def _path_tokens(tokens: jax.Array, parents: jax.Array, max_depth: int) -> jax.Array:
    """int32 [N, max_depth]: tokens from each node up to below its root; -1 padded.

    The root itself is a committed token, which `seen` has already.
    """
    node = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    columns = []
    for _ in range(max_depth):
        parent = jnp.where(node >= 0, parents[jnp.maximum(node, 0)], -1)
        below_root = (node >= 0) & (parent >= 0)
        columns.append(jnp.where(below_root, tokens[jnp.maximum(node, 0)], -1))
        node = jnp.where(below_root, parent, -1)
    return jnp.stack(columns, axis=1)


def _with_penalties(
    logits: jax.Array,
    tokens: jax.Array,
    parents: jax.Array,
    owner: jax.Array,
    state: SlotState,
    options: LogitOptions,
    max_depth: int,
    vocab_axis: str | None,
) -> jax.Array:
    num_rows, vocab = logits.shape
    is_on = options.is_penalised[owner]
    slot = jnp.where(is_on, options.slot[owner], 0)
    knobs = [column[owner][:, None] for column in options[1:4]]
    seen = jnp.where(is_on[:, None], state.seen[slot], 0)
    out = _penalised(logits, seen, *knobs)
    if max_depth == 0:
        return out
    path = _path_tokens(tokens, parents, max_depth)
    times = jnp.sum(path[:, :, None] == path[:, None, :], axis=2, dtype=jnp.int32)
    place = place_in_share(path, vocab, vocab_axis)
    known = jnp.minimum(place, vocab - 1)
    rows = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32)[:, None], path.shape)
    with_path = state.seen[slot[:, None], known] + 2 * times
    fresh = _penalised(logits[rows, known], with_path, *knobs)
    column = jnp.where(is_on[:, None], place, vocab)  # beyond the last: dropped
    return out.at[rows, column].set(fresh, mode="drop")


def adjust_logits_xla(
    logits: jax.Array,
    tokens: jax.Array,
    parents: jax.Array,
    positions: jax.Array,
    node_sequence: jax.Array,
    state: SlotState,
    options: LogitOptions,
    stop_tokens: jax.Array,
    token_mask: jax.Array | None,
    max_depth: int,
    vocab_axis: str | None,
) -> jax.Array:
    """Arguments as in `api.adjust_logits`. Without any option at work: one copy of the logits."""
    vocab = logits.shape[1]
    owner = jnp.maximum(node_sequence, 0)

    def with_bias(logits: jax.Array) -> jax.Array:
        is_on = options.has_bias[owner] > 0
        bias = state.bias[jnp.where(is_on, options.slot[owner], 0)]
        return logits + jnp.where(is_on[:, None], bias, 0.0)

    def without_stops(logits: jax.Array) -> jax.Array:
        is_early = (positions < options.min_position[owner])[:, None]
        stops = place_in_share(stop_tokens, vocab, vocab_axis)[owner]
        column = jnp.where(is_early, stops, vocab)
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        return logits.at[rows, column].set(-jnp.inf, mode="drop")

    def with_options(logits: jax.Array) -> jax.Array:
        logits = lax.cond(
            jnp.any(options.is_penalised),
            lambda x: _with_penalties(
                x, tokens, parents, owner, state, options, max_depth, vocab_axis
            ),
            lambda x: x,
            logits,
        )
        logits = lax.cond(jnp.any(options.has_bias > 0), with_bias, lambda x: x, logits)
        return without_stops(logits)

    is_on = options.is_penalised | (options.has_bias > 0) | (options.min_position > 0)
    adjusted: jax.Array = lax.cond(jnp.any(is_on), with_options, lambda x: x, logits)
    return adjusted if token_mask is None else jnp.where(token_mask, adjusted, -jnp.inf)


def count_tokens_xla(
    state: SlotState,
    options: LogitOptions,
    tokens: jax.Array,
    positions: jax.Array,
    sequence: jax.Array,
    committed: jax.Array,
    vocab_axis: str | None,
) -> SlotState:
    """Arguments as in `api.count_tokens`."""
    num_slots, vocab = state.seen.shape
    owner = jnp.where(committed, sequence, 0)
    counts = committed & options.is_penalised[owner] & (positions >= options.num_prompt[owner])
    slot = jnp.where(counts, options.slot[owner], num_slots)  # beyond the last: dropped
    column = place_in_share(tokens, vocab, vocab_axis)
    return state._replace(seen=state.seen.at[slot, column].add(2, mode="drop"))
