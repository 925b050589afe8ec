"""The head's matrices in 8 bits: half the bytes of bfloat16 that each level of a tree reads.

Per output channel, symmetric: a column w of a matrix becomes round(w / s) in int8 and one float32
s = max|w| / 127. The product is taken with the integers, which every float dtype of the head holds
exactly, and scaled behind it: no dequantised matrix is kept. Norms, biases and the embedding, of
which a row is read for each token, stay as they are; so do KV and states.

The modules of `models.layers` know nothing of it: `reading_int8` stands in for `Linear` wherever a
kernel has scales, while a program is traced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from kernels.cpu_matmul.api import packed_matmul
from models.layers import PACKED_KERNEL, Linear, Params, sum_over
from models.sharding import parameter_spec
from models.trees import flatten, unflatten

SCALE = "kernel_scale"
LM_HEAD_SCALE = "lm_head_scale"
_MOST = 127.0


def quantise(params: Params, mesh: Mesh | None = None) -> Params:
    """A head's parameters, as `load_head` gives them, with int8 `kernel`s [in, out] and `lm_head`
    [K, H], and beside them `kernel_scale` float32 [out] and `lm_head_scale` float32 [K].

    `mesh`: that they are split over (models/sharding.py). Scales go with their outputs; of a matrix
    that is split by its inputs they lie whole on every chip, for its columns were scaled as wholes.
    """
    changed: dict[tuple[str, ...], jax.Array] = {}
    for path, leaf in flatten(params):
        if path[-1] not in ("kernel", "lm_head"):
            changed[path] = leaf
            continue
        paths = path, (*path[:-1], SCALE if path[-1] == "kernel" else LM_HEAD_SCALE)
        places = (
            None if mesh is None else tuple(NamedSharding(mesh, parameter_spec(p)) for p in paths)
        )
        convert = jax.jit(_to_int8, static_argnames="axis", out_shardings=places)
        changed |= zip(paths, convert(leaf, axis=0 if path[-1] == "kernel" else 1), strict=True)
    return unflatten(changed)


def reading_int8() -> AbstractContextManager[Any]:
    """Within it, `Linear`s whose kernels have scales multiply by them."""
    return nn.intercept_methods(_read)


def scaled_product(x: jax.Array, table: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 [T, K]: x [T, H] @ int8 table [H, K] · scale [K]."""
    product = (((1,), (0,)), ((), ()))
    whole = lax.dot_general(x, table.astype(x.dtype), product, preferred_element_type=jnp.float32)
    return whole * scale


def _to_int8(matrix: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """`axis`: the inputs'. A channel of zeros has scale 1."""
    exact = matrix.astype(jnp.float32)
    scale = jnp.max(jnp.abs(exact), axis=axis, keepdims=True) / jnp.float32(_MOST)
    scale = jnp.where(scale > 0, scale, jnp.float32(1.0))
    return jnp.round(exact / scale).astype(jnp.int8), jnp.squeeze(scale, axis)


def _read(following: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    module = context.module
    called = isinstance(module, Linear) and context.method_name == "__call__"
    if not called or not module.has_variable("params", SCALE):
        return following(*args, **kwargs)
    x: jax.Array = args[0]
    scale: jax.Array = module.get_variable("params", SCALE)
    if module.has_variable("params", PACKED_KERNEL):
        packed: jax.Array = module.get_variable("params", PACKED_KERNEL)
        product = packed_matmul(x, packed, module.features) * scale
    else:
        product = scaled_product(x, module.get_variable("params", "kernel"), scale)
    y = sum_over(product.astype(x.dtype), module.axis)
    return y + module.get_variable("params", "bias") if module.use_bias else y
