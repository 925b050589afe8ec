"""What the simulated slices cost: seconds of a verify step, of a draft depth, of the network.

Nothing here was timed on a TPU. A verify step takes

    max(weights, row · rows) + sequence · sequences

seconds: reading the weights, or computing the rows where that takes longer, and reading the KV of
each sequence. Rows are padded to a bucket. The presets are fitted to the vendor roofline of 8B on
four v5e and 70B on eight v6e at 2,048 tokens of context (one sequence's plain step, the slope where
rows dominate, and batch 64), and the draft's to the head's bytes over bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from verify_service.step import StepPoint
from verify_service.step_cost import StepCurve

ROW_BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds. `draft_rows`: rows that a dispatch of the head takes before it gets longer."""

    name: str
    weights: float
    row: float
    sequence: float
    draft: float  # one depth, one dispatch
    draft_rows: int = 240
    verify_chips: int = 1
    draft_chips: int = 1

    def verify_seconds(self, num_rows: int, num_sequences: int) -> float:
        padded = next((b for b in ROW_BUCKETS if b >= num_rows), num_rows)
        return max(self.weights, self.row * padded) + self.sequence * num_sequences

    def draft_seconds(self, num_rows: int) -> float:
        """One depth for so many rows, all sequences and outcomes together."""
        return self.draft * max(1.0, num_rows / self.draft_rows)

    def curve(self) -> StepCurve:
        """What verify's warm-up would have measured."""
        return StepCurve.of(
            [
                StepPoint(rows, 0, sequences, self.verify_seconds(rows, sequences))
                for rows in ROW_BUCKETS
                for sequences in (1, rows)
            ]
        )


def plain(verify_ms: float, draft_ms: float, knee_rows: int) -> Costs:
    """A step of `verify_ms` up to `knee_rows` rows, then in proportion to the rows."""
    weights = verify_ms * 1e-3
    return Costs(
        name=f"verify {verify_ms:g} ms, draft {draft_ms:g} ms a depth",
        weights=weights,
        row=weights / knee_rows,
        sequence=0.0,
        draft=draft_ms * 1e-3,
    )


PRESETS = {
    "8b-v5e": Costs(
        name="8B on 4 v5e, bf16 head on one", weights=5.0e-3, row=2.78e-5, sequence=1.1e-4,
        draft=0.97e-3, verify_chips=4,
    ),
    "8b-v5e-int8": Costs(
        name="8B on 4 v5e, int8 head on one", weights=5.0e-3, row=2.78e-5, sequence=1.1e-4,
        draft=0.52e-3, verify_chips=4,
    ),
    "70b-v6e": Costs(
        name="70B on 8 v6e, bf16 head on one", weights=12.1e-3, row=4.63e-5, sequence=1.1e-4,
        draft=0.83e-3, verify_chips=8,
    ),
}  # fmt: skip
