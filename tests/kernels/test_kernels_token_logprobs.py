"""Log-probabilities of emitted tokens and of the likeliest ones, against the oracle."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backend import Backend
from kernels.token_logprobs.api import token_logprobs
from kernels.token_logprobs.reference import reference_logprobs, reference_top


def test_each_sequence_gets_what_it_asked_for() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 4, (9, 31)).astype(np.float32)
    logits[8] = np.nan  # padding
    visited = np.array([[0, 2, 3], [4, -1, -1], [5, 6, -1], [-1, -1, -1]], np.int32)
    picks = np.array([[7, 1, 30], [3, -1, -1], [2, 2, -1], [-1, -1, -1]], np.int32)
    wanted = np.array([4, -1, 0, 4], np.int32)
    got = token_logprobs(
        *map(jnp.asarray, (logits, visited, picks, wanted)), max_top=4, backend=Backend.XLA
    )
    for b, d in np.ndindex(visited.shape):
        row = visited[b, d]
        if row < 0 or wanted[b] < 0:
            assert got.picked[b, d] == 0.0
            assert (np.asarray(got.top_tokens[b, d]) == -1).all()
            continue
        logprobs = reference_logprobs(logits[row])
        np.testing.assert_allclose(got.picked[b, d], logprobs[picks[b, d]], atol=1e-5)
        if wanted[b]:
            top = reference_top(logits[row], 4)
            np.testing.assert_array_equal(got.top_tokens[b, d], top)
            np.testing.assert_allclose(got.top[b, d], logprobs[top], atol=1e-5)
        else:
            assert (np.asarray(got.top_tokens[b, d]) == -1).all()


def test_more_than_the_vocabulary_is_refused() -> None:
    nothing = np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match=r"max_top: 5 is outside \[0, 4\]"):
        token_logprobs(
            jnp.zeros((1, 4)), nothing, nothing, nothing[0], max_top=5, backend=Backend.XLA
        )
