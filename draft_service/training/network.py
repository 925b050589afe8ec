"""The EAGLE-3 head as it is trained: batched, differentiable, weights as [in, out].

Source: `models.eagle3` runs the same head for serving, on flat rows with an engine's cache. This
one keeps a whole batch's step-0 keys and the rows' own later keys as arrays, which a gradient
can pass. `tests/unit/test_train_network.py` holds both to a slow unrolled draft.

Axes: B sequences, T columns (prompt then response), R response rows, H head size, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

Params = dict[str, Any]
"""`fc` [F, H], `norm` [H], `layers`: list of dicts (see `layer_shapes`). float32."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head in training."""

    hidden_size: int
    feature_size: int  # F, all captured boundaries together
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    fusion: Literal["every", "first"]
    rope_theta: float
    norm_eps: float
    matmul_dtype: str = "float32"

    def layer_input(self, layer: int) -> int:
        """Columns that q, k and v of `layer` take: 2H where the layer is fed [embedding,
        hidden]."""
        return self.hidden_size * (2 if self.takes_embedding(layer) else 1)

    def takes_embedding(self, layer: int) -> bool:
        return layer == 0 or self.fusion == "every"


def layer_shapes(shape: HeadShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Tensor name → [in, out] of one layer; a layer without embedding has no `input_layernorm`."""
    h, inner = shape.hidden_size, shape.intermediate_size
    attention, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "hidden_norm": (h,),
        "q_proj": (shape.layer_input(layer), attention),
        "k_proj": (shape.layer_input(layer), kv),
        "v_proj": (shape.layer_input(layer), kv),
        "o_proj": (attention, h),
        "post_attention_layernorm": (h,),
        "gate_proj": (h, inner),
        "up_proj": (h, inner),
        "down_proj": (inner, h),
    }
    if shape.takes_embedding(layer):
        shapes["input_layernorm"] = (h,)
    return shapes


Product = Callable[[jax.Array, jax.Array], jax.Array]


def make_product(dtype: str) -> Product:
    """a [M, K] · b [K, N] → float32 [M, N] with operands rounded to `dtype`, summed in float32.

    On CPUs with bfloat16 units that is about twice as fast. It has no gradient of its own.
    """
    operand = jnp.dtype(dtype)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            a.astype(operand),
            b.astype(operand),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    return product


def make_matmul(dtype: str) -> Product:
    """x [..., in] · w [in, out] → float32 [..., out]; both passes use `make_product`."""
    product = make_product(dtype)

    @jax.custom_vjp
    def flat(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x, w)

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return product(x, w), (x, w)

    def backward(
        saved: tuple[jax.Array, jax.Array], grad: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        return product(grad, w.T), product(x.T, grad)

    flat.defvjp(forward, backward)

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return flat(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[-1])

    return matmul


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope_table(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos, sin float32 [..., 1, head_dim/2] of `positions` [...]; the rotate-half layout."""
    half = head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = table
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""q [B, R, heads, D], k and v [B, T, kv_heads, D] of one layer's rows → [B, R, heads, D]."""


def run_layer(
    shape: HeadShape,
    layer: int,
    params: Params,
    embed: jax.Array,
    hidden: jax.Array,
    positions: jax.Array,
    attend: Attend,
    first_query: int = 0,
) -> jax.Array:
    """One decoder layer: [B, T, H] → [B, T - first_query, H].

    `embed`, `hidden` [B, T, H]; `positions` int32 [B, T] or [T]. Rows before `first_query` give
    keys and values only.
    """
    matmul = make_matmul(shape.matmul_dtype)
    normed = rms_norm(hidden, params["hidden_norm"], shape.norm_eps)
    if shape.takes_embedding(layer):
        own = rms_norm(embed, params["input_layernorm"], shape.norm_eps)
        normed = jnp.concatenate([own, normed], axis=-1)

    def heads(x: jax.Array, name: str, count: int) -> jax.Array:
        return matmul(x, params[name]).reshape(*x.shape[:-1], count, shape.head_dim)

    cos, sin = rope_table(positions, shape.head_dim, shape.rope_theta)
    k = rotate(heads(normed, "k_proj", shape.num_kv_heads), (cos, sin))
    v = heads(normed, "v_proj", shape.num_kv_heads)
    queries = normed[:, first_query:]
    tables = (cos[..., first_query:, :, :], sin[..., first_query:, :, :])
    q = rotate(heads(queries, "q_proj", shape.num_heads), tables)
    attended = attend(q, k, v)
    out = hidden[:, first_query:] + matmul(
        attended.reshape(*attended.shape[:2], -1), params["o_proj"]
    )
    inner = rms_norm(out, params["post_attention_layernorm"], shape.norm_eps)
    gated = jax.nn.silu(matmul(inner, params["gate_proj"])) * matmul(inner, params["up_proj"])
    return out + matmul(gated, params["down_proj"])


def fuse(shape: HeadShape, params: Params, features: jax.Array) -> jax.Array:
    """Aux features [..., F] → the first step's hidden state [..., H]."""
    return make_matmul(shape.matmul_dtype)(features, params["fc"])


def head_logits(shape: HeadShape, params: Params, lm_head: jax.Array, out: jax.Array) -> jax.Array:
    """Head output [..., H] → float32 logits [..., draft_vocab]; the final norm is inside."""
    normed = rms_norm(out, params["norm"], shape.norm_eps)
    return make_matmul(shape.matmul_dtype)(normed, lm_head)
