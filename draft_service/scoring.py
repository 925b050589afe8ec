"""The head's logits from an output table that lies as the device likes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from draft_service.int8 import LM_HEAD_SCALE, scaled_product
from kernels.cpu_matmul.api import packed_matmul
from models.eagle3 import HeadConfig, head_logits
from models.eagle3.module import Head
from models.layers import PACKED_TABLE, Params
from models.packing import pack_parameters, wants_packing


def lay_out(params: Params) -> Params:
    """`params` as the device multiplies them best.

    On one CPU: packed, where it can (models/packing.py). Else `lm_head` [K, H] as `lm_head_turned`
    [H, K], by which XLA multiplies a few rows up to twice as fast on the CPU. (Turning it back
    inside the program for `head_logits` costs a copy of the table per step, 30 ms and more for 19
    MB.) One table that is the embedding as well stays as it is, so that it is held once.
    """
    if wants_packing(params):
        params = pack_parameters(params, "lm_head")
        if PACKED_TABLE in params or LM_HEAD_SCALE not in params:
            return params
    if params["lm_head"] is params["embedding"]:
        return params
    rest = {name: value for name, value in params.items() if name != "lm_head"}
    return {**rest, "lm_head_turned": params["lm_head"].T}


def score(config: HeadConfig, params: Params, out: jax.Array) -> jax.Array:
    """As `head_logits`, float32 [T, K] of out [T, H]; -inf where a chip's part is padding."""
    logits = _product(config, params, out)
    size = config.local_draft_vocab_size
    if config.axis is None or size * config.num_shards == config.draft_vocab_size:
        return logits
    own: jax.Array = lax.axis_index(config.axis) * size + jnp.arange(size, dtype=jnp.int32)
    return jnp.where(own < config.draft_vocab_size, logits, -jnp.inf)


def own_targets(config: HeadConfig, params: Params) -> jax.Array:
    """int32 [K], the target's ids of the tokens that `score` scores; where it gives -inf, any."""
    whole: jax.Array = params["draft_to_target"]
    if config.axis is None:
        return whole
    size = config.local_draft_vocab_size
    own = lax.axis_index(config.axis) * size + jnp.arange(size, dtype=jnp.int32)
    return jnp.take(whole, own, axis=0, mode="clip")


def best_tokens(
    config: HeadConfig, params: Params, logits: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities float32 and target ids int32 [T, top_k] of the best next tokens; `logits`
    as `score` gives them.

    The top-k is of the 2-D logits, the fast call on every device, and no vocabulary-wide softmax is
    written out. Several chips exchange their own best ones and what their logits add up to, once.
    Not a number counts as impossible, so that it cannot take a better one's place.
    """
    best, ids = lax.top_k(logits, min(top_k, logits.shape[1]))
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    if config.axis is not None:
        ids = ids + lax.axis_index(config.axis) * jnp.int32(config.local_draft_vocab_size)
        bits = lax.bitcast_convert_type(jnp.concatenate([best, total], axis=1), jnp.int32)
        parts: jax.Array = lax.all_gather(jnp.concatenate([bits, ids], axis=1), config.axis)
        parts = parts.transpose(1, 0, 2)  # ties go to the first chip: the lowest id, as on one
        rows, width = parts.shape[0], best.shape[1]
        floats = lax.bitcast_convert_type(parts[:, :, : width + 1], jnp.float32)
        best, chosen = lax.top_k(floats[:, :, :width].reshape(rows, -1), top_k)
        ids = jnp.take_along_axis(parts[:, :, width + 1 :].reshape(rows, -1), chosen, axis=1)
        total = jax.nn.logsumexp(floats[:, :, -1], axis=1, keepdims=True)
    logps = best - total
    logps = jnp.where(jnp.isnan(logps), -jnp.inf, logps)
    return logps, jnp.take(params["draft_to_target"], ids, axis=0, mode="clip")


def _product(config: HeadConfig, params: Params, out: jax.Array) -> jax.Array:
    if PACKED_TABLE not in params and "lm_head_turned" not in params:
        return head_logits(config, params, out)
    normed: Any = out
    if not config.norm_output:
        own = {"final_norm": params["final_norm"]}
        normed = Head(config).apply({"params": own}, out, method="normed")
    if PACKED_TABLE in params:
        scores = packed_matmul(normed, params[PACKED_TABLE], config.draft_vocab_size)
        return scores * params[LM_HEAD_SCALE] if LM_HEAD_SCALE in params else scores
    if LM_HEAD_SCALE in params:
        return scaled_product(normed, params["lm_head_turned"], params[LM_HEAD_SCALE])
    product = (((1,), (0,)), ((), ()))
    return lax.dot_general(
        normed, params["lm_head_turned"], product, preferred_element_type=jnp.float32
    )
