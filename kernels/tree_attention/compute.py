"""The arithmetic of the tree attention kernel: one run of keys against one query tile, in phases.

Phased: first all heads' scores go to VMEM, then the softmax of all heads, then all heads' products
with V. Head after head, every matmul would wait for the exponentials of its own head and these for
its matmul; across heads the waits overlap (static schedule: 29-82 % empty cycles against a few).

Row r of a KV head's `tile * group` query rows is query head `r // tile` of the group, node `r %
tile`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
MASKED = -1e30
"""Score of a key that a row may not see: finite, so that a row without any key yet stays free of
NaN; what such a row sums up is multiplied by exp2(-1e30 - max) = 0 as soon as a real key comes."""

Ref = Any
"""A Pallas reference: jax exports no type for it that mypy could use."""


@dataclass(frozen=True)
class Heads:
    """The static sizes of one call, per chip."""

    kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    scale: float
    dtype: Any  # of q, pages and output
    matrix_units: int  # of a core

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def padded_q_heads(self) -> int:
        """Rows of a token's heads in whole registers of eight."""
        return -(-self.q_heads // 8) * 8

    @property
    def turned_by_strides(self) -> bool:
        """How queries and outputs go between token-major and head-major order: by loads and stores
        that step over a token's heads, or by transposes, which keep the cross-lane units busy.

        Scheduled cycles per item by strides and by transposes, v5e / v6e: 32 heads of 128, T = 32:
        2,637 / 1,977 and 2,067 / 1,243; 16 heads: 1,196 / 1,107 and 1,255 / 1,103; 8 heads: 885 /
        994 and 918 / 992; 9 heads of 64, T = 16: 1,102 / 1,060 and 992 / 1,079. The compiler has
        strided loads of rows of one register's lanes alone.
        """
        return self.padded_q_heads <= 16 and self.head_dim == LANES

    @property
    def row_width(self) -> int:
        """Lanes of a KV row: K and V side by side."""
        return 2 * self.head_dim

    @property
    def packed(self) -> bool:
        """K and V share one 128-lane register: both matmuls run over the whole row."""
        return self.head_dim < LANES

    @property
    def q_width(self) -> int:
        """Lanes of a query row in scratch: packed rows have zeros over V."""
        return self.row_width if self.packed else self.head_dim

    @property
    def precision(self) -> lax.Precision:
        """float32 takes the MXU's several bfloat16 passes; bfloat16 is exact in one."""
        return lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT


@dataclass(frozen=True)
class Scratch:
    """VMEM references of the running softmax of one query tile (R = tile * group rows)."""

    q: Ref  # [kv_heads, R, q_width]     q.dtype
    scores: Ref  # [kv_heads, R, keys]   float32
    weights: Ref  # [kv_heads, R, keys]  q.dtype: exp2(score - max)
    max: Ref  # [kv_heads, R, 128]       float32, scaled by log2(e), equal over lanes
    sum: Ref  # [kv_heads, R, 128]       float32, one partial sum per lane
    decay: Ref  # [kv_heads, R, 128]     float32, exp2(old max - new max)
    out: Ref  # [kv_heads, R, q_width]   float32, not yet divided by the sum
    staging: Ref  # [staging_rows, head_dim] float32: queries between the two orders
    out_staging: Ref  # likewise of the output


def keys_and_values(heads: Heads, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The K and the V operand of KV rows [n, 2*head_dim]; packed rows serve as both."""
    if heads.packed:
        return rows, rows
    return rows[:, : heads.head_dim], rows[:, heads.head_dim :]


def attend(
    heads: Heads,
    scratch: Scratch,
    *,
    rows: int,
    keys: int,
    load: Callable[[int], tuple[jax.Array, jax.Array]],
    bias: jax.Array | None,
    seed: bool,
) -> None:
    """Adds `keys` keys to the running softmax of `rows` query rows of every KV head.

    `load(head)` gives K [keys, q_width] and V [keys, q_width] from VMEM; called twice per head, so
    that no head's V is held in registers through the softmax. `bias` [1 or rows, keys] float32 is
    0 where a key is visible and MASKED elsewhere; None: every row sees every key. `seed`: the
    first keys of the tile, which set maximum, sum and output instead of updating them.
    """
    log2e_scale = heads.scale * 1.4426950408889634
    parts = _row_parts(heads, rows, keys)
    for h in range(heads.kv_heads):
        key_rows = load(h)[0]
        for part in parts:
            scratch.scores[h, part, :keys] = lax.dot_general(
                scratch.q[h, part],
                key_rows,
                (((1,), (1,)), ((), ())),
                precision=heads.precision,
                preferred_element_type=jnp.float32,
            )
    for h in range(heads.kv_heads):
        _softmax(scratch, h, rows, keys, log2e_scale, bias, seed)
    for h in range(heads.kv_heads):
        value_rows = load(h)[1]
        for part in parts:
            product = lax.dot_general(
                scratch.weights[h, part, :keys],
                value_rows,
                (((1,), (0,)), ((), ())),
                precision=heads.precision,
                preferred_element_type=jnp.float32,
            )
            if not seed:
                decay = scratch.decay[h, part]
                decay = jnp.concatenate([decay] * (heads.q_width // LANES), axis=1)
                product = scratch.out[h, part] * decay + product
            scratch.out[h, part] = product


def _row_parts(heads: Heads, rows: int, keys: int) -> list[slice]:
    """Query rows in runs that make enough matmuls for all matrix units.

    One product of few keys occupies one unit; with one or two KV heads the others would idle.
    """
    count = max(1, heads.matrix_units * LANES // (keys * heads.kv_heads))
    while count > 1 and rows % (16 * count):
        count //= 2
    size = rows // count
    return [slice(start, start + size) for start in range(0, rows, size)]


def _softmax(
    scratch: Scratch,
    h: int,
    rows: int,
    keys: int,
    scale: float,
    bias: jax.Array | None,
    seed: bool,
) -> None:
    """Scores of head h -> weights, in place of the running maximum, sums and decay."""
    chunks = []
    for start in range(0, keys, LANES):
        chunk = scratch.scores[h, :rows, start : start + LANES] * scale
        if bias is not None:
            chunk = chunk + bias[:, start : start + LANES]
        chunks.append(chunk)
    lane_max = chunks[0]
    for chunk in chunks[1:]:
        lane_max = jnp.maximum(lane_max, chunk)
    new_max = jnp.broadcast_to(jnp.max(lane_max, axis=1, keepdims=True), (rows, LANES))
    if not seed:
        old_max = scratch.max[h, :rows]
        new_max = jnp.maximum(old_max, new_max)
        decay = jnp.exp2(old_max - new_max)
        scratch.decay[h, :rows] = decay
    total = jnp.zeros((rows, LANES), jnp.float32) if seed else scratch.sum[h, :rows] * decay
    for index, chunk in enumerate(chunks):
        weight = jnp.exp2(chunk - new_max)
        total = total + weight
        start = index * LANES
        scratch.weights[h, :rows, start : start + LANES] = weight.astype(scratch.weights.dtype)
    scratch.max[h, :rows] = new_max
    scratch.sum[h, :rows] = total


def finish(heads: Heads, scratch: Scratch, h: int, rows: int) -> jax.Array:
    """The attention output of head h, float32 [rows, head_dim]."""
    total = jnp.sum(scratch.sum[h, :rows], axis=1, keepdims=True)
    out: jax.Array = scratch.out[h, :rows] * (1.0 / total)
    return out[:, heads.head_dim :] if heads.packed else out
