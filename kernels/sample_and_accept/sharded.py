"""Picks from logits that are split over chips by vocabulary, inside `shard_map`: no chip ever sees
another's logits.

Each chip reduces its own share and the chips exchange a few numbers a row. Collectives, of at most
30 numbers a row: 1 for greedy rows, 1 more if a row is sampled, 3 more if one has a filter, and per
kind of filter the search: its rounds and 1 (`batched.find_edge`; a round cuts the interval in
`WAYS`, 6 rounds are the most and 3 usual), for top_p 1 more. What no row asks for is left out.

In plain XLA: [N, V / chips] is small enough that a pass over it in HBM is cheap beside the lm_head
that made it, and collectives inside a kernel would gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kernels.noise import position_noise
from kernels.sample_and_accept.batched import (
    Part,
    Reduce,
    Row,
    RowEdges,
    RowFilters,
    Terms,
    edge_margins,
    find_edge,
)
from kernels.sample_and_accept.best import Best
from kernels.sample_and_accept.filters import FLOOR
from kernels.sample_and_accept.types import Picks, RowPicks, SamplerParams
from kernels.sample_and_accept.xla import GREEDY_TEMPERATURE, best_two

WAYS = 16
"""Parts that a round of the search cuts an interval in. More would save rounds, each a collective
of some ten microseconds, and cost a comparison per logit and part."""


def _sum(values: jax.Array, axis: str) -> jax.Array:
    total: jax.Array = lax.psum(values, axis)  # type: ignore[no-untyped-call]
    return total


def _max(values: jax.Array, axis: str) -> jax.Array:
    most: jax.Array = lax.pmax(values, axis)  # type: ignore[no-untyped-call]
    return most


@dataclass(frozen=True)
class _Share:
    """This chip's tokens of all rows; a `batched.Part`, float32 [N, V / chips]."""

    scores: jax.Array
    weights: jax.Array
    perturbed: jax.Array

    def spread(self, row: Row) -> jax.Array:
        return row


@dataclass(frozen=True)
class _Vocabulary:
    """`axis`: the mesh axis over which it is split. `ids` int32 [V / chips]: this chip's tokens."""

    axis: str
    ids: jax.Array

    def reduce(self, share: _Share) -> Reduce:
        """A `batched.Reduce` over all chips' shares; Rows are [N, 1]."""

        def over(terms: Callable[[Part], Terms], num_sums: int, num_maxima: int) -> Terms:
            found = terms(share)
            sums, maxima = jnp.zeros(0), jnp.zeros(0)
            if num_sums:
                local = [jnp.sum(s, axis=1) for s in found.sums]
                sums = _sum(jnp.stack(local), self.axis)[..., None]
            if num_maxima:
                local = [jnp.max(m, axis=1) for m in found.maxima]
                maxima = _max(jnp.stack(local), self.axis)[..., None]
            return Terms(tuple(sums), tuple(maxima))

        return over

    def best(
        self, values: jax.Array, at_best: tuple[jax.Array, ...], of_chips: tuple[jax.Array, ...]
    ) -> tuple[Best, list[Row], list[jax.Array]]:
        """Of `values` [N, V / chips], Rows; what each of `at_best` [N, V / chips] holds there; and
        `of_chips` [N] of every chip, [N, chips]. One collective."""
        value = jnp.max(values, axis=1)
        index, lead = best_two(values)
        token = self.ids[jnp.minimum(index, self.ids.shape[0] - 1)]
        second = jnp.where(value > -jnp.inf, value - lead, -jnp.inf)
        # Not a gather: on TPU that reads the array several times.
        chosen = self.ids[None] == token[:, None]
        held = [jnp.max(jnp.where(chosen, array, -jnp.inf), axis=1) for array in at_best]
        local = jnp.stack([value, second, token.astype(jnp.float32), *held, *of_chips])
        value, second, token, *others = jnp.moveaxis(lax.all_gather(local, self.axis), 0, -1)
        best = Best(value, second, token).over_last_axis()
        wins = token == best.token
        held = [
            jnp.max(jnp.where(wins, array, -jnp.inf), axis=1, keepdims=True)
            for array in others[: len(at_best)]
        ]
        return best, held, others[len(at_best) :]


def _rows(values: jax.Array, owner: jax.Array) -> Row:
    return values[owner][:, None]


