"""What the tree attention kernel's references and scalars are called, with shapes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from kernels.tree_attention.compute import Ref


@dataclass(frozen=True)
class Prefetched:
    """Scalars in SMEM, all int32."""

    layer: Ref  # [1]
    kv_lens: Ref  # [B]
    q_starts: Ref  # [B+1]
    block_starts: Ref  # [B+1]
    num_causal: Ref  # [B]
    q_offsets: Ref  # [B]
    work_sequence: Ref  # [max_work]
    work_row: Ref  # [max_work]
    work_bounds: Ref  # [num_cores+1]


@dataclass(frozen=True)
class Hbm:
    """Arrays that stay in HBM."""

    page_table: Ref  # [B, 1, pages_per_sequence] int32
    q: Ref  # [Tq, q_heads, head_dim]
    bits: Ref  # [Tq, W, 128] uint32: every word over all lanes
    block: Ref  # [kv_heads, Tk rounded up, 2*head_dim]
    pages: Ref  # [L, P, kv_heads, page_size, 2*head_dim]
    out: Ref  # [Tq, q_heads, head_dim]


@dataclass(frozen=True)
class Buffers:
    """VMEM and SMEM that DMAs fill or drain; the first axis of 2 alternates."""

    table: Ref  # SMEM [2, 1, pages_per_sequence] int32, by work item
    q: Ref  # [2, tile, q_heads, head_dim], by work item
    bits: Ref  # [2, tile, W, 128] uint32, by work item
    first: Ref  # [2, kv_heads, 128, 2*head_dim]: the block's first piece, by work item
    later: Ref  # [2, kv_heads, 128, 2*head_dim]: its further pieces
    kv: Ref  # [2, kv_heads, keys, 2*head_dim]: KV blocks
    out: Ref  # [2, tile, q_heads, head_dim], by work item


@dataclass(frozen=True)
class Semaphores:
    """DMA semaphores [2], one per buffer half."""

    table: Ref
    q: Ref
    bits: Ref
    first: Ref
    later: Ref
    kv: Ref
    out: Ref


@dataclass(frozen=True)
class Item:
    """One work item's scalars, read from SMEM."""

    sequence: jax.Array
    q_start: jax.Array  # row of q
    num_rows: jax.Array  # 1..tile
    first_row: jax.Array  # block row of the tile's first q row
    num_causal: jax.Array
    block_base: jax.Array  # row of the block array where its first piece starts: aligned
    block_shift: jax.Array  # rows of other sequences in front of the block in that piece
    block_len: jax.Array
    kv_len: jax.Array
    first_page: jax.Array  # first page of the prefix that any row of the tile sees
    num_keys: jax.Array  # prefix tokens from the first page's first on
