"""Draft-ahead slices in virtual time: simulated only, no service does this yet.

While step r runs, the draft learns what began it (half a round trip later), grows trees for the
likeliest outcomes of r, all outcomes in one dispatch a depth, and pushes them, keyed by outcome
(another half). Step r+1 begins when r ends, or when the trees are due if that is later; a sequence
whose outcome is not among them, or whose trees are late, runs its root alone in that step. Where
no sequence has a tree, a step may wait for trees from true features instead, as the synchronous
path does. The tree budget is the service's own. Depth, number of outcomes and waiting are tried on
a short run first; the best of them, plain decoding and the synchronous path are run in full, and
the best of those is told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.overlap_sync import Scenario, Tally
from benchmarks.overlap_text import WIDTH, SimulatedText
from common.types import DraftTree
from verify_service.budget import TreeBudget
from verify_service.sequences import PendingRound

TRIAL_ROUNDS = 200
FINALISTS = 2  # run in full, beside plain decoding and the synchronous path
MAX_ROWS = 1024
MOST_THAT_WAIT = 4  # sequences; in a larger batch somebody nearly always has a tree
MAX_OUTCOMES = 32


@dataclass(slots=True)
class _Sequence:
    text: SimulatedText
    position: int = 0
    depth: int = 0  # of the tree that it has; 0: its root alone
    stem: int = 0  # tokens that the tree was grown on with the head's own states


@dataclass(frozen=True, slots=True)
class AheadPlan:
    """What the draft does in every step: dispatches, outcomes a sequence, and without a hit."""

    depth: int
    num_outcomes: int
    waits: bool


def run_ahead(scenario: Scenario) -> tuple[Tally, AheadPlan]:
    """The best plan's run."""
    trial = replace(scenario, num_steps=max(32, TRIAL_ROUNDS // scenario.batch))
    plans = _plans(scenario)
    by_rate = sorted(plans[2:], key=lambda plan: -AheadRun(trial, plan).run().rate)
    finalists = [*plans[:2], *by_rate[:FINALISTS]]
    runs = [(AheadRun(scenario, plan).run(), plan) for plan in finalists]
    return max(runs, key=lambda run: run[0].rate)


def _plans(s: Scenario) -> list[AheadPlan]:
    """Depth 0 first; then what ends within about one and a half steps."""
    free = max(1, min(MAX_OUTCOMES, s.costs.draft_rows // (s.batch * WIDTH)))
    plans = [AheadPlan(0, 0, waits=False), AheadPlan(0, 0, waits=True)]
    longest = 1.5 * s.costs.verify_seconds(min(MAX_ROWS, 8 * s.batch), s.batch)
    for outcomes in sorted({free, min(MAX_OUTCOMES, 4 * free)}):
        each = s.costs.draft_seconds(s.batch * WIDTH * outcomes)
        plans += [
            AheadPlan(depth, outcomes, waits)
            for waits in ((False, True) if s.batch <= MOST_THAT_WAIT else (False,))
            for depth in range(1, s.depth + 1)
            if s.rtt + depth * each <= longest
        ]
    return plans


class AheadRun:
    def __init__(self, scenario: Scenario, plan: AheadPlan) -> None:
        self._s, self._plan = scenario, plan
        self._budget = TreeBudget(scenario.costs.curve(), scenario.depth)
        self._random = np.random.default_rng(scenario.seed)
        self._gap = 0.0  # that the device waited behind the last step
        self._sequences = [_Sequence(scenario.text(i)) for i in range(scenario.batch)]

    def run(self) -> Tally:
        tally, warm = Tally(), self._s.num_steps // 4
        for step in range(self._s.num_steps):
            self._step(tally if step >= warm else Tally())
        return tally

    def _step(self, tally: Tally) -> None:
        s = self._s
        waited = self._wait() if self._plan.waits else 0.0
        self._budget.note_idle(self._gap + waited)
        rounds = [self._round(sequence) for sequence in self._sequences]
        counts = self._budget.share(rounds, num_causal=s.batch, max_rows=MAX_ROWS, num_kv_tokens=0)
        seconds = s.costs.verify_seconds(sum(counts), s.batch)
        due = arrival = 0.0
        if self._plan.depth:
            each = s.costs.draft_seconds(s.batch * WIDTH * self._plan.num_outcomes)
            due = s.rtt + self._plan.depth * each
            arrival = due + s.jitter * float(self._random.random())
        interval = max(seconds, due)
        verified = []
        for sequence, round_, count in zip(self._sequences, rounds, counts, strict=True):
            cut = round_.prefix(count)
            nodes, is_hit = self._advance(sequence, cut, in_time=arrival <= interval, tally=tally)
            tally.hits += is_hit
            verified.append((cut, nodes))
        self._budget.learn(verified)
        self._gap = interval - seconds
        tally.add(waited + interval, seconds, waited + due)

    def _wait(self) -> float:
        """Seconds until trees from true features are there, if nobody has one."""
        if any(sequence.depth for sequence in self._sequences):
            return 0.0
        for sequence in self._sequences:
            sequence.depth, sequence.stem = self._s.depth, 0
        dispatch = self._s.costs.draft_seconds(self._s.batch * WIDTH)
        jitter = self._s.jitter * float(self._random.random())
        return self._s.rtt + jitter + self._s.depth * dispatch

    def _round(self, sequence: _Sequence) -> PendingRound:
        if not sequence.depth:
            return PendingRound.of(0, DraftTree.root_only(0), 0, 0.0)
        tree = sequence.text.tree(
            sequence.position, sequence.depth, self._s.max_nodes, sequence.stem
        )
        return PendingRound.of(0, tree, 64, 0.0)

    def _advance(
        self, sequence: _Sequence, cut: PendingRound, *, in_time: bool, tally: Tally
    ) -> tuple[np.ndarray, bool]:
        """Walks, moves on, and says which nodes were accepted and whether a tree is there."""
        text = sequence.text
        tokens, parents = cut.tree.tokens.tolist(), cut.tree.parents.tolist()
        children = {(p, t): i for i, (p, t) in enumerate(zip(parents, tokens, strict=True)) if i}
        node, nodes, ranks = 0, list[int](), list[int]()
        while True:
            pick = text.token(sequence.position, len(ranks) + 1, sequence.stem)
            ranks.append(pick)
            if (node, pick) not in children:
                break
            node = children[node, pick]
            nodes.append(node)
        tally.tokens += len(ranks)
        tally.rounds += 1
        tally.nodes += cut.tree.num_nodes
        foreseen = False
        if self._plan.depth and in_time:
            outcomes = text.outcomes(
                sequence.position, sequence.depth, cut.tree.num_nodes, self._plan.num_outcomes,
                size=self._s.max_nodes, stem=sequence.stem,
            )  # fmt: skip
            foreseen = tuple(ranks) in outcomes
        sequence.position += len(ranks)
        sequence.depth = self._plan.depth if foreseen else 0
        sequence.stem = len(ranks) if foreseen else 0
        return np.array(nodes, np.int32), foreseen
