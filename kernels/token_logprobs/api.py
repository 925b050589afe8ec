"""`token_logprobs`: of what `sample_and_accept` emitted, from the logits as the model gave them."""

from __future__ import annotations

import jax
from jax import lax

from kernels.backend import Backend
from kernels.checks import check_dtype, check_shape
from kernels.token_logprobs.types import TokenLogprobs
from kernels.token_logprobs.xla import token_logprobs_xla


def token_logprobs(
    logits: jax.Array,
    visited: jax.Array,
    picks: jax.Array,
    wanted: jax.Array,
    *,
    max_top: int,
    vocab_axis: str | None = None,
    backend: Backend,
) -> TokenLogprobs:
    """Natural logarithms, of the model's own distribution: no penalty, temperature or filter.

    logits      float32 [N, V], unadjusted
    visited     int32 [B, D + 1], rows of root and accepted nodes; -1 padded
    picks       int32 [B, D + 1], the tokens picked there
    wanted      int32 [B]: -1 nothing, 0 the picked ones, more: also the likeliest
    max_top     K, the most that a sequence may want; it gets K of which it uses its own number
    vocab_axis  inside `shard_map`: the mesh axis over which the vocabulary is split, in order. V
                is then this chip's share (fill up with -inf); the result is whole, from at most
                two collectives

    Raises ValueError at trace time for shapes or dtypes that do not fit.
    """
    check_dtype("logits", logits, "float32")
    check_shape("picks", picks, tuple(visited.shape))
    check_shape("wanted", wanted, (visited.shape[0],))
    for name, array in {"visited": visited, "picks": picks, "wanted": wanted}.items():
        check_dtype(name, array, "int32")
    vocab = logits.shape[1] * (1 if vocab_axis is None else lax.axis_size(vocab_axis))
    if not 0 <= max_top <= vocab:
        raise ValueError(f"max_top: {max_top} is outside [0, {vocab}], the vocabulary")
    if backend is not Backend.XLA:
        raise NotImplementedError(
            f"token_logprobs: backend {backend.value} is not built; use Backend.XLA"
        )
    return token_logprobs_xla(logits, visited, picks, wanted, max_top, vocab_axis)
