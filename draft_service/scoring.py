"""The head's logits from an output table that lies as the device likes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models.eagle3 import HeadConfig, head_logits
from models.eagle3.module import Head
from models.layers import Params


def turn_output_table(params: Params) -> Params:
    """`params` with `lm_head` [K, H] as `lm_head_turned` [H, K].

    On the CPU XLA multiplies a few rows by [H, K] up to twice as fast. (Turning it back inside the
    program for `head_logits` costs a copy of the table per step, 30 ms and more for 19 MB.) One
    table that is the embedding as well stays as it is, so that it is held once.
    """
    if params["lm_head"] is params["embedding"]:
        return params
    rest = {name: value for name, value in params.items() if name != "lm_head"}
    return {**rest, "lm_head_turned": params["lm_head"].T}


def score(config: HeadConfig, params: Params, out: jax.Array) -> jax.Array:
    """As `head_logits`, float32 [T, K] of out [T, H]."""
    if "lm_head_turned" not in params:
        return head_logits(config, params, out)
    normed: Any = out
    if not config.norm_output:
        own = {"final_norm": params["final_norm"]}
        normed = Head(config).apply({"params": own}, out, method="normed")
    product = (((1,), (0,)), ((), ()))
    return lax.dot_general(
        normed, params["lm_head_turned"], product, preferred_element_type=jnp.float32
    )
