"""Guessed tokens through the head, on its own states: what trees grown ahead of a result stand on.

True features of these tokens do not exist yet. As along a tree's path, each token is read with the
head's own output at the token before it. One after the other, all sequences at once; nothing of it
enters the pages, so that true features later find them as they were.

Axes: B sequences, S guessed tokens, H hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from draft_service.expand import Prefix, Stem
from kernels.backend import Backend
from kernels.chips import Chip
from kernels.tree_attention.api import tree_attention
from models.eagle3 import HeadConfig, head_embed, head_forward
from models.layers import Params


def run_stem(
    config: HeadConfig,
    params: Params,
    prefix: Prefix,
    states: jax.Array,
    tokens: jax.Array,
    lens: jax.Array,
    *,
    backend: Backend,
    chip: Chip | None,
) -> tuple[jax.Array, Stem]:
    """The head's output at each sequence's last guessed token, [B, H], and the rows of all.

    states [B, H]: its output at the last true pair; tokens int32 [B, S]; lens int32 [B].
    """
    batch, num_stem = tokens.shape
    spec = config.local_attention
    rows_shape = (config.num_layers, batch, num_stem, spec.num_kv_heads, 2 * spec.head_dim)
    num_words = -(-num_stem // 32)
    live = jnp.minimum(jnp.arange(batch + 1, dtype=jnp.int32), prefix.num_live)
    zeros = jnp.zeros((batch,), jnp.int32)
    word = jnp.arange(num_words, dtype=jnp.int32)

    def one(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        before, rows = carry
        # Rows 0 to index: in each word, so many low bits.
        count = jnp.clip(index + 1 - 32 * word, 0, 32).astype(jnp.uint32)
        low = jnp.where(
            count < 32, (jnp.uint32(1) << jnp.minimum(count, 31)) - 1, jnp.uint32(0xFFFFFFFF)
        )
        bits = jnp.broadcast_to(low, (batch, num_words))

        def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
            block = lax.dynamic_update_slice_in_dim(rows[layer], block_kv[:, None], index, axis=1)
            return tree_attention(
                q,
                block.reshape(batch * num_stem, *block.shape[2:]),
                prefix.pages,
                layer,
                prefix.page_table,
                prefix.kv_lens,
                live,
                live * num_stem,
                zeros,
                bits,
                zeros + index,
                scale=config.attention_scale,
                window=config.windows[layer],
                backend=backend,
                chip=chip,
            )

        embed = head_embed(config, params, tokens[:, index])
        outs, block_kv = head_forward(config, params, embed, before, prefix.kv_lens + index, attend)
        rows = lax.dynamic_update_slice_in_dim(rows, block_kv[:, :, None], index, axis=2)
        return jnp.where((index < lens)[:, None], outs, before), rows

    start = (states, jnp.zeros(rows_shape, states.dtype))
    # As many passes as the longest has tokens: likely outcomes are mostly short.
    last, rows = lax.fori_loop(0, jnp.max(lens), one, start)
    return last, Stem(rows, lens)
