"""The head itself: fuse features, embed tokens, run the layers, score the draft vocabulary.

Layer i computes, with e the token's embedding and u the state it is paired with:

    a = attention([embed_norm(e), hidden_norm(u)])     without embedding: attention(hidden_norm(u))
    r = u + a                                          norm_before_residual: hidden_norm(u) + a
    u' = r + mlp(mlp_norm(r))

The last u' is the next step's u (norm_output: its final norm). Logits: lm_head(final_norm(u')).
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.decoder import embedding_rows
from models.eagle3.description import FuseNorm, HeadConfig
from models.layers import Attend, Attention, Linear, Params, RMSNorm, SwiGLU, project_to_vocabulary
from models.rope import rope_angles


class HeadLayer(nn.Module):
    """One layer over T rows; returns (next state [T, H], block_kv)."""

    config: HeadConfig
    layer: int

    @nn.compact
    def __call__(
        self,
        embed: jax.Array,
        state: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        attend: Attend,
    ) -> tuple[jax.Array, jax.Array]:
        config = self.config
        normed = self._norm("hidden_norm")(state)
        inputs = normed
        # norm_before_residual concerns the layers that are built like the first
        residual = state
        if config.embedding_layers[self.layer]:
            inputs = jnp.concatenate([self._norm("embed_norm")(embed), normed], axis=-1)
            residual = normed if config.norm_before_residual else state
        attention = Attention(config.local_attention, self.layer, config.dtype, name="attention")
        mixed, block_kv = attention(inputs, angles, attend)
        stream = residual + mixed
        mlp = SwiGLU(
            config.local_mlp_size,
            config.hidden_size,
            config.mlp_bias,
            config.dtype,
            config.axis,
            name="mlp",
        )
        return stream + mlp(self._norm("mlp_norm")(stream)), block_kv

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.config.norm_eps, self.config.dtype, name=name)


class Fuse(nn.Module):
    """features [T, k·Ht] -> [T, H]."""

    config: HeadConfig

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        config = self.config
        x = features.astype(config.dtype)
        if config.fuse_norm is FuseNorm.JOINT:
            x = RMSNorm(config.norm_eps, config.dtype, name="norm")(x)
        elif config.fuse_norm is FuseNorm.PER_STATE:
            states = jnp.split(x, config.num_states, axis=-1)
            normed = [
                RMSNorm(config.norm_eps, config.dtype, name=f"norm_{i}")(state)
                for i, state in enumerate(states)
            ]
            x = jnp.concatenate(normed, axis=-1)
        if config.has_fc:
            fc = Linear(config.hidden_size, config.fc_bias, config.dtype, config.axis, name="fc")
            x = fc(self._own_columns(x))
        return x

    def _own_columns(self, x: jax.Array) -> jax.Array:
        """Those that a chip's part of fc reads; all of them on a single one."""
        size, axis = self.config.local_feature_size, self.config.axis
        if axis is None or self.is_initializing():
            return x[:, :size]
        own: jax.Array = jax.lax.axis_index(axis)
        return jax.lax.dynamic_slice_in_dim(x, own * size, size, axis=1)


class Head(nn.Module):
    """The head's parameters but for the two tables; `fuse`, `forward`, `normed` by method."""

    config: HeadConfig

    def setup(self) -> None:
        config = self.config
        self.fuse_features = Fuse(config, name="fuse")
        self.layers = [HeadLayer(config, i, name=f"layer_{i}") for i in range(config.num_layers)]
        self.final_norm = RMSNorm(config.norm_eps, config.dtype, name="final_norm")

    def __call__(
        self, features: jax.Array, embed: jax.Array, positions: jax.Array, attend: Attend
    ) -> jax.Array:
        """Everything once, so that `init` makes every parameter."""
        state, _ = self.forward(embed, self.fuse(features), positions, attend)
        return self.normed(state)

    def fuse(self, features: jax.Array) -> jax.Array:
        return self.fuse_features(features)

    def normed(self, state: jax.Array) -> jax.Array:
        return self.final_norm(state)

    def forward(
        self, embed: jax.Array, state: jax.Array, positions: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        config, blocks = self.config, []
        angles = rope_angles(config.rope, config.attention.head_dim, positions)
        for layer in self.layers:
            state, block_kv = layer(embed, state, angles, attend)
            blocks.append(block_kv)
        if config.norm_output:
            state = self.final_norm(state)
        return state, jnp.stack(blocks)


def head_fuse(config: HeadConfig, params: Params, features: jax.Array) -> jax.Array:
    """[T, F] features of the target, in any float dtype, -> u [T, H] in config.dtype."""
    return _apply(config, params, "fuse", features)  # type: ignore[no-any-return]


def head_embed(config: HeadConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """[T, H] of int32 [T] target token ids; one outside the vocabulary reads the nearest row."""
    return embedding_rows(params["embedding"], tokens, config.target_vocab_size, config.axis)


def head_forward(
    config: HeadConfig,
    params: Params,
    embed: jax.Array,
    u: jax.Array,
    positions: jax.Array,
    attend: Attend,
) -> tuple[jax.Array, jax.Array]:
    """All layers over T rows.

    Args:
      embed: [T, H] of token t+1 of each pair.
      u: [T, H]: fused features of token t, or on drafted rows the parent's `out`.
      positions: int32 [T], t.
      attend: as in `target_forward`; it applies `config.attention_scale` and
      `config.windows[layer]`.

    Returns:
      out [T, H], the next step's u, and block_kv [L, T, kv_heads, 2*head_dim].
    """
    out, block_kv = _apply(config, params, "forward", embed, u, positions, attend)
    return out, block_kv


def head_logits(config: HeadConfig, params: Params, out: jax.Array) -> jax.Array:
    """float32 [T, K] of out [T, H]; the final norm is applied here unless `out` already had it.

    On several chips K is what each holds of the draft vocabulary, padding included.
    """
    normed = out if config.norm_output else _apply(config, params, "normed", out)
    return project_to_vocabulary(normed, params["lm_head"])


def head_shapes(config: HeadConfig) -> Params:
    """The nested shapes of all parameters but the tables, as flax would make them: what one chip
    holds of each.
    """

    def keep_q(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        return q

    features = jnp.zeros((1, config.feature_size), config.dtype)
    embed, row = jnp.zeros((1, config.hidden_size), config.dtype), jnp.zeros(1, jnp.int32)
    variables: Any = jax.eval_shape(
        lambda key: Head(config).init(key, features, embed, row, keep_q), jax.random.key(0)
    )
    shapes: Params = variables["params"]
    return shapes


def _apply(config: HeadConfig, params: Params, method: str, *args: Any) -> Any:
    tables = ("embedding", "lm_head", "draft_to_target")
    own = {name: value for name, value in params.items() if name not in tables}
    return Head(config).apply({"params": own}, *args, method=method)
