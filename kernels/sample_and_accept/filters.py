"""The filters of one row as one threshold on its scores, found without sorting.

Each filter keeps the scores at or above some value: top_k the k-th largest, top_p the least one
above which less than p of the mass lies, min_p a fixed distance below the best. So together they
keep `scores >= threshold`, ties included. The first two are found by bisection over value; a pass
reads the row once.

Scores are relative to the row's best one and cut at `FLOOR`: the noise lies in [-3.14, 22.9], so
that a token more than 26.1 below the best one never wins, whatever the filters say about it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

FLOOR = -40.0


class Filters(NamedTuple):
    """Scalars of one row's request, and whether each is at work."""

    top_k: jax.Array  # int32; 0 off
    top_p: jax.Array  # float32; 1 off
    min_p: jax.Array  # float32; 0 off

    @property
    def any_on(self) -> jax.Array:
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


class Edges(NamedTuple):
    """Where a row's filters cut.

    `threshold`: kept are the scores at or above it. `top_k_edge`, `top_p_edge`, `min_p_edge`: the
    same of each filter; FLOOR where it is off. `weights` [V]: exp(score) of what top_k left, else
    0; `mass` their sum.
    """

    top_k_edge: jax.Array
    top_p_edge: jax.Array
    min_p_edge: jax.Array
    weights: jax.Array
    mass: jax.Array

    @property
    def threshold(self) -> jax.Array:
        return jnp.maximum(jnp.maximum(self.top_k_edge, self.top_p_edge), self.min_p_edge)


