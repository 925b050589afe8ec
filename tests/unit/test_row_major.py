"""Tables laid row by row, and programs that take them as they lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from models.decoder import embedding_rows
from models.row_major import is_looked_up, lay_by_rows


def by_columns(table: Any) -> Any:
    """As a TPU would lay a table of 576 columns by itself."""
    put = jax.device_put(table)
    return jax.device_put(put, Format(Layout((1, 0)), put.sharding))


def order(table: Any) -> tuple[int, ...]:
    return tuple(table.format.layout.major_to_minor)


def test_a_table_by_columns_is_turned_and_keeps_its_values() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    table = by_columns(values)
    assert order(table) == (1, 0)
    turned = lay_by_rows(table)
    assert order(turned) == (0, 1)
    assert turned.devices() == table.devices()
    np.testing.assert_array_equal(turned, values)


def test_a_table_by_rows_stays_where_it_is() -> None:
    table = jnp.arange(12.0).reshape(4, 3)
    assert lay_by_rows(table) is table


def test_a_program_takes_the_layout_of_the_table_it_is_compiled_for() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    tokens = jnp.asarray([2, 0], jnp.int32)

    def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return embedding_rows(table, tokens, 4, None)

    for table, expected in ((by_columns(values), (1, 0)), (jnp.asarray(values), (0, 1))):
        program = jax.jit(look_up).lower(table, tokens).compile()
        taken: Any = program.input_formats[0][0]
        assert tuple(taken.layout.major_to_minor) == expected
        np.testing.assert_array_equal(program(table, tokens), values[[2, 0]])


def test_only_the_embedding_is_looked_up() -> None:
    assert is_looked_up(("embedding",))
    assert not is_looked_up(("lm_head",))
    assert not is_looked_up(("layer_0", "mlp", "gate", "kernel"))
