"""A layer of many small MLPs of which each row is sent to a few: a mixture of experts.

Dropless: every row goes to all experts that it picked, however many rows picked the same, and its
shares are added in the order of its own picks. So what a row gets is the same whoever is beside it
in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from models.layers import DType, sum_over

_normal = nn.initializers.normal(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """`size`: the inner width of one expert. `normalise`: the shares of a row's picks add to 1."""

    num_experts: int
    num_per_token: int
    size: int
    normalise: bool


class Experts(nn.Module):
    """Sum of share · down(silu(gate(x)) · up(x)) over each row's experts; x [T, H] -> [T, H].

    Shares: softmax over all experts in float32, the largest `num_per_token` kept. Weights are
    stacked over the experts, E first, each `[in, out]`. Rows are sorted by expert, multiplied group
    by group (`lax.ragged_dot`), and brought back. `axis`: a mesh axis over which `spec.size` is
    split.
    """

    spec: ExpertSpec
    dtype: DType
    axis: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        spec, (num_rows, width) = self.spec, x.shape
        up_shape = (spec.num_experts, width, spec.size)
        down_shape = (spec.num_experts, spec.size, width)
        router = self.param("router", _normal, (spec.num_experts, width), self.dtype)
        gate = self.param("gate", _normal, up_shape, self.dtype)
        up = self.param("up", _normal, up_shape, self.dtype)
        down = self.param("down", _normal, down_shape, self.dtype)

        shares, picked = pick_experts(x @ router.T, spec)
        expert_of = picked.reshape(-1)  # [T·k], a row's picks one after the other
        order = jnp.argsort(expert_of, stable=True)
        sizes = jnp.zeros(spec.num_experts, jnp.int32).at[expert_of].add(1)
        rows = x[order // spec.num_per_token]
        inner = nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
        outer = lax.ragged_dot(inner, down, sizes)
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        outer = outer[back].reshape(num_rows, spec.num_per_token, width)
        mixed = jnp.sum(outer * shares[..., None].astype(x.dtype), axis=1)
        return mixed if self.is_initializing() else sum_over(mixed, self.axis)


def pick_experts(scores: jax.Array, spec: ExpertSpec) -> tuple[jax.Array, jax.Array]:
    """Shares float32 and experts int32, both [T, k], best first, of router scores [T, E]."""
    probabilities = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
    shares, picked = lax.top_k(probabilities, spec.num_per_token)
    if spec.normalise:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return shares, picked
