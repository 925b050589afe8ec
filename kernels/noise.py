"""Gumbel noise keyed by seed, position and token: the same for every service, any subset, no state.

`threefry2x32` is the 20-round Threefry-2x32 of Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (2011). Key: the two words of the 64-bit seed, which for choice > 0 of a request was mixed
with the choice's index. Counter: (absolute position of the picked token, token id). The noise is
the Gumbel quantile of u = (bits + 0.5)·2⁻³². float32 alone would lose both tails:

- u near 1: (bits + 0.5) rounds to 2³² and log(u) to 0. There 1 - u is computed exactly from the
  complement of the bits and -log(u) = -log1p(-(1 - u)).
- u near 0 is representable as it is.

All functions are elementwise over broadcast inputs and run inside Pallas kernels as well.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _rotate_left(x: jax.Array, bits: int) -> jax.Array:
    rotated: jax.Array = (x << jnp.uint32(bits)) | (x >> jnp.uint32(32 - bits))
    return rotated


def threefry2x32(
    key_lo: jax.Array, key_hi: jax.Array, counter_lo: jax.Array, counter_hi: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two uint32 words of output for uint32 key and counter, elementwise."""
    keys = (key_lo, key_hi, key_lo ^ key_hi ^ jnp.uint32(_PARITY))
    x0 = counter_lo + keys[0]
    x1 = counter_hi + keys[1]
    for block in range(5):
        for bits in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = _rotate_left(x1, bits) ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x0, x1


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """float32 -log(-log(u)), u = (bits + 0.5)·2⁻³² of uint32 `bits`; finite for all of them.

    Relative to the exact quantile the error is a few float32 roundings over the whole range
    [-3.13, 22.87].
    """
    scale = jnp.float32(2.0**-32)
    # Signed conversion of the halves: uint32 -> float32 has no vector instruction on many machines.
    upper = bits >= jnp.uint32(0x80000000)
    distance = jnp.where(upper, ~bits, bits)  # steps from the nearer end, below 2**31
    nearer = (distance.astype(jnp.int32).astype(jnp.float32) + jnp.float32(0.5)) * scale
    exponential = jnp.where(upper, -jnp.log1p(-nearer), -jnp.log(nearer))
    return -jnp.log(exponential)


def mix_choice(seed_lo: int, seed_hi: int, choice_index: int) -> tuple[int, int]:
    """Seed words of a request's choice; choice 0 keeps the seed. Host ints in [0, 2**32)."""
    if choice_index == 0:
        return seed_lo, seed_hi
    words = threefry2x32(
        jnp.uint32(seed_lo), jnp.uint32(seed_hi), jnp.uint32(choice_index), jnp.uint32(0xFFFFFFFF)
    )
    return int(words[0]), int(words[1])


def position_noise(
    seed_lo: jax.Array, seed_hi: jax.Array, positions: jax.Array, token_ids: jax.Array
) -> jax.Array:
    """float32 Gumbel noise, elementwise over the broadcast of all four.

    `seed_lo`, `seed_hi` uint32; `positions` int32, of the token that is being picked; `token_ids`
    int32.
    """
    bits, _ = threefry2x32(
        seed_lo, seed_hi, positions.astype(jnp.uint32), token_ids.astype(jnp.uint32)
    )
    return gumbel_from_bits(bits)
