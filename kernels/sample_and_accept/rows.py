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
RUNS = 8
"""Bests kept side by side, so that one need not wait for the other's comparison."""

CHUNK, SMALL_CHUNK = 2048, 1024
"""Tokens that one turn of a loop takes: 16 registers, enough to hide what one waits for; 8 in
passes that compute much, whose registers would spill."""

FEW_TERMS = 3

Ref = Any
State = TypeVar("State")


def _registers(values: jax.Array) -> list[jax.Array]:
    """[8, n] as n / 128 arrays of [8, 128]."""
    return [values[:, at : at + LANES] for at in range(0, values.shape[1], LANES)]


def _over_lanes(column: jax.Array) -> jax.Array:
    """[8, 1] -> a Row. Once, in front of a loop: in it, every turn would wait for the spreading."""
    return jnp.broadcast_to(column, (ROWS, LANES))


def _tree(combine: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """[8, n] -> [8, 128], combined pairwise: short chains of dependent operations."""
    left = _registers(values)
    while len(left) > 1:
        pairs = [combine(a, b) for a, b in zip(left[::2], left[1::2], strict=False)]
        left = pairs + left[2 * len(pairs) :]
    return left[0]


@dataclass(frozen=True)
class Chunk:
    """`width` tokens of the eight rows from `start` on; a `batched.Part`. `is_last`: some may lie
    beyond the vocabulary."""

    block: RowBlock
    start: Any
    width: int
    is_last: bool

    @property
    def span(self) -> Any:
        return pl.ds(self.start, self.width)

    @property
    def ids(self) -> jax.Array:
        """int32 [8, width]."""
        ids: jax.Array = self.start + lax.broadcasted_iota(jnp.int32, (ROWS, self.width), 1)
        return ids

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

    def spread(self, row: jax.Array) -> jax.Array:
        return jnp.concatenate([row] * (self.width // LANES), axis=1)


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
        self, visit: Callable[[Chunk, State], State], state: State, size: int = CHUNK
    ) -> State:
        """`visit(chunk, state)` over the vocabulary in order."""
        full = (self.width - 1) // size  # something is left for the end, where lanes are checked

        def turn(index: jax.Array, state: State) -> State:
            return visit(Chunk(self, pl.multiple_of(index * size, size), size, False), state)

        if full:
            state = lax.fori_loop(0, full, turn, state)
        return visit(Chunk(self, full * size, self.width - full * size, True), state)

    def reduce(self, terms: Callable[[Part], Terms], num_sums: int, num_maxima: int) -> Terms:
        """`batched.Reduce`; gives Rows [8, 128]."""

        def visit(chunk: Chunk, state: Terms) -> Terms:
            found = terms(chunk)
            sums = [t + _tree(jnp.add, f) for t, f in zip(state.sums, found.sums, strict=True)]
            maxima = [
                jnp.maximum(m, _tree(jnp.maximum, f))
                for m, f in zip(state.maxima, found.maxima, strict=True)
            ]
            return Terms(tuple(sums), tuple(maxima))

        zero = jnp.zeros((ROWS, LANES), jnp.float32)
        worst = jnp.full((ROWS, LANES), -jnp.inf, jnp.float32)
        size = CHUNK if num_sums + num_maxima <= FEW_TERMS else SMALL_CHUNK
        done = self.walk(visit, Terms((zero,) * num_sums, (worst,) * num_maxima), size)
        return Terms(
            tuple(_over_lanes(jnp.sum(s, axis=1, keepdims=True)) for s in done.sums),
            tuple(_over_lanes(jnp.max(m, axis=1, keepdims=True)) for m in done.maxima),
        )

    def find_best(
        self, values: Callable[[Chunk], tuple[jax.Array, jax.Array | None]], size: int = CHUNK
    ) -> tuple[Best, jax.Array]:
        """Of the first of `values(chunk)`, and whether the second was ever true, as 0 or 1: a
        value a row, [8, 1]."""
        start = (
            tuple(Best.none((ROWS, LANES)) for _ in range(RUNS)),
            jnp.zeros((ROWS, LANES), jnp.float32),
        )

        def visit(
            chunk: Chunk, state: tuple[tuple[Best, ...], jax.Array]
        ) -> tuple[tuple[Best, ...], jax.Array]:
            runs, flagged = list(state[0]), state[1]
            found, flag = values(chunk)
            for k, value in enumerate(_registers(found)):
                # Only a register's first token is kept, a scalar: the lane says the rest.
                runs[k % RUNS] = runs[k % RUNS].push(value, jnp.int32(chunk.start + k * LANES))
            if flag is not None:
                for mark in _registers(flag):
                    flagged = jnp.where(mark, jnp.float32(1), flagged)
            return tuple(runs), flagged

        runs, flagged = self.walk(visit, start, size)
        best = functools.reduce(Best.merge, runs)
        token = best.token + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        best = best._replace(token=token.astype(jnp.float32))
        return best.over_last_axis(), jnp.max(flagged, axis=1, keepdims=True)

    # ---- the passes

    def allowed(self, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Logits with what may not be picked at -inf, and where they are NaN or +inf."""
        logits = self.logits_ref[:, chunk.span]
        fine = logits < jnp.inf
        broken = ~fine
        if self.mask_ref is not None:
            fine = fine & (self.mask_ref[:, chunk.span].astype(jnp.int32) != 0)
        if chunk.is_last and self.vocab != self.width:
            inside = chunk.ids < self.vocab
            fine, broken = fine & inside, broken & inside
        return jnp.where(fine, logits, -jnp.inf), broken

    def greedy(self) -> None:
        """Best and next best of every row. Leaves the allowed logits in `scores`."""

        def values(chunk: Chunk) -> tuple[jax.Array, jax.Array]:
            logits, broken = self.allowed(chunk)
            self.scores_ref[:, chunk.span] = logits
            return logits, broken

        best, broken = self.find_best(values)
        self.usable = (broken == 0) & (best.value > -jnp.inf) & (self.live[:, :1] > 0)
        self.best_logit = _over_lanes(jnp.where(self.usable, best.value, 0.0))
        self._write(best.token, best.value - best.second)

    def _write(self, index: jax.Array, margin: jax.Array) -> None:
        """Picks and margins of all rows, each [8, 1]."""
        pick = jnp.where(self.usable, index, jnp.float32(-1))
        gap = jnp.where(self.usable, margin, jnp.float32(0))
        lane = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        self.out_ref[...] = jnp.where(lane == 0, pick, jnp.where(lane == 1, gap, jnp.float32(0)))

    def sample(self, any_top_k: jax.Array, any_top_p: jax.Array, any_filter: jax.Array) -> None:
        """The sampled rows' picks and margins in place of the greedy ones. `any_...`: whether one
        of the rows has it."""
        self._scores()
        edges = self._edges(any_top_k, any_top_p)
        best = self._perturb(edges.threshold)
        rows = (self.sampled[:, :1] > 0) & (best.value > -jnp.inf)
        pick = jnp.where(rows, best.token, self.out_ref[:, 0:1])
        gap = jnp.where(rows, best.value - best.second, self.out_ref[:, 1:2])
        self._write(pick, gap)

        @pl.when(any_filter)
        def _near_edges() -> None:
            index, perturbed = _over_lanes(best.token), _over_lanes(best.value)

            def at_pick(chunk: Any) -> Terms:
                chosen = chunk.ids.astype(jnp.float32) == chunk.spread(index)
                return Terms((), (jnp.where(chosen, chunk.scores, -jnp.inf),))

            pick_score = self.reduce(at_pick, 0, 1).maxima[0]
            margins = edge_margins(self.reduce, pick_score, perturbed, edges, self.filters)
            self._write(pick, jnp.where(rows, jnp.minimum(gap, margins[:, :1]), gap))

    def _scores(self) -> None:
        def visit(chunk: Chunk, state: jax.Array) -> jax.Array:
            scores = chunk.scores - chunk.spread(self.best_logit)
            scores = scores * chunk.spread(self.inverse_temperature)
            self.scores_ref[:, chunk.span] = jnp.where(scores < FLOOR, -jnp.inf, scores)
            return state

        self.walk(visit, jnp.int32(0))

    def _edges(self, any_top_k: jax.Array, any_top_p: jax.Array) -> RowEdges:
        floor = jnp.full((ROWS, LANES), FLOOR, jnp.float32)
        filters = self.filters

        def search_top_k() -> jax.Array:
            return find_edge(self.reduce, None, filters.top_k, filters.top_k > 0, ways=2)

        top_k_edge: jax.Array = lax.cond(any_top_k, search_top_k, lambda: floor)

        def search_top_p() -> tuple[jax.Array, jax.Array]:
            mass = self._weigh(top_k_edge)
            need, wanted = filters.top_p * mass, filters.top_p < 1.0
            return find_edge(self.reduce, lambda part: part.weights, need, wanted, ways=2), mass

        top_p_edge, mass = lax.cond(any_top_p, search_top_p, lambda: (floor, jnp.ones_like(floor)))
        return RowEdges(top_k_edge, top_p_edge, filters.min_p_edge, mass)

    def _weigh(self, top_k_edge: jax.Array) -> jax.Array:
        """Writes the weights of what top_k left; their sum."""

        def visit(chunk: Chunk, total: jax.Array) -> jax.Array:
            scores = chunk.scores
            weights = jnp.where(scores >= chunk.spread(top_k_edge), jnp.exp(scores), jnp.float32(0))
            self.work_ref[:, chunk.span] = weights
            return total + _tree(jnp.add, weights)

        total = self.walk(visit, jnp.zeros((ROWS, LANES), jnp.float32))
        return _over_lanes(jnp.sum(total, axis=1, keepdims=True))

    def _perturb(self, threshold: jax.Array) -> Best:
        """Writes score + noise; the best of what the filters keep."""
        words = [_over_lanes(self.words[:, i : i + 1]) for i in range(3)]
        seeds = [lax.bitcast_convert_type(word, jnp.uint32) for word in words[:2]]

        def values(chunk: Chunk) -> tuple[jax.Array, None]:
            scores = chunk.scores
            lo, hi, position = (chunk.spread(word) for word in (*seeds, words[2]))
            perturbed = scores + position_noise(lo, hi, position, chunk.ids)
            self.work_ref[:, chunk.span] = perturbed
            return jnp.where(scores >= chunk.spread(threshold), perturbed, -jnp.inf), None

        return self.find_best(values, SMALL_CHUNK)[0]

    def logprobs(self) -> None:
        """Log-probability of the picks over all logits, masked or not, at temperature 1."""
        pick = _over_lanes(self.out_ref[:, 0:1])

        def visit(
            chunk: Chunk, state: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            most, total, picked = state
            logits = self.logits_ref[:, chunk.span]
            if chunk.is_last and self.vocab != self.width:
                logits = jnp.where(chunk.ids < self.vocab, logits, -jnp.inf)
            at_pick = jnp.where(
                chunk.ids.astype(jnp.float32) == chunk.spread(pick), logits, -jnp.inf
            )
            higher = jnp.maximum(most, _tree(jnp.maximum, logits))
            weights = jnp.exp(logits - chunk.spread(higher))
            total = total * jnp.exp(most - higher) + _tree(jnp.add, weights)
            return higher, total, jnp.maximum(picked, _tree(jnp.maximum, at_pick))

        lowest = jnp.full((ROWS, LANES), -1e30, jnp.float32)  # finite: no inf - inf
        most, total, picked = self.walk(visit, (lowest, jnp.zeros_like(lowest), lowest))
        top = jnp.max(most, axis=1, keepdims=True)
        total = jnp.sum(total * jnp.exp(most - top), axis=1, keepdims=True)
        logprob = jnp.max(picked, axis=1, keepdims=True) - (jnp.log(total) + top)
        lane = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        self.out_ref[...] = jnp.where(lane == 2, logprob, self.out_ref[...])
