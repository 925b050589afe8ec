"""Eight rows of logits in VMEM: the passes of the sampling kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.noise import position_noise
from kernels.sample_and_accept.batched import (
    Part,
    RowEdges,
    RowFilters,
    Terms,
    edge_margins,
    find_edge,
)
from kernels.sample_and_accept.best import Best
from kernels.sample_and_accept.filters import FLOOR

ROWS, LANES = 8, 128
RUNS = 4
"""Bests kept side by side, so that one need not wait for the other's comparison."""

PIECES = 8
"""Registers of [8, 128] that one turn of a loop takes: enough to hide what one waits for."""

Ref = Any
State = TypeVar("State")


def _tree(combine: Callable[[jax.Array, jax.Array], jax.Array], values: list[jax.Array]) -> Any:
    """`values` combined pairwise: short chains of dependent operations."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[2 * len(pairs) :]
    return values[0]


def _over_lanes(value: jax.Array) -> jax.Array:
    return jnp.broadcast_to(value, (ROWS, LANES))


@dataclass(frozen=True)
class _Piece:
    """128 tokens of the eight rows, `start` the first of them. A `batched.Part`."""

    block: RowBlock
    start: Any

    @property
    def span(self) -> Any:
        return pl.ds(self.start, LANES)

    @property
    def ids(self) -> jax.Array:
        """float32 [8, 128]."""
        return (self.start + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)).astype(jnp.float32)

    @property
    def scores(self) -> jax.Array:
        scores: jax.Array = self.block.scores_ref[:, self.span]
        return scores

    @property
    def weights(self) -> jax.Array:
        weights: jax.Array = self.block.work_ref[:, self.span]
        return weights

    @property
    def perturbed(self) -> jax.Array:
        return self.weights  # by then the work array holds them


class RowBlock:
    """Code generation over one block; the methods trace into the kernel's body.

    floats, words: per-row parameters, a value a lane (`kernel.FLOATS`, `kernel.WORDS`). out
    [8, 128]: pick, margin and log-probability in lanes 0 to 2.
    """

    def __init__(
        self,
        floats: Ref,
        words: Ref,
        logits: Ref,
        mask: Ref | None,
        out: Ref,
        scores: Ref,
        work: Ref,
        vocab: int,
    ) -> None:
        self.logits_ref, self.mask_ref, self.out_ref = logits, mask, out
        self.scores_ref, self.work_ref = scores, work
        self.vocab, self.width = vocab, -(-vocab // LANES) * LANES
        column = [_over_lanes(floats[:, i : i + 1]) for i in range(6)]
        self.live, self.sampled, self.inverse_temperature = column[:3]
        self.filters = RowFilters(*column[3:])
        self.words = words

    # ---- walking

    def walk(
        self, visit: Callable[[list[_Piece], bool, State], State], state: State
    ) -> State:
        """`visit(pieces, is_last, state)` over the vocabulary in order; `is_last`: the pieces may
        reach beyond it."""
        size = PIECES * LANES
        full = (self.width - 1) // size  # at least one piece is left for the end

        def turn(index: jax.Array, state: State) -> State:
            start = pl.multiple_of(index * size, size)
            pieces = [_Piece(self, start + k * LANES) for k in range(PIECES)]
            return visit(pieces, False, state)

        if full:
            state = lax.fori_loop(0, full, turn, state)
        rest = range(full * size, self.width, LANES)
        return visit([_Piece(self, start) for start in rest], True, state)

    def reduce(self, terms: Callable[[Part], Terms], num_sums: int, num_maxima: int) -> Terms:
        """`batched.Reduce`; gives [8, 128] with equal lanes."""

        def visit(pieces: list[_Piece], _: bool, state: Terms) -> Terms:
            found = [terms(piece) for piece in pieces]
            sums = [
                total + _tree(jnp.add, [f.sums[k] for f in found])
                for k, total in enumerate(state.sums)
            ]
            maxima = [
                jnp.maximum(most, _tree(jnp.maximum, [f.maxima[k] for f in found]))
                for k, most in enumerate(state.maxima)
            ]
            return Terms(tuple(sums), tuple(maxima))

        zero = jnp.zeros((ROWS, LANES), jnp.float32)
        worst = jnp.full((ROWS, LANES), -jnp.inf, jnp.float32)
        done = self.walk(visit, Terms((zero,) * num_sums, (worst,) * num_maxima))
        return Terms(
            tuple(_over_lanes(jnp.sum(s, axis=1, keepdims=True)) for s in done.sums),
            tuple(_over_lanes(jnp.max(m, axis=1, keepdims=True)) for m in done.maxima),
        )

    def find_best(
        self, values: Callable[[_Piece, bool], tuple[jax.Array, jax.Array | None]]
    ) -> tuple[Best, jax.Array]:
        """Of the first of `values(piece, is_last)`, and whether the second was ever true, as 0 or
        1: a value a row, [8, 1]."""
        start = (
            tuple(Best.none((ROWS, LANES)) for _ in range(RUNS)),
            jnp.zeros((ROWS, LANES), jnp.float32),
        )

        def visit(
            pieces: list[_Piece], is_last: bool, state: tuple[tuple[Best, ...], jax.Array]
        ) -> tuple[tuple[Best, ...], jax.Array]:
            runs, flagged = list(state[0]), state[1]
            for k, piece in enumerate(pieces):
                found, flag = values(piece, is_last)
                runs[k % RUNS] = runs[k % RUNS].push(found, piece.ids)
                if flag is not None:
                    flagged = jnp.where(flag, jnp.float32(1), flagged)
            return tuple(runs), flagged

        runs, flagged = self.walk(visit, start)
        best = functools.reduce(Best.merge, runs)
        return best.over_last_axis(), jnp.max(flagged, axis=1, keepdims=True)

    # ---- the passes

    def allowed(self, piece: _Piece, is_last: bool) -> tuple[jax.Array, jax.Array]:
        """Logits with what may not be picked at -inf, and where they are NaN or +inf."""
        logits = self.logits_ref[:, piece.span]
        broken = ~(logits < jnp.inf)
        allowed = ~broken
        if self.mask_ref is not None:
            mask = self.mask_ref[:, piece.span].astype(jnp.int32)
            allowed = allowed & (mask != 0)
        if is_last and self.vocab != self.width:
            inside = piece.ids < self.vocab
            allowed, broken = allowed & inside, broken & inside
        return jnp.where(allowed, logits, -jnp.inf), broken

    def greedy(self) -> None:
        """Best and next best of every row. Leaves the allowed logits in `scores`."""

        def values(piece: _Piece, is_last: bool) -> tuple[jax.Array, jax.Array]:
            logits, broken = self.allowed(piece, is_last)
            self.scores_ref[:, piece.span] = logits
            return logits, broken

        best, broken = self.find_best(values)
        self.usable = (broken == 0) & (best.value > -jnp.inf) & (self.live[:, :1] > 0)
        self.best_logit = jnp.where(self.usable, best.value, 0.0)
        self._write(best.index, best.value - best.second)

    def _write(self, index: jax.Array, margin: jax.Array) -> None:
        """Picks and margins of all rows, each [8, 1]."""
        lane = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        pick = jnp.where(self.usable, index, jnp.float32(-1))
        gap = jnp.where(self.usable, margin, jnp.float32(0))
        self.out_ref[...] = jnp.where(lane == 0, pick, jnp.where(lane == 1, gap, jnp.float32(0)))

    def sample(self, any_top_k: jax.Array, any_top_p: jax.Array, any_filter: jax.Array) -> None:
        """The sampled rows' picks and margins in place of the greedy ones. `any_...`: whether one
        of the rows has it."""
        self._scores()
        edges = self._edges(any_top_k, any_top_p)
        best = self._perturb(edges.threshold)
        pick_perturbed = _over_lanes(best.value)
        rows = (self.sampled[:, :1] > 0) & (best.value > -jnp.inf)
        pick = jnp.where(rows, best.index, self.out_ref[:, 0:1])
        gap = jnp.where(rows, best.value - best.second, self.out_ref[:, 1:2])
        self._write(pick, gap)

        @pl.when(any_filter)
        def _near_edges() -> None:
            def at_pick(part: Part) -> Terms:
                chosen = part.ids == _over_lanes(best.index)  # type: ignore[attr-defined]
                return Terms((), (jnp.where(chosen, part.scores, -jnp.inf),))

            pick_score = self.reduce(at_pick, 0, 1).maxima[0]
            margins = edge_margins(self.reduce, pick_score, pick_perturbed, edges, self.filters)
            self._write(pick, jnp.where(rows, jnp.minimum(gap, margins[:, :1]), gap))

    def _scores(self) -> None:
        best = _over_lanes(self.best_logit)

        def visit(pieces: list[_Piece], _: bool, state: jax.Array) -> jax.Array:
            for piece in pieces:
                scores = (piece.scores - best) * self.inverse_temperature
                self.scores_ref[:, piece.span] = jnp.where(scores < FLOOR, -jnp.inf, scores)
            return state

        self.walk(visit, jnp.int32(0))

    def _edges(self, any_top_k: jax.Array, any_top_p: jax.Array) -> RowEdges:
        floor = jnp.full((ROWS, LANES), FLOOR, jnp.float32)
        filters = self.filters

        def search_top_k() -> jax.Array:
            return find_edge(
                self.reduce,
                lambda part: jnp.ones_like(part.scores),
                filters.top_k,
                filters.top_k > 0,
                ways=2,
            )

        top_k_edge: jax.Array = lax.cond(any_top_k, search_top_k, lambda: floor)

        def search_top_p() -> tuple[jax.Array, jax.Array]:
            mass = self._weigh(top_k_edge)
            edge = find_edge(
                self.reduce,
                lambda part: part.weights,
                filters.top_p * mass,
                filters.top_p < 1.0,
                ways=2,
            )
            return edge, mass

        top_p_edge, mass = lax.cond(
            any_top_p, search_top_p, lambda: (floor, jnp.ones_like(floor))
        )
        return RowEdges(top_k_edge, top_p_edge, filters.min_p_edge, mass)

    def _weigh(self, top_k_edge: jax.Array) -> jax.Array:
        """Writes the weights of what top_k left; their sum."""

        def visit(pieces: list[_Piece], _: bool, total: jax.Array) -> jax.Array:
            weights = []
            for piece in pieces:
                scores = piece.scores
                weight = jnp.where(scores >= top_k_edge, jnp.exp(scores), jnp.float32(0))
                self.work_ref[:, piece.span] = weight
                weights.append(weight)
            return total + _tree(jnp.add, weights)

        total = self.walk(visit, jnp.zeros((ROWS, LANES), jnp.float32))
        return _over_lanes(jnp.sum(total, axis=1, keepdims=True))

    def _perturb(self, threshold: jax.Array) -> Best:
        """Writes score + noise; the best of what the filters keep."""
        seed_lo, seed_hi, position = (_over_lanes(self.words[:, i : i + 1]) for i in range(3))
        seed_lo = lax.bitcast_convert_type(seed_lo, jnp.uint32)
        seed_hi = lax.bitcast_convert_type(seed_hi, jnp.uint32)

        def values(piece: _Piece, _: bool) -> tuple[jax.Array, None]:
            ids = piece.start + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
            scores = piece.scores
            perturbed = scores + position_noise(seed_lo, seed_hi, position, ids)
            self.work_ref[:, piece.span] = perturbed
            return jnp.where(scores >= threshold, perturbed, -jnp.inf), None

        return self.find_best(values)[0]

    def logprobs(self) -> None:
        """Log-probability of the picks over all logits, masked or not, at temperature 1."""
        pick = _over_lanes(self.out_ref[:, 0:1])

        def visit(
            pieces: list[_Piece], is_last: bool, state: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            most, total, picked = state
            rows = []
            for piece in pieces:
                logits = self.logits_ref[:, piece.span]
                if is_last and self.vocab != self.width:
                    logits = jnp.where(piece.ids < self.vocab, logits, -jnp.inf)
                rows.append(logits)
                picked = jnp.maximum(picked, jnp.where(piece.ids == pick, logits, -jnp.inf))
            higher = jnp.maximum(most, _tree(jnp.maximum, rows))
            total = total * jnp.exp(most - higher)
            total = total + _tree(jnp.add, [jnp.exp(logits - higher) for logits in rows])
            return higher, total, picked

        lowest = jnp.full((ROWS, LANES), -1e30, jnp.float32)  # finite: no inf - inf
        start = (lowest, jnp.zeros((ROWS, LANES), jnp.float32), lowest)
        most, total, picked = self.walk(visit, start)
        top = jnp.max(most, axis=1, keepdims=True)
        total = jnp.sum(total * jnp.exp(most - top), axis=1, keepdims=True)
        logprob = jnp.max(picked, axis=1, keepdims=True) - (jnp.log(total) + top)
        lane = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        self.out_ref[...] = jnp.where(lane == 2, _over_lanes(logprob), self.out_ref[...])
