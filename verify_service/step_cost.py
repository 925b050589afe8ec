"""Seconds of a step that was not run yet, from the points that warm-up measured.

Per row bucket b a plane: base(b) + kv(b) · tokens in pages + sequence(b) · (sequences - 1). A step
is padded to its bucket, so between two buckets the seconds do not change. Measured points are
noisy: slopes below zero count as zero, and a larger bucket never costs less than a smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verify_service.step import StepPoint

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class StepCurve:
    """Arrays [K], K buckets of rising `rows`; `base`, `per_kv_token`, `per_sequence` in seconds."""

    rows: npt.NDArray[np.int64]
    base: Float64Array
    per_kv_token: Float64Array
    per_sequence: Float64Array

    @staticmethod
    def of(points: Sequence[StepPoint]) -> StepCurve:
        """Raises ValueError without points. A slope that was not measured is zero."""
        if not points:
            raise ValueError("points: none; the curve needs a step time of each row bucket")
        rows = sorted({point.num_tokens for point in points})
        planes = [_plane([p for p in points if p.num_tokens == bucket]) for bucket in rows]
        base, per_kv_token, per_sequence = np.array(planes, np.float64).T
        return StepCurve(np.array(rows, np.int64), base, per_kv_token, per_sequence)

    def seconds(
        self, num_rows: int | IntArray, num_kv_tokens: int, num_sequences: int
    ) -> Float64Array:
        """float64, as `num_rows`; beyond the largest bucket, the largest bucket's."""
        of_bucket = self.base + self.per_kv_token * num_kv_tokens
        of_bucket = of_bucket + self.per_sequence * max(0, num_sequences - 1)
        of_bucket = np.maximum.accumulate(of_bucket)
        bucket = np.searchsorted(self.rows, num_rows)
        taken: Float64Array = of_bucket[np.minimum(bucket, self.rows.size - 1)]
        return taken


def _plane(points: Sequence[StepPoint]) -> tuple[float, float, float]:
    """Base and slopes of one bucket, from its smallest point and those that differ from it."""
    origin = min(points, key=lambda p: (p.num_kv_tokens, p.num_sequences))
    per_kv_token = per_sequence = 0.0
    for point in points:
        tokens = point.num_kv_tokens - origin.num_kv_tokens
        sequences = point.num_sequences - origin.num_sequences
        longer = point.seconds - origin.seconds
        if tokens > 0 and sequences == 0:
            per_kv_token = max(per_kv_token, longer / tokens)
        if sequences > 0 and tokens == 0:
            per_sequence = max(per_sequence, longer / sequences)
    base = origin.seconds - per_kv_token * origin.num_kv_tokens
    return base - per_sequence * (origin.num_sequences - 1), per_kv_token, per_sequence
