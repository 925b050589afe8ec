"""Tree attention's XLA form against the float64 oracle."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import AttentionCase, make_case

from kernels.backend import Backend
from kernels.tree_attention.api import tree_attention
from kernels.tree_attention.reference import reference_tree_attention
from kernels.tree_attention.shapes import EDGE_SHAPES, PRODUCTION_SHAPES, AttentionShape

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}


@functools.cache
def compiled(scale: float, window: int | None):
    call = functools.partial(tree_attention, scale=scale, window=window, backend=Backend.XLA)
    return jax.jit(lambda arrays: call(**arrays))


def check(case: AttentionCase, dtype=jnp.float32) -> None:
    arrays = case.device(dtype)
    got = np.asarray(compiled(case.scale, case.window)(arrays), np.float64)
    # The oracle sees the rounded inputs: what is tested is the computation.
    rounded = {name: np.asarray(array) for name, array in arrays.items()}
    rounded["layer"] = int(rounded["layer"])
    want = reference_tree_attention(**rounded, scale=case.scale, window=case.window)
    assert not np.isnan(got).any()
    live = int(case.arrays["q_starts"][-1])
    assert (got[live:] == 0).all()
    error = np.abs(got[:live] - want[:live]).max(initial=0.0)
    assert error <= TOLERANCE[jnp.dtype(dtype).name], error


@pytest.mark.parametrize("shape", EDGE_SHAPES, ids=lambda shape: shape.name)
def test_edge_shapes_match_the_oracle(shape: AttentionShape) -> None:
    check(make_case(shape, seed=1, extra_rows=3))


@pytest.mark.parametrize("shape", EDGE_SHAPES[4:], ids=lambda shape: shape.name)
def test_bfloat16_stays_within_its_rounding(shape: AttentionShape) -> None:
    check(make_case(shape, seed=1, extra_rows=3), jnp.bfloat16)


@pytest.mark.parametrize("index", [1, 3], ids=lambda index: PRODUCTION_SHAPES[index].name)
def test_demo_shapes_match_the_oracle(index: int) -> None:
    check(make_case(PRODUCTION_SHAPES[index], seed=2))


blocks = st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 36))


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(blocks, min_size=2, max_size=2),
    seed=st.integers(0, 2**16),
    window=st.sampled_from([None, 65]),
)
def test_random_trees_match_the_oracle(blocks, seed: int, window) -> None:
    # Rows are padded to one size, so that hypothesis' examples share one program.
    rows = sum(causal + tree for _, causal, tree in blocks)
    shape = AttentionShape(
        name="random",
        q_heads=4,
        kv_heads=2,
        head_dim=8,
        page_size=8,
        blocks=tuple(blocks),
        window=window,
    )
    case = make_case(shape, seed, extra_rows=96 - rows)
    arrays = dict(case.arrays)
    num_pages, words = 16, 2
    pages = np.full((2, num_pages, *arrays["pages"].shape[2:]), np.nan, np.float32)
    pages[:, : arrays["pages"].shape[1]] = arrays["pages"]
    table = np.full((2, 6), num_pages - 1, np.int32)
    table[:, : arrays["page_table"].shape[1]] = arrays["page_table"]
    ancestors = np.zeros((96, words), np.uint32)
    ancestors[:, : arrays["ancestors"].shape[1]] = arrays["ancestors"]
    arrays |= {"pages": pages, "page_table": table, "ancestors": ancestors}
    check(AttentionCase(arrays, case.window, case.scale))


def test_frontier_queries_see_the_whole_block() -> None:
    """The draft's use: q holds the last rows of a longer block."""
    shape = AttentionShape(
        name="draft", q_heads=4, kv_heads=2, head_dim=8, page_size=8, blocks=((11, 2, 9), (3, 1, 6))
    )
    whole = make_case(shape, seed=3)
    want = compiled(whole.scale, None)(whole.device())
    part = dict(whole.arrays)
    keep = np.array([7, 8, 9, 10, 15, 16, 17])  # 4 last rows of the first block, 3 of the second
    part |= {
        "q": part["q"][keep],
        "ancestors": part["ancestors"][keep],
        "q_starts": np.array([0, 4, 7], np.int32),
        "q_offsets": np.array([7, 4], np.int32),
    }
    got = compiled(whole.scale, None)(AttentionCase(part, None, whole.scale).device())
    np.testing.assert_allclose(got, np.asarray(want)[keep], atol=2e-6)


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    """Bit for bit: the same rows, alone and in a batch, in one program shape."""
    shape = EDGE_SHAPES[5]
    together = make_case(shape, seed=4)
    arrays = dict(together.arrays)
    alone = dict(arrays)
    third = slice(int(arrays["q_starts"][2]), int(arrays["q_starts"][3]))
    starts = np.array([0, 0, 0, third.stop - third.start, third.stop - third.start], np.int32)
    moved = {"q_starts": starts, "block_starts": starts}
    for name in ("q", "block_kv", "ancestors"):
        moved[name] = np.roll(arrays[name], -third.start, axis=0)
    alone |= moved
    run = compiled(together.scale, None)
    got = run(AttentionCase(alone, None, together.scale).device())
    want = run(together.device())
    np.testing.assert_array_equal(np.asarray(got)[: third.stop - third.start], want[third])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "q",
            np.zeros((4, 3, 8), np.float32),
            "3 heads must be a multiple of the pages' 2 KV heads",
        ),
        ("kv_lens", np.zeros(3, np.int32), r"kv_lens: shape \(3,\) must be \(1,\)"),
        ("q_starts", np.zeros(2, np.float32), "q_starts: dtype float32 must be int32"),
        ("ancestors", np.zeros((4, 33), np.uint32), "33 words must be 1 to 32"),
        ("block_kv", np.zeros((4, 2, 8), np.float32), r"block_kv: shape \(4, 2, 8\) must be"),
    ],
)
def test_misfits_are_refused_with_both_values(field: str, value, message: str) -> None:
    shape = AttentionShape(
        name="small", q_heads=4, kv_heads=2, head_dim=8, page_size=4, blocks=((3, 1, 3),)
    )
    arrays = make_case(shape, seed=0).device() | {field: jnp.asarray(value)}
    with pytest.raises(ValueError, match=message):
        tree_attention(**arrays, scale=1.0, backend=Backend.XLA)


def test_a_window_below_the_tree_is_refused() -> None:
    arrays = make_case(EDGE_SHAPES[1], seed=0).device()
    with pytest.raises(ValueError, match="window: 32 must exceed 32"):
        tree_attention(**arrays, scale=1.0, window=32, backend=Backend.XLA)
