"""Draft-ahead as the services do it, in virtual time: the real verify machine begins rounds itself.

As `overlap_sync`, and beside it: once a round's tree is out, and whenever verify has begun a round
by itself, the draft grows trees for the likeliest outcomes of that round, all sequences in one
dispatch, when nobody waits for a tree; they reach verify half a round trip later as a Foresee. The
outcomes' tokens are read first, a pass of the head each: a tree ahead takes as many more passes as
the longest of its outcomes has tokens, and has the levels that the draft's `LevelRule` allows. A
miss goes the synchronous way. That the router sends trees itself which come too late for verify is
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.overlap_sync import STREAM, Scenario, SyncRun, Tally
from benchmarks.overlap_text import WIDTH
from common.types import DraftTree
from draft_service.levels import LevelRule
from verify_service import commands, events

Results = list[tuple[int, events.RoundResult]]
Trees = dict[tuple[int, ...], DraftTree]


@dataclass(frozen=True, slots=True)
class Wish:
    """Trees for `round`, by the outcomes of the round before it, whose root stands at `root`."""

    round: int
    root: int
    stem: int  # that the tree there was grown on; 0: on true features


class BuiltRun(SyncRun):
    def __init__(self, scenario: Scenario, num_outcomes: int) -> None:
        super().__init__(scenario, budget=True)
        each = scenario.costs.draft_seconds
        self._rule = LevelRule([(n, each(WIDTH * n)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)])
        self._asked: dict[int, tuple[float, float]] = {}  # when, and seconds until the tree went
        self._ahead: dict[int, tuple[int, Trees]] = {}  # the last trees ahead and their round
        self._num_outcomes = num_outcomes
        self._wishes: dict[int, Wish] = {}
        self._num_begun: list[int] = []

    def _after(self, results: Results, now: float) -> None:
        begun = [(i, result) for i, result in results if result.next_begun]
        self._num_begun.append(len(begun))
        for index, result in results:
            self._device.stems[index] = len(result.tokens) if result.next_begun else 0
        super()._after([(i, result) for i, result in results if not result.next_begun], now)
        if begun:
            self._at(now + self._way(), lambda later: self._go_on(begun, later))

    def _go_on(self, begun: Results, now: float) -> None:
        self._note(begun, now)
        self._wish(begun)
        self._draft(now)

    def _wish(self, rounds: Results) -> None:
        """For the outcomes of the rounds behind these results."""
        for index, result in rounds:
            root = result.kv_len + len(result.tokens)
            stem = len(result.tokens) if result.next_begun else 0
            self._wishes[index] = Wish(result.round + 2, root, stem)

    def _note(self, results: Results, now: float) -> None:
        """As the draft's machine tells its rule when it hears of rounds."""
        for index, result in results:
            if index in self._asked:
                since, drafting = self._asked[index]
                self._rule.note_round(now - since, len(result.tokens), drafting)
            self._asked[index] = now, 0.0
            round_, trees = self._ahead.get(index, (0, {}))
            if round_ == result.round + 1 and result.tokens in trees:
                self._rule.note_ahead(result.next_begun)

    def _to_draft(self, results: Results, now: float) -> None:
        self._note(results, now)
        for index, _ in results:
            self._wishes.pop(index, None)  # missed
        super()._to_draft(results, now)

    def _drafted(self, taken: Results, now: float) -> None:
        for index, _ in taken:
            since, _ = self._asked[index]
            self._asked[index] = since, now - since
        self._wish(taken)
        super()._drafted(taken, now)

    def _draft(self, now: float) -> None:
        if self._draft_busy or self._drafts or not self._wishes:
            super()._draft(now)
            return
        self._draft_busy = True
        wishes, self._wishes = self._wishes, {}
        outcomes = {index: self._outcomes(index, wish) for index, wish in wishes.items()}
        num_trees = sum(map(len, outcomes.values()))
        longest = max((len(tokens) for each in outcomes.values() for tokens in each), default=0)
        most = self._rule.levels_ahead(num_trees, longest)
        levels = self._s.depth if most is None else min(most, self._s.depth)
        grown = {
            index: (wish, self._trees(index, wish, outcomes[index], levels))
            for index, wish in wishes.items()
        }
        costs = self._s.costs
        seconds = (1 + longest) * costs.draft_seconds(num_trees)
        seconds += (levels - 1) * costs.draft_seconds(WIDTH * num_trees)
        self._at(now + seconds, lambda end: self._grown(grown, end))

    def _grown(self, wishes: dict[int, tuple[Wish, Trees]], now: float) -> None:
        self._draft_busy = False
        self._ahead |= {index: (wish.round, trees) for index, (wish, trees) in wishes.items()}
        self._at(now + self._way(), lambda later: self._foresee(wishes, later))
        self._draft(now)

    def _foresee(self, wishes: dict[int, tuple[Wish, Trees]], now: float) -> None:
        frame = [
            commands.Foresee(
                sequence_id=index.to_bytes(16, "big"), epoch=1, acked_round=wish.round - 2,
                round=wish.round, outcomes=trees,
            )
            for index, (wish, trees) in wishes.items()
        ]  # fmt: skip
        for event in self._machine.handle(STREAM, frame, now):
            raise AssertionError(event)

    def _outcomes(self, index: int, wish: Wish) -> list[tuple[int, ...]]:
        """None below a leaf as deep as trees are grown: nothing is grown there."""
        s = self._s
        likely = self._texts[index].outcomes(
            wish.root, s.depth, s.max_nodes, self._num_outcomes, size=s.max_nodes, stem=wish.stem
        )
        return [tokens for tokens in likely if len(tokens) <= s.depth]

    def _trees(self, index: int, wish: Wish, outcomes: list[tuple[int, ...]], levels: int) -> Trees:
        text, size = self._texts[index], self._s.max_nodes
        trees = {}
        for tokens in outcomes:
            grown = text.tree(wish.root + len(tokens), levels, size, len(tokens))
            nodes = np.concatenate([np.array(tokens[-1:], np.int32), grown.tokens[1:]])
            trees[tokens] = DraftTree(nodes, grown.parents, grown.scores)
        return trees

    def _tally(self) -> Tally:
        tally = super()._tally()
        tally.hits = sum(self._num_begun[self._s.num_steps // 4 : len(self._started) - 1])
        return tally


def run_built(scenario: Scenario, most_outcomes: int) -> tuple[Tally, int]:
    """With as many outcomes a sequence as one dispatch takes without getting longer."""
    free = scenario.costs.draft_rows // (scenario.batch * WIDTH)
    num_outcomes = max(1, min(most_outcomes, free))
    return BuiltRun(scenario, num_outcomes).run(), num_outcomes
