"""KV commit: exact, in place, and nothing else moves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backend import Backend
from kernels.kv_commit.api import kv_commit
from kernels.kv_commit.reference import reference_kv_commit
from kernels.kv_commit.shapes import EDGE_SHAPES, CommitShape
from kernels.kv_layout import scatter_pairs, scatter_rows

commit = jax.jit(functools.partial(kv_commit, backend=Backend.XLA), donate_argnums=(0,))


def arrays_for(shape: CommitShape, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows at distinct places of their sequences; the others are invalid and point anywhere."""
    ids = rng.permutation(shape.num_pages)
    table = ids[: shape.num_sequences * shape.pages_per_sequence]
    table = table.reshape(shape.num_sequences, -1).astype(np.int32)
    room = shape.pages_per_sequence * shape.page_size
    places = rng.permutation(shape.num_sequences * room)
    num_valid = int(rng.integers(0, min(shape.num_rows, places.size) + 1))
    sequence = rng.integers(-9, 2**31 - 1, shape.num_rows)
    positions = rng.integers(-(2**31), 2**31 - 1, shape.num_rows)
    valid = np.zeros(shape.num_rows, bool)
    chosen = rng.permutation(shape.num_rows)[:num_valid]
    valid[chosen] = True
    sequence[chosen] = places[:num_valid] // room
    positions[chosen] = places[:num_valid] % room
    row = (shape.kv_heads, 2 * shape.head_dim)
    pages = rng.normal(
        size=(shape.num_layers, shape.num_pages, row[0], shape.page_size, row[1])
    ).astype(np.float32)
    rows = rng.normal(size=(shape.num_layers, shape.num_rows, *row)).astype(np.float32)
    rows[:, ~valid] = np.nan
    return [pages, rows, table, sequence.astype(np.int32), positions.astype(np.int32), valid]


@settings(max_examples=40, deadline=None)
@given(which=st.integers(0, len(EDGE_SHAPES) - 1), seed=st.integers(0, 2**16))
def test_only_valid_rows_change_the_pages(which: int, seed: int) -> None:
    arrays = arrays_for(EDGE_SHAPES[which], np.random.default_rng(seed))
    got = commit(*(jnp.asarray(array) for array in arrays))
    np.testing.assert_array_equal(got, reference_kv_commit(*arrays))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_the_form_for_tpu_writes_the_same(seed: int) -> None:
    """`write_rows` picks a form by platform; both run anywhere."""
    rng = np.random.default_rng(seed)
    pages = jnp.asarray(rng.normal(size=(2, 5, 3, 4, 8)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(2, 12, 3, 8)), jnp.float32)
    places = rng.permutation(7 * 4)[:12].astype(np.int32)  # pages 5 and 6 do not exist
    page, offset = jnp.asarray(places // 4), jnp.asarray(places % 4)
    by_pair = jax.jit(scatter_pairs)(pages, rows, page, offset)
    np.testing.assert_array_equal(by_pair, jax.jit(scatter_rows)(pages, rows, page, offset))


def test_donated_pages_are_written_in_place() -> None:
    arrays = [jnp.asarray(a) for a in arrays_for(EDGE_SHAPES[1], np.random.default_rng(1))]
    memory = commit.lower(*arrays).compile().memory_analysis()
    assert memory.alias_size_in_bytes == arrays[0].nbytes
    assert memory.temp_size_in_bytes < arrays[1].nbytes + 16384  # the rows, not the pages


def test_misfits_are_refused_with_both_values() -> None:
    arrays = [jnp.asarray(a) for a in arrays_for(EDGE_SHAPES[1], np.random.default_rng(1))]
    arrays[1] = arrays[1][:, :, :1]
    with pytest.raises(ValueError, match=r"rows: shape \(2, 24, 1, 16\) must be \(2, 24, 2, 16\)"):
        kv_commit(*arrays, backend=Backend.XLA)
