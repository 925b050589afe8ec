"""The decoder layer that all families share, and the rows of an embedding that may be split."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from models.config import TargetConfig
from models.experts import Experts
from models.layers import Attend, Attention, RMSNorm, SwiGLU, sum_over


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP on a residual stream [T, Ht]; returns (stream, block_kv)."""

    config: TargetConfig
    layer: int

    @nn.compact
    def __call__(
        self, stream: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        config = self.config
        normed = RMSNorm(config.norm_eps, config.dtype, name="attention_norm")(stream)
        attention = Attention(config.attention, self.layer, config.dtype, name="attention")
        mixed, block_kv = attention(normed, angles, attend)
        stream = stream + mixed
        normed = RMSNorm(config.norm_eps, config.dtype, name="mlp_norm")(stream)
        mlp: nn.Module
        if config.local_experts is not None and config.is_sparse(self.layer):
            mlp = Experts(config.local_experts, config.dtype, config.axis, name="experts")
        else:
            mlp = SwiGLU(
                config.local_mlp_size,
                config.hidden_size,
                config.mlp_bias,
                config.dtype,
                config.axis,
                name="mlp",
            )
        return stream + mlp(normed), block_kv


def embedding_rows(
    table: jax.Array, tokens: jax.Array, vocab_size: int, axis: str | None
) -> jax.Array:
    """[T, Ht]: the tokens' rows. Over a mesh axis, a chip that does not hold a row adds zeros."""
    tokens = jnp.clip(tokens, 0, vocab_size - 1)
    if axis is None:
        return jnp.take(table, tokens, axis=0, mode="clip")
    own = tokens - lax.axis_index(axis) * jnp.int32(table.shape[0])
    held = (own >= 0) & (own < table.shape[0])
    rows = jnp.take(table, own, axis=0, mode="clip")
    return sum_over(jnp.where(held[:, None], rows, 0), axis)
