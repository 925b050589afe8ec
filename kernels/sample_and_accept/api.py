"""`sample_and_accept`: the target's pick at every node, and the accepted path of every tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.backend import Backend
from kernels.checks import check_dtype, check_shape
from kernels.chips import Chip
from kernels.sample_and_accept.kernel import pick_rows_pallas
from kernels.sample_and_accept.sharded import pick_rows_sharded
from kernels.sample_and_accept.types import Accepted, SamplerParams
from kernels.sample_and_accept.walk import Trees, walk_rows
from kernels.sample_and_accept.xla import pick_and_walk_xla


def _check(
    logits: jax.Array,
    columns: dict[str, jax.Array],
    params: SamplerParams,
    stop_tokens: jax.Array,
    token_mask: jax.Array | None,
    max_depth: int,
) -> None:
    check_dtype("logits", logits, "float32")
    num_nodes, _ = logits.shape
    for name, array in columns.items():
        check_shape(name, array, (num_nodes,))
        check_dtype(name, array, "int32")
    check_dtype("stop_tokens", stop_tokens, "int32")
    batch, _ = stop_tokens.shape
    for name, array in params._asdict().items():
        check_shape(f"params.{name}", array, (batch,))
    for name in ("temperature", "top_p", "min_p"):
        check_dtype(f"params.{name}", getattr(params, name), "float32")
    check_dtype("params.top_k", params.top_k, "int32")
    for name in ("seed_lo", "seed_hi"):
        check_dtype(f"params.{name}", getattr(params, name), "uint32")
    if token_mask is not None:
        check_shape("token_mask", token_mask, tuple(logits.shape))
        check_dtype("token_mask", token_mask, "bool")
    if max_depth < 0:
        raise ValueError(f"max_depth: {max_depth} must not be negative")


def sample_and_accept(
    logits: jax.Array,
    tokens: jax.Array,
    parents: jax.Array,
    positions: jax.Array,
    node_sequence: jax.Array,
    params: SamplerParams,
    stop_tokens: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    max_depth: int,
    want_logprobs: jax.Array | bool = False,
    vocab_axis: str | None = None,
    backend: Backend,
    chip: Chip | None = None,
) -> Accepted:
    """Picks at N nodes of B trees, and the walk from each root along them.

    logits        float32 [N, V]
    tokens        int32 [N], the nodes' own tokens
    parents       int32 [N], row of the parent in these arrays, before its children; -1 at roots
                  and in padding
    positions     int32 [N], absolute position of the *picked* token: the node's own + 1
    node_sequence int32 [N] in [0, B); -1 in padding
    params        arrays [B]
    stop_tokens   int32 [B, S], -1 padded; a stop token is emitted and ends the walk
    token_mask    bool [N, V], False: never picked; applied before the filters
    max_depth     most accepted nodes; deeper ones are not looked at
    want_logprobs may be a traced bool: the pass over the logits is skipped if False
    vocab_axis    inside `shard_map`: the mesh axis over which the vocabulary is split, in order. V
                  is then this chip's share, of logits and token_mask, the same on every chip (fill
                  up with -inf); all else is whole, and so is the result. Only with Backend.XLA

    A node is accepted if its parent is and its token equals the parent's pick. Among siblings with
    one token the first counts. The pick at the last accepted node is the bonus. A row whose logits
    hold NaN or +inf, or no finite one, has no pick (-1) and is never accepted.
    Raises ValueError at trace time for shapes or dtypes that do not fit.
    """
    wanted = jnp.asarray(want_logprobs)
    columns = {
        "tokens": tokens,
        "parents": parents,
        "positions": positions,
        "node_sequence": node_sequence,
    }
    _check(logits, columns, params, stop_tokens, token_mask, max_depth)
    if vocab_axis is not None:
        if backend is not Backend.XLA:
            raise ValueError(
                f"backend: {backend.value} cannot take a vocabulary split over {vocab_axis!r};"
                " use Backend.XLA there, on TPU too"
            )
        split = pick_rows_sharded(
            logits, positions, node_sequence, params, wanted, token_mask, axis=vocab_axis
        )
        trees = Trees(tokens, parents, node_sequence, stop_tokens, split.usable)
        return walk_rows(split, trees, wanted, max_depth)
    if backend.uses_kernel:
        if chip is None:
            raise ValueError(f"chip: backend {backend.value} needs one of kernels.chips.CHIPS")
        rows = pick_rows_pallas(
            logits,
            positions,
            node_sequence,
            params,
            wanted,
            token_mask,
            chip=chip,
            interpret=pltpu.InterpretParams() if backend is Backend.INTERPRET else False,
        )
        trees = Trees(tokens, parents, node_sequence, stop_tokens, rows.usable)
        return walk_rows(rows, trees, wanted, max_depth)
    return pick_and_walk_xla(
        logits,
        tokens,
        parents,
        positions,
        node_sequence,
        params,
        stop_tokens,
        wanted,
        token_mask,
        max_depth,
    )
