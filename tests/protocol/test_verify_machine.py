"""One promise of the verify protocol per test, with the toy target."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from verify_toy import VOCAB, ToyEngine, continuation

from common.types import Drafting, DraftTree, ErrorCode, SamplingParams, SequenceState
from verify_service import commands as c
from verify_service import events as e
from verify_service.budget import TreeBudget
from verify_service.draft_gate import DraftGate
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine
from verify_service.step import StepPoint
from verify_service.step_cost import StepCurve

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
PROMPT = (3, 1, 4, 1, 5)


class Bench:
    """A machine with its toy device and a clock. `steps` runs until nothing is left to run."""

    def __init__(self, **limits: Any) -> None:
        defaults: dict[str, Any] = {
            "vocab_size": 7, "max_context_len": 64, "max_tree_nodes": 8, "max_tree_depth": 6,
            "max_sequences": 4, "max_waiting_sequences": 4, "page_size": 4, "num_pages": 32,
            "max_step_tokens": 32, "max_prefill_tokens": 16,
        }  # fmt: skip
        self.limits = VerifyLimits(**(defaults | limits))
        self.machine = VerifyMachine(self.limits)
        self.engine = ToyEngine(self.limits.num_pages, self.limits.page_size)
        self.now = 0.0
        self.machine.connect(1)
        self.machine.connect(2)

    def do(self, *commands: c.Command, stream: int = 1) -> list[e.Event]:
        events = self.machine.handle(stream, commands, self.now)
        self.machine.check_balance()
        return events

    def open(self, sequence_id: bytes = A, tokens: tuple[int, ...] = PROMPT, **more: Any):
        stream = more.pop("stream", 1)
        fields: dict[str, Any] = {
            "epoch": 1, "num_prompt_tokens": len(tokens), "sampling": SamplingParams(),
            "max_total_tokens": 40,
        }  # fmt: skip
        return self.do(
            c.Open(sequence_id=sequence_id, tokens=tokens, **(fields | more)), stream=stream
        )

    def launch(self) -> Any:
        return self.machine.plan(self.now)

    def land(self, plan: Any) -> list[e.Event]:
        events = self.machine.retire(plan.works, self.engine.run(plan.works), self.now, 0.01)
        self.machine.check_balance()
        return events

    def steps(self) -> list[e.Event]:
        events: list[e.Event] = []
        while (plan := self.launch()).works:
            events += [*plan.events, *self.land(plan)]
        return events + plan.events


def tree(root: int, *nodes: tuple[int, int]) -> DraftTree:
    """`nodes`: (token, parent)."""
    tokens = [root, *(token for token, _ in nodes)]
    parents = [-1, *(parent for _, parent in nodes)]
    scores = -np.arange(len(tokens), dtype=np.float32)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), scores)


def verify(round_: int, kv_len: int, draft: DraftTree, epoch: int = 1, acked: int = c.NO_ROUND):
    return c.VerifyTree(
        sequence_id=A, epoch=epoch, acked_round=acked, round=round_, kv_len=kv_len, tree=draft
    )


def code(events: list[e.Event]) -> ErrorCode:
    (event,) = events
    assert isinstance(event, e.Failed), event
    return event.code


def result(events: list[e.Event]) -> e.RoundResult:
    (done,) = [event for event in events if isinstance(event, e.RoundDone)]
    return done.result


REFERENCE = continuation(PROMPT, 30)


def test_open_answers_with_its_state_and_round_zero_rides_on_the_prefill() -> None:
    bench = Bench()
    (report,) = bench.open()
    assert report == e.StateReport(
        stream=1, sequence_id=A, epoch=1,
        state=SequenceState(epoch=1, next_round=0, committed_len=5, kv_len=4),
    )  # fmt: skip
    plan = bench.launch()
    (work,) = plan.works
    assert (work.num_causal, work.samples, work.kv_len) == (5, True, 0)
    done = result(bench.land(plan))
    assert (done.round, done.kv_len, list(done.tokens)) == (0, 4, REFERENCE[:1])


def test_accepted_path_and_bonus_are_emitted_and_indices_are_the_senders() -> None:
    bench = Bench()
    bench.open()
    bench.steps()
    r = REFERENCE
    draft = tree(r[0], ((r[1] + 1) % 7, 0), (r[1], 0), (r[2], 2), ((r[3] + 1) % 7, 3))
    assert bench.do(verify(1, 5, draft, acked=0)) == []
    done = result(bench.steps())
    assert list(done.tokens) == r[1:4]
    assert done.accepted_nodes == (2, 3)
    assert (done.num_nodes, done.kv_len) == (5, 5)


def test_repeated_round_commits_once() -> None:
    bench = Bench()
    bench.open()
    bench.steps()
    first = verify(1, 5, tree(REFERENCE[0], (REFERENCE[1], 0)), acked=0)
    bench.do(first)
    assert bench.do(first) == []  # its answer is on the way
    done = result(bench.steps())
    again = bench.do(verify(1, 5, tree(REFERENCE[0])))  # another tree
    assert result(again) == done
    assert bench.steps() == []


def test_round_asked_again_while_it_runs_keeps_its_first_tree() -> None:
    bench = Bench()
    bench.open()
    bench.steps()
    bench.do(verify(1, 5, tree(REFERENCE[0]), acked=0))
    plan = bench.launch()
    bench.do(verify(1, 5, tree(REFERENCE[0], (REFERENCE[1], 0))))
    assert list(result(bench.land(plan)).tokens) == REFERENCE[1:2]
    assert bench.steps() == []


def test_older_future_and_misfitting_rounds_are_refused_with_the_state() -> None:
    bench = Bench()
    bench.open()
    bench.steps()
    root = tree(REFERENCE[0])
    state = SequenceState(epoch=1, next_round=1, committed_len=6, kv_len=5)
    for command in (
        verify(2, 5, root),
        verify(1, 4, root),
        verify(1, 5, tree((REFERENCE[0] + 1) % 7)),
        verify(1, 5, root, epoch=2),
        verify(1, 5, root, acked=1),
    ):
        (failed,) = bench.do(command)
        assert isinstance(failed, e.Failed)
        assert (failed.code, failed.state) == (ErrorCode.WRONG_ROUND, state), failed
    bench.do(verify(1, 5, root, acked=0))
    bench.steps()
    assert code(bench.do(verify(0, 4, tree(5)))) is ErrorCode.WRONG_ROUND


def test_at_most_two_results_wait_for_acknowledgement() -> None:
    bench = Bench()
    bench.open()
    bench.steps()
    bench.do(verify(1, 5, tree(REFERENCE[0])))
    bench.steps()
    refused = bench.do(verify(2, 6, tree(REFERENCE[1])))
    assert code(refused) is ErrorCode.WRONG_ROUND
    assert "2 results are unacknowledged" in refused[0].message
    assert bench.do(verify(2, 6, tree(REFERENCE[1]), acked=1)) == []


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (tree(1, *[(2, 0)] * 8), "tree has 9 nodes; it must have 1 to 8"),
        (tree(1, (7, 0)), r"token outside \[0, 7\)"),
        (tree(1, (2, 1)), "parent in a tree must stand before its child"),
        (DraftTree(*(np.zeros(0, t) for t in (np.int32, np.int32, np.float32))), "0 nodes"),
        (
            DraftTree(np.array([1, 2], np.int32), np.array([-1, 0], np.int32),
                      np.array([0, np.nan], np.float32)),
            "score that is not finite",
        ),
    ],
)  # fmt: skip
def test_malformed_tree_is_an_error_of_its_sequence_alone(draft: DraftTree, message: str) -> None:
    bench = Bench()
    bench.open()
    bench.open(B)
    bench.steps()
    events = bench.do(
        verify(1, 5, draft),
        c.VerifyTree(sequence_id=B, epoch=1, round=1, kv_len=5, tree=tree(REFERENCE[0])),
    )
    assert code(events) is ErrorCode.INVALID
    assert re.search(message, events[0].message)
    assert list(result(bench.steps()).tokens) == REFERENCE[1:2]


def test_equal_epoch_changes_nothing_and_smaller_is_stale() -> None:
    bench = Bench()
    bench.open(epoch=5)
    bench.steps()
    state = SequenceState(epoch=5, next_round=1, committed_len=6, kv_len=5)
    for same in (
        c.Open(
            sequence_id=A, epoch=5, tokens=(1,), num_prompt_tokens=1, sampling=SamplingParams(),
            max_total_tokens=9,
        ),
        c.Attach(sequence_id=A, epoch=5),
        c.Rollback(sequence_id=A, epoch=5, committed_len=2, round=9),
    ):  # fmt: skip
        (report,) = bench.do(same, stream=2)
        assert report == e.StateReport(stream=2, sequence_id=A, epoch=5, state=state)
    for stale in (
        c.Attach(sequence_id=A, epoch=4),
        c.Rollback(sequence_id=A, epoch=4, committed_len=2, round=9),
        c.Close(sequence_id=A, epoch=4),
        verify(1, 5, tree(REFERENCE[0]), epoch=4),
    ):
        assert code(bench.do(stale)) is ErrorCode.STALE_EPOCH


def test_only_the_owning_stream_drives_a_sequence() -> None:
    bench = Bench()
    bench.open()
    bench.steps()
    command = verify(1, 5, tree(REFERENCE[0]))
    assert code(bench.do(command, stream=2)) is ErrorCode.STALE_EPOCH
    bench.do(c.Attach(sequence_id=A, epoch=2), stream=2)
    assert code(bench.do(command)) is ErrorCode.STALE_EPOCH
    bench.do(verify(1, 5, tree(REFERENCE[0]), epoch=2), stream=2)
    (done,) = bench.steps()
    assert (done.stream, done.epoch) == (2, 2)


def test_takeover_waits_for_the_running_step_and_finds_its_result() -> None:
    bench = Bench()
    bench.open()
    bench.steps()
    bench.do(verify(1, 5, tree(REFERENCE[0], (REFERENCE[1], 0)), acked=0))
    plan = bench.launch()
    attach = c.Attach(sequence_id=A, epoch=2, acked_round=0)
    follow_up = verify(2, 7, tree(REFERENCE[2]), epoch=2, acked=1)
    assert bench.do(attach, follow_up, stream=2) == []
    to_old, report, replayed = bench.land(plan)
    assert (to_old.stream, to_old.epoch) == (1, 1)
    assert report.state == SequenceState(epoch=2, next_round=2, committed_len=8, kv_len=7)
    assert (replayed.stream, replayed.epoch) == (2, 2)
    assert replayed.result == to_old.result
    assert list(result(bench.steps()).tokens) == REFERENCE[3:4]


def test_rollback_waits_for_the_running_step_and_cuts_what_it_committed() -> None:
    bench = Bench(num_pages=10)
    bench.open()
    bench.steps()
    draft = tree(REFERENCE[0], *[(REFERENCE[i + 1], i) for i in range(5)])
    bench.do(verify(1, 5, draft, acked=0))
    plan = bench.launch()
    assert bench.do(c.Rollback(sequence_id=A, epoch=2, committed_len=4, round=7)) == []
    *_, report = bench.land(plan)
    assert report.state == SequenceState(epoch=2, next_round=7, committed_len=4, kv_len=3)
    assert bench.machine.page_counts.available == 9  # one page of four rows is left
    done = result(bench.do(verify(7, 3, tree(PROMPT[3]), epoch=2)) + bench.steps())
    assert list(done.tokens) == continuation(PROMPT[:4], 1)


def test_close_frees_at_once_but_pages_of_a_launched_step_when_it_retires() -> None:
    bench = Bench(max_sequences=1)
    bench.open()
    plan = bench.launch()
    (closed,) = bench.do(c.Close(sequence_id=A, epoch=1))
    assert closed == e.Closed(stream=1, sequence_id=A, epoch=1)
    assert bench.machine.num_sequences == 0
    assert bench.machine.page_counts.available == 30
    bench.open(B)
    assert bench.launch().works == []  # the slot is still the device's
    assert bench.land(plan) == []
    assert list(result(bench.steps()).tokens) == REFERENCE[:1]
    bench.do(c.Close(sequence_id=B, epoch=1))
    assert bench.machine.page_counts.available == 32


def test_closed_id_is_a_tombstone_for_the_grace_time() -> None:
    bench = Bench(grace_seconds=30)
    bench.do(c.Close(sequence_id=A, epoch=1))  # its Open comes late
    assert code(bench.open()) is ErrorCode.CLOSED
    assert code(bench.do(verify(0, 4, tree(5)))) is ErrorCode.CLOSED
    assert isinstance(bench.do(c.Close(sequence_id=A, epoch=1))[0], e.Closed)
    bench.now = 31
    bench.machine.tick(bench.now)
    assert code(bench.do(verify(0, 4, tree(5)))) is ErrorCode.UNKNOWN_SEQUENCE


def test_closed_id_opens_again_under_a_greater_epoch() -> None:
    bench = Bench()
    bench.open()
    plan = bench.launch()
    bench.do(c.Close(sequence_id=A, epoch=1))
    bench.open(epoch=2, tokens=PROMPT[:3])
    assert bench.land(plan) == []
    assert list(result(bench.steps()).tokens) == continuation(PROMPT[:3], 1)


def test_lost_stream_keeps_its_sequences_for_attach_then_frees_them() -> None:
    bench = Bench(grace_seconds=30)
    bench.open()
    bench.open(B)
    bench.machine.disconnect(1, 0.0)
    bench.steps()
    bench.now = 29
    bench.machine.tick(bench.now)
    report, replayed = bench.do(c.Attach(sequence_id=A, epoch=2), stream=2)
    assert report.state.next_round == 1
    assert list(replayed.result.tokens) == REFERENCE[:1]
    bench.now = 60
    bench.machine.tick(bench.now)
    assert bench.machine.num_sequences == 1
    attach = c.Attach(sequence_id=B, epoch=2)
    assert code(bench.do(attach, stream=2)) is ErrorCode.UNKNOWN_SEQUENCE


def test_out_of_pages_puts_the_youngest_out_and_its_round_still_runs() -> None:
    bench = Bench(num_pages=5, pause_seconds=100)
    told: dict[bytes, list[int]] = {A: [], B: []}
    asked = {A: 0, B: 0}
    events: list[e.Event] = []
    for s in (A, B):
        bench.open(s, max_total_tokens=16)
    for _ in range(30):
        new = bench.steps()
        events += new
        for done in [event for event in new if isinstance(event, e.RoundDone)]:
            s, tokens = done.sequence_id, told[done.sequence_id]
            tokens += done.result.tokens
            if len(tokens) == 11:
                bench.do(c.Close(sequence_id=s, epoch=1))
                continue
            asked[s] += 1
            bench.do(c.VerifyTree(
                sequence_id=s, epoch=1, acked_round=asked[s] - 1, round=asked[s],
                kv_len=4 + len(tokens), tree=tree(tokens[-1]),
            ))  # fmt: skip
    assert told == {A: REFERENCE[:11], B: REFERENCE[:11]}
    assert {event.sequence_id for event in events if isinstance(event, e.Preempted)} == {B}
    assert bench.machine.page_counts.available == 5


def test_running_sequence_does_not_give_way_to_a_younger_one() -> None:
    bench = Bench(num_pages=3, pause_seconds=100)
    bench.open(A, max_total_tokens=12)
    bench.steps()
    bench.open(B, max_total_tokens=12)
    assert bench.steps() == []  # B waits; A holds two pages of three
    bench.now = 101
    (preempted, done) = bench.steps()
    assert (preempted.sequence_id, done.sequence_id) == (A, B)


def test_sequence_that_can_never_fit_is_refused_at_open() -> None:
    bench = Bench(num_pages=4, page_size=4)
    assert code(bench.open(max_total_tokens=18)) is ErrorCode.NEVER_FITS
    assert isinstance(bench.open(max_total_tokens=17)[0], e.StateReport)


def test_waiting_queue_is_bounded() -> None:
    bench = Bench(max_sequences=1, max_waiting_sequences=1)
    bench.open(A)
    bench.open(B)
    assert code(bench.open(C)) is ErrorCode.OVERLOADED
    bench.do(c.Close(sequence_id=A, epoch=1))
    assert isinstance(bench.open(C)[0], e.StateReport)


def test_orphans_do_not_fill_the_queue_and_are_bounded_themselves() -> None:
    bench = Bench(max_sequences=1, max_waiting_sequences=1)
    for life in range(3):
        for number in range(2):
            bench.machine.connect(3 + life)
            opened = bench.open(bytes([life, number]) * 8, stream=3 + life)
            assert isinstance(opened[0], e.StateReport)
        bench.machine.disconnect(3 + life, float(life))
    assert bench.machine.num_sequences == 2
    attach = c.Attach(sequence_id=bytes([1, 0]) * 8, epoch=2)
    assert code(bench.do(attach)) is ErrorCode.UNKNOWN_SEQUENCE
    bench.open(A)
    ran = [event.sequence_id for event in bench.steps() if isinstance(event, e.RoundDone)]
    assert ran[0] == A


def test_draining_refuses_new_sequences_and_goes_on_with_the_open_ones() -> None:
    bench = Bench()
    bench.open()
    bench.machine.drain()
    assert code(bench.open(B)) is ErrorCode.NOT_SERVING
    assert list(result(bench.steps()).tokens) == REFERENCE[:1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": (), "num_prompt_tokens": 1}, "tokens: empty"),
        ({"tokens": (1, 7)}, r"tokens: one is outside the vocabulary \[0, 7\)"),
        ({"num_prompt_tokens": 6}, r"num_prompt_tokens: 6 is outside \[1, 5\]"),
        ({"max_total_tokens": 5}, r"max_total_tokens: 5 is outside \(5, 64\]"),
        ({"max_total_tokens": 65}, r"max_total_tokens: 65 is outside \(5, 64\]"),
        ({"stop_tokens": (7,)}, "stop_token_ids: one is outside"),
        ({"stop_tokens": (1,) * 9}, "stop_token_ids: 9 of them; at most 8"),
        ({"sampling": SamplingParams(top_p=0.0)}, r"sampling.top_p: 0.0 is outside \(0, 1\]"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "sampling.temperature: nan"),
    ],
)
def test_bad_open_names_field_value_and_limit(fields: dict[str, Any], message: str) -> None:
    bench = Bench()
    events = bench.open(**fields)
    assert code(events) is ErrorCode.INVALID
    assert re.search(message, events[0].message), events[0].message


def test_tree_never_grows_beyond_max_total_tokens() -> None:
    bench = Bench()
    bench.open(max_total_tokens=8)
    bench.steps()
    draft = tree(REFERENCE[0], *[(REFERENCE[i + 1], i) for i in range(5)])
    bench.do(verify(1, 5, draft, acked=0))
    done = result(bench.steps())
    assert list(done.tokens) == REFERENCE[1:3]
    assert done.num_nodes == 2
    refused = bench.do(verify(2, 7, tree(REFERENCE[2]), acked=1))
    assert code(refused) is ErrorCode.WRONG_ROUND
    assert "max_total_tokens, 8" in refused[0].message


def test_walk_stops_at_a_stop_token_unless_told_to_ignore_it() -> None:
    draft = tree(REFERENCE[0], *[(REFERENCE[i + 1], i) for i in range(3)])
    stop = REFERENCE[1]
    bench = Bench()
    bench.open(stop_tokens=(stop,))
    bench.steps()
    bench.do(verify(1, 5, draft, acked=0))
    assert list(result(bench.steps()).tokens) == REFERENCE[1:2]
    bench = Bench()
    bench.open(stop_tokens=(stop,), sampling=SamplingParams(ignore_eos=True))
    bench.steps()
    bench.do(verify(1, 5, draft, acked=0))
    assert list(result(bench.steps()).tokens) == REFERENCE[1:5]


def test_long_prompt_is_chunked_beside_a_running_sequence() -> None:
    bench = Bench(max_prefill_tokens=4, max_step_tokens=8, max_sequences=2)
    bench.open(A)
    bench.steps()
    bench.open(B, tokens=PROMPT * 4)
    bench.do(verify(1, 5, tree(REFERENCE[0], (REFERENCE[1], 0)), acked=0))
    plan = bench.launch()
    assert [(w.num_causal, w.samples, w.num_rows) for w in plan.works] == [
        (1, True, 2),
        (4, False, 4),
    ]
    assert list(result(bench.land(plan)).tokens) == REFERENCE[1:3]
    assert list(result(bench.steps()).tokens) == continuation(PROMPT * 4, 1)


def test_reopened_sequence_goes_on_as_if_nothing_had_happened() -> None:
    bench = Bench()
    bench.open(tokens=(*PROMPT, *REFERENCE[:4]), num_prompt_tokens=5, round=3)
    done = result(bench.steps())
    assert (done.round, list(done.tokens)) == (3, REFERENCE[4:5])


def test_features_of_every_position_come_once_and_again_on_replay() -> None:
    bench = Bench(max_prefill_tokens=2, max_step_tokens=8)
    bench.open(wants_features=True)
    bench.steps()

    def pull(stream: int = 1, max_bytes: int = 16) -> list[tuple[int, int]]:
        rows: list[tuple[int, int]] = []
        while (piece := bench.machine.next_features(stream, max_bytes)) is not None:
            assert piece.rows.nbytes <= max_bytes
            rows += [(int(p), int(t)) for p, t in piece.rows]
            assert rows[-1][0] == piece.position + len(piece.rows) - 1
        return rows

    assert pull(max_bytes=7) == []  # not even one row of 8 bytes
    assert pull(stream=2) == []
    assert pull() == list(enumerate(PROMPT))
    assert pull() == []
    bench.do(c.ReplayFeatures(sequence_id=A, epoch=1, position=3))
    assert pull() == [(3, PROMPT[3]), (4, PROMPT[4])]
    bench.do(c.Attach(sequence_id=A, epoch=2), stream=2)  # replays round 0, whose root is row 4
    assert pull(stream=2) == [(4, PROMPT[4])]


def test_failed_step_is_told_and_frees_everything() -> None:
    bench = Bench()
    bench.open()
    bench.open(B)
    events = bench.machine.fail(bench.launch().works, "the device is gone", 0.0)
    assert [(x.sequence_id, x.code) for x in events] == [
        (A, ErrorCode.INTERNAL),
        (B, ErrorCode.INTERNAL),
    ]
    assert bench.machine.num_sequences == 0
    assert bench.machine.page_counts.available == 32


def test_sequence_without_a_pick_is_lost_alone() -> None:
    """NaN logits: the device emits nothing for it and commits nothing."""
    bench = Bench()
    bench.open()
    bench.open(B)
    plan = bench.launch()
    first, second = bench.engine.run(plan.works)
    nothing = np.zeros(0, np.int32)
    broken = replace(
        first, tokens=nothing, margins=np.zeros(0, np.float32), accepted_nodes=nothing,
        num_committed=0, features=None,
    )  # fmt: skip
    events = bench.machine.retire(plan.works, [broken, second], 0.0, 0.01)
    bench.machine.check_balance()
    (lost,) = [event for event in events if isinstance(event, e.Failed)]
    assert (lost.sequence_id, lost.code) == (A, ErrorCode.INTERNAL)
    assert "no pick: not a number" in lost.message
    assert result(events).tokens == tuple(REFERENCE[:1])
    assert bench.machine.num_sequences == 1
    bench.open()  # and may come again
    assert result([x for x in bench.steps() if x.sequence_id == A]).tokens == (REFERENCE[0],)


def test_sequence_in_a_launched_step_is_never_put_out() -> None:
    bench = Bench(num_pages=5, pause_seconds=0.0)
    bench.open(A, max_total_tokens=16)
    bench.steps()
    other = (2, *PROMPT[1:])
    bench.open(B, other, max_total_tokens=16)
    running = bench.launch()  # B's prefill; A has two pages, B two, one is free
    for round_, kv_len in enumerate(range(5, 12), start=1):
        root = REFERENCE[round_ - 1]
        bench.do(verify(round_, kv_len, tree(root), acked=round_ - 1))
        plan = bench.launch()
        assert plan.events == []
        bench.land(plan)
    bench.do(verify(8, 12, tree(REFERENCE[7]), acked=7))
    stalled = bench.launch()  # A needs a fourth page, and only B could give one
    assert (stalled.works, stalled.events) == ([], [])
    assert list(result(bench.land(running)).tokens) == continuation(other, 1)
    preempted, done = bench.steps()
    assert (preempted.sequence_id, list(done.result.tokens)) == (B, REFERENCE[8:9])


def test_features_behind_a_rollback_are_sent_anew_under_the_new_epoch() -> None:
    bench = Bench()
    bench.open(wants_features=True)
    bench.steps()
    assert bench.machine.next_features(1, 4096).rows.shape == (5, 2)
    bench.do(c.Rollback(sequence_id=A, epoch=2, committed_len=4, round=1))
    bench.do(verify(1, 3, tree(PROMPT[3]), epoch=2))
    bench.steps()
    anew = bench.machine.next_features(1, 4096)
    assert (anew.epoch, anew.position, anew.rows.tolist()) == (2, 3, [[3, PROMPT[3]]])


def test_budget_cuts_what_does_not_pay_and_changes_no_token() -> None:
    dear = StepCurve.of([StepPoint(1, 0, 1, 1.0), StepPoint(8, 0, 1, 9.0)])
    bench = Bench()
    bench.machine = VerifyMachine(bench.limits, TreeBudget(dear, bench.limits.max_tree_depth))
    bench.machine.connect(1)
    bench.open()
    bench.steps()
    a, b = REFERENCE[1:3]
    for round_, kv_len in ((1, 5), (2, 6)):
        draft = tree(REFERENCE[kv_len - 5], (a, 0), (b, 1))
        bench.do(verify(round_, kv_len, draft, acked=round_ - 1))
        plan = bench.launch()
        done = result(bench.land(plan))
        assert plan.num_offered == 3
        assert (done.num_nodes, list(done.tokens)) == (1, [REFERENCE[kv_len - 4]])


def test_results_say_whether_trees_pay_by_the_time_between_them() -> None:
    """Rounds with a tree take four seconds and give one token, roots alone one."""
    bench = Bench(max_context_len=400, num_pages=100)
    bench.machine = VerifyMachine(bench.limits, gate=DraftGate())
    bench.machine.connect(1)
    bench.open(max_total_tokens=300)
    bench.steps()
    truth, advice, way = continuation(PROMPT, 300), [], Drafting.SYNCHRONOUS
    for round_ in range(1, 180):
        here = round_ - 1
        wrong = (truth[here + 1] + 1) % VOCAB
        waits = way is Drafting.SYNCHRONOUS
        draft = tree(truth[here], (wrong, 0)) if waits else tree(truth[here])
        bench.now += 4.0 if waits else 1.0
        bench.do(verify(round_, 5 + here, draft, acked=round_ - 1))
        (done,) = [x.result for x in bench.steps() if isinstance(x, e.RoundDone)]
        assert list(done.tokens) == [truth[here + 1]]
        way = done.drafting
        advice.append(way)
    assert advice[0] is Drafting.SYNCHRONOUS
    assert {*advice[-40:]} == {Drafting.NONE}
    assert bench.machine.drafting is Drafting.NONE
    assert bench.machine.num_draft_probes == 3  # each way is tried twice


def test_budget_learns_by_a_probe_that_trees_pay() -> None:
    costs = StepCurve.of([StepPoint(1, 0, 1, 1.0), StepPoint(8, 0, 1, 1.55)])
    bench = Bench(max_context_len=400, num_pages=100)
    bench.machine = VerifyMachine(bench.limits, TreeBudget(costs, bench.limits.max_tree_depth))
    bench.machine.connect(1)
    bench.open(max_total_tokens=300)
    bench.steps()
    truth, kv_len, used = continuation(PROMPT, 300), 5, []
    for round_ in range(1, 70):
        here = kv_len - 5
        chain = tree(truth[here], (truth[here + 1], 0), (truth[here + 2], 1))
        bench.do(verify(round_, kv_len, chain, acked=round_ - 1))
        (done,) = [x.result for x in bench.steps() if isinstance(x, e.RoundDone)]
        assert list(done.tokens) == truth[here + 1 : here + 1 + len(done.tokens)]
        used.append(done.num_nodes)
        kv_len += len(done.tokens)
    assert used[0] == 1  # exp(-1) + exp(-2) beside 1 do not pay for 0.55 more
    assert used[-1] == 3


@pytest.mark.parametrize(("away_seconds", "num_rows"), [(0.01, 4), (10.0, 16)])
def test_prefill_is_as_short_for_those_who_are_away_for_a_moment(
    away_seconds: float, num_rows: int
) -> None:
    """Their next rounds wait for this step's end. Those who pause are not waited for."""
    bench = Bench(max_prefill_tokens=4, max_step_tokens=16, max_sequences=2)
    bench.open()
    bench.steps()
    bench.open(B, tuple(i % 7 for i in range(30)))
    bench.now += away_seconds
    assert [work.num_rows for work in bench.launch().works] == [num_rows]
