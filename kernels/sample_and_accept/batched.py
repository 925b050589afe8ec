"""Filters and margins of many rows at once, over a vocabulary that is walked in parts.

The same mathematics as `filters.py` has for one row on the CPU, for two walkers: the Pallas kernel
takes a row's scores from VMEM piece by piece, the sharded form reduces its own share and then over
the chips. Either gives a `Reduce`: what one pass over the vocabulary sums up and finds the
maximum of.

A per-row value ("Row") is float32 [R, 1], or [R, 128] with equal lanes: whatever the walker makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kernels.sample_and_accept.filters import FLOOR, REACHES

Row = jax.Array


class Part(Protocol):
    """Some tokens of all rows, each float32 [R, n], read when asked for. Tokens that do not exist
    or may not be picked score -inf."""

    @property
    def scores(self) -> jax.Array: ...

    @property
    def weights(self) -> jax.Array:
        """exp(score) of what top_k left, else 0; there until the noise is."""

    @property
    def perturbed(self) -> jax.Array:
        """score + noise; there from the noise on."""

    def spread(self, row: Row) -> jax.Array:
        """A Row beside every token: something that broadcasts with the arrays above."""


class Terms(NamedTuple):
    """What each token adds: [R, n] arrays; reduced: Rows."""

    sums: tuple[jax.Array, ...]
    maxima: tuple[jax.Array, ...] = ()


Reduce = Callable[[Callable[[Part], Terms], int, int], Terms]
"""One pass: what a function says of every part, summed and maximised over the whole vocabulary.
Arguments: the function, the number of its sums, and of its maxima."""


class RowFilters(NamedTuple):
    """Rows, as `filters.Filters`, with what is off made harmless."""

    top_k: Row  # as float32; 0 off
    top_p: Row  # 1 off
    min_p_edge: Row  # log(min_p); FLOOR off


class RowEdges(NamedTuple):
    """Rows, as `filters.Edges`; `mass`: sum of the weights of what top_k left."""

    top_k_edge: Row
    top_p_edge: Row
    min_p_edge: Row
    mass: Row

    @property
    def threshold(self) -> Row:
        return jnp.maximum(jnp.maximum(self.top_k_edge, self.top_p_edge), self.min_p_edge)


class _Bounds(NamedTuple):
    low: Row
    high: Row
    count_low: Row  # scores at or above low
    count_high: Row
    active: Row  # 1 where the search goes on


def _number(condition: jax.Array) -> jax.Array:
    return jnp.where(condition, jnp.float32(1), jnp.float32(0))


def find_edge(
    reduce: Reduce,
    weigh: Callable[[Part], jax.Array] | None,
    need: Row,
    wanted: jax.Array,
    ways: int,
) -> Row:
    """Largest score v for which `weigh` of all scores >= v sums to `need` (None: each weighs 1); of
    several within one float's rounding the least. FLOOR in rows that are not `wanted` (bool Row).

    A pass cuts [low, high] in `ways` parts and keeps one; two ways where a pass is cheap, more
    where each costs a collective. It ends when one score is left between the bounds.
    """

    def cut(low: Row, high: Row) -> list[Row]:
        return [low + (high - low) * jnp.float32(part / ways) for part in range(1, ways)]

    def weight_and_count(values: list[Row]) -> list[tuple[Row, Row]]:
        def terms(part: Part) -> Terms:
            found = []
            for value in values:
                inside = part.scores >= part.spread(value)
                if weigh is not None:
                    found.append(jnp.where(inside, weigh(part), jnp.float32(0)))
                found.append(_number(inside))
            return Terms(tuple(found))

        if weigh is None:
            counts = reduce(terms, len(values), 0).sums
            return list(zip(counts, counts, strict=True))
        sums = reduce(terms, 2 * len(values), 0).sums
        return list(zip(sums[::2], sums[1::2], strict=True))

    def narrowed(s: _Bounds, values: list[Row], found: list[tuple[Row, Row]]) -> _Bounds:
        low, high, count_low, count_high, _ = s
        for value, (weight, count) in zip(values, found, strict=True):
            enough = weight >= need
            low = jnp.where(enough, jnp.maximum(low, value), low)
            count_low = jnp.where(enough, jnp.minimum(count_low, count), count_low)
            high = jnp.where(enough, high, jnp.minimum(high, value))
            count_high = jnp.where(enough, count_high, jnp.maximum(count_high, count))
        middle = low + (high - low) * jnp.float32(0.5)
        goes_on = (count_low - count_high > 1) & (middle > low) & (middle < high)
        going = s.active > 0
        return _Bounds(
            jnp.where(going, low, s.low),
            jnp.where(going, high, s.high),
            jnp.where(going, count_low, s.count_low),
            jnp.where(going, count_high, s.count_high),
            jnp.where(goes_on, s.active, jnp.float32(0)),
        )

    def narrow(s: _Bounds) -> _Bounds:
        values = cut(s.low, s.high)
        return narrowed(s, values, weight_and_count(values))

    floor = jnp.full_like(need, FLOOR)
    ceiling = jnp.full_like(need, 1e-6)  # just above the best score, which is 0
    values = cut(floor, ceiling)
    (weight_all, count_all), *found = weight_and_count([floor, *values])
    start = _Bounds(
        floor, ceiling, count_all, jnp.zeros_like(need), _number(wanted & (weight_all >= need))
    )
    low = lax.while_loop(
        lambda s: jnp.max(s.active) > 0, narrow, narrowed(start, values, found)
    ).low

    def score_above(part: Part) -> Terms:
        inside = part.scores >= part.spread(low)
        return Terms((), (jnp.where(inside, -part.scores, -jnp.inf),))

    # The bound lies in the gap below the value that is sought: the edge is the score itself.
    edge = -reduce(score_above, 0, 1).maxima[0]
    return jnp.where(wanted & (edge < jnp.inf), edge, floor)


def _log_odds(share: Row) -> Row:
    return jnp.log(share) - jnp.log(jnp.maximum(1.0 - share, 1e-30))


def _top_p_distance(score: Row, inside: bool, above: tuple[Row, ...], mass: Row, top_p: Row) -> Row:
    """As `filters._top_p_distance`; `above`: for each reach, the mass of scores above `score` less
    (inside) or plus the reach."""
    found = jnp.zeros_like(score)
    for reach, held in zip(REACHES, above, strict=True):
        own = jnp.exp(score) if inside else jnp.float32(0)
        share = _log_odds(jnp.maximum(held - own, 0.0) / mass)
        difference = _log_odds(top_p) - share if inside else share - _log_odds(top_p)
        found = jnp.maximum(found, jnp.minimum(jnp.float32(reach), difference))
    return found


def edge_margins(
    reduce: Reduce, pick_score: Row, pick_perturbed: Row, edges: RowEdges, filters: RowFilters
) -> Row:
    """As `filters.edge_margin`, of all rows, in two passes; inf in rows without a filter."""
    has_k, has_p = filters.top_k > 0, filters.top_p < 1.0
    has_m = filters.min_p_edge > FLOOR
    threshold = edges.threshold

    def weight(part: Part) -> jax.Array:
        inside = part.scores >= part.spread(edges.top_k_edge)
        return jnp.where(inside, jnp.exp(part.scores), jnp.float32(0))

    def near_pick(part: Part) -> Terms:
        scores, weights, spread = part.scores, weight(part), part.spread
        in_top_k, outside = scores >= spread(edges.top_k_edge), scores < spread(threshold)
        above = [jnp.where(scores > spread(pick_score - reach), weights, 0.0) for reach in REACHES]
        beating = [outside & (part.perturbed > spread(pick_perturbed - reach)) for reach in REACHES]
        return Terms(
            (_number(in_top_k), *above),
            (
                jnp.where(in_top_k, -jnp.inf, scores),
                jnp.where(outside, scores, -jnp.inf),
                *[jnp.where(beats, scores, -jnp.inf) for beats in beating],
            ),
        )

    (num_in_top_k, *above_pick), (next_best, best_outside, *rivals) = reduce(
        near_pick, 1 + len(REACHES), 2 + len(REACHES)
    )

    def above_rivals(part: Part) -> Terms:
        scores, weights = part.scores, weight(part)
        return Terms(
            tuple(
                jnp.where(scores > part.spread(rival + reach), weights, 0.0)
                for rival in rivals
                for reach in REACHES
            )
        )

    above = reduce(above_rivals, len(REACHES) ** 2, 0).sums

    far = jnp.full_like(pick_score, jnp.inf)
    # With a tie at the k-th place more than k are kept, and the least move breaks it.
    tied = has_k & (num_in_top_k > filters.top_k)
    next_best = jnp.where(tied, edges.top_k_edge, next_best)
    leaves = jnp.minimum(
        jnp.where(has_k, pick_score - next_best, far),
        jnp.where(has_m, pick_score - edges.min_p_edge, far),
    )
    stays = _top_p_distance(pick_score, True, tuple(above_pick), edges.mass, filters.top_p)
    leaves = jnp.minimum(leaves, jnp.where(has_p, jnp.where(tied, 0.0, stays), far))
    nearest = jnp.zeros_like(pick_score)
    for index, (reach, rival) in enumerate(zip(REACHES, rivals, strict=True)):
        held = above[index * len(REACHES) : (index + 1) * len(REACHES)]
        waits = _top_p_distance(rival, False, held, edges.mass, filters.top_p)
        waits = jnp.where(tied, 0.0, waits)
        to_edge = jnp.maximum(
            jnp.where(rival < edges.top_k_edge, edges.top_k_edge - rival, 0.0),
            jnp.where(rival < edges.min_p_edge, edges.min_p_edge - rival, 0.0),
        )
        to_edge = jnp.maximum(to_edge, jnp.where(rival < edges.top_p_edge, waits, 0.0))
        enters = jnp.where(rival > -jnp.inf, jnp.minimum(to_edge, reach), reach)
        nearest = jnp.maximum(nearest, enters)
    nobody = best_outside == -jnp.inf
    margin = jnp.minimum(leaves, jnp.where(nobody, far, nearest))
    return jnp.where(has_k | has_p | has_m, margin, far)
