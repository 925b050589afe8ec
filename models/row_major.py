"""Tables whose rows are looked up lie row by row on the device.

XLA for TPU lays a matrix so that it pads least: one of 576 columns, no multiple of the 128 lanes,
lies column by column. A look-up of rows wants each row's numbers side by side, so XLA would turn
the whole table in every step. Laid row by row once, at loading, it is padded to 640 columns, and
both the look-up and, where tables are tied, the product with it read it as it lies.

A program compiled for such an array takes its layout from it; nothing in the step says so.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format, Layout

ROW_MAJOR = Layout((0, 1))


def is_looked_up(path: tuple[str, ...]) -> bool:
    """Whether the parameter is a table [V, H] of which a step reads single rows."""
    return path == ("embedding",)


def lay_by_rows(table: jax.Array) -> jax.Array:
    """`table` [V, H] row by row, on the devices where it is; itself if it lies so already, as on
    the CPU always. While it is turned both lie on the device.
    """
    stored: Any = table  # jax's own types leave `format` out
    layout = stored.format.layout
    if layout is None or layout.major_to_minor == ROW_MAJOR.major_to_minor:
        return table
    turn = jax.jit(lambda x: x, out_shardings=Format(ROW_MAJOR, table.sharding))
    turned: jax.Array = turn(table)
    return turned.block_until_ready()
