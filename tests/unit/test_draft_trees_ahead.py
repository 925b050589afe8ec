"""Trees for rounds to come, on the draft's side: when they are grown, sent, and what is learnt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from common.types import DraftTree, ErrorCode, FeatureRows, TreeShape
from draft_service.ahead import SentAhead
from draft_service.assembly import with_window
from draft_service.commands import Attach, Extend, Open, Rollback
from draft_service.config import DraftConfig
from draft_service.events import Failed, GrownTree
from draft_service.limits import DraftLimits
from draft_service.machine import DraftMachine
from draft_service.sizes import AheadShape
from draft_service.step import SequenceOutcome, SequenceWork
from tests.parity.draft_tiny import tiny_head

ONE, TWO = bytes(16), bytes(15) + b"2"
SHAPE = TreeShape(max_depth=2, top_k=2, max_nodes=4)
AHEAD = TreeShape(max_depth=6, top_k=32, max_nodes=8)


def chain(root: int, depth: int, chance: float = 0.9) -> DraftTree:
    """root, root + 1, ..., each as likely below the one before."""
    tokens = np.arange(root, root + depth + 1, dtype=np.int32)
    scores = np.arange(depth + 1, dtype=np.float32) * np.float32(np.log(chance))
    return DraftTree(tokens, np.arange(-1, depth, dtype=np.int32), scores)


class Bench:
    """A machine and an engine whose trees are chains, as deep as they may be."""

    def __init__(self, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "vocab_size": 1000, "feature_size": 2, "max_context_len": 40, "tree": SHAPE,
            "max_sequences": 4, "page_size": 4, "num_pages": 30, "max_step_sequences": 4,
            "max_draft_rows": 8, "max_extend_rows": 8, "ahead": AHEAD,
        }  # fmt: skip
        self.machine, self.now = DraftMachine(DraftLimits(**(settings | changes))), 0.0
        self.machine.connect(1)
        self.rounds = {ONE: 0, TWO: 0}
        self.committed = {ONE: [1, 2, 3], TWO: [1, 2, 3]}

    def do(self, command: Any) -> list[Any]:
        return self.machine.handle(1, [command], self.now)

    def open(self, sequence_id: bytes = ONE) -> Bench:
        self.do(Open(sequence_id=sequence_id, epoch=1, tokens=(1, 2, 3), max_total_tokens=40))
        self.features(sequence_id, 0)
        return self

    def features(self, sequence_id: bytes = ONE, first: int | None = None) -> None:
        """Up to the last token's, which verify does not have yet; `first`: None for one row."""
        until = len(self.committed[sequence_id]) - 1
        first = until - 1 if first is None else first
        rows = np.zeros((until - first, 2), np.float32)
        self.machine.receive(FeatureRows(sequence_id, 1, first, rows), self.now)

    def extend(self, *tokens: int, id: bytes = ONE, ahead: bool = True, **more: Any) -> list[Any]:
        base, self.rounds[id] = len(self.committed[id]), self.rounds[id] + 1
        self.committed[id] += tokens
        wish = Extend(
            sequence_id=id, epoch=1, round=self.rounds[id], base_len=base, tokens=tokens,
            ahead=ahead, **more,
        )  # fmt: skip
        return self.do(wish)

    def plan(self) -> list[SequenceWork]:
        return self.machine.plan(self.now).works

    def retire(self, works: list[SequenceWork]) -> list[GrownTree]:
        outcomes = [
            SequenceOutcome(
                tree=chain(int(work.tokens[-1]), min(work.max_levels, 6)) if work.drafts else None
            )
            for work in works
        ]
        events = self.machine.retire(works, outcomes, self.now)
        self.machine.check_balance()
        return [event.grown for event in events]


def test_a_wish_ahead_gets_a_tree_of_its_own_shape() -> None:
    bench = Bench().open()
    bench.extend(10, tree=TreeShape(max_depth=1, top_k=1, max_nodes=2))
    bench.features()
    (work,) = bench.plan()
    assert work.ahead
    (grown,) = bench.retire([work])
    assert (grown.round, grown.committed_len, grown.ahead) == (1, 4, True)
    assert grown.tree.tokens.tolist() == list(range(10, 17)), "verify cuts it, round for round"
    again = bench.do(Extend(sequence_id=ONE, epoch=1, round=1, base_len=9, tokens=(), ahead=True))
    assert [event.grown for event in again] == [grown]


def test_no_tree_is_deeper_than_the_sequence_may_become() -> None:
    bench = Bench().open()
    bench.extend(*range(10, 43), ahead=True)
    bench.features(first=2)
    while not (works := bench.plan())[0].drafts:
        bench.retire(works)
    (grown,) = bench.retire(works)
    assert grown.tree.num_nodes == 1 + 3


def test_a_newer_wish_supersedes_one_that_has_not_begun() -> None:
    for ahead in (True, False):
        bench = Bench().open()
        bench.extend(10)
        bench.extend(11, ahead=ahead)
        bench.features(first=2)
        (grown,) = bench.retire(bench.plan())
        assert (grown.round, grown.ahead) == (2, ahead)
        assert bench.plan() == []


