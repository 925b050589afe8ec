"""`tree_attention`: new rows of a step over their sequences' paged prefixes and their own
blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.backend import Backend
from kernels.checks import check_dtype, check_shape
from kernels.chips import Chip
from kernels.tree_attention.call import tree_attention_pallas
from kernels.tree_attention.xla import tree_attention_xla

MAX_WORDS = 32
"""Words of ancestor bits: trees of up to 1,024 nodes."""


def _check(
    q: jax.Array,
    block_kv: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    ancestors: jax.Array,
    per_sequence: dict[str, tuple[jax.Array, int]],
    window: int | None,
) -> None:
    if q.ndim != 3 or block_kv.ndim != 3 or pages.ndim != 5:
        raise ValueError(
            f"q, block_kv, pages: {q.ndim}, {block_kv.ndim} and {pages.ndim} axes"
            " must be 3, 3 and 5"
        )
    num_rows, q_heads, head_dim = q.shape
    kv_heads, width = pages.shape[2], pages.shape[4]
    if width != 2 * head_dim:
        raise ValueError(f"pages: last axis {width} must be twice q's head_dim {head_dim}")
    if q_heads % kv_heads:
        raise ValueError(f"q: {q_heads} heads must be a multiple of the pages' {kv_heads} KV heads")
    check_shape("block_kv", block_kv, (block_kv.shape[0], kv_heads, width))
    check_dtype("pages", pages, q.dtype.name)
    check_dtype("block_kv", block_kv, q.dtype.name)
    check_dtype("q", q, "float32", "bfloat16")
    check_shape("ancestors", ancestors, (num_rows, ancestors.shape[-1]))
    check_dtype("ancestors", ancestors, "uint32")
    if not 1 <= ancestors.shape[1] <= MAX_WORDS:
        raise ValueError(f"ancestors: {ancestors.shape[1]} words must be 1 to {MAX_WORDS}")
    check_dtype("page_table", page_table, "int32")
    batch = page_table.shape[0]
    for name, (array, extra) in per_sequence.items():
        check_shape(name, array, (batch + extra,))
        check_dtype(name, array, "int32")
    if window is not None and window <= 32 * ancestors.shape[1]:
        # Tree rows are then always inside the window of the rows that name them.
        raise ValueError(
            f"window: {window} must exceed {32 * ancestors.shape[1]}, the most nodes that"
            f" {ancestors.shape[1]} words of ancestor bits name"
        )


def tree_attention(
    q: jax.Array,
    block_kv: jax.Array,
    pages: jax.Array,
    layer: jax.Array | int,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_starts: jax.Array,
    block_starts: jax.Array,
    num_causal: jax.Array,
    ancestors: jax.Array,
    q_offsets: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    backend: Backend,
    chip: Chip | None = None,
) -> jax.Array:
    """[Tq, q_heads, head_dim] in q's dtype; softmax in float32; rows beyond q_starts[-1] are zero.

    q            [Tq, q_heads, head_dim], after rope
    block_kv     [Tk, kv_heads, 2·head_dim], the step's own rows, not yet in pages
    pages        [L, P, kv_heads, page_size, 2·head_dim]
    layer        int32 scalar or Python int
    page_table   int32 [B, pages_per_sequence]; ids behind a sequence's last page may be anything
    kv_lens      int32 [B], prefix tokens in pages, all of them visible (but for the window)
    q_starts     int32 [B + 1], ascending: rows of q of each sequence; equal ends: none
    block_starts int32 [B + 1], the same for block_kv (verify: equal to q_starts)
    num_causal   int32 [B]
    ancestors    uint32 [Tq, W]; 0 for causal rows
    q_offsets    int32 [B], block row of the sequence's first q row (verify: 0; draft: the
                 frontier's)
    window       a row at position p sees positions above p - window; a tree node's position is
                 that of the last causal row plus its number of bits

    A causal block row (below num_causal) sees the block's rows up to itself. A later one sees all
    causal rows and the rows of its bits: bit k of word k//32 is block row num_causal + k. The tree
    in a block is ordered: no row names one behind itself, every row names itself.

    Unused slots of pages and rows beyond block_starts[-1] may hold anything, NaN too.
    Raises ValueError at trace time for shapes or dtypes that do not fit, with both values.
    """
    per_sequence = {
        "kv_lens": (kv_lens, 0),
        "q_starts": (q_starts, 1),
        "block_starts": (block_starts, 1),
        "num_causal": (num_causal, 0),
        "q_offsets": (q_offsets, 0),
    }
    _check(q, block_kv, pages, page_table, ancestors, per_sequence, window)
    if backend.uses_kernel:
        if chip is None:
            raise ValueError(f"chip: backend {backend.value} needs one of kernels.chips.CHIPS")
        kernel_out: jax.Array = tree_attention_pallas(
            q,
            block_kv,
            pages,
            jnp.asarray(layer, jnp.int32),
            page_table,
            kv_lens,
            q_starts,
            block_starts,
            num_causal,
            ancestors,
            q_offsets,
            scale=scale,
            window=window,
            chip=chip,
            interpret=pltpu.InterpretParams() if backend is Backend.INTERPRET else False,
        )
        return kernel_out
    out: jax.Array = tree_attention_xla(
        q,
        block_kv,
        pages,
        jnp.asarray(layer, jnp.int32),
        page_table,
        kv_lens,
        q_starts,
        block_starts,
        num_causal,
        ancestors,
        q_offsets,
        scale=scale,
        window=window,
    )
    return out
