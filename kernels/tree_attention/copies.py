"""The DMAs of the tree attention kernel: each copy as one method, used to start and to await it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.tree_attention.blocks import BLOCK_PIECE, ROW_ALIGN
from kernels.tree_attention.compute import Ref
from kernels.tree_attention.refs import Buffers, Hbm, Item, Prefetched, Semaphores


@dataclass(frozen=True)
class Copies:
    """`half`, `slot`: which half of a double buffer. `keys`: prefix tokens of a whole KV block."""

    page_size: int
    keys: int
    scalars: Prefetched
    hbm: Hbm
    buffers: Buffers
    semaphores: Semaphores

    @property
    def pages_per_block(self) -> int:
        return self.keys // self.page_size

    def table(self, item: Item, half: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.hbm.page_table.at[item.sequence],
            self.buffers.table.at[half],
            self.semaphores.table.at[half],
        )

    def inputs(self, item: Item, half: jax.Array) -> list[Any]:
        rows = pl.ds(item.q_start, item.num_rows)
        kept = pl.ds(0, item.num_rows)
        b, s = self.buffers, self.semaphores
        return [
            pltpu.make_async_copy(self.hbm.q.at[rows], b.q.at[half, kept], s.q.at[half]),
            pltpu.make_async_copy(self.hbm.bits.at[rows], b.bits.at[half, kept], s.bits.at[half]),
            self.piece(item, jnp.int32(0), b.first.at[half], s.first.at[half]),
        ]

    def piece(self, item: Item, piece: jax.Array, target: Ref, semaphore: Ref) -> Any:
        start = pl.multiple_of(item.block_base + piece * BLOCK_PIECE, ROW_ALIGN)
        return pltpu.make_async_copy(
            self.hbm.block.at[:, pl.ds(start, BLOCK_PIECE)], target, semaphore
        )

    def out(self, item: Item, half: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.buffers.out.at[half, pl.ds(0, item.num_rows)],
            self.hbm.out.at[pl.ds(item.q_start, item.num_rows)],
            self.semaphores.out.at[half],
        )

    def page(self, page: jax.Array, index: jax.Array | int, slot: jax.Array) -> Any:
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
        left = item.num_keys - block * self.keys
        pages = (left + (self.page_size - 1)) // self.page_size
        return jnp.minimum(pages, self.pages_per_block)

    def fetch(self, item: Item, half: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        """Starts the DMAs of one KV block; its page table row is in `table[half]`."""
        base = item.first_page + block * self.pages_per_block
        num_pages = self.block_pages(item, block)
        table = self.buffers.table

        def start(index: jax.Array | int) -> None:
            self.page(table[half, 0, base + index], index, slot).start()

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
            self.page(jnp.int32(0), index, slot).wait()

        lax.fori_loop(0, num_pages, wait, None)
