"""The decoder all families share, as flax modules: embedding, layers, final norm, features."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from models.config import TargetConfig
from models.experts import Experts
from models.layers import Attend, Attention, RMSNorm, SwiGLU, sum_over
from models.rope import rope_angles

_normal = nn.initializers.normal(0.02)


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


class Decoder(nn.Module):
    """tokens, positions int32 [T] -> hidden [T, Ht], block_kv [L, T, ...], features [T, F].

    The layers are unrolled: XLA's CPU backend runs them faster than a scan over stacked weights.
    """

    config: TargetConfig

    @nn.compact
    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        table_shape = (config.local_vocab_size, config.hidden_size)
        embedding = self.param("embedding", _normal, table_shape, config.dtype)
        if not config.tied_embeddings:
            self.param("lm_head", _normal, table_shape, config.dtype)
        axis = None if self.is_initializing() else config.axis
        stream = embedding_rows(embedding, tokens, config.vocab_size, axis)
        angles = rope_angles(config.rope, config.head_dim, positions)
        boundaries, blocks = [stream], []
        for layer in range(config.num_layers):
            stream, block_kv = DecoderLayer(config, layer, name=f"layer_{layer}")(
                stream, angles, attend
            )
            boundaries.append(stream)
            blocks.append(block_kv)
        captured = [boundaries[b] for b in config.boundaries]
        features = (
            jnp.concatenate(captured, axis=-1)
            if captured
            else jnp.zeros((stream.shape[0], 0), stream.dtype)
        )
        hidden = RMSNorm(config.norm_eps, config.dtype, name="final_norm")(stream)
        return hidden, jnp.stack(blocks), features


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
