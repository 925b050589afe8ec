"""`kv_commit`: rows of committed tokens into pages, all layers in one program, nothing else
moves."""

from __future__ import annotations

import jax

from kernels.backend import Backend
from kernels.checks import check_dtype, check_shape
from kernels.chips import Chip
from kernels.kv_commit.xla import kv_commit_xla


def kv_commit(
    pages: jax.Array,
    rows: jax.Array,
    page_table: jax.Array,
    sequence: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    *,
    backend: Backend,
    chip: Chip | None = None,
) -> jax.Array:
    """`pages` with every valid row written to its token's place; in place when `pages` is donated.

    pages      [L, P, kv_heads, page_size, 2·head_dim]
    rows       [L, R, kv_heads, 2·head_dim], cast to the pages' dtype
    page_table int32 [B, pages_per_sequence]
    sequence   int32 [R], which row of page_table
    positions  int32 [R], token position in its sequence
    valid      bool [R]; where False, sequence and position are not looked at and nothing changes

    No two valid rows may share sequence and position. Bytes written: the valid rows.
    Raises ValueError at trace time for shapes that do not fit, showing both.
    """
    num_layers, _, kv_heads, _, width = pages.shape
    num_rows = positions.shape[0]
    check_shape("rows", rows, (num_layers, num_rows, kv_heads, width))
    check_shape("page_table", page_table, (page_table.shape[0], page_table.shape[-1]))
    check_shape("sequence", sequence, (num_rows,))
    check_shape("positions", positions, (num_rows,))
    check_shape("valid", valid, (num_rows,))
    for name, array in (
        ("page_table", page_table),
        ("sequence", sequence),
        ("positions", positions),
    ):
        check_dtype(name, array, "int32")
    check_dtype("valid", valid, "bool")
    if backend is Backend.XLA:
        return kv_commit_xla(pages, rows, page_table, sequence, positions, valid)
    raise NotImplementedError(
        f"kv_commit: backend {backend.value} is not built (chip {chip.name if chip else None});"
        " XLA's scatter is in place on TPU as well: use Backend.XLA"
    )
