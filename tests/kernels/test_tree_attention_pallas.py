"""The Pallas kernel in TPU interpret mode against the float64 oracle: values, races, semaphores.

Every slot that no query may read holds NaN, as does VMEM before it is written.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_oracle import Sequence, Step, make_step, oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import KernelFault, Mode, interpret, small_blocks

from kernels.backend import Backend
from kernels.chips import CHIPS
from kernels.tree_attention.api import tree_attention
from kernels.tree_attention.copies import Copies
from kernels.tree_attention.kernel import Kernel

pytestmark = pytest.mark.interpret

MODES: tuple[Mode, ...] = ("eager", "on_wait")
BATCH, ROWS, PAGES, PER_SEQUENCE = 3, 128, 48, 14

SIZES: dict[str, dict[str, Any]] = {
    "float32, head_dim 128": {
        "kv_heads": 2,
        "group": 2,
        "head_dim": 128,
        "page_size": 32,
        "dtype": np.float32,
        "num_words": 2,
    },
    "bfloat16, head_dim 64 packed, group of 3": {
        "kv_heads": 3,
        "group": 3,
        "head_dim": 64,
        "page_size": 32,
        "dtype": ml_dtypes.bfloat16,
        "num_words": 1,
    },
    "bfloat16, head_dim 256, 20 heads, window": {
        "kv_heads": 2,
        "group": 10,
        "head_dim": 256,
        "page_size": 64,
        "dtype": ml_dtypes.bfloat16,
        "num_words": 1,
        "window": 70,
    },
}

SMALL = {"kv_heads": 1, "group": 1, "head_dim": 128, "page_size": 128}
SMALL_STEP = [Sequence(384, 1, 3), Sequence(300, 1)]


def _run(step: Step, mode: Mode, **blocks: Any) -> np.ndarray:
    return interpret(
        step.arrays, small_blocks(**blocks), mode, scale=step.scale, window=step.window
    )


def _padded(seed: int, sequences: list[Sequence], sizes: dict[str, Any]) -> Step:
    rng = np.random.default_rng(seed)
    return make_step(
        rng,
        sequences,
        num_rows=ROWS,
        num_pages=PAGES,
        pages_per_sequence=PER_SEQUENCE,
        **sizes,
    )


def _assert_close(out: np.ndarray, want: np.ndarray, dtype: Any) -> None:
    """Within 2e-5 in float32. In bfloat16 within 1e-2, but for outputs beyond 1.7: there rounding
    them (half a step, 2^-8 of the value) takes most of that by itself.
    """
    if dtype == np.float32:
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)
        return
    allowed = np.maximum(1e-2, 1.5 * 2**-8 * np.abs(want))
    np.testing.assert_array_less(np.abs(out - want), allowed)


@st.composite
def sequences_of(draw: st.DrawFn, num_words: int) -> list[Sequence]:
    """Trees, roots, prefill chunks, frontiers of a growing tree, and sequences without rows."""
    found = []
    for _ in range(BATCH):
        kind = draw(st.sampled_from(["tree", "root", "prefill", "both", "frontier", "none"]))
        kv_len = draw(
            st.one_of(st.sampled_from([0, 1, 31, 32, 127, 128, 256]), st.integers(0, 400))
        )
        nodes = draw(st.integers(1, min(32 * num_words, 38)))
        if kind == "tree":
            found.append(Sequence(kv_len, 1, nodes))
        elif kind == "root":
            found.append(Sequence(kv_len, 1))
        elif kind == "prefill":
            found.append(Sequence(kv_len, draw(st.integers(1, 40))))
        elif kind == "both":
            found.append(Sequence(kv_len, draw(st.integers(2, 20)), min(nodes, 18)))
        elif kind == "frontier":
            found.append(Sequence(kv_len, 2, nodes, draw(st.integers(0, 1 + nodes))))
        else:
            found.append(Sequence(kv_len, 0))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SIZES)
def test_any_step_equals_the_oracle_without_race_or_leak(name: str, mode: Mode) -> None:
    sizes = SIZES[name]
    tiles = (8, 32) if mode == "eager" else (16,)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32 - 1), sequences=sequences_of(sizes["num_words"]))
    def check(seed: int, sequences: list[Sequence]) -> None:
        step = _padded(seed, sequences, sizes)
        out = _run(step, mode, tiles=tiles)
        _assert_close(out, oracle(step), sizes["dtype"])

    check()


@pytest.mark.parametrize("mode", MODES)
def test_unchanged_kernel_passes_where_the_mutants_are_caught(mode: Mode) -> None:
    step = make_step(np.random.default_rng(1), SMALL_STEP, **SMALL)
    np.testing.assert_allclose(_run(step, mode, tiles=(8,)), oracle(step), rtol=0, atol=2e-5)


def test_a_long_block_goes_in_pieces_and_two_cores_share_the_work() -> None:
    sizes = {"kv_heads": 1, "group": 1, "head_dim": 128, "page_size": 64}
    sequences = [Sequence(200, 300), Sequence(0, 140, 20), Sequence(150, 1, 8), Sequence(90, 1)]
    step = make_step(np.random.default_rng(0), sequences, **sizes)
    blocks = small_blocks(keys=256, tiles=(32,))
    two_cores = type(blocks)(**{**vars(blocks), "num_cores": 2})
    out = interpret(step.arrays, two_cores, "eager", scale=step.scale, window=None)
    np.testing.assert_allclose(out, oracle(step), rtol=0, atol=2e-5)


MANY_ITEMS = [Sequence(kv_len, 1, nodes) for kv_len, nodes in ((40, 4), (0, 5), (9, 3), (128, 6))]
MANY_ITEMS += [Sequence(64, 12), Sequence(30, 1)]


def test_outputs_put_off_to_the_next_item_and_not_where_its_tile_differs() -> None:
    step = make_step(np.random.default_rng(3), MANY_ITEMS, **SMALL)
    out = _run(step, "on_wait", tiles=(8, 16))
    np.testing.assert_allclose(out, oracle(step), rtol=0, atol=2e-5)


def test_an_output_buffer_not_waited_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "free_output", lambda self, *rest: None)
    step = make_step(np.random.default_rng(3), MANY_ITEMS, **SMALL)
    with pytest.raises(KernelFault):
        _run(step, "eager", tiles=(8, 24))


@pytest.mark.parametrize("mode", MODES)
def test_removed_wait_is_caught(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    monkeypatch.setattr(Copies, "await_whole", lambda self, slot: None)
    step = make_step(np.random.default_rng(0), SMALL_STEP, **SMALL)
    with pytest.raises((KernelFault, AssertionError)):
        np.testing.assert_allclose(_run(step, mode, tiles=(16,)), oracle(step), rtol=0, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_swapped_buffer_is_caught(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    right = Kernel.whole_rows
    monkeypatch.setattr(Kernel, "whole_rows", lambda self, at, h: right(self, 1 - at, h))
    step = make_step(np.random.default_rng(1), SMALL_STEP, **SMALL)
    with pytest.raises((KernelFault, AssertionError)):
        np.testing.assert_allclose(_run(step, mode, tiles=(24,)), oracle(step), rtol=0, atol=2e-5)


def test_public_entry_takes_the_kernel_and_refuses_what_it_is_not_built_for() -> None:
    step = make_step(np.random.default_rng(2), [Sequence(40, 1, 5), Sequence(0, 9)], **SMALL)
    arrays = {k: jnp.asarray(v) for k, v in step.arrays.items()}
    options: dict[str, Any] = {"scale": step.scale, "backend": Backend.INTERPRET}
    out = tree_attention(**arrays, **options, chip=CHIPS["v5e"])
    np.testing.assert_allclose(np.asarray(out), oracle(step), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="chip"):
        tree_attention(**arrays, **options)
    odd = make_step(
        np.random.default_rng(2), [Sequence(4, 1)], kv_heads=1, group=1, head_dim=8, page_size=128
    )
    odd_arrays = {k: jnp.asarray(v) for k, v in odd.arrays.items()}
    with pytest.raises(ValueError, match="head_dim: 8"):
        tree_attention(**odd_arrays, **options, chip=CHIPS["v5e"])
