"""The small flax modules that targets and heads are built of.

Rows are flattened: x is [T, features], with no batch axis. Weights are `[in, out]`, one array per
projection and layer: on the CPU XLA multiplies 8 and 16 rows by `[in, out]` a quarter faster than
by `[out, in]`, and unrolled layers run faster than a scan over stacked ones (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu_matmul.api import packed_matmul
from models.rope import rotate

Attend = Callable[[int, jax.Array, jax.Array], jax.Array]
"""(layer, q [T, heads, head_dim], block_kv [T, kv_heads, 2*head_dim]) -> [T, heads, head_dim]."""

Params = dict[str, Any]
"""A nested dict of arrays, as flax keeps parameters."""

DType = np.dtype[Any]

PACKED_KERNEL = "packed_kernel"
"""What stands in the place of a `kernel` that was packed for the CPU (models/packing.py)."""

PACKED_TABLE = "packed_output_table"
"""Among the parameters of a target or a head: its output table, packed likewise."""

_normal = nn.initializers.normal(0.02)


def sum_over(x: jax.Array, axis: str | None) -> jax.Array:
    """Added up over a mesh axis, within `shard_map`; x itself where `axis` is None."""
    if axis is None:
        return x
    total: jax.Array = jax.lax.psum(x, axis)  # type: ignore[no-untyped-call]
    return total


class Linear(nn.Module):
    """y = x @ kernel (+ bias); kernel [in, out].

    `axis`: a mesh axis over which the inputs are split; what the chips found is added up.
    """

    features: int
    use_bias: bool
    dtype: DType
    axis: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.has_variable("params", PACKED_KERNEL):
            y = packed_matmul(x, self.get_variable("params", PACKED_KERNEL), self.features)
        else:
            y = x @ self.param("kernel", _normal, (x.shape[-1], self.features), self.dtype)
        if not self.is_initializing():
            y = sum_over(y, self.axis)
        if self.use_bias:
            y = y + self.param("bias", _normal, (self.features,), self.dtype)
        return y


class RMSNorm(nn.Module):
    """x / rms(x) · scale over the last axis; the mean in float32, the product in x.dtype."""

    eps: float
    dtype: DType

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.dtype)
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        return scale * (x32 * jax.lax.rsqrt(mean_square + jnp.float32(self.eps))).astype(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), of width `out_features`; `features` are split over `axis`."""

    features: int
    out_features: int
    use_bias: bool
    dtype: DType
    axis: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = Linear(self.features, self.use_bias, self.dtype, name="gate")(x)
        up = Linear(self.features, self.use_bias, self.dtype, name="up")(x)
        down = Linear(self.out_features, self.use_bias, self.dtype, self.axis, name="down")
        return down(nn.silu(gate) * up)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The shape of one attention block; `qk_norm`: an RMSNorm per head of q and k, before RoPE.

    `axis`: a mesh axis over which heads are split; the numbers of heads are then a chip's own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    out_features: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6
    axis: str | None = None


class Attention(nn.Module):
    """Projections and rotation round the engine's `attend`; returns ([T, out], block_kv)."""

    spec: AttentionSpec
    layer: int
    dtype: DType

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, jax.Array]:

        spec, rows = self.spec, x.shape[0]

        def project(name: str, heads: int) -> jax.Array:
            flat = Linear(heads * spec.head_dim, spec.qkv_bias, self.dtype, name=name)(x)
            return flat.reshape(rows, heads, spec.head_dim)

        q, k = project("q", spec.num_heads), project("k", spec.num_kv_heads)
        v = project("v", spec.num_kv_heads)
        if spec.qk_norm:
            q = RMSNorm(spec.eps, self.dtype, name="q_norm")(q)
            k = RMSNorm(spec.eps, self.dtype, name="k_norm")(k)
        block_kv = jnp.concatenate([rotate(k, angles), v], axis=-1)
        mixed = attend(self.layer, rotate(q, angles), block_kv).reshape(rows, -1)
        o = Linear(spec.out_features, spec.output_bias, self.dtype, spec.axis, name="o")
        return o(mixed), block_kv


def project_to_vocabulary(hidden: jax.Array, table: jax.Array) -> jax.Array:
    """float32 [N, V] = hidden [N, H] · table [V, H]ᵀ, summed in float32."""
    return jax.lax.dot_general(
        hidden, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
