"""The generation machine's rules one by one: what it says after what it hears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.types import Drafting, ErrorCode, SamplingParams, SequenceState, TreeShape
from router.actions import (
    Action,
    Emitted,
    Failed,
    Finished,
    FinishReason,
    ReleaseFeatures,
    ToDraft,
    ToVerify,
)
from router.drafting import DraftSettings, DraftStage, FeatureRoute
from router.errors import ErrorKind
from router.generation import Generation
from router.machine import GenerationMachine, MachineSettings, Phase
from router.messages import (
    Close,
    DraftAttach,
    DraftExtend,
    DraftOpen,
    Evicted,
    Preempted,
    Rollback,
    RoundResult,
    SequenceFailed,
    StateReport,
    TreeReady,
    VerifyAttach,
    VerifyOpen,
    VerifyTree,
)
from router.output_text import OutputText
from router.requests import MAX_STOP_TOKEN_IDS
from router.stops import StopStrings
from router.trees import Tree

ID = b"0123456789abcdef"
PROMPT = (5, 6, 7)
SHAPE = TreeShape(max_depth=3, max_nodes=8)
DRAFT = DraftSettings(deadline_seconds=1.0, catch_up_tokens=4)


class Letters:
    """Token n is the n-th letter."""

    def push(self, token_id: int) -> str:
        return chr(96 + token_id)

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        return ""


def machine(
    *,
    stop: tuple[str, ...] = (),
    stop_ids: tuple[int, ...] = (),
    max_tokens: int = 20,
    tree: TreeShape | None = SHAPE,
    draft: DraftSettings | None = DRAFT,
    **settings: Any,
) -> GenerationMachine:
    generation = Generation(
        request_id="r",
        prompt_tokens=PROMPT,
        sampling=SamplingParams(seed=3),
        max_total_tokens=len(PROMPT) + max_tokens,
        stop_strings=stop,
        stop_token_ids=stop_ids,
        tree=tree,
    )
    text = OutputText(Letters(), StopStrings(stop))
    return GenerationMachine(
        generation, ID, text, MachineSettings(draft=draft, max_tree_nodes=6, **settings), 0.0
    )


def to_verify(actions: list[Action]) -> list[Any]:
    return [action.command for action in actions if isinstance(action, ToVerify)]


def to_draft(actions: list[Action]) -> list[Any]:
    return [action.command for action in actions if isinstance(action, ToDraft)]


def of(kind: type, actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def result(
    subject: GenerationMachine, tokens: list[int], *, round_: int | None = None, epoch: int = 1
) -> RoundResult:
    round_ = subject.round if round_ is None else round_
    kv_len = len(subject.tokens) - 1
    return RoundResult(ID, epoch, round_, kv_len, tokens, [1.0] * len(tokens), 1, [], 0.01, 0.0)


def chain(root: int, *tokens: int) -> Tree:
    count = len(tokens) + 1
    return Tree((root, *tokens), (0, *range(count - 1)), tuple(-0.1 * n for n in range(count)))


def tree_ready(subject: GenerationMachine, tree: Tree, *, epoch: int = 1) -> TreeReady:
    return TreeReady(ID, epoch, subject.round, len(subject.tokens), tree, 0.002, 0.0)


def failed(code: ErrorCode, *, epoch: int = 1, round_: int = 0, **state: int) -> SequenceFailed:
    return SequenceFailed(ID, epoch, code, "because", round_, SequenceState(**state))


def started(**options: Any) -> GenerationMachine:
    subject = machine(**options)
    subject.start(0.0, draft_up=subject._draft is not None)
    subject.on_draft(StateReport(ID, 1, SequenceState(epoch=1, committed_len=3)), 0.0)
    return subject


# -- a round


def test_every_stop_id_reaches_verify() -> None:
    """Else it could pick one before min_tokens, which the router would have to end at."""
    ids = tuple(range(20, 20 + MAX_STOP_TOKEN_IDS))
    (command, *_) = machine(stop_ids=ids).start(0.0, draft_up=True)
    assert isinstance(command, ToVerify)
    assert isinstance(command.command, VerifyOpen)
    assert tuple(command.command.stop_token_ids) == ids


def test_start_opens_both_with_the_prompt() -> None:
    actions = machine(stop_ids=(2, 9)).start(0.0, draft_up=True)
    assert to_verify(actions) == [
        VerifyOpen(
            *(ID, 1, None),
            tokens=PROMPT,
            num_prompt_tokens=3,
            sampling=SamplingParams(seed=3),
            stop_token_ids=(2, 9),
            max_total_tokens=23,
            round=0,
            wants_features=True,
        )
    ]
    (opened,) = to_draft(actions)
    assert isinstance(opened, DraftOpen)
    assert (opened.epoch, opened.tokens, opened.features_from) == (1, PROMPT, 0)


def test_a_round_goes_from_result_to_extend_to_tree() -> None:
    subject = started()
    actions = subject.on_verify(result(subject, [1]), 0.1)
    assert of(Emitted, actions) == [Emitted([1], "a", [1.0], None)]
    assert to_draft(actions) == [DraftExtend(ID, 1, None, 1, 3, [1])]
    assert to_verify(actions) == []
    actions = subject.on_draft(tree_ready(subject, chain(1, 2, 3)), 0.2)
    assert to_verify(actions) == [VerifyTree(ID, 1, 0, 1, 3, chain(1, 2, 3))]
    actions = subject.on_verify(result(subject, [2, 3, 4]), 0.3)
    assert of(Emitted, actions)[0].text == "bcd"
    assert to_draft(actions) == [DraftExtend(ID, 1, 1, 2, 4, [2, 3, 4])]


def advised(subject: GenerationMachine, tokens: list[int], way: Drafting) -> RoundResult:
    return result(subject, tokens)._replace(drafting=way)


def test_where_verify_advises_against_trees_the_root_goes_at_once() -> None:
    subject = started()
    actions = subject.on_verify(advised(subject, [1], Drafting.NONE), 0.1)
    assert to_verify(actions) == [VerifyTree(ID, 1, 0, 1, 3, Tree.root_only(1))]
    assert to_draft(actions) == []
    actions = subject.on_verify(advised(subject, [2], Drafting.SYNCHRONOUS), 0.2)
    assert to_draft(actions) == [DraftExtend(ID, 1, None, 2, 3, [1, 2])]
    assert to_verify(actions) == []
    assert subject.num_undrafted_rounds == 1
    assert subject.statistics.num_root_only_rounds == 0


def test_a_draft_that_is_asked_nothing_still_hears_the_tokens() -> None:
    subject = started()
    root_alone = TreeShape(max_depth=0, top_k=0, max_nodes=1)
    told = []
    for token in range(1, 10):
        told += to_draft(subject.on_verify(advised(subject, [token], Drafting.NONE), 0.1))
    assert told == [DraftExtend(ID, 1, None, 8, 3, [*range(1, 9)], root_alone)]
    # A wish comes before its answer: it supersedes what was only told.
    actions = subject.on_verify(advised(subject, [10], Drafting.SYNCHRONOUS), 0.2)
    assert to_draft(actions) == [DraftExtend(ID, 1, None, 10, 11, [9, 10])]
    late = TreeReady(ID, 1, 8, 11, Tree.root_only(8), 0.0, 0.0)
    assert subject.on_draft(late, 0.3) == []
    actions = subject.on_draft(tree_ready(subject, chain(10, 11)), 0.4)
    assert to_verify(actions) == [VerifyTree(ID, 1, 9, 10, 12, chain(10, 11))]


def test_without_speculation_or_draft_the_root_goes_at_once() -> None:
    for options in ({"tree": None}, {"draft": None}):
        subject = started(**options)
        actions = subject.on_verify(result(subject, [1]), 0.1)
        assert to_verify(actions) == [VerifyTree(ID, 1, 0, 1, 3, Tree.root_only(1))]
        assert to_draft(actions) == []
        assert subject.statistics.num_root_only_rounds == 0


def test_trees_are_capped_to_request_verify_and_remaining_tokens() -> None:
    subject = started(max_tokens=4)
    subject.on_verify(result(subject, [1]), 0.0)
    actions = subject.on_draft(tree_ready(subject, chain(1, 2, 3, 4, 5, 6, 7)), 0.0)
    # Three tokens may follow: two of the tree and a bonus.
    assert to_verify(actions)[0].tree.tokens == [1, 2, 3]
    wide = Tree((1, *range(2, 10)), (0,) * 9, tuple(-0.1 * n for n in range(9)))
    subject = started()
    subject.on_verify(result(subject, [1]), 0.0)
    actions = subject.on_draft(tree_ready(subject, wide), 0.0)
    assert to_verify(actions)[0].tree.tokens == [1, 2, 3, 4, 5, 6]


def test_the_last_token_needs_no_tree() -> None:
    subject = started(max_tokens=2)
    actions = subject.on_verify(result(subject, [1]), 0.0)
    assert to_draft(actions) == []
    assert to_verify(actions)[0].tree == Tree.root_only(1)


# -- where it ends


def test_a_stop_string_inside_a_block_cuts_text_and_tokens() -> None:
    subject = started(stop=("cd",))
    subject.on_verify(result(subject, [1]), 0.0)
    subject.on_draft(tree_ready(subject, chain(1, 2, 3)), 0.0)
    actions = subject.on_verify(result(subject, [2, 3, 4, 5, 6]), 0.0)
    assert of(Emitted, actions) == [Emitted([2, 3, 4], "b", [1.0] * 3, None)]
    assert of(Finished, actions) == [Finished(FinishReason.STOP, stop_string="cd")]
    assert to_verify(actions) == [Close(ID, 1, 1)]
    assert to_draft(actions) == [Close(ID, 1, 1)]
    assert subject.num_emitted == 4


def test_a_stop_token_has_no_text_and_frees_what_was_held_back() -> None:
    subject = started(stop=("bz",), stop_ids=(9,))
    actions = subject.on_verify(result(subject, [2]), 0.0)
    assert of(Emitted, actions)[0].text == ""
    subject.tick(2.0)
    actions = subject.on_verify(result(subject, [9, 4]), 2.0)
    assert of(Emitted, actions) == [Emitted([9], "b", [1.0], None)]
    assert of(Finished, actions) == [Finished(FinishReason.STOP, stop_token_id=9)]


def test_max_tokens_cuts_a_block() -> None:
    subject = started(max_tokens=3)
    actions = subject.on_verify(result(subject, [1, 2, 3, 4]), 0.0)
    assert of(Emitted, actions)[0].tokens == [1, 2, 3]
    assert of(Finished, actions) == [Finished(FinishReason.LENGTH)]
    assert subject.ended


def test_cancel_says_nothing_and_closes_both_once() -> None:
    subject = started()
    actions = subject.cancel()
    assert [type(a) for a in actions] == [ToVerify, ToDraft]
    assert subject.cancel() == []
    assert subject.abort(1.0) == []
    assert subject.on_verify(result(subject, [1]), 1.0) == []


def test_abort_frees_held_text() -> None:
    subject = started(stop=("az",))
    subject.on_verify(result(subject, [1]), 0.0)
    actions = subject.abort(1.0)
    assert of(Emitted, actions)[0].text == "a"
    assert of(Finished, actions) == [Finished(FinishReason.ABORTED)]


# -- late, repeated, stale


def test_a_repeated_result_commits_once() -> None:
    subject = started()
    first = result(subject, [1])
    subject.on_verify(first, 0.0)
    assert subject.on_verify(first, 0.0) == []
    assert subject.tokens == [*PROMPT, 1]


def test_frames_of_another_epoch_are_dropped() -> None:
    subject = started()
    assert subject.on_verify(result(subject, [1], epoch=2), 0.0) == []
    assert subject.on_verify(failed(ErrorCode.INTERNAL, epoch=2), 0.0) == []
    subject.on_verify(result(subject, [1]), 0.0)
    assert subject.on_draft(tree_ready(subject, chain(1, 2), epoch=7), 0.0) == []


def test_a_missed_deadline_costs_one_tree_and_no_second_extend() -> None:
    subject = started()
    subject.on_verify(result(subject, [1]), 0.0)
    assert subject.deadline() == 1.0
    assert subject.tick(0.99) == []
    actions = subject.tick(1.0)
    assert to_verify(actions)[0].tree == Tree.root_only(1)
    late = TreeReady(ID, 1, 1, 4, chain(1, 2), 0.0, 0.0)
    actions = subject.on_verify(result(subject, [2]), 1.1)  # its tree is still under way
    assert to_draft(actions) == []
    assert to_verify(actions)[0].tree == Tree.root_only(2)
    assert subject.on_draft(late, 1.2) == []
    actions = subject.on_verify(result(subject, [3]), 1.3)  # caught up: all at once
    assert to_draft(actions) == [DraftExtend(ID, 1, 1, 3, 4, [2, 3])]
    assert subject.statistics.num_root_only_rounds == 2
    assert subject.num_draft_misses == 1


def test_misses_in_a_row_make_fewer_waits() -> None:
    subject = started(max_tokens=500)
    subject.on_verify(result(subject, [1]), 0.0)
    waits = []
    now = 0.0
    for _ in range(80):
        waits.append(subject.phase is Phase.TREE)
        if subject.phase is Phase.TREE:
            now += 1.0
            round_ = subject.round
            subject.tick(now)
            subject.on_draft(TreeReady(ID, 1, round_, 0, chain(1), 0.0, 0.0), now)  # too late
        subject.on_verify(result(subject, [1]), now)
    assert [index for index, waited in enumerate(waits) if waited] == [0, 1, 3, 7, 15, 31, 63]


def test_a_tree_with_another_root_is_not_sent() -> None:
    subject = started()
    subject.on_verify(result(subject, [1]), 0.0)
    actions = subject.on_draft(tree_ready(subject, chain(8, 2)), 0.0)
    assert to_verify(actions)[0].tree == Tree.root_only(1)
    assert subject.draft_stage is DraftStage.ABSENT


# -- the draft lost and found


@pytest.mark.parametrize(
    "loss",
    [
        failed(ErrorCode.UNKNOWN_SEQUENCE),
        failed(ErrorCode.OVERLOADED),
        failed(ErrorCode.NEVER_FITS),
        Evicted(ID, 1),
    ],
)
def test_a_lost_draft_sends_the_waiting_round_at_once(loss: Any) -> None:
    subject = started()
    subject.on_verify(result(subject, [1]), 0.0)
    actions = subject.on_draft(loss, 0.1)
    assert to_verify(actions) == [VerifyTree(ID, 1, 0, 1, 3, Tree.root_only(1))]


def test_a_draft_is_opened_again_where_verifys_features_begin() -> None:
    subject = started()
    subject.on_verify(result(subject, [1, 2, 3, 4]), 0.0)
    subject.on_draft(failed(ErrorCode.UNKNOWN_SEQUENCE), 0.0)
    actions = subject.on_verify(result(subject, [5]), 0.0)  # round 1
    # Eight tokens are known, four of them back it begins; the epoch tells new rows from old.
    attach, tree = to_verify(actions)
    assert attach == VerifyAttach(ID, 2, 1, 4)
    assert (tree.epoch, tree.round) == (2, 2)
    assert subject.route_features(1, 7, 1) == (FeatureRoute.DROP, 0, [])
    route, epoch, opening = subject.route_features(2, 5, 3)  # older rows fell out of the window
    (opened,) = to_draft(opening)
    assert (route, epoch) == (FeatureRoute.HOLD, 2)
    assert (opened.epoch, opened.features_from, len(opened.tokens)) == (2, 5, 8)
    actions = subject.on_draft(StateReport(ID, 2, SequenceState(epoch=2)), 0.0)
    assert actions == [ReleaseFeatures(2)]
    assert subject.route_features(2, 8, 1)[0] is FeatureRoute.FORWARD


def test_a_draft_without_features_is_opened_again_with_the_next_round() -> None:
    subject = started(draft=DraftSettings(needs_features=False))
    subject.on_verify(result(subject, [1]), 0.0)
    subject.on_draft(failed(ErrorCode.UNKNOWN_SEQUENCE), 0.0)
    actions = subject.on_verify(result(subject, [2]), 0.0)
    opened, extend = to_draft(actions)
    assert (opened.epoch, opened.tokens, opened.features_from) == (2, (5, 6, 7, 1), 0)
    assert extend == DraftExtend(ID, 2, None, 2, 4, [2])


def test_nobody_waits_for_a_draft_that_catches_up() -> None:
    """Opened in mid-generation it has a prefill before it: rounds go root-only until its tree."""
    subject = started(draft=DraftSettings(needs_features=False))
    subject.on_verify(result(subject, [1]), 0.0)
    subject.on_draft(failed(ErrorCode.UNKNOWN_SEQUENCE), 0.0)
    actions = subject.on_verify(result(subject, [2]), 0.0)
    assert [type(command) for command in to_draft(actions)] == [DraftOpen, DraftExtend]
    assert to_verify(actions)[0].tree == Tree.root_only(2)
    actions = subject.on_verify(result(subject, [3]), 0.0)  # no second question meanwhile
    assert to_draft(actions) == []
    assert to_verify(actions)[0].tree == Tree.root_only(3)
    late = TreeReady(ID, 2, 2, 5, chain(2, 3), 0.0, 0.0)
    assert subject.on_draft(late, 0.0) == []
    actions = subject.on_verify(result(subject, [4]), 0.0)
    assert to_draft(actions) == [DraftExtend(ID, 2, 2, 4, 5, [3, 4])]
    assert to_verify(actions) == []  # it has caught up: now its tree is worth a wait
    assert subject.num_draft_misses == 0


def test_rows_that_leave_a_gap_open_the_draft_anew() -> None:
    subject = started()
    assert subject.route_features(1, 0, 2)[0] is FeatureRoute.FORWARD
    assert subject.route_features(1, 0, 2)[0] is FeatureRoute.DROP  # known already
    assert subject.route_features(1, 1, 2)[0] is FeatureRoute.FORWARD  # one of them is new
    route, epoch, actions = subject.route_features(1, 9, 1)
    assert (route, epoch) == (FeatureRoute.HOLD, 2)
    assert to_draft(actions)[0].features_from == 9


def test_a_reconnected_draft_is_asked_what_it_has() -> None:
    subject = started()
    subject.on_verify(result(subject, [1]), 0.0)
    actions = subject.on_draft_down(0.1)
    assert to_verify(actions)[0].tree == Tree.root_only(1)
    assert to_draft(subject.on_draft_up()) == [DraftAttach(ID, 2, None)]
    assert subject.route_features(1, 3, 1)[0] is FeatureRoute.DROP
    state = SequenceState(epoch=2, committed_len=4, kv_len=2)
    actions = subject.on_draft(StateReport(ID, 2, state), 0.2)
    # Rows under way were lost with the link: verify sends them again from where the draft stands.
    assert to_verify(actions)[0] == VerifyAttach(ID, 2, 0, 2)
    actions = subject.on_verify(result(subject, [2], epoch=2), 0.3)
    assert to_draft(actions) == [DraftExtend(ID, 2, None, 2, 4, [2])]


# -- verify lost and found


def test_a_reconnect_attaches_and_repeats_the_round() -> None:
    subject = started(draft=None)
    subject.on_verify(result(subject, [1]), 0.0)
    subject.on_verify_down(0.1)
    actions = subject.on_verify_up(0.5)
    assert to_verify(actions) == [
        VerifyAttach(ID, 2, 0, None),
        VerifyTree(ID, 2, 0, 1, 3, Tree.root_only(1)),
    ]
    actions = subject.on_verify(result(subject, [2], epoch=2), 0.6)
    assert of(Emitted, actions)[0].tokens == [2]


def test_what_verify_forgot_is_opened_with_all_tokens_at_the_same_round() -> None:
    subject = started(draft=None)
    subject.on_verify(result(subject, [1]), 0.0)
    actions = subject.on_verify(failed(ErrorCode.UNKNOWN_SEQUENCE, round_=1), 0.1)
    (opened,) = to_verify(actions)
    assert (opened.epoch, opened.round, opened.tokens) == (2, 1, (5, 6, 7, 1))
    assert opened.num_prompt_tokens == 3
    assert subject.num_reopened == 1


def test_a_verify_that_is_ahead_is_cut_back() -> None:
    subject = started(draft=None)
    subject.on_verify(result(subject, [1]), 0.0)
    wrong = failed(ErrorCode.WRONG_ROUND, round_=1, epoch=1, committed_len=9)
    actions = subject.on_verify(wrong, 0.1)
    assert to_verify(actions) == [
        Rollback(ID, 2, None, 4, 1),
        VerifyTree(ID, 2, 0, 1, 3, Tree.root_only(1)),
    ]
    assert subject.statistics.num_rollbacks == 1


def test_a_tree_that_verify_finds_malformed_goes_root_only() -> None:
    subject = started()
    subject.on_verify(result(subject, [1]), 0.0)
    subject.on_draft(tree_ready(subject, chain(1, 2)), 0.0)
    actions = subject.on_verify(failed(ErrorCode.INVALID, round_=1), 0.1)
    assert to_verify(actions)[0].tree == Tree.root_only(1)
    actions = subject.on_verify(failed(ErrorCode.INVALID, round_=1), 0.2)
    assert of(Failed, actions)[0].failure.kind is ErrorKind.INTERNAL


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.OVERLOADED, ErrorKind.RESOURCE_EXHAUSTED),
        (ErrorCode.NOT_SERVING, ErrorKind.UNAVAILABLE),
    ],
)
def test_a_full_verify_refuses_the_new_and_keeps_the_begun_waiting(
    code: ErrorCode, kind: ErrorKind
) -> None:
    fresh = started(draft=None)
    failure = of(Failed, fresh.on_verify(failed(code), 0.1))[0].failure
    assert (failure.kind, failure.retry_seconds) == (kind, 1.0)
    begun = started(draft=None)
    begun.on_verify(result(begun, [1]), 0.0)
    assert begun.on_verify(failed(code, round_=1), 0.1) == []
    assert begun.tick(0.5) == []
    (opened,) = to_verify(begun.tick(0.7))
    assert (opened.epoch, opened.round) == (2, 1)


def test_a_verify_that_stays_away_ends_the_generation() -> None:
    subject = started(draft=None, verify_lost_seconds=5.0)
    subject.on_verify_down(1.0)
    assert subject.deadline() == 6.0
    assert subject.tick(5.9) == []
    failure = of(Failed, subject.tick(6.0))[0].failure
    assert failure.kind is ErrorKind.UNAVAILABLE
    assert "not back after 5 s" in failure.message


def test_a_sequence_that_brings_verify_down_is_given_up() -> None:
    subject = started(draft=None, max_recoveries=3)
    kinds = []
    for epoch in range(1, 5):
        actions = subject.on_verify(failed(ErrorCode.INTERNAL, epoch=epoch), 0.0)
        kinds.append(type(actions[0]))
    assert kinds == [ToVerify, ToVerify, ToVerify, Failed]


def test_preemption_is_waited_out() -> None:
    subject = started(draft=None)
    assert subject.on_verify(Preempted(ID, 1), 0.0) == []
    assert subject.num_preemptions == 1
    assert of(Emitted, subject.on_verify(result(subject, [1]), 9.0))


# -- a slow client


def test_a_paused_generation_begins_no_round() -> None:
    subject = started()
    subject.pause()
    actions = subject.on_verify(result(subject, [1]), 0.0)
    assert len(to_draft(actions)) == 1  # the draft may grow its tree meanwhile
    assert subject.on_draft(tree_ready(subject, chain(1, 2)), 0.1) == []
    assert subject.phase is Phase.HELD
    assert to_verify(subject.resume(5.0)) == [VerifyTree(ID, 1, 0, 1, 3, chain(1, 2))]
    assert subject.resume(5.1) == []
