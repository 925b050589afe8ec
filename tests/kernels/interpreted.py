"""Runs kernels in Pallas' TPU interpret mode and fails on what that mode only prints."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kernels.chips import CHIPS
from kernels.tree_attention.blocks import Blocks
from kernels.tree_attention.call import tree_attention_pallas

Mode = Literal["eager", "on_wait"]


class KernelFault(AssertionError):
    """A data race, or a semaphore left with a count."""


@contextlib.contextmanager
def failing_on_faults() -> Iterator[None]:
    """Raises KernelFault with the interpreter's words. Results must be fetched inside."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
        pltpu.reset_tpu_interpret_mode_state()
    said = printed.getvalue()
    if "RACE DETECTED" in said or "non-zero count" in said:
        raise KernelFault(said[:2000])


def interpret(
    arrays: dict[str, Any],
    blocks: Blocks,
    mode: Mode,
    *,
    scale: float,
    window: int | None,
    detect_races: bool = True,
) -> np.ndarray:
    """float64 output of the attention kernel. Raises KernelFault."""
    params = pltpu.InterpretParams(detect_races=detect_races, dma_execution_mode=mode)
    call = _compiled(blocks, params, scale, window)
    with failing_on_faults():
        out = np.asarray(call({k: jnp.asarray(v) for k, v in arrays.items()}))
    return out.astype(np.float64)


@functools.cache
def _compiled(blocks: Blocks, params: Any, scale: float, window: int | None) -> Any:
    def call(arrays: dict[str, jax.Array]) -> jax.Array:
        return tree_attention_pallas(
            **arrays,
            scale=scale,
            window=window,
            chip=CHIPS["v5e"],
            blocks=blocks,
            interpret=params,
        )

    return jax.jit(call)


def small_blocks(keys: int = 128, piece: int = 128, tiles: tuple[int, ...] = (8,)) -> Blocks:
    """Sizes that make a test of a few hundred tokens walk several blocks."""
    return Blocks(keys=keys, piece=piece, tiles=tiles, num_cores=1, vmem_limit_bytes=16 << 20)
