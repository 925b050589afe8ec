"""The decoder layer that all families share, as a flax module."""

from __future__ import annotations

import flax.linen as nn
import jax

from models.config import TargetConfig
from models.experts import Experts
from models.layers import Attend, Attention, RMSNorm, SwiGLU


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP on a residual stream [T, Ht]; returns (stream, block_kv).

    `layer` is what `attend` is called with; `sparse`: experts in the place of one MLP.
    """

    config: TargetConfig
    layer: int
    sparse: bool

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
        if self.sparse and config.local_experts is not None:
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
