"""Speculation statistics and timings of one generation, counted as rounds end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from common.types import DraftTree


@dataclass(slots=True)
class GenerationStats:
    """Counts as in `SpeculationStats`, seconds as in `Timings`.

    Round 0 rides on the prefill and has no tree: a round, but not part of the acceptance length.
    """

    started: float
    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_emitted_first: int = 0
    num_rollbacks: int = 0
    num_root_only_rounds: int = 0
    drafted_per_depth: Counter[int] = field(default_factory=Counter)
    accepted_per_depth: Counter[int] = field(default_factory=Counter)
    emitted_histogram: Counter[int] = field(default_factory=Counter)
    queue_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    transport_seconds: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None

    def count_round(
        self, tree: DraftTree, num_emitted: int, now: float, *, wanted_tree: bool
    ) -> None:
        """One result: `tree` is what verify used, root included."""
        if self.first_token_at is None:
            self.first_token_at = now
            self.num_emitted_first = num_emitted
        self.last_token_at = now
        self.num_rounds += 1
        self.num_emitted += num_emitted
        self.num_drafted += tree.num_nodes - 1
        self.num_accepted += num_emitted - 1
        self.num_root_only_rounds += wanted_tree and tree.num_nodes == 1
        self.emitted_histogram[num_emitted] += 1
        deepest = int(tree.depths().max())
        self.drafted_per_depth.update(range(1, deepest + 1))
        self.accepted_per_depth.update(range(1, num_emitted))

    @property
    def acceptance_length(self) -> float:
        """Mean num_emitted per round after the first; 0.0 when there was none."""
        rounds = self.num_rounds - 1
        return (self.num_emitted - self.num_emitted_first) / rounds if rounds > 0 else 0.0

    def per_depth(self, counts: Counter[int]) -> list[int]:
        return [counts[depth] for depth in range(1, max(self.drafted_per_depth, default=0) + 1)]

    def histogram(self) -> list[int]:
        """Rounds by num_emitted, from 1."""
        return [
            self.emitted_histogram[n] for n in range(1, max(self.emitted_histogram, default=0) + 1)
        ]

    @property
    def time_to_first_token_seconds(self) -> float:
        return (self.first_token_at or self.started) - self.started

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        if self.first_token_at is None or self.last_token_at is None:
            return 0.0
        return self.last_token_at - self.first_token_at
