"""Tree attention in plain XLA, made for the CPU: cost follows the real lengths, nothing is
bucketed.

One loop walks over the rows in query tiles, none across two sequences; each tile loops over its
own block, then over its prefix, gathered from pages a few at a time, with a running softmax in
float32. Trip counts are dynamic, so neither batch nor context has a compiled width, and a row's
sums run over the same key blocks whatever else is in the batch.

A tile's size is chosen at run time among `TILES`: one row for a root alone, 8 or 16 for a tree, 128
for prefill. Measured on two CPU cores, busy with other work besides, interleaved, least of 25 runs,
at SmolLM2's shape (9 query heads, 3 KV heads, head_dim 64, 30 layers) in float32, against dense
masked attention over a contiguous cache of exactly that length: T=1 3.2 ms to 4.2 at 200 tokens and
24 to 79 at 2,000; T=16 9.3 to 6.6 and 63 to 116. T=8 in a tile of 8 and not of 16: 5.6 ms to 7.9 at
150 tokens. Slicing K and V apart beat zero-padded packed rows, and key blocks of 512 those of 256,
when last compared; tails are taken in 128.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels import kv_layout
from kernels.tree_attention.plan import Plan, make_plan, row_owners

TILES = (1, 8, 16, 128)
"""Query rows of a tile, at most."""

FULL_KEYS, TAIL_KEYS = 512, 128
"""Prefix tokens of a key block: as long as whole blocks are left, and then."""

MASKED = -1e30
"""Score of a key that a row does not see: finite, so that a row without any key so far stays free
of NaN; what it summed up is multiplied by exp(-1e30 - max) = 0 as soon as a key comes."""


class Running(NamedTuple):
    """A softmax on its way; float32, R = tile·group rows. `best`, `total` [kv_heads, R, 1];
    `weighted` [kv_heads, R, head_dim]."""

    best: jax.Array
    total: jax.Array
    weighted: jax.Array


def _advance(
    state: Running,
    queries: jax.Array,
    rows: jax.Array,
    live: jax.Array,
    seen: jax.Array | None,
    scale: float,
) -> Running:
    """`state` with a block of S keys taken in.

    queries [kv_heads, R, head_dim]; rows [kv_heads, S, 2·head_dim]; live bool [S]: others may hold
    anything, NaN too; seen bool [R, S] or None: every live key.
    """
    keys, values = kv_layout.unpack_rows(jnp.where(live[None, :, None], rows, 0))
    scores = lax.dot_general(
        queries,
        keys,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    shown = live[None] if seen is None else seen & live[None]
    scores = jnp.where(shown[None], scores * jnp.float32(scale), MASKED)
    best = jnp.maximum(state.best, jnp.max(scores, axis=2, keepdims=True))
    shrink, weights = jnp.exp(state.best - best), jnp.exp(scores - best)
    added = lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((2,), (1,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return Running(
        best,
        state.total * shrink + jnp.sum(weights, axis=2, keepdims=True),
        state.weighted * shrink + added,
    )


@dataclass(frozen=True)
class _Call:
    """One call's arrays. q, block_kv and plan end in `padding` rows of nothing, so that a tile may
    read past the last row."""

    q: jax.Array  # [Tq + padding, kv_heads, group, head_dim]
    block_kv: jax.Array  # [Tk + padding, kv_heads, 2·head_dim]
    pages: jax.Array
    layer: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    q_starts: jax.Array
    block_starts: jax.Array
    q_offsets: jax.Array
    plan: Plan
    padding: int
    scale: float
    window: int | None

    def tile(self, size: int, b: jax.Array, row: jax.Array) -> jax.Array:
        """[size, q_heads, head_dim] float32: attention of q rows from `row` on, of sequence `b`.
        Rows beyond the sequence's own come out as anything."""
        _, kv_heads, group, head_dim = self.q.shape
        queries = lax.dynamic_slice_in_dim(self.q, row, size)
        queries = queries.transpose(1, 0, 2, 3).reshape(kv_heads, size * group, head_dim)
        shape = (kv_heads, size * group, 1)
        state = Running(
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape[:2], head_dim), jnp.float32),
        )
        state = self._over_block(state, queries, size, b, row)
        state = self._over_prefix(state, queries, size, b, row)
        out = state.weighted / state.total
        out = out.reshape(kv_heads, size, group, head_dim).transpose(1, 0, 2, 3)
        return out.reshape(size, kv_heads * group, head_dim)

    def _spread(self, mask: jax.Array) -> jax.Array:
        """bool [size, S] per row as [size·group, S] per query."""
        size, num_keys = mask.shape
        spread = jnp.broadcast_to(mask[:, None], (size, self.q.shape[2], num_keys))
        return spread.reshape(-1, num_keys)

    def _over_block(
        self, state: Running, queries: jax.Array, size: int, b: jax.Array, row: jax.Array
    ) -> Running:
        step = self.padding
        start, end = self.block_starts[b], self.block_starts[b + 1]
        # No row sees a row behind it.
        reach = jnp.minimum(end - start, self.q_offsets[b] + row - self.q_starts[b] + size)

        def take(i: jax.Array, state: Running) -> Running:
            at = start + i * step
            rows = lax.dynamic_slice_in_dim(self.block_kv, at, step)
            live = at + jnp.arange(step, dtype=jnp.int32) < end
            seen = lax.dynamic_slice(self.plan.visible, (row, at), (size, step))
            return _advance(
                state, queries, rows.transpose(1, 0, 2), live, self._spread(seen), self.scale
            )

        done: Running = lax.fori_loop(0, (reach + step - 1) // step, take, state)
        return done

    def _over_prefix(
        self, state: Running, queries: jax.Array, size: int, b: jax.Array, row: jax.Array
    ) -> Running:
        page_size = kv_layout.page_size_of(self.pages)
        kv_len = self.kv_lens[b]
        positions = lax.dynamic_slice_in_dim(self.plan.positions, row, size)
        pages_ids = self.page_table[b]
        first = jnp.int32(0)
        if self.window is not None:
            # The first row stands lowest: what lies before its window no row of the tile sees.
            first = jnp.maximum(positions[0] - self.window + 1, 0) // page_size

        def take(num_keys: int, offset: jax.Array, i: jax.Array, state: Running) -> Running:
            num_pages = num_keys // page_size
            page = offset + i * num_pages
            ids = lax.dynamic_slice_in_dim(pages_ids, page, num_pages)
            rows = kv_layout.read_pages(self.pages, self.layer, ids)
            place = page * page_size + jnp.arange(num_keys, dtype=jnp.int32)
            seen = None
            if self.window is not None:
                seen = self._spread(place[None] > positions[:, None] - self.window)
            return _advance(state, queries, rows, place < kv_len, seen, self.scale)

        full_keys = -(-FULL_KEYS // page_size) * page_size
        tail_keys = -(-TAIL_KEYS // page_size) * page_size
        num_full = jnp.maximum(kv_len - first * page_size, 0) // full_keys
        state = lax.fori_loop(0, num_full, functools.partial(take, full_keys, first), state)
        second = first + num_full * (full_keys // page_size)
        left = jnp.maximum(kv_len - second * page_size, 0)
        num_tail = (left + tail_keys - 1) // tail_keys
        done: Running = lax.fori_loop(
            0, num_tail, functools.partial(take, tail_keys, second), state
        )
        return done


def _tile_sizes(num_rows: int) -> tuple[int, ...]:
    """The tiles that a call of `num_rows` rows can need."""
    return tuple(size for i, size in enumerate(TILES) if i == 0 or TILES[i - 1] < num_rows)


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def tree_attention_xla(
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
    window: int | None,
) -> jax.Array:
    """Arguments as in `api.tree_attention`. Jitted: a model of many layers traces it once."""
    num_rows, q_heads, head_dim = q.shape
    num_keys, kv_heads, _ = block_kv.shape
    sizes = _tile_sizes(num_rows)
    padding = sizes[-1]
    page_size = kv_layout.page_size_of(pages)
    q_rows = q.reshape(num_rows, kv_heads, q_heads // kv_heads, head_dim)
    call = _Call(
        q=jnp.pad(q_rows, ((0, padding), (0, 0), (0, 0), (0, 0))),
        block_kv=jnp.pad(block_kv, ((0, padding), (0, 0), (0, 0))),
        pages=pages,
        layer=jnp.asarray(layer, jnp.int32),
        # A key block may reach past the last page of a sequence: then its ids are read, not used.
        page_table=jnp.pad(page_table, ((0, 0), (0, FULL_KEYS // page_size + 1))),
        kv_lens=kv_lens,
        q_starts=q_starts,
        block_starts=block_starts,
        q_offsets=q_offsets,
        plan=make_plan(
            q_starts,
            block_starts,
            kv_lens,
            num_causal,
            ancestors,
            q_offsets,
            num_keys=num_keys,
            padding=padding,
            window=window,
        ),
        padding=padding,
        scale=scale,
        window=window,
    )

    owners = row_owners(q_starts, num_rows)
    Carry = tuple[jax.Array, jax.Array]

    def visit(carry: Carry) -> Carry:
        row, out = carry
        b = owners[row]
        left = q_starts[b + 1] - row

        def place(size: int, out: jax.Array) -> jax.Array:
            tile = call.tile(size, b, row).astype(out.dtype)
            return lax.dynamic_update_slice_in_dim(out, tile, row, 0)

        which = jnp.sum(left > jnp.asarray(sizes[:-1], jnp.int32), dtype=jnp.int32)
        out = lax.switch(which, [functools.partial(place, size) for size in sizes], out)
        return row + jnp.minimum(left, jnp.asarray(sizes, jnp.int32)[which]), out

    start = (q_starts[0], jnp.zeros((num_rows + padding, q_heads, head_dim), q.dtype))
    _, out = lax.while_loop(lambda carry: carry[0] < q_starts[-1], visit, start)
    # A tile's rows beyond its sequence are overwritten by the next one's; behind the last, zeros.
    live = jnp.arange(num_rows, dtype=jnp.int32) < q_starts[-1]
    return jnp.where(live[:, None, None], out[:num_rows], jnp.zeros((), q.dtype))
