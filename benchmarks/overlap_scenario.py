"""What is simulated, and what came of it: settings and sums of the simulated slices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.overlap_costs import Costs
from benchmarks.overlap_recorded import RecordedText, Recording
from benchmarks.overlap_text import WIDTH, Head, MadeUpText, SimulatedText, Text
from common.types import TreeShape
from draft_service.levels import LevelSeconds
from draft_service.sizes import AheadShape

MAX_CONTEXT = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`depth`, `max_nodes`: of a tree for the next round, and what a round takes of one ahead."""

    costs: Costs
    head: Head
    batch: int
    depth: int
    max_nodes: int
    num_steps: int
    seed: int
    rtt: float  # seconds; verify → draft → verify
    jitter: float = 0.0  # seconds; each way adds up to half of it
    root_turn: float = 0.0  # seconds that router and hosts take of a round without a tree
    tree_turn: float = 0.0  # the same of one that waits for a tree
    open_gap: float = 0.0  # seconds from the first sequence's Open to the others'
    ahead_depth: int = 8
    ahead_nodes: int = 128
    ahead_rows: int = 64
    one_device: bool = False  # draft and verify in turn on the verify slice
    recorded: Recording | None = None  # text and proposals, instead of made-up ones

    def text(self, sequence: int) -> SimulatedText:
        if self.recorded is not None:
            return RecordedText(self.recorded, sequence)
        return MadeUpText(self.head, Text(sequence, self.seed))

    @property
    def tree(self) -> TreeShape:
        return TreeShape(max_depth=self.depth, top_k=WIDTH, max_nodes=self.max_nodes)

    @property
    def ahead(self) -> AheadShape:
        return AheadShape(
            max_depth=self.ahead_depth, max_nodes=self.ahead_nodes, top_k=WIDTH,
            max_rows=self.ahead_rows,
        )  # fmt: skip

    def draft_width(self, num_sequences: int, *, ahead: bool) -> int:
        """Nodes of a level, of each of so many sequences."""
        return self.ahead.width(num_sequences, WIDTH) if ahead else WIDTH

    def level_seconds(self, *, ahead: bool) -> LevelSeconds:
        """What the draft's warm-up would have measured."""
        sizes = [1 << bits for bits in range((self.batch - 1).bit_length() + 1)]
        return [(n, self.costs.draft_seconds(n * self.draft_width(n, ahead=ahead))) for n in sizes]


@dataclass(slots=True)
class Tally:
    """What a run gave once it was warm. Seconds; one entry a step.

    `rounds` end in `tokens`; `nodes` of their trees were verified, roots included. `trees`: rounds
    with more than the root. `behind`: by tokens since its root, rounds with nodes of a tree ahead.
    `spent`: by the draft's device for these steps, and a round trip for each with a tree, hidden or
    not.
    """

    tokens: int = 0
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)
    rounds: int = 0
    nodes: int = 0
    trees: int = 0
    behind: dict[int, int] = field(default_factory=dict)
    spent: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def step_over_verify(self, percent: float) -> float:
        ratios = np.array(self.intervals) / np.array(self.step_seconds)
        return float(np.percentile(ratios, percent))

    @property
    def hidden(self) -> float | None:
        """Share of draft and network time that verify did not wait for; None without a draft."""
        waited = sum(self.intervals) - sum(self.step_seconds)
        return max(0.0, 1.0 - waited / self.spent) if self.spent else None

    def add(self, interval: float, step_seconds: float, spent: float) -> None:
        self.seconds += interval
        self.spent += spent
        self.intervals.append(interval)
        self.step_seconds.append(step_seconds)
