"""Picks and walk in plain XLA, made for the CPU.

Greedy picks of all rows at once. Sampled sequences are walked one after the other and only the
rows on their paths are sampled: of a tree of 16 nodes two or three. A row's passes (threshold
search, noise, best of all) read 4·V bytes that stay in the core's cache; each row takes only the
passes that its own request needs, and without a sampled sequence there are none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.noise import position_noise
from kernels.sample_and_accept.filters import FLOOR, Edges, Filters, edge_margin, find_edges
from kernels.sample_and_accept.types import Accepted, Picks, SamplerParams
from kernels.sample_and_accept.walk import Trees, as_accepted, walk

GREEDY_TEMPERATURE = 1e-5  # as common.types has it


def best_two(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the best score (lowest among equals) and its lead over the next, along the last
    axis.

    Three maximum passes: XLA's argmax is not vectorised on the CPU and takes five times as long.
    """
    vocab = scores.shape[-1]
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    best = jnp.max(scores, axis=-1)
    index = jnp.min(jnp.where(scores == best[..., None], ids, vocab), axis=-1)
    second = jnp.max(jnp.where(ids == index[..., None], -jnp.inf, scores), axis=-1)
    return index, best - second


def sample_row(
    logits: jax.Array, noise: jax.Array, temperature: jax.Array, filters: Filters
) -> tuple[jax.Array, jax.Array]:
    """Pick and margin of one row with a valid maximum. `logits`, `noise` float32 [V]."""
    best = jnp.max(logits)
    scores = (logits - best) / temperature
    scores = jnp.where(scores < FLOOR, -jnp.inf, scores)
    perturbed = scores + noise

    def unfiltered() -> tuple[jax.Array, jax.Array]:
        return best_two(perturbed)

    def filtered() -> tuple[jax.Array, jax.Array]:
        edges: Edges = find_edges(scores, filters)
        pick, gap = best_two(jnp.where(scores >= edges.threshold, perturbed, -jnp.inf))
        margin = edge_margin(scores, perturbed, scores[pick], perturbed[pick], edges, filters)
        return pick, jnp.minimum(gap, margin)

    chosen: tuple[jax.Array, jax.Array] = lax.cond(filters.any_on, filtered, unfiltered)
    return chosen


def _sample_along_paths(
    logits: jax.Array,
    greedy: Picks,
    sampled: jax.Array,
    positions: jax.Array,
    params: SamplerParams,
    trees: Trees,
    max_depth: int,
) -> Picks:
    """`greedy` with the rows that the walks of `sampled` sequences (bool [B]) visit picked anew."""
    vocab = logits.shape[1]
    token_ids = jnp.arange(vocab, dtype=jnp.int32)
    roots = trees.roots()

    def walk_sequence(b: jax.Array, picks: Picks) -> Picks:
        filters = Filters(params.top_k[b], params.top_p[b], params.min_p[b])
        # A top_k as large as the vocabulary keeps everything.
        filters = filters._replace(top_k=jnp.where(filters.top_k >= vocab, 0, filters.top_k))

        def visit(state: tuple[Picks, jax.Array, jax.Array]) -> tuple[Picks, jax.Array, jax.Array]:
            done, row, depth = state
            noise = position_noise(params.seed_lo[b], params.seed_hi[b], positions[row], token_ids)
            pick, margin = sample_row(logits[row], noise, params.temperature[b], filters)
            done = Picks(done.picks.at[row].set(pick), done.margins.at[row].set(margin))
            return done, trees.child(row[None], pick[None])[0], depth + 1

        start = (picks, jnp.where(sampled[b], roots[b], -1), jnp.int32(0))
        walked, *_ = lax.while_loop(lambda s: (s[1] >= 0) & (s[2] <= max_depth), visit, start)
        return Picks(*walked)

    return Picks(*lax.fori_loop(0, trees.num_sequences, walk_sequence, greedy))


def pick_and_walk_xla(
    logits: jax.Array,
    tokens: jax.Array,
    parents: jax.Array,
    positions: jax.Array,
    node_sequence: jax.Array,
    params: SamplerParams,
    stop_tokens: jax.Array,
    want_logprobs: jax.Array,
    token_mask: jax.Array | None,
    max_depth: int,
) -> Accepted:
    """Arguments as in `api.sample_and_accept`."""
    broken = jnp.any(jnp.isnan(logits) | (logits == jnp.inf), axis=1)
    allowed = logits if token_mask is None else jnp.where(token_mask, logits, -jnp.inf)
    usable = (node_sequence >= 0) & ~broken & (jnp.max(allowed, axis=1) > -jnp.inf)
    trees = Trees(tokens, parents, node_sequence, stop_tokens, usable)
    best, lead = best_two(allowed)
    chosen = Picks(jnp.where(usable, best, -1), jnp.where(usable, lead, 0.0))
    sampled = params.temperature >= GREEDY_TEMPERATURE
    chosen = lax.cond(
        jnp.any(sampled),
        lambda: _sample_along_paths(allowed, chosen, sampled, positions, params, trees, max_depth),
        lambda: chosen,
    )
    path = walk(chosen, trees, max_depth)

    def logprobs() -> jax.Array:
        rows = jnp.maximum(path.visited, 0)
        picked = logits[rows, jnp.maximum(path.emitted, 0)]
        total = jax.nn.logsumexp(jnp.where(broken[:, None], 0.0, logits), axis=1)
        return jnp.where(path.visited >= 0, picked - total[rows], 0.0)

    none = jnp.zeros(path.emitted.shape, jnp.float32)
    return as_accepted(path, lax.cond(want_logprobs, logprobs, lambda: none))
