"""The order of the axes of KV pages; nothing else in Canopy knows it.

Pages: `[L, P, kv_heads, page_size, 2·head_dim]`, K in the first half of the last axis and V in the
second. At head_dim 64 a K/V pair fills the 128 lanes of a TPU register, at 128 and 256 the halves
are lane-aligned, and one page of one head is one contiguous DMA. A **row** (one token, one layer)
is `[kv_heads, 2·head_dim]`.

Functions take and return device arrays or tracers; none copies pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def pages_shape(
    *, num_layers: int, num_pages: int, kv_heads: int, page_size: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """The shape of a page pool."""
    return (num_layers, num_pages, kv_heads, page_size, 2 * head_dim)


def pages_bytes(shape: tuple[int, int, int, int, int], dtype: DTypeLike) -> int:
    """Bytes of a page pool of `shape`."""
    size = int(jnp.dtype(dtype).itemsize)
    for axis in shape:
        size *= axis
    return size


def num_pages_of(pages: jax.Array) -> int:
    return int(pages.shape[1])


def page_size_of(pages: jax.Array) -> int:
    """Tokens in a page."""
    return int(pages.shape[3])


def pack_rows(keys: jax.Array, values: jax.Array) -> jax.Array:
    """Rows [..., kv_heads, 2·head_dim] of keys and values [..., kv_heads, head_dim]."""
    return jnp.concatenate([keys, values], axis=-1)


def unpack_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [..., head_dim] of rows [..., 2·head_dim]."""
    head_dim = rows.shape[-1] // 2
    return rows[..., :head_dim], rows[..., head_dim:]


def read_pages(pages: jax.Array, layer: jax.Array, page_ids: jax.Array) -> jax.Array:
    """[kv_heads, n·page_size, 2·head_dim]: n pages of one layer, one after the other.

    `layer` int32 scalar, `page_ids` int32 [n]; ids out of range read some page. Only what is asked
    for is copied, never a layer.
    """
    blocks = pages[layer, page_ids]  # [n, kv_heads, page_size, 2·head_dim]
    num, kv_heads, page_size, width = blocks.shape
    return blocks.transpose(1, 0, 2, 3).reshape(kv_heads, num * page_size, width)


def write_rows(pages: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """`pages` with `rows` [L, R, kv_heads, 2·head_dim] at (`page`[r], `offset`[r]), all layers.

    A row whose `page` is num_pages or more is dropped (negative ids would wrap: never pass one).
    In place if `pages` is donated. Live rows must not share a place.
    """
    rows = rows.astype(pages.dtype)
    written: jax.Array = lax.platform_dependent(
        pages, rows, page, offset, tpu=scatter_pairs, default=scatter_rows
    )
    return written


def copy_pages(
    pages: jax.Array, source: jax.Array, target: jax.Array, num_copies: jax.Array
) -> jax.Array:
    """`pages` with page `target`[i] as `source`[i], all layers, for i below `num_copies`, in turn.

    `source`, `target` int32 [C]; `num_copies` int32 scalar at most C. In place if `pages` is
    donated; nothing is moved where there is nothing to copy.
    """

    def copy(i: jax.Array, pages: jax.Array) -> jax.Array:
        page = lax.dynamic_slice_in_dim(pages, source[i], 1, axis=1)
        return lax.dynamic_update_slice_in_dim(pages, page, target[i], axis=1)

    done: jax.Array = lax.fori_loop(0, num_copies, copy, pages)
    return done


def scatter_rows(
    pages: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array
) -> jax.Array:
    """One scatter, a row of all layers and heads at a time: the fewest indices, best on the CPU,
    where each costs a turn of a loop."""
    # Advanced indices split by a slice put the R axis first: [R, L, kv_heads, 2·head_dim].
    moved = jnp.moveaxis(rows, 1, 0)
    return pages.at[:, page, :, offset, :].set(moved, mode="drop", unique_indices=False)


def scatter_pairs(
    pages: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array
) -> jax.Array:
    """Layer after layer, each K/V pair indexed by itself: in place on TPU at every shape.

    Given whole rows, XLA for TPU would at some shapes rather have the heads behind the tokens of a
    page, and turns all pages there and back: seen with one layer, with one KV head, and with 1,024
    rows.
    """
    num_layers, _, kv_heads, _ = rows.shape
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None]

    def write(layer: jax.Array, pages: jax.Array) -> jax.Array:
        at = pages.at[layer, page[:, None], head, offset[:, None]]
        return at.set(rows[layer], mode="drop", unique_indices=False)

    done: jax.Array = lax.fori_loop(0, num_layers, write, pages)
    return done
