"""Tree attention over paged KV as one Pallas TPU kernel.

A work item is a tile of up to 64 q rows of one sequence. For each, in order:

1. the sequence's own new rows (the *block*) under causal order and ancestor bits, 128 keys at a
time. They seed maximum and sum, and hide the arrival of the first page;
2. the prefix in whole KV blocks of about 2 MiB, **without any mask**: every row sees all of it;
3. what is left of the prefix, piece by piece, under one length mask.

DMAs: KV blocks are double-buffered page by page; while a block is computed the next one, or the
next item's first one, arrives. Queries, bits, first block rows and the page table row of the next
item arrive during this one. Outputs are finished and leave during the next item. Nothing is padded
per sequence: reads of q and writes of the output are exactly the sequence's rows.

HBM traffic per call: q and o once; every sequence's prefix pages once per tile of its rows; its
block rows rounded up to 128; 512 bytes of bits per q row and word. VMEM: `blocks.vmem_bytes`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.tree_attention.blocks import BLOCK_PIECE, ROW_ALIGN, Blocks
from kernels.tree_attention.compute import Heads, Ref, Scratch, attend, finish, keys_and_values
from kernels.tree_attention.copies import Copies
from kernels.tree_attention.masks import Masks
from kernels.tree_attention.refs import Buffers, Hbm, Item, Prefetched, Semaphores

SPARE = 2
"""The output buffer that nothing is sent from."""


@dataclass(frozen=True)
class Kernel:
    """Code generation for one set of static sizes; methods trace into the kernel's body."""

    heads: Heads
    blocks: Blocks
    copies: Copies
    masks: Masks
    scratch: Scratch

    @property
    def scalars(self) -> Prefetched:
        return self.copies.scalars

    @property
    def buffers(self) -> Buffers:
        return self.copies.buffers

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
        if self.masks.window is not None:
            # Rows of the tile stand at kv_len + their block row, tree nodes nowhere before
            # num_causal.
            nearest = kv_len + jnp.minimum(first_row, num_causal)
            first_page = jnp.maximum(nearest - (self.masks.window - 1), 0) // self.copies.page_size
        num_keys = jnp.maximum(kv_len - first_page * self.copies.page_size, 0)
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

    # ---- the walk

    def run(self, core: jax.Array) -> None:
        begin, end = self.scalars.work_bounds[core], self.scalars.work_bounds[core + 1]
        if self.heads.packed:
            self.scratch.q[...] = jnp.zeros(self.scratch.q.shape, self.scratch.q.dtype)

        @pl.when(begin < end)
        def _first() -> None:
            item, half = self.item(begin), begin % 2
            table = self.copies.table(item, half)
            table.start()
            for copy in self.copies.inputs(item, half):
                copy.start()
            table.wait()

            @pl.when(item.num_keys > 0)
            def _() -> None:
                self.copies.fetch(item, half, jnp.int32(0), jnp.int32(0))

        lax.fori_loop(begin, end, functools.partial(self.step, begin, end), jnp.int32(0))

        for back in (2, 1):

            @pl.when(end - back >= begin)
            def _drain(back: int = back) -> None:
                self.copies.out(self.item(end - back), (end - back) % 2).wait()

        @pl.when(core == self.blocks.num_cores - 1)
        def _padding() -> None:
            self.clear_padding()

    def step(self, begin: jax.Array, end: jax.Array, work: jax.Array, slot: jax.Array) -> jax.Array:
        """One work item; its first KV block is arriving in `slot`. Returns the next item's slot.

        Its output is finished within the next item's block; where that one's tile has another size,
        or there is none, at once.
        """
        item, half = self.item(work), work % 2
        following = jnp.minimum(work + 1, end - 1)
        after, other = self.item(following), (work + 1) % 2

        @pl.when(work + 1 < end)
        def _next_inputs() -> None:
            self.copies.table(after, other).start()
            for copy in self.copies.inputs(after, other):
                copy.start()

        for copy in self.copies.inputs(item, half):
            copy.wait()

        def prefetch(target: jax.Array) -> None:
            """The next item's first KV block."""

            @pl.when(work + 1 < end)
            def _() -> None:
                self.copies.table(after, other).wait()

                @pl.when(after.num_keys > 0)
                def _() -> None:
                    self.copies.fetch(after, other, jnp.int32(0), target)

        previous = self.item(jnp.maximum(work - 1, begin))
        smallest = 0
        for tile in self.blocks.tiles:

            def takes(other: Item, above: int = smallest, most: int = tile) -> jax.Array:
                return (other.num_rows > above) & (other.num_rows <= most)

            @pl.when(takes(item))
            def _tile(tile: int = tile, takes: Any = takes) -> None:
                put_off = (work > begin) & takes(previous)
                self.free_output(begin, work - 1, other, put_off)
                self.load_queries(half, tile)
                # In one run of instructions with this item's block, whose matmuls and reductions
                # are waited for meanwhile. Where nothing was put off it stores what nobody reads.
                self.store_output(jnp.where(put_off, other, SPARE), tile)
                self.attend_tile(item, half, slot, tile, prefetch)

                @pl.when(put_off)
                def _send_previous() -> None:
                    self.copies.out(previous, other).start()

                def finish_now(_: jax.Array, __: None) -> None:
                    self.free_output(begin, work, half, True)
                    self.store_output(half, tile)
                    self.copies.out(item, half).start()

                # A loop of one turn or none: not part of what every item costs.
                cannot_wait = (work + 1 == end) | ~takes(after)
                lax.fori_loop(0, cannot_wait.astype(jnp.int32), finish_now, None)

            smallest = tile
        return (slot + self.num_blocks(item)) % 2

    def free_output(
        self, begin: jax.Array, work: jax.Array, half: jax.Array, is_used: jax.Array | bool
    ) -> None:
        """Waits until the output that item `work` takes the buffer over from has left it."""

        @pl.when(is_used & (work - 2 >= begin))
        def _wait() -> None:
            self.copies.out(self.item(work - 2), half).wait()

    def attend_tile(
        self, item: Item, half: jax.Array, slot: jax.Array, tile: int, prefetch: Any
    ) -> None:
        heads, scratch = self.heads, self.scratch
        num_words = self.buffers.bits.shape[2]
        bits = [self.buffers.bits[half, :tile, word, :] for word in range(num_words)]
        self.attend_block(item, half, bits, tile)
        num_blocks = self.num_blocks(item)

        def fetch_after(block: jax.Array) -> None:
            free = (slot + block + 1) % 2

            @pl.when(block + 1 < num_blocks)
            def _() -> None:
                self.copies.fetch(item, half, block + 1, free)

            @pl.when(block + 1 == num_blocks)
            def _() -> None:
                prefetch(free)

        lowest = self.masks.lowest_keys(item, bits, tile)

        def whole(block: jax.Array, _: None) -> None:
            fetch_after(block)
            at = (slot + block) % 2
            self.copies.await_whole(at)
            bias = None
            if self.masks.window is not None:
                bias = self.masks.prefix_bias(
                    item, block * self.blocks.keys, self.blocks.keys, lowest
                )
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

        @pl.when((num_whole < num_blocks) | (num_blocks == 0))
        def _last_is_not_whole() -> None:
            prefetch((slot + num_blocks) % 2)

        @pl.when(num_whole < num_blocks)
        def _rest() -> None:
            at = (slot + num_whole) % 2
            self.copies.await_pages(self.copies.block_pages(item, num_whole), at)
            self.attend_rest(item, at, num_whole * self.blocks.keys, lowest, tile)

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
                bias=self.masks.prefix_bias(item, base + start, size, lowest),
                seed=False,
            )

        lax.fori_loop(0, (left + (size - 1)) // size, piece, None)

    # ---- the block, queries, output

    def attend_block(self, item: Item, half: jax.Array, bits: list[jax.Array], tile: int) -> None:
        """The sequence's own rows; the first piece seeds maximum and sum."""
        b, s = self.buffers, self.copies.semaphores
        extent = item.block_shift + item.first_row + item.num_rows  # rows up to the tile's last
        num_pieces = (extent + (BLOCK_PIECE - 1)) // BLOCK_PIECE

        @pl.when(num_pieces > 1)
        def _second() -> None:
            self.copies.piece(item, jnp.int32(1), b.later.at[1], s.later.at[1]).start()

        self.attend_piece(item, bits, jnp.int32(0), b.first.at[half], tile, seed=True)

        def further(piece: jax.Array, _: None) -> None:
            at = piece % 2

            @pl.when(piece + 1 < num_pieces)
            def _next() -> None:
                self.copies.piece(item, piece + 1, b.later.at[1 - at], s.later.at[1 - at]).start()

            self.copies.piece(item, piece, b.later.at[at], s.later.at[at]).wait()
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
            bias=self.masks.block_bias(item, bits, piece, tile),
            seed=seed,
        )

    def load_queries(self, half: jax.Array, tile: int) -> None:
        """Token-major queries -> one matrix of group * tile rows per KV head.

        Both ways of turning take 32-bit rows. See `Heads.turned_by_strides`.
        """
        heads, staging, stride = self.heads, self.scratch.staging, self.heads.padded_q_heads
        if not heads.turned_by_strides:
            head_major = jnp.swapaxes(self.buffers.q[half, :tile].astype(jnp.float32), 0, 1)
            per_head = (heads.group * tile, heads.head_dim)
            for h in range(heads.kv_heads):
                part = head_major[h * heads.group : (h + 1) * heads.group].reshape(per_head)
                self.scratch.q[h, : per_head[0], : heads.head_dim] = part.astype(heads.dtype)
            return
        for token in range(tile):
            rows = self.buffers.q[half, token].astype(jnp.float32)
            staging[token * stride : token * stride + heads.q_heads, :] = rows
        for head in range(heads.q_heads):
            h, place = divmod(head, heads.group)
            rows = staging[pl.ds(head, tile, stride=stride), :].astype(heads.dtype)
            self.scratch.q[h, place * tile : (place + 1) * tile, : heads.head_dim] = rows

    def store_output(self, half: jax.Array, tile: int) -> None:
        """One matrix per KV head -> token-major output, the other way round."""
        heads, staging, stride = self.heads, self.scratch.out_staging, self.heads.padded_q_heads
        if not heads.turned_by_strides:
            shape = (heads.group, tile, heads.head_dim)
            outs = [
                finish(heads, self.scratch, h, tile * heads.group).reshape(shape)
                for h in range(heads.kv_heads)
            ]
            token_major = jnp.swapaxes(jnp.concatenate(outs, axis=0), 0, 1)
            self.buffers.out[half, :tile] = token_major.astype(heads.dtype)
            return
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
        tile, total = self.blocks.tile, self.copies.hbm.out.shape[0]
        begin = self.scalars.q_starts[self.scalars.q_starts.shape[0] - 1]
        self.buffers.out[0] = jnp.zeros(self.buffers.out.shape[1:], self.buffers.out.dtype)

        def clear(index: jax.Array, _: None) -> None:
            start = begin + index * tile
            size = jnp.minimum(total - start, tile)
            copy: Any = pltpu.make_async_copy(
                self.buffers.out.at[0, pl.ds(0, size)],
                self.copies.hbm.out.at[pl.ds(start, size)],
                self.copies.semaphores.out.at[0],
            )
            copy.start()
            copy.wait()

        lax.fori_loop(0, (total - begin + (tile - 1)) // tile, clear, None)


def body(*refs: Ref, heads: Heads, blocks: Blocks, window: int | None, page_size: int) -> None:
    """Refs in the order of `Prefetched`, `Hbm`, `Buffers`, `Scratch`, `Semaphores`."""
    scalars, refs = Prefetched(*refs[:9]), refs[9:]
    hbm, refs = Hbm(*refs[:6]), refs[6:]
    buffers, refs = Buffers(*refs[:7]), refs[7:]
    scratch, refs = Scratch(*refs[:9]), refs[9:]
    copies = Copies(page_size, blocks.keys, scalars, hbm, buffers, Semaphores(*refs))
    masks = Masks(heads.group, window, page_size)
    Kernel(heads, blocks, copies, masks, scratch).run(pl.program_id(0))
