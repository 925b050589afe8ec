"""The gate asks for trees where they pay, stays near roots where they do not, and finds back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from verify_service.draft_gate import MOST_OF_MEAN, DraftGate


@dataclass
class Load:
    """Sequences side by side; a round's seconds and its mean tokens with a tree."""

    gate: DraftGate
    num_sequences: int
    tree: tuple[float, float]
    root_seconds: float = 1.0
    tokens: int = 0
    seconds: float = 0.0
    num_trees: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, num_rounds: int) -> float:
        """Tokens per sequence-second over roots alone, of the rounds just run."""
        self.tokens, self.seconds, self.num_trees = 0, 0.0, 0
        for _ in range(num_rounds):
            had_tree = self.gate.wants_tree
            if had_tree:
                seconds, mean = self.tree
                tokens = 1 + int(self.random.poisson(mean - 1))
            else:
                seconds, tokens = self.root_seconds, 1
            self.gate.note_round(had_tree, tokens, seconds, self.num_sequences)
            self.tokens += tokens
            self.seconds += seconds
            self.num_trees += had_tree
        return self.tokens / self.seconds * self.root_seconds


@pytest.mark.parametrize("num_sequences", [1, 16, 64])
@pytest.mark.parametrize("tree", [(3.2, 2.9), (2.0, 1.2), (4.0, 1.9), (1.1, 1.05)])
def test_where_trees_lose_it_is_never_far_behind_roots(
    tree: tuple[float, float], num_sequences: int
) -> None:
    load = Load(DraftGate(), num_sequences, tree)
    load.run(1000 + 20 * num_sequences)  # the first judgement
    assert load.run(max(10000, 1200 * num_sequences)) >= 0.98
    assert load.num_trees > 0, "it must go on trying"


@pytest.mark.parametrize("num_sequences", [1, 16, 64])
@pytest.mark.parametrize("tree", [(1.5, 2.9), (1.0, 1.5), (2.0, 2.4)])
def test_where_trees_pay_they_are_nearly_always_asked_for(
    tree: tuple[float, float], num_sequences: int
) -> None:
    load = Load(DraftGate(), num_sequences, tree)
    load.run(1000 + 20 * num_sequences)
    assert load.run(10000) >= 0.98 * tree[1] / tree[0]


def test_it_finds_the_way_back_and_leaves_again() -> None:
    load = Load(DraftGate(), 4, (2.0, 1.1))
    load.run(2000)
    load.tree = (2.0, 4.0)  # the text became easy
    load.run(10000)
    assert load.run(1000) > 1.8
    load.tree = (2.0, 1.1)
    load.run(300)
    assert load.run(4000) >= 0.98


def test_another_load_is_judged_by_its_own_rounds() -> None:
    gate = DraftGate()
    alone, crowd = Load(gate, 1, (1.5, 3.0)), Load(gate, 64, (6.0, 2.0), root_seconds=2.0)
    assert alone.run(2000) > 1.8
    crowd.run(3000)
    assert crowd.run(6000) >= 0.98
    alone.run(200)
    assert alone.run(2000) > 1.8, "what was known of one sequence is still known"


def test_a_client_that_pauses_does_not_decide() -> None:
    gate = DraftGate()
    load = Load(gate, 1, (1.5, 3.0))
    load.run(500)
    for _ in range(3):
        gate.note_round(gate.wants_tree, 1, 1000.0, 1)
    assert load.run(500) > 1.7
    assert MOST_OF_MEAN < 1000


def test_rounds_that_did_not_do_as_asked_decide_nothing() -> None:
    gate = DraftGate()
    for had_tree in itertools.islice(itertools.cycle([False]), 500):
        gate.note_round(had_tree, 1, 1.0, 1)
    assert gate.wants_tree
    assert gate.num_probes == 0
