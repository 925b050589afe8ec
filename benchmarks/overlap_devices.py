"""The two devices of the simulated slices: what they give is the text's, their seconds are stated.

A sequence's number is its request's seed. The target tells it to the head with its features:
[sequence, position].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.overlap_scenario import Scenario
from benchmarks.overlap_text import SimulatedText
from common.types import DraftTree
from draft_service import step as draft_step
from verify_service.step import SequenceOutcome, SequenceWork

FEATURES = 2


class SimulatedTarget:
    """Picks what the text says; commits what the walk accepted."""

    def __init__(self, scenario: Scenario) -> None:
        self._costs = scenario.costs
        self._texts = [scenario.text(i) for i in range(scenario.batch)]

    @property
    def vocab_size(self) -> int:
        return self._texts[0].vocab_size

    def run(self, works: Sequence[SequenceWork]) -> tuple[list[SequenceOutcome], float]:
        """The outcomes, and the seconds that they take."""
        outcomes = [_walk(self._texts[work.sampling.seed], work) for work in works]
        return outcomes, self.seconds(works)

    def seconds(self, works: Sequence[SequenceWork]) -> float:
        num_rows = sum(work.num_rows for work in works)
        return self._costs.verify_seconds(num_rows, len(works))

    def follow(self, work: SequenceWork, before: SequenceOutcome) -> SequenceOutcome:
        """Of a round that was launched behind another, now that this has ended."""
        assert work.follows is not None
        chosen = work.follows.choose(before.tokens.tolist())
        known = replace(
            work, tokens=chosen.tree.tokens, parents=chosen.tree.parents, follows=None,
            kv_len=work.kv_len + before.num_emitted,
        )  # fmt: skip
        return replace(_walk(self._texts[work.sampling.seed], known), chosen=chosen)


def _walk(text: SimulatedText, work: SequenceWork) -> SequenceOutcome:
    first = work.num_causal
    nodes = zip(work.parents[first:].tolist(), work.tokens[first:].tolist(), strict=True)
    children = {node: row for row, node in enumerate(nodes, first)}
    root = work.kv_len + first - 1
    row, rows, emitted = first - 1, list[int](), list[int]()
    while True:
        pick = text.token(root, len(rows) + 1)
        emitted.append(pick)
        if (row, pick) not in children:
            break
        row = children[row, pick]
        rows.append(row)
    num_committed = first + len(rows)
    features = np.empty((num_committed, FEATURES), np.float32)
    features[:, 0] = work.sampling.seed
    features[:, 1] = np.arange(work.kv_len, work.kv_len + num_committed)
    return SequenceOutcome(
        tokens=np.array(emitted, np.int32),
        margins=np.ones(len(emitted), np.float32),
        logprobs=np.zeros(len(emitted), np.float32),
        accepted_nodes=np.array(rows, np.int32) - first + 1,
        num_nodes=work.num_nodes,
        num_committed=num_committed,
        features=features,
    )


class SimulatedHead:
    """A dispatch for each level, the first of which also reads the new pairs."""

    def __init__(self, scenario: Scenario) -> None:
        self._s = scenario
        self._texts = [scenario.text(i) for i in range(scenario.batch)]

    def run(
        self, works: Sequence[draft_step.SequenceWork]
    ) -> tuple[list[draft_step.SequenceOutcome], float]:
        """The outcomes, and the seconds that they take."""
        costs = self._s.costs
        first = costs.draft_seconds(sum(work.num_rows for work in works))
        if not works[0].drafts:
            return [draft_step.SequenceOutcome(tree=None) for _ in works], first
        width = self._s.draft_width(len(works), ahead=works[0].ahead)
        trees = [self._tree(work, width) for work in works]
        num_levels = self._num_levels(works, trees, width)
        each = costs.draft_seconds(width * len(works))
        cut = [tree.within_depth(num_levels) for tree in trees]
        outcomes = [draft_step.SequenceOutcome(tree=tree) for tree in cut]
        return outcomes, first + (num_levels - 1) * each

    def _tree(self, work: draft_step.SequenceWork, width: int) -> DraftTree:
        """Of the engine's full shape."""
        s = self._s
        sequence, position = (int(value) for value in work.features[-1])
        text, root = self._texts[sequence], position + 1
        if work.ahead:
            tree = text.tree_ahead(root, width, s.ahead_depth, s.ahead_nodes)
        else:
            tree = text.tree(root, s.depth, s.max_nodes)
        tokens = np.concatenate([work.tokens[-1:], tree.tokens[1:]])
        return DraftTree(tokens, tree.parents, tree.scores)

    def _num_levels(
        self, works: Sequence[draft_step.SequenceWork], trees: Sequence[DraftTree], width: int
    ) -> int:
        """As `draft_service.expand` stops: of a level, only the best `width` are gone on from."""
        most = self._s.ahead_depth if works[0].ahead else self._s.depth
        most = min(most, max(work.max_levels for work in works))
        depths = [tree.depths() for tree in trees]
        for level in range(1, most):
            spare = 0.0
            for work, tree, depth in zip(works, trees, depths, strict=True):
                best = tree.scores[depth == level][:width]  # they stand best first
                spare += float(np.exp(best).sum()) - work.least_reach
            if spare <= 0:
                return level
        return most
