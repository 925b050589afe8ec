"""Candidates ordered with the noise that the target will pick with.

At temperature > 0 the target picks argmax(log p / T + g), its noise g a function of the sequence's
seed, the pick's position and the token (`kernels.noise`), which the draft can compute as well.
Where the head's q is near p, argmax(log q / T + g) is likely that very pick; the likeliest tokens
by q alone are not. How sure one may be of it follows from how far q is from p, which nobody knows;
the softmax of SURENESS · (log q / T + g) stands for it, and verify's budget calibrates what it is
told.

A guess changes no token: the target picks as ever. Its filters and penalties are not known here; a
token that they forbid is a wrong guess.

Axes: B sequences, N rows (the same number for each sequence), V draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.noise import position_noise

SURENESS = 1.0


class SharedNoise(NamedTuple):
    """seed_lo, seed_hi uint32 [B]; temperature float32 [B], 0: greedy, no noise; positions int32
    [B]: of the token that is picked at the tree's root.
    """

    seed_lo: jax.Array
    seed_hi: jax.Array
    temperature: jax.Array
    positions: jax.Array


def with_noise(
    logits: jax.Array, token_ids: jax.Array, noise: SharedNoise | None, depth: jax.Array | int
) -> jax.Array:
    """float32 [N, V]: what to order and to score children by. `logits` of nodes at `depth`.

    token_ids int32 [V]: of the draft vocabulary, in the target's. Where no sequence samples, no
    noise is computed.
    """
    if noise is None:
        return logits
    repeats = logits.shape[0] // noise.positions.shape[0]

    def rows(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, repeats)[:, None]

    def sampled(logits: jax.Array) -> jax.Array:
        positions = rows(noise.positions + depth)
        gumbel = position_noise(rows(noise.seed_lo), rows(noise.seed_hi), positions, token_ids)
        temperature = rows(noise.temperature)
        samples = temperature > 0
        cooled = logits / jnp.where(samples, temperature, jnp.float32(1))
        return jnp.where(samples, jnp.float32(SURENESS) * (cooled + gumbel), logits)

    any_samples = (noise.temperature > 0).any()
    ordered: jax.Array = lax.cond(any_samples, sampled, lambda same: same, logits)
    return ordered