def test_a_tree_under_way_is_sent_though_a_newer_wish_has_come() -> None:
    for ahead in (True, False):
        bench = Bench().open()
        bench.extend(10)
        bench.features()
        works = bench.plan()
        bench.extend(11, 12, ahead=ahead)
        (late,) = bench.retire(works)
        assert (late.round, late.committed_len, late.ahead) == (1, 4, True)
        assert late.tree.tokens[0] == 10
        attached = bench.do(Attach(sequence_id=ONE, epoch=2))
        assert len(attached) == 1, "nobody waits for it: it is not kept"
        assert bench.plan() == [], "the newer one lacks features"


def test_a_tree_that_a_round_waited_for_is_not_sent_once_it_is_superseded() -> None:
    bench = Bench().open()
    bench.extend(10, ahead=False)
    bench.features()
    works = bench.plan()
    bench.extend(11)
    assert bench.retire(works) == []


def test_those_who_wait_go_first_and_those_without_features_hold_up_nobody() -> None:
    bench = Bench().open().open(TWO)
    bench.extend(10)
    bench.features()
    bench.extend(10, id=TWO, ahead=False)
    (ahead,) = works = bench.plan()
    assert ahead.ahead, "the other's features are not there"
    bench.retire(works)
    bench.extend(11)
    bench.features()
    bench.features(TWO)
    (waited,) = works = bench.plan()
    assert (waited.sequence_id, waited.ahead) == (TWO, False)
    bench.retire(works)
    assert [work.ahead for work in bench.plan()] == [True]


def test_all_wishes_ahead_go_together_with_features_that_came_meanwhile() -> None:
    bench = Bench().open().open(TWO)
    for sequence_id in (ONE, TWO):
        bench.extend(10, id=sequence_id)
    assert bench.machine.expects_features(-1.0)
    assert bench.machine.num_waiting == 0
    bench.features(ONE)
    bench.features(TWO)
    assert not bench.machine.expects_features(-1.0)
    works = bench.plan()
    assert [work.sequence_id for work in works] == [ONE, TWO]
    assert all(work.num_rows == 3 for work in works)


def test_after_a_rollback_nothing_of_before_is_sent() -> None:
    bench = Bench().open()
    bench.extend(10)
    bench.features()
    bench.do(Rollback(sequence_id=ONE, epoch=2, committed_len=3, round=1))
    assert not any(work.drafts for work in bench.plan())


def test_a_service_without_trees_ahead_refuses_the_wish() -> None:
    bench = Bench(ahead=None).open()
    (failed,) = bench.extend(10)
    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.INVALID
    assert failed.message.startswith("ahead: ")
    assert "--draft-ahead" in failed.message


def test_levels_fit_the_rounds_once_they_are_known() -> None:
    bench = Bench(ahead_level_seconds=((1, 0.01),)).open()
    for token in (10, 11, 12):
        bench.extend(token, verified_ahead=len(bench.committed[ONE]) - 1)
        bench.features()
        (work,) = works = bench.plan()
        bench.retire(works)
        bench.now += 0.041
    assert work.max_levels == 4


def test_what_verify_took_and_passed_over() -> None:
    sent = SentAhead()
    sent.note(chain(10, 6), 4, [], at=1.0)
    sent.follow([11, 12])
    sent.note(chain(12, 1, chance=0.1), 6, [], at=2.0)
    assert sent.way(5.0, 4) == (4.0, []), "the newer one's only node is no likely one"
    assert sent.way(5.0, None) == (None, [4.0])
    sent.note(chain(12, 6), 6, [], at=3.0)
    assert sent.way(5.0, 4) == (4.0, [2.0])
    assert sent.way(5.0, 6) == (2.0, [])
    assert sent.way(2.5, 4) == (1.5, []), "it was sent after the round had begun"
    sent.follow([99])
    sent.note(chain(12, 6), 6, [99], at=3.0)
    assert sent.way(5.0, None) == (None, []), "the tokens have left all trees"


@pytest.mark.parametrize(("rows", "widths"), [(64, (32, 16, 8, 4, 4)), (100, (32, 16, 8, 8, 4))])
def test_trees_ahead_are_as_wide_as_their_number_lets_them_be(
    rows: int, widths: tuple[int, ...]
) -> None:
    shape = AheadShape(max_rows=rows)
    assert tuple(shape.width(count, 4) for count in (1, 4, 8, 12, 32)) == widths


def test_settings_of_trees_ahead_name_their_limits() -> None:
    assert not DraftConfig(head="h").draft_ahead
    with pytest.raises(ValidationError, match="ahead_nodes"):
        DraftConfig(head="h", draft_ahead=True, ahead_nodes=300)


@pytest.mark.parametrize(("own", "asked", "got"), [(None, 8, 8), (4, 8, 4), (None, 0, None)])
def test_a_window_is_never_widened(own: int | None, asked: int, got: int | None) -> None:
    head = replace(tiny_head(0)[0], windows=(own,))
    assert with_window(head, asked).windows == (got,)
