"""The call of the tree attention kernel: what it is built for, its memory, its arguments' forms."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.chips import Chip
from kernels.tree_attention.blocks import BLOCK_PIECE, Blocks, choose_blocks, staging_rows
from kernels.tree_attention.compute import LANES, Heads
from kernels.tree_attention.kernel import body
from kernels.tree_attention.work import plan_work

HEAD_DIMS = (64, 128, 256)
MIN_PAGE = 16
"""Tokens: a page is written to VMEM at whole tiles of packed rows."""


def _scratch_shapes(
    heads: Heads, blocks: Blocks, num_words: int, pages_per_sequence: int
) -> list[Any]:
    rows, tile, width = blocks.tile * heads.group, blocks.tile, heads.row_width
    kv, f32 = heads.kv_heads, jnp.float32
    buffers = [
        pltpu.SMEM((2, 1, pages_per_sequence), jnp.int32),
        pltpu.VMEM((2, tile, heads.q_heads, heads.head_dim), heads.dtype),
        pltpu.VMEM((2, tile, num_words, LANES), jnp.uint32),
        pltpu.VMEM((2, kv, BLOCK_PIECE, width), heads.dtype),
        pltpu.VMEM((2, kv, BLOCK_PIECE, width), heads.dtype),
        pltpu.VMEM((2, kv, blocks.keys, width), heads.dtype),
        pltpu.VMEM((3, tile, heads.q_heads, heads.head_dim), heads.dtype),
    ]
    most = max(blocks.keys, BLOCK_PIECE)
    softmax = [
        pltpu.VMEM((kv, rows, heads.q_width), heads.dtype),
        pltpu.VMEM((kv, rows, most), f32),
        pltpu.VMEM((kv, rows, most), heads.dtype),
        pltpu.VMEM((kv, rows, LANES), f32),
        pltpu.VMEM((kv, rows, LANES), f32),
        pltpu.VMEM((kv, rows, LANES), f32),
        pltpu.VMEM((kv, rows, heads.q_width), f32),
        *[pltpu.VMEM((staging_rows(heads, tile), heads.head_dim), f32)] * 2,
    ]
    return [*buffers, *softmax, *[pltpu.SemaphoreType.DMA((2,)) for _ in range(7)]]


@functools.partial(jax.jit, static_argnames=("scale", "window", "chip", "blocks", "interpret"))
def tree_attention_pallas(
    q: jax.Array,  # [Tq, q_heads, head_dim]
    block_kv: jax.Array,  # [Tk, kv_heads, 2*head_dim]
    pages: jax.Array,  # [L, P, kv_heads, page_size, 2*head_dim]
    layer: jax.Array,  # int32 scalar
    page_table: jax.Array,  # int32 [B, pages_per_sequence]
    kv_lens: jax.Array,  # int32 [B]
    q_starts: jax.Array,  # int32 [B+1]
    block_starts: jax.Array,  # int32 [B+1]
    num_causal: jax.Array,  # int32 [B]
    ancestors: jax.Array,  # uint32 [Tq, W]
    q_offsets: jax.Array,  # int32 [B]
    *,
    scale: float,
    window: int | None,
    chip: Chip,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> jax.Array:
    """The Pallas call; arguments as in `api.tree_attention`. `blocks`: other sizes than the chip's.

    Jitted: a model of many layers traces and lowers it once.

    `interpret`: False, or `pltpu.InterpretParams`. Raises ValueError for a head_dim, page size or
    number of heads that the kernel is not built for.
    """
    num_rows, q_heads, head_dim = q.shape
    kv_heads, page_size = pages.shape[2], pages.shape[3]
    heads = Heads(kv_heads, q_heads // kv_heads, head_dim, scale, q.dtype, chip.matrix_units)
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: {head_dim} is none of {HEAD_DIMS}; use Backend.XLA")
    if page_size < MIN_PAGE or page_size & (page_size - 1):
        raise ValueError(f"page_size: {page_size} must be a power of two of at least {MIN_PAGE}")
    if blocks is None:
        blocks = choose_blocks(
            chip,
            heads,
            page_size=page_size,
            pages_per_sequence=page_table.shape[1],
            num_rows=num_rows,
            num_words=ancestors.shape[1],
        )
    work = plan_work(
        q_starts, kv_lens, num_rows=num_rows, tile=blocks.tile, num_cores=blocks.num_cores
    )
    # Head-major block rows: a DMA then starts at a whole tile of rows and masks do the rest. One
    # more piece behind the end, so that every piece may be read whole.
    total = (-(-block_kv.shape[0] // BLOCK_PIECE) + 1) * BLOCK_PIECE
    head_major = jnp.swapaxes(block_kv, 0, 1)
    head_major = jnp.pad(head_major, ((0, 0), (0, total - block_kv.shape[0]), (0, 0)))
    # Every word over all lanes: in HBM a row of one word takes 512 bytes anyway, and spreading it
    # in the kernel would occupy the cross-lane units.
    bits = jnp.broadcast_to(ancestors[:, :, None], (*ancestors.shape, LANES))
    if not interpret:
        # XLA would keep such small arrays in VMEM, where the kernel's copies become loops of loads
        # and stores that nothing overlaps.
        q, bits, head_major = (
            pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (q, bits, head_major)
        )
    call = pl.pallas_call(
        functools.partial(body, heads=heads, blocks=blocks, window=window, page_size=page_size),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),  # type: ignore[no-untyped-call]
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=9,
            grid=(blocks.num_cores,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM) for _ in range(5)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=_scratch_shapes(heads, blocks, ancestors.shape[1], page_table.shape[1]),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if blocks.num_cores > 1 else "arbitrary",),
            vmem_limit_bytes=blocks.vmem_limit_bytes,
            # The host validates what it sends; the checks would keep DMAs from being issued in
            # parallel to anything.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="tree_attention",
    )
    out: jax.Array = call(
        jnp.reshape(layer, (1,)).astype(jnp.int32),
        kv_lens,
        q_starts,
        block_starts,
        num_causal,
        q_offsets,
        work.sequence,
        work.row,
        work.bounds,
        page_table[:, None, :],
        q,
        bits,
        head_major,
        pages,
    )
    return out
