"""The bits of token masks as the sampler takes them, on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from verify_service.token_masks import WORD_BITS


def unpack_share(words: jax.Array, num_tokens: int, vocab_axis: str | None) -> jax.Array:
    """bool [N, num_tokens] of uint32 [N, M] (verify_service/token_masks.py).

    `vocab_axis`: inside `shard_map`, the axis over which the vocabulary is split into shares of
    `num_tokens`, in order; this chip's share then. Tokens beyond the words are not allowed.
    """
    bits = (words[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & jnp.uint32(1)
    allowed: jax.Array = (bits != 0).reshape(words.shape[0], -1)
    if vocab_axis is None:
        return allowed[:, :num_tokens]
    beyond = max(0, lax.axis_size(vocab_axis) * num_tokens - allowed.shape[1])
    allowed = jnp.pad(allowed, ((0, 0), (0, beyond)))
    first = lax.axis_index(vocab_axis) * num_tokens
    share: jax.Array = lax.dynamic_slice_in_dim(allowed, first, num_tokens, axis=1)
    return share
