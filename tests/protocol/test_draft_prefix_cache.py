"""What sequences with a common beginning share in the draft, with the toy head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.types import FeatureRows, TreeShape
from draft_service.commands import Close, Extend, Open, Rollback
from draft_service.events import StateReport, TreeReady
from draft_service.limits import DraftLimits
from draft_service.machine import DraftMachine
from tests.protocol.draft_toy import PAGE_SIZE, VOCAB, ToyEngine, digest

A, B = b"a" * 16, b"b" * 16
TOKENS = tuple(range(100, 111))  # ten pairs: two full pages of four, and two more


class Bench:
    def __init__(self, **limits: Any) -> None:
        defaults: dict[str, Any] = {
            "vocab_size": VOCAB, "feature_size": 2, "max_context_len": 32,
            "tree": TreeShape(max_depth=4, top_k=2, max_nodes=8), "max_sequences": 4,
            "page_size": PAGE_SIZE, "num_pages": 16, "max_step_sequences": 4,
            "max_draft_rows": 4, "max_extend_rows": 32,
        }  # fmt: skip
        self.machine = DraftMachine(DraftLimits(**(defaults | limits)))
        self.engine = ToyEngine(16)
        self.machine.connect(1)

    def do(self, command: Any) -> list[Any]:
        events = self.machine.handle(1, [command], 0.0)
        self.machine.check_balance()
        return events

    def open(self, name: bytes, tokens: tuple[int, ...] = TOKENS, **more: Any) -> int:
        """The first feature row that is wanted."""
        (state,) = self.do(
            Open(sequence_id=name, epoch=1, tokens=tokens, max_total_tokens=30, **more)
        )
        assert isinstance(state, StateReport)
        return state.state.kv_len

    def feed(self, name: bytes, positions: range, epoch: int = 1) -> None:
        rows = np.array([[p, -p] for p in positions], np.float32)
        self.machine.receive(FeatureRows(name, epoch, positions.start, rows), 0.0)

    def tree_token(
        self, name: bytes, round_: int, length: int, *tokens: int, epoch: int = 1
    ) -> int:
        """The digest of all pairs that the tree of this round stands on."""
        events = self.do(
            Extend(sequence_id=name, epoch=epoch, round=round_, base_len=length, tokens=tokens)
        )
        while (plan := self.machine.plan(0.0)).works:
            events += self.machine.retire(plan.works, self.engine.run(plan.works), 0.0)
            self.machine.check_balance()
        (tree,) = [event for event in events if isinstance(event, TreeReady)]
        return int(tree.grown.tree.tokens[1])


def whole(tokens: tuple[int, ...]) -> int:
    return digest([(t, float(p), float(-p)) for p, t in enumerate(tokens[1:])])


def test_second_sequence_wants_features_of_what_is_new_only() -> None:
    bench = Bench()
    assert bench.open(A) == 0
    bench.feed(A, range(10))
    assert bench.tree_token(A, 0, 11) == whole(TOKENS)
    assert bench.open(B) == 8
    bench.feed(B, range(8, 10))
    fed = bench.engine.num_pairs_fed
    assert bench.tree_token(B, 0, 11) == whole(TOKENS)
    assert bench.engine.num_pairs_fed - fed == 2
    assert bench.machine.prefix_counts == (20, 8, 0)
    assert bench.machine.page_counts.live == 4


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"cache_salt": b"tenant"}, 0),
        ({"tokens": TOKENS[:10]}, 8),
        ({"tokens": TOKENS[:9]}, 4),  # the last pair is fed for its output
        ({"tokens": (*TOKENS[:8], 7, 7, 7)}, 4),  # the last pair of a page has a later token
        ({"features_from": 8}, 8),  # what it did not get the pages have
        ({"features_from": 9}, 9),
    ],
)
def test_only_what_is_the_same_is_shared(changes: dict[str, Any], wanted: int) -> None:
    bench = Bench()
    bench.open(A)
    bench.feed(A, range(10))
    bench.tree_token(A, 0, 11)
    assert bench.open(B, **changes) == wanted


def test_pages_of_a_sequence_that_began_late_are_not_shared() -> None:
    bench = Bench()
    bench.open(A, features_from=2)
    bench.feed(A, range(2, 10))
    bench.tree_token(A, 0, 11)
    assert bench.open(B) == 0


def test_cache_that_is_off_keeps_nothing() -> None:
    bench = Bench(prefix_cache=False)
    bench.open(A)
    bench.feed(A, range(10))
    bench.tree_token(A, 0, 11)
    bench.do(Close(sequence_id=A, epoch=1))
    assert bench.machine.page_counts.free == 16
    assert bench.open(B) == 0


def test_rollback_into_a_shared_page_leaves_it_as_it_was() -> None:
    bench = Bench()
    bench.open(A)
    bench.feed(A, range(10))
    bench.tree_token(A, 0, 11)
    bench.open(B)
    bench.feed(B, range(8, 10))
    bench.tree_token(B, 0, 11)
    bench.do(Rollback(sequence_id=B, epoch=2, committed_len=7, round=1))
    bench.feed(B, range(6, 8), epoch=2)
    changed = (*TOKENS[:7], 5, 6)
    assert bench.tree_token(B, 1, 7, 5, 6, epoch=2) == whole(changed)
    bench.feed(A, range(10, 11))
    assert bench.tree_token(A, 1, 11, 9) == whole((*TOKENS, 9))


def test_tree_asked_for_again_writes_into_no_shared_page() -> None:
    bench = Bench()
    bench.open(A, TOKENS[:9])  # eight pairs: two full pages
    bench.feed(A, range(8))
    bench.tree_token(A, 0, 9)
    assert bench.open(B, TOKENS[:10]) == 8
    assert bench.tree_token(A, 1, 9) == whole(TOKENS[:9])
    bench.feed(B, range(8, 9))
    assert bench.tree_token(B, 0, 10) == whole(TOKENS[:10])


def test_failed_step_leaves_nothing_to_find() -> None:
    bench = Bench()
    bench.open(A)
    bench.feed(A, range(10))
    bench.tree_token(A, 0, 11)
    bench.open(B)
    bench.feed(B, range(8, 10))
    bench.machine.fail(bench.machine.plan(0.0).works, "gone", 0.0)
    assert bench.machine.page_counts.free == 16
    assert bench.open(b"c" * 16) == 0
