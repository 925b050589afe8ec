"""Picks at all nodes as one Pallas TPU kernel: logits come from HBM once.

Grid: eight rows of logits at a time, one sublane each, [8, V] in VMEM while the next eight arrive.
All passes read VMEM:

1. best, next best and the check for NaN and +inf: all that greedy rows take;
2. (score - best) / temperature;
3. top_k's edge by bisection over value, a dozen to 25 passes; exp(score) of what is left; top_p's
   edge likewise (`batched.find_edge`);
4. score + noise, the noise computed in place from seed, position and token; best and next best of
   what the filters keep;
5. how near the filters' edges were (`batched.edge_margins`), three passes;
6. where asked for, the sum of exponentials for the pick's log-probability.

2 and 4 are left out for eight rows without a sampled one, 3 and 5 without a filter of theirs.

HBM bytes: the logits, V more per row for a token mask, 1,536 per row of parameters and results.
VMEM: `vmem_bytes`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.chips import Chip
from kernels.sample_and_accept.filters import FLOOR
from kernels.sample_and_accept.rows import RowBlock
from kernels.sample_and_accept.types import Picks, RowPicks, SamplerParams

ROWS, LANES = 8, 128
GREEDY_TEMPERATURE = 1e-5  # as common.types has it


@dataclass(frozen=True)
class Plan:
    """`width`: V rounded up to whole registers. `buffers`: eight-row blocks of logits in VMEM, two
    if they fit: one computed on, one arriving."""

    width: int
    buffers: int
    vmem_limit_bytes: int


def vmem_bytes(width: int, buffers: int, masked: bool) -> int:
    """VMEM of the logits' (and masks') blocks, the scores and the work array."""
    return ROWS * width * (4 * (buffers + 2) + (buffers if masked else 0))


def choose_plan(chip: Chip, vocab: int, masked: bool) -> Plan:
    """Raises ValueError for a vocabulary whose eight rows do not fit into the chip's VMEM."""
    width = -(-vocab // LANES) * LANES
    limit = int(chip.vmem_bytes * 0.97)
    for buffers in (2, 1):
        if vmem_bytes(width, buffers, masked) + ROWS * LANES * 4 * 8 <= limit:
            return Plan(width, buffers, limit)
    raise ValueError(
        f"logits: eight rows over {vocab} tokens need {vmem_bytes(width, 1, masked)} bytes of VMEM;"
        f" {chip.name} has {chip.vmem_bytes}; split the vocabulary over chips or use Backend.XLA"
    )


class RowParams(NamedTuple):
    """What the kernel reads beside the logits: [N, 128] arrays, one value a lane."""

    floats: jax.Array  # float32: FLOATS in their order
    words: jax.Array  # int32: WORDS in their order


FLOATS = ("live", "sampled", "inverse_temperature", "top_k", "top_p", "min_p_edge")
WORDS = ("seed_lo", "seed_hi", "position")


def row_params(
    params: SamplerParams, positions: jax.Array, node_sequence: jax.Array, vocab: int
) -> tuple[RowParams, jax.Array]:
    """Every row's parameters, and what its eight rows ask for: int32 [ceil(N / 8), 4], 1 where any
    of them is sampled, has a top_k, a top_p, any filter."""
    owner = jnp.maximum(node_sequence, 0)
    live = node_sequence >= 0
    sampled = live & (params.temperature[owner] >= GREEDY_TEMPERATURE)
    top_k = jnp.where(params.top_k >= vocab, 0, params.top_k)[owner]
    top_k = jnp.where(sampled, top_k, 0).astype(jnp.float32)
    top_p = jnp.where(sampled, params.top_p[owner], 1.0)
    min_p = jnp.where(sampled, params.min_p[owner], 0.0)
    temperature = jnp.where(sampled, params.temperature[owner], 1.0)
    columns = (
        live.astype(jnp.float32),
        sampled.astype(jnp.float32),
        1.0 / temperature,
        top_k,
        jnp.minimum(top_p, 1.0),
        jnp.where(min_p > 0.0, jnp.maximum(jnp.log(min_p), FLOOR), FLOOR),
    )
    words = (
        lax.bitcast_convert_type(params.seed_lo[owner], jnp.int32),
        lax.bitcast_convert_type(params.seed_hi[owner], jnp.int32),
        positions,
    )
    pad = -owner.shape[0] % ROWS

    def columns_of(values: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.pad(jnp.stack(values, axis=1), ((0, pad), (0, LANES - len(values))))

    has_k, has_p = top_k > 0, top_p < 1.0
    asked = jnp.stack([sampled, has_k, has_p, has_k | has_p | (min_p > 0.0)], axis=1)
    asked = jnp.pad(asked, ((0, pad), (0, 0))).reshape(-1, ROWS, 4)
    return (
        RowParams(columns_of(columns), columns_of(words)),
        jnp.any(asked, axis=1).astype(jnp.int32),
    )


def _body(
    asked: Any,  # SMEM int32 [ceil(N / 8), 4]
    want_logprobs: Any,  # SMEM int32 [1]
    floats: Any,  # VMEM float32 [8, 128]
    words: Any,  # VMEM int32 [8, 128]
    logits: Any,  # VMEM float32 [8, width]; lanes from V on hold anything
    *rest: Any,  # [mask int8 [8, width]], out float32 [8, 128], scores and work float32 [8, width]
    vocab: int,
    masked: bool,
) -> None:
    mask = rest[0] if masked else None
    out, scores, work = rest[1:] if masked else rest
    block = RowBlock(floats, words, logits, mask, out, scores, work, vocab)
    step = pl.program_id(0)
    block.greedy()

    @pl.when(asked[step, 0] > 0)
    def _sampled() -> None:
        block.sample(*(asked[step, i] > 0 for i in (1, 2, 3)))

    @pl.when(want_logprobs[0] > 0)
    def _logprobs() -> None:
        block.logprobs()


def pick_rows_pallas(
    logits: jax.Array,  # float32 [N, V]
    positions: jax.Array,  # int32 [N]
    node_sequence: jax.Array,  # int32 [N]
    params: SamplerParams,  # [B]
    want_logprobs: jax.Array,  # bool scalar
    token_mask: jax.Array | None,  # bool [N, V]
    *,
    chip: Chip,
    interpret: Any = False,
) -> RowPicks:
    """Arguments as in `api.sample_and_accept`. Raises ValueError as `choose_plan`."""
    num_rows, vocab = logits.shape
    masked = token_mask is not None
    plan = choose_plan(chip, vocab, masked)
    rows, asked = row_params(params, positions, node_sequence, vocab)
    num_blocks = asked.shape[0]

    def wide(buffers: int) -> pl.BlockSpec:
        mode = pl.Buffered(buffers)
        return pl.BlockSpec((ROWS, plan.width), lambda i, *_: (i, 0), pipeline_mode=mode)

    narrow = pl.BlockSpec((ROWS, LANES), lambda i, *_: (i, 0))
    inputs: list[jax.Array] = [rows.floats, rows.words, logits]
    if token_mask is not None:
        inputs.append(token_mask.astype(jnp.int8))
    call = pl.pallas_call(
        functools.partial(_body, vocab=vocab, masked=masked),
        out_shape=jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            (num_blocks * ROWS, LANES), jnp.float32
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_blocks,),
            in_specs=[narrow, narrow, *[wide(plan.buffers)] * (1 + masked)],
            out_specs=narrow,
            scratch_shapes=[pltpu.VMEM((ROWS, plan.width), jnp.float32)] * 2,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=plan.vmem_limit_bytes,
            # Every span is a constant or a loop's index; the checks would take more scalar
            # instructions than the passes have vector ones.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="sample_rows",
    )
    out = call(asked, jnp.reshape(want_logprobs, (1,)).astype(jnp.int32), *inputs)[:num_rows]
    picks = Picks(out[:, 0].astype(jnp.int32), out[:, 1])
    return RowPicks(picks, picks.picks >= 0, out[:, 2])