def pick_rows_sharded(
    logits: jax.Array,  # float32 [N, V / chips], this chip's
    positions: jax.Array,  # int32 [N]
    node_sequence: jax.Array,  # int32 [N]
    params: SamplerParams,  # [B]
    want_logprobs: jax.Array,  # bool scalar
    token_mask: jax.Array | None,  # bool [N, V / chips], this chip's
    *,
    axis: str,
) -> RowPicks:
    """Arguments as in `api.sample_and_accept`; the same result on every chip."""
    size = logits.shape[1]
    ids = lax.axis_index(axis) * size + jnp.arange(size, dtype=jnp.int32)
    vocabulary = _Vocabulary(axis, ids)
    broken = jnp.any(~(logits < jnp.inf), axis=1)
    clean = jnp.where(broken[:, None], -jnp.inf, logits)
    allowed = clean if token_mask is None else jnp.where(token_mask, clean, -jnp.inf)
    none = jnp.zeros(broken.shape, jnp.float32)
    total = lax.cond(want_logprobs, lambda: jax.nn.logsumexp(clean, axis=1), lambda: none)
    found = vocabulary.best(allowed, (), (broken.astype(jnp.float32), total))
    best, _, (any_broken, totals) = found
    usable = (node_sequence >= 0) & (best.value[:, 0] > -jnp.inf)
    usable &= jnp.max(any_broken, axis=1) == 0

    owner = jnp.maximum(node_sequence, 0)
    sampled = usable & (params.temperature[owner] >= GREEDY_TEMPERATURE)
    greedy = (best.token, best.value - best.second, best.value)
    token, margin, logit = lax.cond(
        jnp.any(sampled),
        lambda: _sample(vocabulary, allowed, best.value, greedy, positions, owner, sampled, params),
        lambda: greedy,
    )
    picks = Picks(
        jnp.where(usable, token[:, 0], -1.0).astype(jnp.int32),
        jnp.where(usable, margin[:, 0], 0.0),
    )
    return RowPicks(picks, usable, logit[:, 0] - jax.nn.logsumexp(totals, axis=1))


def _sample(
    vocabulary: _Vocabulary,
    allowed: jax.Array,
    best_logit: Row,
    greedy: tuple[Row, Row, Row],
    positions: jax.Array,
    owner: jax.Array,
    sampled: jax.Array,
    params: SamplerParams,
) -> tuple[Row, Row, Row]:
    """Tokens, margins and logits of the picks: those of `sampled` rows anew."""
    chips = lax.axis_size(vocabulary.axis)
    on = sampled[:, None]
    top_k = _rows(params.top_k, owner)
    min_p = _rows(params.min_p, owner)
    filters = RowFilters(
        jnp.where(on & (top_k < chips * allowed.shape[1]), top_k, 0).astype(jnp.float32),
        jnp.where(on, jnp.minimum(_rows(params.top_p, owner), 1.0), 1.0),
        jnp.where(on & (min_p > 0.0), jnp.maximum(jnp.log(min_p), FLOOR), FLOOR),
    )
    temperature = jnp.where(on, _rows(params.temperature, owner), 1.0)
    scores = (allowed - jnp.where(on, best_logit, 0.0)) / temperature
    scores = jnp.where(scores < FLOOR, -jnp.inf, scores)
    edges = _find_edges(vocabulary, scores, filters)
    noise = position_noise(
        _rows(params.seed_lo, owner),
        _rows(params.seed_hi, owner),
        positions[:, None],
        vocabulary.ids[None],
    )
    perturbed = scores + noise
    kept = jnp.where(scores >= edges.threshold, perturbed, -jnp.inf)
    best, (pick_score, pick_logit), _ = vocabulary.best(kept, (scores, allowed), ())

    share = _Share(scores, scores, perturbed)
    no_limit = jnp.full_like(best.value, jnp.inf)
    limit = lax.cond(
        jnp.any(edges.threshold > FLOOR),
        lambda: edge_margins(vocabulary.reduce(share), pick_score, best.value, edges, filters),
        lambda: no_limit,
    )
    margin = jnp.minimum(best.value - best.second, limit)
    token, gap, logit = greedy
    return (
        jnp.where(on, best.token, token),
        jnp.where(on, margin, gap),
        jnp.where(on, pick_logit, logit),
    )


def _find_edges(vocabulary: _Vocabulary, scores: jax.Array, filters: RowFilters) -> RowEdges:
    floor = jnp.full_like(filters.top_k, FLOOR)
    has_k, has_p = filters.top_k > 0, filters.top_p < 1.0

    def search_top_k() -> Row:
        reduce = vocabulary.reduce(_Share(scores, scores, scores))
        return find_edge(reduce, None, filters.top_k, has_k, WAYS)

    top_k_edge: Row = lax.cond(jnp.any(has_k), search_top_k, lambda: floor)

    def search_top_p() -> tuple[Row, Row]:
        weights = jnp.where(scores >= top_k_edge, jnp.exp(scores), 0.0)
        mass = _sum(jnp.sum(weights, axis=1, keepdims=True), vocabulary.axis)
        reduce = vocabulary.reduce(_Share(scores, weights, scores))
        need = filters.top_p * mass
        return find_edge(reduce, lambda part: part.weights, need, has_p, WAYS), mass

    top_p_edge, mass = lax.cond(jnp.any(has_p), search_top_p, lambda: (floor, jnp.ones_like(floor)))
    return RowEdges(top_k_edge, top_p_edge, filters.min_p_edge, mass)
