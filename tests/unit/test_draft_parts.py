"""The draft machine's small parts, each with literal values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.tensors import MAX_PIECE_BYTES
from common.types import DraftTree, FeatureRows, TreeShape
from draft_service.commands import Extend, Open
from draft_service.config import DraftConfig
from draft_service.events import Evicted, Failed, TreeReady
from draft_service.features import FeatureStore
from draft_service.limits import DraftLimits
from draft_service.machine import DraftMachine
from draft_service.streams import WINDOW_BYTES, StreamHub
from tests.protocol.draft_toy import VOCAB, ToyEngine, digest

ONE, TWO, THREE = (bytes([i]) * 16 for i in (1, 2, 3))


def rows(first: int, until: int) -> Any:
    return np.arange(first, until, dtype=np.float32)[:, None].repeat(2, axis=1)


def limits(**changes: Any) -> DraftLimits:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "feature_size": 2, "max_context_len": 40,
        "tree": TreeShape(max_depth=4, top_k=2, max_nodes=8), "max_sequences": 4, "page_size": 4,
        "num_pages": 4, "max_step_sequences": 2, "max_draft_rows": 8, "max_extend_rows": 8,
    }  # fmt: skip
    return DraftLimits(**(settings | changes))


def run_once(machine: DraftMachine, engine: ToyEngine, now: float) -> list[Any]:
    plan = machine.plan(now)
    events = list(plan.events)
    if plan.works:
        events += machine.retire(plan.works, engine.run(plan.works), now)
    return events


def ask(
    machine: DraftMachine,
    sequence_id: bytes,
    tokens: tuple[int, ...],
    now: float,
    max_total_tokens: int = 9,
) -> None:
    """Opens with all features, and wishes for a tree."""
    opened = Open(
        sequence_id=sequence_id, epoch=1, tokens=tokens, max_total_tokens=max_total_tokens
    )
    machine.handle(1, [opened], now)
    machine.receive(FeatureRows(sequence_id, 1, 0, rows(0, len(tokens))), now)
    wish = Extend(sequence_id=sequence_id, epoch=1, round=1, base_len=len(tokens), tokens=())
    machine.handle(1, [wish], now)


# -- features


def test_rows_behind_a_gap_wait_for_it() -> None:
    store = FeatureStore(first=2, recent_rows=2)
    assert store.put(5, rows(5, 7)) == 2
    assert store.num_available == 0
    assert store.put(0, rows(0, 5)) == 3  # below 2 none is wanted
    assert (store.next, store.available_until) == (2, 7)
    assert store.take(4, 2)[:, 0].tolist() == [4, 5]
    assert store.num_waiting_bytes == 5 * 8


def test_known_rows_are_ignored() -> None:
    store = FeatureStore(first=0, recent_rows=2)
    store.put(0, rows(0, 4))
    store.fed(3)
    assert store.put(0, rows(100, 104)) == 0
    assert store.take(1, 3)[:, 0].tolist() == [1, 2, 3]


def test_only_recent_rows_stay_behind_the_kv() -> None:
    store = FeatureStore(first=0, recent_rows=2)
    store.put(0, rows(0, 6))
    store.fed(5)
    assert [store.has(p) for p in range(6)] == [False, False, False, True, True, True]
    assert store.num_waiting_bytes == 8


def test_cut_rows_come_again() -> None:
    store = FeatureStore(first=0, recent_rows=4)
    store.put(0, rows(0, 8))
    store.fed(6)
    store.cut(3)
    assert (store.next, store.available_until, store.num_waiting_bytes) == (3, 3, 0)
    assert store.put(3, rows(13, 15)) == 2
    assert store.take(2, 3)[:, 0].tolist() == [2, 13, 14]


# -- trees


def test_tree_is_cut_by_depth_then_children_then_nodes() -> None:
    #        0
    #    1   2   3
    #   4 5      6
    #   7
    tree = DraftTree(
        np.arange(8, dtype=np.int32) + 10,
        np.array([-1, 0, 0, 0, 1, 1, 3, 4], np.int32),
        -np.arange(8, dtype=np.float32),
    )
    cut = tree.within(TreeShape(max_depth=2, top_k=8, max_nodes=8))
    assert cut.tokens.tolist() == [10, 11, 12, 13, 14, 15, 16]
    cut = tree.within(TreeShape(max_depth=3, top_k=1, max_nodes=8))
    assert (cut.tokens.tolist(), cut.parents.tolist()) == ([10, 11, 14, 17], [-1, 0, 1, 2])
    cut = tree.within(TreeShape(max_depth=3, top_k=2, max_nodes=3))
    assert cut.tokens.tolist() == [10, 11, 12]


# -- the machine, rule by rule


def test_missing_features_hold_up_nobody_else() -> None:
    machine, engine = DraftMachine(limits()), ToyEngine(4)
    ask(machine, ONE, (1, 2, 3), 0.0)
    machine.handle(
        1, [Extend(sequence_id=ONE, epoch=1, round=2, base_len=3, tokens=(4, 5))], 0.0
    )  # its features have not come
    ask(machine, TWO, (7, 8), 0.0)
    events = run_once(machine, engine, 1.0)
    assert [(e.sequence_id, type(e)) for e in events] == [(TWO, TreeReady)]


def test_extend_before_the_former_tree_is_grown_supersedes_it() -> None:
    machine, engine = DraftMachine(limits()), ToyEngine(4)
    ask(machine, ONE, (1, 2, 3), 0.0)
    plan = machine.plan(0.0)
    again = Extend(sequence_id=ONE, epoch=1, round=2, base_len=3, tokens=(4,))
    machine.handle(1, [again], 0.5)
    assert machine.retire(plan.works, engine.run(plan.works), 1.0) == []
    (event,) = run_once(machine, engine, 2.0)
    assert (event.grown.round, event.grown.committed_len) == (2, 4)
    pairs = [(2, 0.0, 0.0), (3, 1.0, 1.0), (4, 2.0, 2.0)]
    assert event.grown.tree.tokens.tolist() == [4, digest(pairs)]


def test_least_recently_used_idle_sequence_is_evicted() -> None:
    machine, engine = DraftMachine(limits(num_pages=2)), ToyEngine(2)
    for now, sequence_id in ((1.0, ONE), (2.0, TWO)):
        ask(machine, sequence_id, (1, 2, 3), now)
        assert [type(e) for e in run_once(machine, engine, now)] == [TreeReady]
    ask(machine, THREE, (1, 2, 3), 3.0)
    events = run_once(machine, engine, 3.0)
    assert [(type(e), e.sequence_id) for e in events] == [(Evicted, ONE), (TreeReady, THREE)]
    wish = Extend(sequence_id=ONE, epoch=1, round=2, base_len=3, tokens=())
    (refused,) = machine.handle(1, [wish], 4.0)
    assert refused.code.name == "UNKNOWN_SEQUENCE"
    machine.check_balance()


def test_rows_that_fill_the_memory_and_cannot_be_fed_are_put_out() -> None:
    machine = DraftMachine(limits(max_waiting_bytes=MAX_PIECE_BYTES + 64))
    ask(machine, ONE, (1, 2), 0.0, max_total_tokens=16)
    run_once(machine, ToyEngine(4), 0.0)
    machine.receive(FeatureRows(ONE, 1, 3, rows(3, 13)), 0.0)  # behind a gap: 80 bytes
    assert [type(e) for e in machine.plan(1.0).events] == [Evicted]
    assert machine.waiting_feature_bytes == 0


def test_sequence_that_never_fits_is_refused_at_open() -> None:
    machine = DraftMachine(limits(num_pages=2))
    opened = Open(sequence_id=ONE, epoch=1, tokens=(1,), max_total_tokens=11)
    (failed,) = machine.handle(1, [opened], 0.0)
    assert isinstance(failed, Failed)
    assert failed.code.name == "NEVER_FITS"
    assert "11 tokens need 3 KV pages, the pool has 2" in failed.message


def test_failed_step_ends_every_sequence_and_says_so() -> None:
    machine, engine = DraftMachine(limits()), ToyEngine(4)
    ask(machine, ONE, (1, 2, 3), 0.0)
    run_once(machine, engine, 0.0)
    ask(machine, TWO, (1, 2, 3), 1.0)
    plan = machine.plan(1.0)
    events = machine.fail(plan.works, "the draft step failed", 2.0)
    assert sorted(e.sequence_id for e in events if isinstance(e, Failed)) == [ONE, TWO]
    machine.check_balance()
    assert machine.page_counts.available == 4


# -- credit and settings


def test_credit_stops_when_rows_fill_the_memory_and_returns_with_room() -> None:
    hub = StreamHub(2 * WINDOW_BYTES)
    sender = hub.add_sender()
    hub.share_credit(0)
    assert sender.to_grant_bytes == sender.outstanding_bytes == WINDOW_BYTES
    sender.outstanding_bytes = 0  # all of it came
    hub.share_credit(2 * WINDOW_BYTES)
    assert sender.to_grant_bytes == WINDOW_BYTES
    hub.share_credit(WINDOW_BYTES)
    assert sender.to_grant_bytes == 2 * WINDOW_BYTES


def test_tree_that_cannot_be_grown_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="max_nodes: 16 is beyond the 5 nodes"):
        DraftConfig(head="h", max_depth=4, top_k=1, max_nodes=16)  # type: ignore[arg-type]


def test_rows_that_never_came_do_not_count_as_fed() -> None:
    """As when the prefix cache held them."""
    store = FeatureStore(0, 4)
    store.fed(32)
    assert store.num_waiting_bytes == 0
    store.put(32, np.zeros((2, 3), np.float32))
    assert store.num_waiting_bytes == 24
    store.fed(34)
    assert store.num_waiting_bytes == 0
