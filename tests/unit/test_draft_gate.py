"""The gate takes the way that gives most, stays near it where another loses, and finds back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from common.types import Drafting
from verify_service.draft_gate import MOST_OF_MEAN, DraftGate, FixedWay

NONE, SYNCHRONOUS, AHEAD = Drafting.NONE, Drafting.SYNCHRONOUS, Drafting.AHEAD
Round = tuple[float, float]  # seconds, mean tokens


@dataclass
class Load:
    """Sequences side by side, and what a round of each way takes and gives."""

    gate: DraftGate
    num_sequences: int
    tree: Round
    ahead: Round | None = None
    root_seconds: float = 1.0
    tokens: int = 0
    seconds: float = 0.0
    rounds: dict[Drafting, int] = field(default_factory=dict)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, num_rounds: int) -> float:
        """Tokens per sequence-second over roots alone, of the rounds just run."""
        self.tokens, self.seconds = 0, 0.0
        self.rounds = dict.fromkeys(Drafting, 0)
        ways = {NONE: (self.root_seconds, 1.0), SYNCHRONOUS: self.tree, AHEAD: self.ahead}
        for _ in range(num_rounds):
            self.gate.offer_ahead(self.ahead is not None)
            way = self.gate.drafting
            round_ = ways[way]
            assert round_ is not None, "a way was asked for that is not to be had"
            tokens = 1 + int(self.random.poisson(round_[1] - 1))
            self.gate.note_round(way, tokens, round_[0], self.num_sequences)
            self.tokens += tokens
            self.seconds += round_[0]
            self.rounds[way] += 1
        return self.tokens / self.seconds * self.root_seconds

    def best(self) -> float:
        ways = [(self.root_seconds, 1.0), self.tree]
        ways += [] if self.ahead is None else [self.ahead]
        return max(tokens / seconds for seconds, tokens in ways) * self.root_seconds


@pytest.mark.parametrize("num_sequences", [1, 64])
@pytest.mark.parametrize("tree", [(3.2, 2.9), (2.0, 1.2), (4.0, 1.9), (1.1, 1.05)])
def test_where_trees_lose_it_is_never_far_behind_roots(tree: Round, num_sequences: int) -> None:
    load = Load(DraftGate(), num_sequences, tree)
    load.run(1000 + 20 * num_sequences)  # the first judgement
    assert load.run(max(20000, 1200 * num_sequences)) >= 0.98
    assert load.rounds[SYNCHRONOUS] > 0, "it must go on trying"


@pytest.mark.parametrize("num_sequences", [1, 64])
@pytest.mark.parametrize("tree", [(1.5, 2.9), (1.0, 1.5), (2.0, 2.4)])
def test_where_trees_pay_they_are_nearly_always_asked_for(tree: Round, num_sequences: int) -> None:
    load = Load(DraftGate(), num_sequences, tree)
    load.run(1000 + 20 * num_sequences)
    assert load.run(10000) >= 0.98 * tree[1] / tree[0]


@pytest.mark.parametrize("num_sequences", [1, 64])
@pytest.mark.parametrize(
    ("tree", "ahead"),
    [
        ((3.0, 2.9), (1.1, 1.6)),  # far away: trees ahead win
        ((1.4, 2.9), (1.1, 1.6)),  # near: those that are waited for
        ((3.0, 2.9), (1.3, 1.1)),  # roots alone
        ((1.0, 1.6), (1.0, 2.0)),
    ],
)
def test_of_three_ways_the_best_is_taken_and_the_others_tried(
    tree: Round, ahead: Round, num_sequences: int
) -> None:
    load = Load(DraftGate(), num_sequences, tree, ahead)
    load.run(2000 + 40 * num_sequences)
    probes = load.gate.num_probes
    assert load.run(max(24000, 1500 * num_sequences)) >= 0.97 * load.best()
    assert load.gate.num_probes > probes
    assert all(load.rounds.values()), "every way must be tried now and then"


def test_it_begins_with_trees_that_are_waited_for_then_tries_each_other_way() -> None:
    load = Load(DraftGate(), 1, (1.0, 2.0), (1.0, 2.0))
    asked = []
    for _ in range(200):
        asked.append(load.gate.drafting)
        load.run(1)
    assert asked[:20] == [SYNCHRONOUS] * 20
    assert {*asked} == {*Drafting}


def test_it_finds_the_way_back_and_leaves_again() -> None:
    load = Load(DraftGate(), 4, (2.0, 1.1))
    load.run(2000)
    load.tree = (2.0, 4.0)  # the text became easy
    load.run(10000)
    assert load.run(1000) > 1.8
    load.tree = (2.0, 1.1)
    load.run(300)
    assert load.run(4000) >= 0.98


def test_it_comes_back_to_trees_ahead_when_the_network_gets_slow_again() -> None:
    load = Load(DraftGate(), 4, (3.0, 2.5), (1.1, 1.8))
    load.run(2000)
    assert load.run(1000) > 1.5
    load.tree = (1.2, 2.5)  # the draft is near now; dear probes are rare, and weigh a quarter
    load.run(50000)
    assert load.run(2000) > 1.9
    load.tree = (3.0, 2.5)
    load.run(4000)
    assert load.run(4000) > 1.5


def test_trees_ahead_that_are_not_to_be_had_are_left_at_once() -> None:
    load = Load(DraftGate(), 1, (3.0, 2.0), (1.0, 3.0))
    for _ in range(1000):
        if load.gate.drafting is AHEAD:
            break
        load.run(1)
    assert load.gate.drafting is AHEAD
    load.ahead = None
    load.gate.offer_ahead(False)
    assert load.gate.drafting is not AHEAD
    load.run(3000)  # `run` asserts that AHEAD is never asked for


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_the_way_back_takes_a_few_tries(num_sequences: int) -> None:
    """The draft has become near: what was learnt of it long ago must not stand for ever."""
    load = Load(DraftGate(), num_sequences, (1.5, 1.8), ahead=(1.0, 1.5))
    load.run(6000)
    assert load.gate.drafting is AHEAD
    load.tree = (1.5, 2.9)
    load.run(16_000)
    assert load.gate.drafting is SYNCHRONOUS


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
        gate.note_round(gate.drafting, 1, 1000.0, 1)
    assert load.run(500) > 1.7
    assert MOST_OF_MEAN < 1000


def test_rounds_that_did_not_go_as_asked_decide_nothing() -> None:
    gate = DraftGate()
    for _ in range(500):
        gate.note_round(NONE, 1, 1.0, 1)
    assert gate.drafting is SYNCHRONOUS
    assert gate.num_probes == 0


@pytest.mark.parametrize("way", Drafting)
def test_a_fixed_way_is_kept_whatever_it_gives(way: Drafting) -> None:
    gate = FixedWay(way)
    gate.offer_ahead(False)
    for other in Drafting:
        gate.note_round(other, 9, 0.1, 1)
    assert (gate.drafting, gate.num_probes) == (way, 0)
