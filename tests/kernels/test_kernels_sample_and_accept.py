"""Picks, margins and walk against the float64 oracle, and the distribution of picks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import params_of, random_logits, requests, roots_call, tree_call
from scipy import stats

from kernels.backend import Backend
from kernels.sample_and_accept.api import sample_and_accept
from kernels.sample_and_accept.reference import keep_mask, reference_pick, reference_walk
from kernels.sample_and_accept.types import Accepted

MAX_DEPTH = 8


@functools.cache
def compiled(max_depth: int):
    return jax.jit(
        functools.partial(
            sample_and_accept, max_depth=max_depth, want_logprobs=True, backend=Backend.XLA
        )
    )


def pick_rows(logits: np.ndarray, positions: np.ndarray, wanted: list[dict]) -> Accepted:
    """Every row the root of a sequence of its own."""
    return compiled(0)(**roots_call(logits, positions, wanted))


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(requests, min_size=4, max_size=4),
    seed=st.integers(0, 2**16),
    ties=st.booleans(),
)
def test_picks_equal_the_oracle(wanted, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, 4, 101, ties)
    positions = rng.integers(0, 100_000, 4)
    got = pick_rows(logits, positions, wanted)
    for row, request in enumerate(wanted):
        want = reference_pick(logits[row], **request, position=int(positions[row]))
        margin = float(got.emitted_margins[row, 0])
        assert margin >= 0
        if want.pick != int(got.emitted[row, 0]):
            assert margin < 1e-3, (request, want, margin)
            continue
        assert margin <= want.gap + 1e-4
        np.testing.assert_allclose(got.emitted_logprobs[row, 0], want.logprob, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(requests, min_size=4, max_size=4),
    seed=st.integers(0, 2**16),
    ties=st.booleans(),
)
def test_no_move_below_half_the_margin_changes_a_pick(wanted, seed: int, ties: bool) -> None:
    """What `margins` promises, tried with moves that are as bad as they can be."""
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, 4, 53, ties)
    positions = rng.integers(0, 1000, 4)
    got = pick_rows(logits, positions, wanted)
    picks, margins = np.asarray(got.emitted[:, 0]), np.asarray(got.emitted_margins[:, 0])
    scale = np.array([r["temperature"] if r["temperature"] > 0 else 1.0 for r in wanted])
    reach = np.minimum(margins * 0.49, 5.0) - 1e-5
    for attempt in range(6):
        signs = rng.choice([-1.0, 1.0], logits.shape)
        if attempt == 0:  # everyone but the pick gains
            signs = np.ones(logits.shape)
            signs[np.arange(4), picks] = -1
        moved = logits + signs * np.maximum(reach, 0.0)[:, None] * scale[:, None]
        again = np.asarray(pick_rows(moved, positions, wanted).emitted[:, 0])
        assert (again == picks).all() or (reach[again != picks] <= 0).all()


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("request_", FILTERS, ids=str)
def test_picks_follow_the_filtered_distribution(request_: dict) -> None:
    rng = np.random.default_rng(7)
    row = (rng.normal(size=24) * 2).astype(np.float32)
    draws, batch = 6000, 500
    counts = np.zeros(24, int)
    for start in range(0, draws, batch):
        got = pick_rows(
            np.tile(row, (batch, 1)),
            np.arange(start, start + batch),
            [request_ | {"seed_lo": 11, "seed_hi": start}] * batch,
        )
        counts += np.bincount(np.asarray(got.emitted[:, 0]), minlength=24)
    scores = row.astype(np.float64) / request_["temperature"]
    kept = keep_mask(
        scores, request_.get("top_k", 0), request_.get("top_p", 1.0), request_.get("min_p", 0.0)
    )
    expected = np.where(kept, np.exp(scores - scores.max()), 0.0)
    expected *= draws / expected.sum()
    assert counts[~kept].sum() == 0
    rare = kept & (expected < 5)
    common = kept & ~rare
    observed = [*counts[common], counts[rare].sum()]
    wanted = [*expected[common], expected[rare].sum()]
    if not rare.any():
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), temperature=st.sampled_from([0.0, 1.0]))
def test_walks_equal_the_oracle(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    call = tree_call(rng, num_nodes=40, batch=3, vocab=4)
    wanted = [{"temperature": t, "seed_lo": i} for i, t in enumerate((0.0, temperature, 1.0))]
    got = compiled(12)(params=params_of(*wanted), **{k: jnp.asarray(v) for k, v in call.items()})
    picks = np.full(40, -1)
    for n, b in enumerate(call["node_sequence"]):
        if b >= 0:
            picks[n] = reference_pick(
                call["logits"][n], **wanted[b], position=int(call["positions"][n])
            ).pick
    want = reference_walk(
        picks, *(call[k] for k in ("tokens", "parents", "node_sequence", "stop_tokens"))
    )
    for b, (path, emitted) in enumerate(want):
        assert int(got.num_accepted[b]) == len(path)
        assert [int(n) for n in got.accepted[b] if n >= 0] == path
        assert [int(t) for t in got.emitted[b] if t >= 0] == emitted


def test_masked_tokens_are_never_picked() -> None:
    logits = jnp.asarray([[5.0, 4.0, 3.0, 2.0]] * 2)
    mask = jnp.asarray([[False, False, True, True]] * 2)
    got = sample_and_accept(
        logits,
        jnp.zeros(2, jnp.int32),
        jnp.full(2, -1, jnp.int32),
        jnp.arange(2, dtype=jnp.int32),
        jnp.arange(2, dtype=jnp.int32),
        params_of({}, {"temperature": 1.0}),
        jnp.full((2, 1), -1, jnp.int32),
        mask,
        max_depth=0,
        backend=Backend.XLA,
    )
    assert int(got.emitted[0, 0]) == 2
    assert int(got.emitted[1, 0]) in (2, 3)
    assert float(got.emitted_logprobs[0, 0]) == 0.0  # not asked for


def test_greedy_ties_go_to_the_lowest_id_with_margin_0() -> None:
    got = pick_rows(np.array([[1.0, 3.0, 3.0, 2.0]]), np.zeros(1), [{}])
    assert int(got.emitted[0, 0]) == 1
    assert float(got.emitted_margins[0, 0]) == 0.0


def test_misfits_are_refused_with_both_values() -> None:
    call = {k: jnp.asarray(v) for k, v in tree_call(np.random.default_rng(0), 8, 2, 4).items()}
    with pytest.raises(ValueError, match=r"params.temperature: shape \(1,\) must be \(2,\)"):
        compiled(4)(params=params_of({}), **call)
    call["logits"] = call["logits"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="logits: dtype bfloat16 must be float32"):
        compiled(4)(params=params_of({}, {}), **call)