def largest_value_holding(scores: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """Largest v among `scores` for which the weights of all scores >= v sum to `need`; FLOOR if
    none.

    Bisection in [FLOOR, 0] until one distinct score is left between the bounds (or no float lies
    between them), some 12 to 25 passes.
    """

    Bounds = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

    def weight_and_count(value: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside = scores >= value
        return jnp.sum(jnp.where(inside, weights, 0.0)), jnp.sum(inside, dtype=jnp.int32)

    def narrow(state: Bounds) -> Bounds:
        low, high, count_low, count_high, _ = state
        middle = low + (high - low) * 0.5
        weight, count = weight_and_count(middle)
        enough = weight >= need
        low, high = jnp.where(enough, middle, low), jnp.where(enough, high, middle)
        count_low = jnp.where(enough, count, count_low)
        count_high = jnp.where(enough, count_high, count)
        following = low + (high - low) * 0.5
        done = (count_low - count_high <= 1) | (following <= low) | (following >= high)
        return low, high, count_low, count_high, done

    weight_all, count_all = weight_and_count(jnp.float32(FLOOR))
    start = (
        jnp.float32(FLOOR),
        jnp.float32(1e-6),  # just above the best score, which is 0
        count_all,
        jnp.int32(0),
        weight_all < need,
    )
    low, *_ = lax.while_loop(lambda state: ~state[4], narrow, start)
    # The bound lies in the gap below the value that is sought: the edge is the score itself.
    edge = jnp.min(jnp.where(scores >= low, scores, 0.0))
    return jnp.where(weight_all < need, jnp.float32(FLOOR), edge)


def find_edges(scores: jax.Array, filters: Filters) -> Edges:
    """`scores` float32 [V]: the best is 0, none below FLOOR but -inf."""
    floor = jnp.float32(FLOOR)
    counted = jnp.ones_like(scores)
    top_k_edge = lax.cond(
        filters.top_k > 0,
        lambda: largest_value_holding(scores, counted, filters.top_k.astype(jnp.float32)),
        lambda: floor,
    )
    weights = jnp.where(scores >= top_k_edge, jnp.exp(scores), 0.0)
    mass = jnp.sum(weights)
    top_p_edge = lax.cond(
        filters.top_p < 1.0,
        lambda: largest_value_holding(scores, weights, filters.top_p * mass),
        lambda: floor,
    )
    min_p_edge = jnp.where(filters.min_p > 0.0, jnp.log(filters.min_p), floor)
    return Edges(top_k_edge, top_p_edge, min_p_edge, weights, mass)


def _log_odds(share: jax.Array) -> jax.Array:
    return jnp.log(share) - jnp.log1p(-jnp.minimum(share, 1.0))


REACHES = (4e-3, 6e-2, 1.0)
"""Distances, in score, at which margins are looked for; the last caps those that filters set."""


def _top_p_distance(
    score: jax.Array, inside: bool, scores: jax.Array, edges: Edges, top_p: jax.Array
) -> jax.Array:
    """Lower bound of how far two scores must move against each other for a token at `score` to
    cross top_p's edge, from `inside` or from outside.

    A token is kept while the share of mass above it is below top_p. When no score moves by more
    than d, (1) only tokens within 2d of it change sides with it, (2) the log-odds of a fixed set's
    share move by at most 2d. So within a reach r the distance is at least min(r, difference of
    log-odds with the tokens within r counted against it); the best of some reaches is taken.
    """
    reach = jnp.asarray(REACHES, jnp.float32)[:, None]
    above = scores[None] > (score - reach if inside else score + reach)
    mass = jnp.sum(jnp.where(above, edges.weights[None], 0.0), axis=1)
    # The token itself is not above itself, however far the reach.
    mass = jnp.maximum(mass - jnp.exp(score), 0.0) if inside else mass
    share = _log_odds(mass / edges.mass)
    difference = _log_odds(top_p) - share if inside else share - _log_odds(top_p)
    return jnp.maximum(jnp.max(jnp.minimum(reach[:, 0], difference)), 0.0)


def edge_margin(
    scores: jax.Array,
    perturbed: jax.Array,
    pick_score: jax.Array,
    pick_perturbed: jax.Array,
    edges: Edges,
    filters: Filters,
) -> jax.Array:
    """How far the filters are from changing the pick, in score. `perturbed` [V]: before filtering.

    The pick may leave, or a token outside may come in that beats it. A token outside has to come in
    *and* to beat the pick; the first distance grows as its score falls. So within a reach r the
    distance is at least min(r, that of the best-scored token within r of beating the pick).
    """
    has_k, has_p, has_m = filters.top_k > 0, filters.top_p < 1.0, filters.min_p > 0.0
    far = jnp.float32(jnp.inf)
    in_top_k = scores >= edges.top_k_edge
    # With a tie at the k-th place more than k are kept, and the least move breaks it.
    tied = has_k & (jnp.sum(in_top_k, dtype=jnp.int32) > filters.top_k)
    next_best = jnp.max(jnp.where(in_top_k, -jnp.inf, scores))
    next_best = jnp.where(tied, edges.top_k_edge, next_best)
    leaves = jnp.minimum(
        jnp.where(has_k, pick_score - next_best, far),
        jnp.where(has_m, pick_score - edges.min_p_edge, far),
    )
    stays = _top_p_distance(pick_score, True, scores, edges, filters.top_p)
    leaves = jnp.minimum(leaves, jnp.where(has_p, jnp.where(tied, 0.0, stays), far))

    def enters(reach: float) -> jax.Array:
        beats = perturbed > pick_perturbed - jnp.float32(reach)
        rival = jnp.max(jnp.where((scores < edges.threshold) & beats, scores, -jnp.inf))
        waits = jnp.where(tied, 0.0, _top_p_distance(rival, False, scores, edges, filters.top_p))
        to_edge = jnp.maximum(
            jnp.where(rival < edges.top_k_edge, edges.top_k_edge - rival, 0.0),
            jnp.where(rival < edges.min_p_edge, edges.min_p_edge - rival, 0.0),
        )
        to_edge = jnp.maximum(to_edge, jnp.where(rival < edges.top_p_edge, waits, 0.0))
        return jnp.where(rival > -jnp.inf, jnp.minimum(to_edge, reach), reach)

    nobody = ~jnp.any((scores < edges.threshold) & (scores > -jnp.inf))
    nearest = jnp.max(jnp.stack([enters(reach) for reach in REACHES]))
    return jnp.minimum(leaves, jnp.where(nobody, far, nearest))
