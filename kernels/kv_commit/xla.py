"""KV commit as one XLA scatter over all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels import kv_layout


def kv_commit_xla(
    pages: jax.Array,
    rows: jax.Array,
    page_table: jax.Array,
    sequence: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    """`pages` with the valid rows written; shapes as in `api.kv_commit`."""
    page_size = kv_layout.page_size_of(pages)
    num_pages = kv_layout.num_pages_of(pages)
    # Rows that change nothing get a page beyond the last, which the scatter drops. Their sequence
    # and position may be anything: a clamped look-up would otherwise name a page of someone else.
    owner = jnp.where(valid, sequence, 0)
    place = jnp.where(valid, positions, 0)
    page = page_table[owner, place // page_size]
    page = jnp.where(valid, page, num_pages)
    return kv_layout.write_rows(pages, rows, page, place % page_size)
