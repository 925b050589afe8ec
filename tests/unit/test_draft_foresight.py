"""Trees ahead of a result, on the draft's side: for which outcomes, when, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.types import DraftTree, FeatureRows, TreeShape
from draft_service.assembly import with_window
from draft_service.commands import Extend, Open, Rollback
from draft_service.config import DraftConfig
from draft_service.events import Foreseen, TreeReady
from draft_service.foresight import likeliest_outcomes
from draft_service.limits import DraftLimits
from draft_service.machine import DraftMachine
from draft_service.step import SequenceOutcome, SequenceWork
from draft_service.stepper import cut_to
from tests.parity.draft_tiny import tiny_head

ID = bytes(16)
SENT = TreeShape(max_depth=2, top_k=2, max_nodes=4)


def tree(*nodes: tuple[int, int]) -> DraftTree:
    """Of (token, parent), the root first, scores falling."""
    tokens, parents = zip(*nodes, strict=True)
    scores = -np.arange(len(nodes), dtype=np.float32)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), scores)


def test_outcomes_are_what_hangs_on_the_sent_tree_and_is_not_in_it() -> None:
    #      9 ─ 1 ─ 2 ─ 5      sent: 9, 1, 2, 3; 5 is too deep, 4 and 6 are beyond the four nodes,
    #      │   └ 4 ─ 7        7 hangs on what is not sent
    #      ├ 3
    #      └ 6
    grown = tree((9, -1), (1, 0), (2, 1), (3, 0), (5, 2), (4, 1), (7, 5), (6, 0))
    sent = cut_to(grown, SENT)
    assert sent.tokens.tolist() == [9, 1, 2, 3]
    assert likeliest_outcomes(grown, sent, 8) == ((1, 2, 5), (1, 4), (6,))
    assert likeliest_outcomes(grown, sent, 2) == ((1, 2, 5), (1, 4))
    assert likeliest_outcomes(sent, sent, 8) == ()


class Engine:
    """Below token t: t+1 (with t+2 below it), then t+2, t+3; notes what it was asked."""

    def __init__(self) -> None:
        self.works: list[SequenceWork] = []

    def run(self, works: list[SequenceWork]) -> list[SequenceOutcome]:
        self.works += works
        return [SequenceOutcome(tree=self._tree(work)) for work in works]

    def _tree(self, work: SequenceWork) -> DraftTree | None:
        root = int([*work.tokens, *work.guessed][-1])
        nodes = [(root, -1), (root + 1, 0), (root + 2, 1), (root + 2, 0), (root + 3, 0)]
        return tree(*nodes) if work.drafts else None


class Bench:
    def __init__(self, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "vocab_size": 1000, "feature_size": 2, "max_context_len": 40, "tree": SENT,
            "max_sequences": 4, "page_size": 4, "num_pages": 12, "max_step_sequences": 4,
            "max_draft_rows": 8, "max_extend_rows": 8, "max_outcomes": 4,
        }  # fmt: skip
        self.machine, self.engine = DraftMachine(DraftLimits(**(settings | changes))), Engine()
        self.machine.connect(1)
        self.do(Open(sequence_id=ID, epoch=1, tokens=(1, 2, 3), max_total_tokens=40))
        self.features(0, 2)

    def do(self, command: Any) -> list[Any]:
        return self.machine.handle(1, [command], 0.0)

    def features(self, first: int, until: int) -> None:
        rows = np.zeros((until - first, 2), np.float32)
        self.machine.receive(FeatureRows(ID, 1, first, rows), 0.0)

    def extend(self, round_: int, base: int, *tokens: int, **more: Any) -> list[Any]:
        more = {"max_outcomes": 4, **more}
        return self.do(
            Extend(sequence_id=ID, epoch=1, round=round_, base_len=base, tokens=tokens, **more)
        )

    def step(self) -> list[Any]:
        plan = self.machine.plan(0.0)
        if not plan.works:
            return list(plan.events)
        done = self.machine.retire(plan.works, self.engine.run(plan.works), 0.0)
        self.machine.check_balance()
        return [*plan.events, *done]

    def grown(self) -> Bench:
        """Round 1's tree is out; trees for its outcomes come next."""
        self.extend(1, 3, 10)
        self.features(2, 3)
        (ready,) = self.step()
        assert isinstance(ready, TreeReady)
        return self


def test_trees_for_outcomes_follow_the_rounds_own() -> None:
    bench = Bench().grown()
    (foreseen,) = bench.step()
    assert isinstance(foreseen, Foreseen)
    assert foreseen.round == 2
    assert list(foreseen.outcomes) == [(13,)]
    assert foreseen.outcomes[(13,)].tokens.tolist() == [13, 14, 15, 15]
    (work,) = [w for w in bench.engine.works if w.guessed.size]
    assert work.guessed.tolist() == [13]
    assert work.tokens.tolist() == [10], "the last true pair is read again"
    assert bench.step() == []


def test_a_round_that_verify_has_begun_needs_no_tree_and_names_the_next_outcomes() -> None:
    bench = Bench().grown()
    bench.step()
    assert bench.extend(2, 4, 13, begun=True) == []
    assert bench.step() == [], "its features are not here yet"
    bench.features(3, 4)
    (foreseen,) = bench.step()
    assert foreseen.round == 3
    assert list(foreseen.outcomes) == [(16,)]
    last = bench.engine.works[-1]
    assert (last.kv_len, last.tokens.tolist()) == (3, [13]), "true features, fed with them"
    assert bench.extend(2, 4, 13, begun=True) == [], "a repetition"


def test_a_begun_tree_that_is_not_known_is_grown() -> None:
    bench = Bench().grown()
    bench.step()
    bench.extend(2, 4, 77, begun=True)
    bench.features(3, 4)
    assert isinstance(bench.step()[0], TreeReady)


def test_a_wish_goes_before_trees_ahead() -> None:
    bench = Bench().grown()
    bench.extend(2, 4, 11)
    bench.features(3, 4)
    (ready,) = bench.step()
    assert isinstance(ready, TreeReady)
    assert ready.grown.round == 2


def test_what_was_asked_for_decides_how_many() -> None:
    for asked, allowed in ((0, 4), (4, 0)):
        bench = Bench(max_outcomes=allowed)
        bench.extend(1, 3, 10, max_outcomes=asked)
        bench.features(2, 3)
        assert isinstance(bench.step()[0], TreeReady)
        assert bench.step() == []


def test_a_rollback_forgets_what_was_foreseen() -> None:
    bench = Bench().grown()
    bench.do(Rollback(sequence_id=ID, epoch=2, committed_len=3, round=1))
    assert bench.step() == []


def test_settings_grow_more_than_is_sent() -> None:
    config = DraftConfig(head="h", draft_ahead=2)
    assert config.tree == TreeShape(max_depth=5, top_k=4, max_nodes=16)
    assert config.grown_tree == TreeShape(max_depth=5, top_k=4, max_nodes=22)
    assert DraftConfig(head="h").grown_tree == config.tree


@pytest.mark.parametrize(("own", "asked", "got"), [(None, 8, 8), (4, 8, 4), (None, 0, None)])
def test_a_window_is_never_widened(own: int | None, asked: int, got: int | None) -> None:
    head = replace(tiny_head(0)[0], windows=(own,))
    assert with_window(head, asked).windows == (got,)
