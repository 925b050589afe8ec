"""Tree attention over paged KV as one Pallas TPU kernel.

A work item is a tile of up to 64 q rows of one sequence. For each, in order:

1. the sequence's own new rows (the *block*) under causal order and ancestor bits, 128 keys at a
time. They seed maximum and sum, and hide the arrival of the first page;
2. the prefix in whole KV blocks of about 2 MiB, **without any mask**: every row sees all of it;
3. what is left of the prefix, piece by piece, under one length mask.

DMAs: KV blocks are double-buffered page by page; while a block is computed the next one, or the
next item's first one, arrives. Queries, bits, first block rows and the page table row of the next
item arrive during this one. Outputs leave during the next item. Nothing is padded per sequence:
reads of q and writes of the output are exactly the sequence's rows.

HBM traffic per call: q and o once; every sequence's prefix pages once per tile of its rows; its
block rows rounded up to 128; 512 bytes of bits per q row and word. VMEM: `blocks.vmem_bytes`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.chips import Chip
from kernels.tree_attention.blocks import BLOCK_PIECE, ROW_ALIGN, Blocks, choose_blocks
from kernels.tree_attention.compute import (
    LANES,
    MASKED,
    Heads,
    Ref,
    Scratch,
    attend,
    finish,
    keys_and_values,
)
from kernels.tree_attention.refs import Buffers, Hbm, Item, Prefetched, Semaphores
from kernels.tree_attention.work import plan_work

HEAD_DIMS = (64, 128, 256)
MIN_PAGE = 16
"""Tokens: a page is written to VMEM at whole tiles of packed rows."""


class _Kernel:
    """Code generation for one set of static sizes; methods trace into the kernel's body."""

    def __init__(
        self,
        heads: Heads,
        blocks: Blocks,
        window: int | None,
        page_size: int,
        scalars: Prefetched,
        hbm: Hbm,
        buffers: Buffers,
        semaphores: Semaphores,
        scratch: Scratch,
    ) -> None:
        self.heads = heads
        self.blocks = blocks
        self.window = window
        self.page_size = page_size
        self.scalars = scalars
        self.hbm = hbm
        self.buffers = buffers
        self.semaphores = semaphores
        self.scratch = scratch
        self.pages_per_block = blocks.keys // page_size

    # ---- scalars

    def item(self, work: jax.Array) -> Item:
        s = self.scalars
        sequence = s.work_sequence[work]
        row = s.work_row[work]
        q_start = s.q_starts[sequence] + row
        num_rows = jnp.minimum(s.q_starts[sequence + 1] - q_start, self.blocks.tile)
        first_row = s.q_offsets[sequence] + row
        num_causal = s.num_causal[sequence]
        block_start = s.block_starts[sequence]
        block_base = block_start // ROW_ALIGN * ROW_ALIGN
        kv_len = s.kv_lens[sequence]
        first_page = jnp.int32(0)
        if self.window is not None:
            # Rows of the tile stand at kv_len + their block row, tree nodes nowhere before
            # num_causal.
            nearest = kv_len + jnp.minimum(first_row, num_causal)
            first_page = jnp.maximum(nearest - (self.window - 1), 0) // self.page_size
        num_keys = jnp.maximum(kv_len - first_page * self.page_size, 0)
        return Item(
            sequence=sequence,
            q_start=q_start,
            num_rows=num_rows,
            first_row=first_row,
            num_causal=num_causal,
            block_base=block_base,
            block_shift=block_start - block_base,
            block_len=s.block_starts[sequence + 1] - block_start,
            kv_len=kv_len,
            first_page=first_page,
            num_keys=num_keys,
        )

    def num_blocks(self, item: Item) -> jax.Array:
        return (item.num_keys + (self.blocks.keys - 1)) // self.blocks.keys

    # ---- copies

    def table_copy(self, item: Item, half: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.hbm.page_table.at[item.sequence],
            self.buffers.table.at[half],
            self.semaphores.table.at[half],
        )

    def input_copies(self, item: Item, half: jax.Array) -> list[Any]:
        rows = pl.ds(item.q_start, item.num_rows)
        kept = pl.ds(0, item.num_rows)
        b, s = self.buffers, self.semaphores
        return [
            pltpu.make_async_copy(self.hbm.q.at[rows], b.q.at[half, kept], s.q.at[half]),
            pltpu.make_async_copy(self.hbm.bits.at[rows], b.bits.at[half, kept], s.bits.at[half]),
            self.piece_copy(item, jnp.int32(0), b.first.at[half], s.first.at[half]),
        ]

    def piece_copy(self, item: Item, piece: jax.Array, target: Ref, semaphore: Ref) -> Any:
        start = pl.multiple_of(item.block_base + piece * BLOCK_PIECE, ROW_ALIGN)
        return pltpu.make_async_copy(
            self.hbm.block.at[:, pl.ds(start, BLOCK_PIECE)], target, semaphore
        )

    def out_copy(self, item: Item, half: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.buffers.out.at[half, pl.ds(0, item.num_rows)],
            self.hbm.out.at[pl.ds(item.q_start, item.num_rows)],
            self.semaphores.out.at[half],
        )

    def page_copy(self, page: jax.Array, index: jax.Array | int, slot: jax.Array) -> Any:
        start = index * self.page_size
        if not isinstance(start, int):
            start = pl.multiple_of(start, self.page_size)
        return pltpu.make_async_copy(
            self.hbm.pages.at[self.scalars.layer[0], page],
            self.buffers.kv.at[slot, :, pl.ds(start, self.page_size)],
            self.semaphores.kv.at[slot],
        )

    def block_pages(self, item: Item, block: jax.Array) -> jax.Array:
        """Pages of the item's KV block that hold prefix tokens."""
        left = item.num_keys - block * self.blocks.keys
        pages = (left + (self.page_size - 1)) // self.page_size
        return jnp.minimum(pages, self.pages_per_block)

    def fetch(self, item: Item, half: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        """Starts the DMAs of one KV block; its page table row is in `table[half]`."""
        base = item.first_page + block * self.pages_per_block
        num_pages = self.block_pages(item, block)
        table = self.buffers.table

        def start(index: jax.Array | int) -> None:
            self.page_copy(table[half, 0, base + index], index, slot).start()

        @pl.when(num_pages == self.pages_per_block)
        def _whole() -> None:
            for index in range(self.pages_per_block):
                start(index)

        @pl.when(num_pages < self.pages_per_block)
        def _part() -> None:
            lax.fori_loop(0, num_pages, lambda index, _: start(index), None)

    def await_whole(self, slot: jax.Array) -> None:
        whole = self.buffers.kv.at[slot]
        copy: Any = pltpu.make_async_copy(whole, whole, self.semaphores.kv.at[slot])
        copy.wait()

    def await_pages(self, num_pages: jax.Array, slot: jax.Array) -> None:
        def wait(index: jax.Array, _: None) -> None:
            self.page_copy(jnp.int32(0), index, slot).wait()

        lax.fori_loop(0, num_pages, wait, None)

    # ---- the walk

    def run(self, core: jax.Array) -> None:
        begin, end = self.scalars.work_bounds[core], self.scalars.work_bounds[core + 1]
        if self.heads.packed:
            self.scratch.q[...] = jnp.zeros(self.scratch.q.shape, self.scratch.q.dtype)

        @pl.when(begin < end)
        def _first() -> None:
            item, half = self.item(begin), begin % 2
            table = self.table_copy(item, half)
            table.start()
            for copy in self.input_copies(item, half):
                copy.start()
            table.wait()

            @pl.when(item.num_keys > 0)
            def _() -> None:
                self.fetch(item, half, jnp.int32(0), jnp.int32(0))

        lax.fori_loop(begin, end, functools.partial(self.step, begin, end), jnp.int32(0))

        for back in (2, 1):

            @pl.when(end - back >= begin)
            def _drain(back: int = back) -> None:
                self.out_copy(self.item(end - back), (end - back) % 2).wait()

        @pl.when(core == self.blocks.num_cores - 1)
        def _padding() -> None:
            self.clear_padding()

    def step(self, begin: jax.Array, end: jax.Array, work: jax.Array, slot: jax.Array) -> jax.Array:
        """One work item; its first KV block is arriving in `slot`. Returns the next item's slot."""
        item, half = self.item(work), work % 2
        following = jnp.minimum(work + 1, end - 1)
        after, other = self.item(following), (work + 1) % 2

        @pl.when(work + 1 < end)
        def _next_inputs() -> None:
            self.table_copy(after, other).start()
            for copy in self.input_copies(after, other):
                copy.start()

        for copy in self.input_copies(item, half):
            copy.wait()

        @pl.when(work - 2 >= begin)
        def _free_out() -> None:
            self.out_copy(self.item(work - 2), half).wait()

        def prefetch(target: jax.Array) -> None:
            """The next item's first KV block."""

            @pl.when(work + 1 < end)
            def _() -> None:
                self.table_copy(after, other).wait()

                @pl.when(after.num_keys > 0)
                def _() -> None:
                    self.fetch(after, other, jnp.int32(0), target)

        smallest = 0
        for tile in self.blocks.tiles:

            @pl.when((item.num_rows > smallest) & (item.num_rows <= tile))
            def _tile(tile: int = tile) -> None:
                self.attend_tile(item, half, slot, tile, prefetch)

            smallest = tile
        self.out_copy(item, half).start()
        return (slot + self.num_blocks(item)) % 2

    def attend_tile(
        self, item: Item, half: jax.Array, slot: jax.Array, tile: int, prefetch: Any
    ) -> None:
        heads, scratch = self.heads, self.scratch
        self.load_queries(half, tile)
        num_words = self.buffers.bits.shape[2]
        bits = [self.buffers.bits[half, :tile, word, :] for word in range(num_words)]
        self.attend_block(item, half, bits, tile)
        num_blocks = self.num_blocks(item)

        @pl.when(num_blocks == 0)
        def _nothing() -> None:
            prefetch(slot)

        def fetch_after(block: jax.Array) -> None:
            free = (slot + block + 1) % 2

            @pl.when(block + 1 < num_blocks)
            def _() -> None:
                self.fetch(item, half, block + 1, free)

            @pl.when(block + 1 == num_blocks)
            def _() -> None:
                prefetch(free)

        lowest = self.lowest_keys(item, bits, tile)

        def whole(block: jax.Array, _: None) -> None:
            fetch_after(block)
            at = (slot + block) % 2
            self.await_whole(at)
            bias = None
            if self.window is not None:
                bias = self.prefix_bias(item, block * self.blocks.keys, self.blocks.keys, lowest)
            attend(
                heads,
                scratch,
                rows=tile * heads.group,
                keys=self.blocks.keys,
                load=lambda h: self.whole_rows(at, h),
                bias=bias,
                seed=False,
            )

        num_whole = item.num_keys // self.blocks.keys
        lax.fori_loop(0, num_whole, whole, None)

        @pl.when(num_whole < num_blocks)
        def _rest() -> None:
            fetch_after(num_whole)
            at = (slot + num_whole) % 2
            self.await_pages(self.block_pages(item, num_whole), at)
            self.attend_rest(item, at, num_whole * self.blocks.keys, lowest, tile)

        self.store_output(half, tile)

    def whole_rows(self, at: jax.Array, h: int) -> tuple[jax.Array, jax.Array]:
        """K and V of head h in the KV block that has arrived in slot `at`."""
        return keys_and_values(self.heads, self.buffers.kv[at, h])

    def attend_rest(
        self, item: Item, at: jax.Array, base: jax.Array, lowest: jax.Array | None, tile: int
    ) -> None:
        """The last, partial KV block: `base` is its first key, counted from the first page's."""
        heads, size = self.heads, self.blocks.piece
        left = item.num_keys - base

        def piece(index: jax.Array, _: None) -> None:
            start = pl.multiple_of(index * size, size)
            row = lax.broadcasted_iota(jnp.int32, (size, heads.row_width), 0)
            live = row < left - start

            def load(h: int) -> tuple[jax.Array, jax.Array]:
                # Slots beyond the prefix may hold anything, NaN included; 0 times NaN is NaN.
                rows = self.buffers.kv[at, h, pl.ds(start, size)]
                return keys_and_values(heads, jnp.where(live, rows, jnp.zeros_like(rows)))

            attend(
                heads,
                self.scratch,
                rows=tile * heads.group,
                keys=size,
                load=load,
                bias=self.prefix_bias(item, base + start, size, lowest),
                seed=False,
            )

        lax.fori_loop(0, (left + (size - 1)) // size, piece, None)

    # ---- masks

    def prefix_bias(
        self, item: Item, base: jax.Array, keys: int, lowest: jax.Array | None
    ) -> jax.Array:
        """[1 or rows, keys]: keys before the end of the prefix and within the rows' windows."""
        key = base + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        visible = key < item.num_keys
        if lowest is not None:
            visible = visible & (key >= lowest)
        return jnp.where(visible, 0.0, MASKED).astype(jnp.float32)

    def lowest_keys(self, item: Item, bits: list[jax.Array], tile: int) -> jax.Array | None:
        """[rows, 1]: the first prefix key of each row's window, counted from the first page's."""
        if self.window is None:
            return None
        row = item.first_row + lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        depth = jnp.zeros((tile, 1), jnp.int32)
        for column in bits:
            depth = depth + lax.population_count(column[:, :1]).astype(jnp.int32)
        offset = jnp.where(row < item.num_causal, row, item.num_causal - 1 + depth)
        lowest = item.kv_len + offset - (self.window - 1) - item.first_page * self.page_size
        return jnp.concatenate([lowest] * self.heads.group, axis=0)

    def block_bias(
        self, item: Item, bits: list[jax.Array], piece: jax.Array, tile: int
    ) -> jax.Array:
        """[rows, 128]: which keys of a piece of the block each row sees."""
        row = item.first_row + lax.broadcasted_iota(jnp.int32, (tile, BLOCK_PIECE), 0)
        lane = lax.broadcasted_iota(jnp.int32, (tile, BLOCK_PIECE), 1)
        key = piece * BLOCK_PIECE + lane - item.block_shift
        causal = (key >= 0) & (key <= row) & ((row < item.num_causal) | (key < item.num_causal))
        node = key - item.num_causal
        named = jnp.zeros((tile, BLOCK_PIECE), jnp.int32)
        for word, column in enumerate(bits):
            bit = lax.bitcast_convert_type(column, jnp.int32) >> (node & 31)
            named = jnp.where((node >> 5) == word, bit & 1, named)
        visible = causal | ((row >= item.num_causal) & (named == 1))
        if self.window is not None:
            visible = visible & self.block_window(item, bits, key, node, tile)
        bias = jnp.where(visible, 0.0, MASKED).astype(jnp.float32)
        return jnp.concatenate([bias] * self.heads.group, axis=0)

    def block_window(
        self, item: Item, bits: list[jax.Array], key: jax.Array, node: jax.Array, tile: int
    ) -> jax.Array:
        """[tile, 128]: block keys less than `window` positions before the row.

        The distance is the number of visible block rows behind the key up to the row itself.
        """
        assert self.window is not None
        row = item.first_row + lax.broadcasted_iota(jnp.int32, (tile, BLOCK_PIECE), 0)
        behind = jnp.zeros((tile, BLOCK_PIECE), jnp.int32)
        for word, column in enumerate(bits):
            shift = jnp.clip(node + 1 - 32 * word, 0, 32)  # bits of this word up to the key
            above = jnp.where(
                shift < 32, column >> jnp.minimum(shift, 31).astype(jnp.uint32), jnp.uint32(0)
            )
            behind = behind + lax.population_count(above).astype(jnp.int32)
        tree_distance = behind + jnp.maximum(item.num_causal - 1 - key, 0)
        return jnp.where(row < item.num_causal, row - key, tree_distance) < self.window

    # ---- the block, queries, output

    def attend_block(self, item: Item, half: jax.Array, bits: list[jax.Array], tile: int) -> None:
        """The sequence's own rows; the first piece seeds maximum and sum."""
        b, s = self.buffers, self.semaphores
        extent = item.block_shift + item.first_row + item.num_rows  # rows up to the tile's last
        num_pieces = (extent + (BLOCK_PIECE - 1)) // BLOCK_PIECE

        @pl.when(num_pieces > 1)
        def _second() -> None:
            self.piece_copy(item, jnp.int32(1), b.later.at[1], s.later.at[1]).start()

        self.attend_piece(item, bits, jnp.int32(0), b.first.at[half], tile, seed=True)

        def further(piece: jax.Array, _: None) -> None:
            at = piece % 2

            @pl.when(piece + 1 < num_pieces)
            def _next() -> None:
                self.piece_copy(item, piece + 1, b.later.at[1 - at], s.later.at[1 - at]).start()

            self.piece_copy(item, piece, b.later.at[at], s.later.at[at]).wait()
            self.attend_piece(item, bits, piece, b.later.at[at], tile, seed=False)

        lax.fori_loop(1, num_pieces, further, None)

    def attend_piece(
        self,
        item: Item,
        bits: list[jax.Array],
        piece: jax.Array,
        source: Ref,
        tile: int,
        *,
        seed: bool,
    ) -> None:
        heads = self.heads
        row = lax.broadcasted_iota(jnp.int32, (BLOCK_PIECE, heads.row_width), 0)
        key = row + (piece * BLOCK_PIECE - item.block_shift)
        live = (key >= 0) & (key < item.block_len)

        def load(h: int) -> tuple[jax.Array, jax.Array]:
            rows = source[h]
            return keys_and_values(heads, jnp.where(live, rows, jnp.zeros_like(rows)))

        attend(
            heads,
            self.scratch,
            rows=tile * heads.group,
            keys=BLOCK_PIECE,
            load=load,
            bias=self.block_bias(item, bits, piece, tile),
            seed=seed,
        )

    def load_queries(self, half: jax.Array, tile: int) -> None:
        """Token-major queries -> one matrix of group * tile rows per KV head.

        Turned by loads that step over a token's heads: a transpose would take eight operations of
        the cross-lane unit a register. They take 32-bit rows.
        """
        heads, staging, stride = self.heads, self.scratch.staging, self.heads.padded_q_heads
        for token in range(tile):
            rows = self.buffers.q[half, token].astype(jnp.float32)
            staging[token * stride : token * stride + heads.q_heads, :] = rows
        for head in range(heads.q_heads):
            h, place = divmod(head, heads.group)
            rows = staging[pl.ds(head, tile, stride=stride), :].astype(heads.dtype)
            self.scratch.q[h, place * tile : (place + 1) * tile, : heads.head_dim] = rows

    def store_output(self, half: jax.Array, tile: int) -> None:
        """One matrix per KV head -> token-major output, the other way round."""
        heads, staging, stride = self.heads, self.scratch.staging, self.heads.padded_q_heads
        for h in range(heads.kv_heads):
            out = finish(heads, self.scratch, h, tile * heads.group)
            for place in range(heads.group):
                rows = out[place * tile : (place + 1) * tile]
                staging[pl.ds(h * heads.group + place, tile, stride=stride), :] = rows
        for token in range(tile):
            rows = staging[token * stride : token * stride + heads.q_heads, :]
            self.buffers.out[half, token] = rows.astype(heads.dtype)

    def clear_padding(self) -> None:
        """Zeros in the output rows that belong to no sequence. All output DMAs have been
        awaited.
        """
        tile, total = self.blocks.tile, self.hbm.out.shape[0]
        begin = self.scalars.q_starts[self.scalars.q_starts.shape[0] - 1]
        self.buffers.out[0] = jnp.zeros(self.buffers.out.shape[1:], self.buffers.out.dtype)

        def clear(index: jax.Array, _: None) -> None:
            start = begin + index * tile
            size = jnp.minimum(total - start, tile)
            copy: Any = pltpu.make_async_copy(
                self.buffers.out.at[0, pl.ds(0, size)],
                self.hbm.out.at[pl.ds(start, size)],
                self.semaphores.out.at[0],
            )
            copy.start()
            copy.wait()

        lax.fori_loop(0, (total - begin + (tile - 1)) // tile, clear, None)


def _body(*refs: Ref, heads: Heads, blocks: Blocks, window: int | None, page_size: int) -> None:
    """Refs in the order of `Prefetched`, `Hbm`, `Buffers`, `Scratch`, `Semaphores`."""
    scalars, refs = Prefetched(*refs[:9]), refs[9:]
    hbm, refs = Hbm(*refs[:6]), refs[6:]
    buffers, refs = Buffers(*refs[:7]), refs[7:]
    scratch, refs = Scratch(*refs[:8]), refs[8:]
    kernel = _Kernel(
        heads, blocks, window, page_size, scalars, hbm, buffers, Semaphores(*refs), scratch
    )
    kernel.run(pl.program_id(0))


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
        pltpu.VMEM((2, tile, heads.q_heads, heads.head_dim), heads.dtype),
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
        pltpu.VMEM((tile * heads.padded_q_heads, heads.head_dim), f32),
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
    heads = Heads(kv_heads, q_heads // kv_heads, head_dim, scale, q.dtype)
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
        functools.partial(_body, heads=heads, blocks=blocks, window=window, page_size=page_size),
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
