"""How long a step takes on a slice: from what it reads and computes, or from a measured curve.

The bounds are those of sizing.py's formula; nothing here was measured on a TPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernels.chips import CHIPS, Chip

MXUS_PER_CORE = 4
"""In every generation of the table; with it the peaks come out as the vendor states them."""

HBM_GIB = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}
"""Memory of a chip; the vendor's figures."""

StepTime = Callable[[int], float]
"""Seconds of a step that carries so many sequences."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """`num_chips` chips that work as one."""

    chip: Chip
    num_chips: int

    @property
    def name(self) -> str:
        return f"{self.chip.name}-{self.num_chips}"

    @property
    def bytes_per_second(self) -> float:
        return self.num_chips * self.chip.hbm_bytes_per_second

    @property
    def operations_per_second(self) -> float:
        """Peak in bfloat16."""
        units = self.chip.cores * MXUS_PER_CORE * self.chip.mxu_width**2
        return self.num_chips * 2 * units * self.chip.clock_hz

    @property
    def memory_bytes(self) -> float:
        return self.num_chips * HBM_GIB[self.chip.name] * float(1 << 30)


def slice_by_name(name: str) -> Slice:
    """`v5e-8`: eight chips of v5e. Raises ValueError naming what is known."""
    chip, _, count = name.rpartition("-")
    if chip not in CHIPS or not count.isdigit() or int(count) < 1:
        known = ", ".join(CHIPS)
        raise ValueError(f"{name!r} is no slice; give CHIP-COUNT, as v5e-8, of the chips {known}")
    return Slice(chip=CHIPS[chip], num_chips=int(count))


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What one pass through a model reads and multiplies.

    `extra_params`: of a part that runs once per round, the head's fusion of features.
    """

    params: float
    held_params: float  # with the embedding, of which a pass reads a few rows only
    kv_bytes_per_token: float
    bytes_per_number: int
    extra_params: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Trees, and what comes of them. `acceptance_length`: tokens per round, A."""

    acceptance_length: float
    nodes: int
    depth: int
    top_k: int


def acceptance_length(chances: Sequence[float]) -> float:
    """1 + Σ over depths of the product of the chances so far.

    `chances[d]`: that a node at depth d+1 is right where all above it are.
    """
    total, path = 1.0, 1.0
    for chance in chances:
        path *= chance
        total += path
    return total


def pass_seconds(
    weights: Weights, on: Slice, *, num_rows: int, kv_tokens: float, efficiency: float
) -> float:
    """One pass over `num_rows` rows that attend `kv_tokens` tokens in all: bytes or operations."""
    read = weights.params * weights.bytes_per_number + kv_tokens * weights.kv_bytes_per_token
    return (
        max(read / on.bytes_per_second, 2 * weights.params * num_rows / on.operations_per_second)
        / efficiency
    )


def verify_time(
    weights: Weights, on: Slice, *, nodes: int, context: int, efficiency: float, launch: float
) -> StepTime:
    def seconds(batch: int) -> float:
        rows, tokens = batch * nodes, batch * context
        return launch + pass_seconds(
            weights, on, num_rows=rows, kv_tokens=tokens, efficiency=efficiency
        )

    return seconds


def draft_time(
    weights: Weights,
    on: Slice,
    speculation: Speculation,
    *,
    context: int,
    efficiency: float,
    launch: float,
) -> StepTime:
    """The first pass takes the round's new pairs, each further one the nodes kept of a level."""

    def seconds(batch: int) -> float:
        common = {"kv_tokens": batch * context, "efficiency": efficiency}
        pairs = batch * math.ceil(speculation.acceptance_length)
        first = pass_seconds(weights, on, num_rows=pairs, **common)
        fusion = weights.extra_params * weights.bytes_per_number
        first += fusion / on.bytes_per_second / efficiency
        rows = batch * speculation.top_k
        further = pass_seconds(weights, on, num_rows=rows, **common)
        return launch + first + (speculation.depth - 1) * further

    return seconds


def curve_time(points: Sequence[tuple[int, float]]) -> StepTime:
    """Measured (sequences, seconds), joined by straight lines and continued beyond the ends."""
    ordered = sorted(points)

    def seconds(batch: int) -> float:
        if len(ordered) == 1:
            return ordered[0][1]
        upper = next((i for i, (at, _) in enumerate(ordered) if at >= batch), len(ordered) - 1)
        (x0, y0), (x1, y1) = ordered[max(0, upper - 1)], ordered[max(1, upper)]
        return max(0.0, y0 + (y1 - y0) * (batch - x0) / (x1 - x0))

    return seconds
