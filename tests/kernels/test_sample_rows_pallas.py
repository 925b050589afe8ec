"""The sampling kernel in TPU interpret mode against the float64 oracle and the XLA form.

Lanes beyond the vocabulary, rows beyond the last and VMEM before it is written hold NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import failing_on_faults
from jax.experimental.pallas import tpu as pltpu
from sampling_cases import params_of, random_logits, requests, roots_call, tree_call

from kernels.backend import Backend
from kernels.chips import CHIPS
from kernels.sample_and_accept.api import sample_and_accept
from kernels.sample_and_accept.kernel import choose_plan, pick_rows_pallas, vmem_bytes
from kernels.sample_and_accept.reference import reference_pick
from kernels.sample_and_accept.types import Accepted, RowPicks

pytestmark = pytest.mark.interpret

ROWS, VOCAB = 11, 2300
"""Two blocks of rows, the second not full; a whole turn of the loops, and an end of two registers,
the second not full."""


@functools.cache
def _kernel(masked: bool) -> Any:
    params = pltpu.InterpretParams(detect_races=True)

    def call(logits: Any, positions: Any, owner: Any, wanted: Any, *mask: Any) -> RowPicks:
        return pick_rows_pallas(
            logits,
            positions,
            owner,
            wanted,
            jnp.asarray(True),
            mask[0] if masked else None,
            chip=CHIPS["v5e"],
            interpret=params,
        )

    return jax.jit(call)


def run_kernel(call: dict, mask: np.ndarray | None = None) -> RowPicks:
    """On the host. Raises KernelFault for a race."""
    arrays = [call[k] for k in ("logits", "positions", "node_sequence", "params")]
    extra = [] if mask is None else [jnp.asarray(mask)]
    with failing_on_faults():
        out = jax.device_get(_kernel(mask is not None)(*arrays, *extra))
    return out


@functools.cache
def _whole(backend: Backend, max_depth: int) -> Any:
    return jax.jit(
        functools.partial(
            sample_and_accept,
            max_depth=max_depth,
            want_logprobs=True,
            backend=backend,
            chip=CHIPS["v5e"],
        )
    )


def both(call: dict, max_depth: int) -> tuple[Accepted, Accepted]:
    with failing_on_faults():
        got = jax.device_get(_whole(Backend.INTERPRET, max_depth)(**call))
    return got, jax.device_get(_whole(Backend.XLA, max_depth)(**call))


@settings(max_examples=8, deadline=None)
@given(
    wanted=st.lists(requests, min_size=ROWS, max_size=ROWS),
    seed=st.integers(0, 2**16),
    ties=st.booleans(),
)
def test_picks_and_margins_equal_the_xla_form(wanted: list, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, ROWS, VOCAB, ties)
    call = roots_call(logits, rng.integers(0, 100_000, ROWS), wanted)
    got, want = run_kernel(call), jax.device_get(_whole(Backend.XLA, 0)(**call))
    for row in range(ROWS):
        if got.picks.picks[row] != want.emitted[row, 0]:
            assert want.emitted_margins[row, 0] < 1e-3, wanted[row]
            continue
        np.testing.assert_allclose(
            got.picks.margins[row], want.emitted_margins[row, 0], rtol=1e-4, atol=1e-3
        )
        np.testing.assert_allclose(got.logprobs[row], want.emitted_logprobs[row, 0], atol=1e-4)


@settings(max_examples=4, deadline=None)
@given(
    wanted=st.lists(requests, min_size=ROWS, max_size=ROWS),
    seed=st.integers(0, 2**16),
    masked=st.booleans(),
)
def test_picks_equal_the_oracle(wanted: list, seed: int, masked: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, ROWS, VOCAB, False)
    logits[3, 7], logits[5, 2299], logits[8] = np.nan, np.inf, -np.inf
    mask = rng.random(logits.shape) < 0.5 if masked else None
    positions = rng.integers(0, 100_000, ROWS)
    got = run_kernel(roots_call(logits, positions, wanted), mask)
    for row, request in enumerate(wanted):
        want = reference_pick(
            logits[row],
            **request,
            position=int(positions[row]),
            token_mask=None if mask is None else mask[row],
        )
        pick, margin = int(got.picks.picks[row]), float(got.picks.margins[row])
        assert bool(got.usable[row]) == (want.pick >= 0)
        if pick != want.pick:
            assert margin < 1e-3, (request, want, margin)
            continue
        if pick >= 0:
            assert 0 <= margin <= want.gap + 1e-3
            np.testing.assert_allclose(got.logprobs[row], want.logprob, atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_walks_equal_the_xla_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    call = tree_call(rng, num_nodes=40, batch=3, vocab=4)
    wanted = [{"temperature": t, "seed_lo": i} for i, t in enumerate((0.0, 0.7, 1.0))]
    arrays = {name: jnp.asarray(value) for name, value in call.items()}
    got, want = both({**arrays, "params": params_of(*wanted)}, max_depth=12)
    for name in ("num_accepted", "accepted", "emitted"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_allclose(got.emitted_logprobs, want.emitted_logprobs, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (9, 131)])
def test_edge_shapes(shape: tuple[int, int]) -> None:
    rows = shape[0]
    logits = np.random.default_rng(0).normal(size=shape)
    wanted = [{"temperature": float(row % 2), "top_k": row % 3} for row in range(rows)]
    got, want = both(roots_call(logits, np.arange(rows), wanted), max_depth=0)
    np.testing.assert_array_equal(got.emitted, want.emitted)
    np.testing.assert_allclose(got.emitted_margins, want.emitted_margins, rtol=1e-4, atol=1e-4)


def test_two_buffers_where_they_fit_and_an_error_where_nothing_does() -> None:
    assert choose_plan(CHIPS["v5e"], 151936, masked=True).buffers == 2
    assert choose_plan(CHIPS["v4"], 151936, masked=True).buffers == 1
    with pytest.raises(ValueError, match="split the vocabulary"):
        choose_plan(CHIPS["v4"], 300_000, masked=False)
    assert vmem_bytes(128256, 2, masked=False) == 8 * 128256 * 4 * 4
    call = roots_call(np.zeros((1, 8)), np.zeros(1), [{}])
    with pytest.raises(ValueError, match="chip: backend interpret needs"):
        sample_and_accept(**call, max_depth=0, backend=Backend.INTERPRET)
