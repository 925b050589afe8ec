"""Noise: the published threefry answers, tails in double precision, distribution."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from common.noise_key import seed_of_choice
from kernels.noise import gumbel_from_bits, mix_choice, position_noise, threefry2x32
from kernels.sample_and_accept.reference import reference_noise, reference_threefry2x32

# Random123's known answers: counter, key, output.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_threefry_gives_the_known_answers(counter, key, output) -> None:
    words = threefry2x32(*(jnp.uint32(word) for word in (*key, *counter)))
    assert tuple(int(word) for word in words) == output
    assert reference_threefry2x32(key, counter) == output


def test_noise_equals_the_double_precision_quantile_in_both_tails() -> None:
    edges = [0, 1, 2, 255, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 256, 2**32 - 2, 2**32 - 1]
    bits = np.array(edges + list(np.random.default_rng(0).integers(0, 2**32, 5000)), np.uint64)
    want = [-math.log(-math.log1p((int(b) + 0.5) / 2**32 - 1)) for b in bits]
    got = np.asarray(gumbel_from_bits(jnp.asarray(bits.astype(np.uint32))), np.float64)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=4e-7, atol=4e-7)
    assert got.max() > 22.8
    assert got.min() < -3.1


def test_noise_is_keyed_by_seed_position_and_token() -> None:
    seeds = [(1, 0), (0, 1), (0xFFFFFFFF, 7)]
    for lo, hi in seeds:
        for position in (0, 1, 70000):
            got = position_noise(
                jnp.uint32(lo), jnp.uint32(hi), jnp.int32(position), jnp.arange(5, dtype=jnp.int32)
            )
            want = [reference_noise(lo, hi, position, token) for token in range(5)]
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-6, atol=1e-6)


def test_choices_have_seeds_of_their_own_and_choice_0_keeps_it() -> None:
    mixed = [mix_choice(123, 456, choice) for choice in range(5)]
    assert mixed[0] == (123, 456)
    assert len(set(mixed)) == 5
    assert mixed[1] == reference_threefry2x32((123, 456), (1, 0xFFFFFFFF))


@pytest.mark.parametrize("seed", [0, 456 << 32 | 123, 0xFEDCBA9876543210, (1 << 64) - 1])
def test_seed_of_choice_on_the_host_is_the_same_function(seed: int) -> None:
    for choice in range(3):
        lo, hi = mix_choice(seed & 0xFFFFFFFF, seed >> 32, choice)
        assert seed_of_choice(seed, choice) == hi << 32 | lo


def test_noise_is_gumbel_distributed() -> None:
    noise = position_noise(
        jnp.uint32(3),
        jnp.uint32(4),
        jnp.arange(200, dtype=jnp.int32)[:, None],
        jnp.arange(200, dtype=jnp.int32)[None],
    )
    assert stats.kstest(np.asarray(noise).ravel(), stats.gumbel_r.cdf).pvalue > 1e-3
