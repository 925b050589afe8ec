"""The generation machine where verify begins rounds itself: it acknowledges, tells the draft, and
passes trees ahead on; it waits for nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.types import Drafting, ErrorCode, SequenceState, TreeShape
from router.actions import Emitted, Failed
from router.drafting import DraftSettings, DraftStage
from router.machine import GenerationMachine, Phase
from router.messages import (
    DraftExtend,
    RoundResult,
    TreeReady,
    VerifiedAhead,
    VerifyAcknowledge,
    VerifyAttach,
    VerifyTree,
    VerifyTreeAhead,
)
from router.trees import Tree
from tests.unit.test_router_machine_rules import (
    DRAFT,
    ID,
    chain,
    failed,
    of,
    result,
    started,
    to_draft,
    to_verify,
)

AHEAD = DraftSettings(deadline_seconds=1.0, catch_up_tokens=4, draft_ahead=True)
MOST = TreeShape(max_depth=3, max_nodes=6)


def begun(
    subject: GenerationMachine, tokens: list[int], way: Drafting = Drafting.AHEAD, **more: Any
) -> RoundResult:
    """A result behind which verify goes on."""
    return result(subject, tokens)._replace(drafting=way, next_begun=True, **more)


def grown(round_: int, committed_len: int, tree: Tree) -> TreeReady:
    return TreeReady(ID, 1, round_, committed_len, tree, 0.002, 0.0)


def test_a_round_that_runs_is_acknowledged_and_a_tree_wished_ahead() -> None:
    subject = started(draft=AHEAD)
    actions = subject.on_verify(begun(subject, [1]), 0.1)
    assert of(Emitted, actions)[0].text == "a"
    assert to_verify(actions) == [VerifyAcknowledge(ID, 1, 0)]
    assert to_draft(actions) == [DraftExtend(ID, 1, None, 1, 3, [1], None, True)]
    assert (subject.phase, subject.round) == (Phase.RESULT, 1)
    # The next result is not kept waiting by the tree that is not here, nor is the next wish.
    actions = subject.on_verify(begun(subject, [2]), 0.2)
    assert to_verify(actions) == [VerifyAcknowledge(ID, 1, 1)]
    assert to_draft(actions) == [DraftExtend(ID, 1, None, 2, 4, [2], None, True)]
    assert subject.deadline() is None


@pytest.mark.parametrize("draft", [None, DRAFT, AHEAD])
def test_without_trees_it_only_acknowledges(draft: DraftSettings | None) -> None:
    subject = started(draft=draft)
    actions = subject.on_verify(begun(subject, [1], Drafting.NONE), 0.1)
    assert to_verify(actions) == [VerifyAcknowledge(ID, 1, 0)]
    assert to_draft(actions) == []


def test_a_draft_that_grows_none_ahead_is_not_asked_for_any() -> None:
    subject = started(draft=DRAFT)
    for token in range(1, 8):
        assert to_draft(subject.on_verify(begun(subject, [token]), 0.1)) == []
    (told,) = to_draft(subject.on_verify(begun(subject, [8]), 0.1))
    assert (told.ahead, told.tree.max_nodes) == (False, 1), "it hears the tokens, some at a time"


def test_a_client_that_is_slow_holds_the_acknowledgement_back() -> None:
    subject = started(draft=AHEAD)
    subject.pause()
    assert to_verify(subject.on_verify(begun(subject, [1]), 0.1)) == []
    assert to_verify(subject.resume(0.2)) == [VerifyAcknowledge(ID, 1, 0)]
    assert subject.resume(0.3) == []


def test_a_tree_ahead_is_passed_on_late_or_not_with_the_requests_limits() -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    subject.on_verify(begun(subject, [2]), 0.2)
    late = chain(1, 2, 3, 4, 5, 6, 7)
    assert to_verify(subject.on_draft(grown(1, 4, late), 0.3)) == [
        VerifyTreeAhead(ID, 1, 1, 1, 3, late, MOST)
    ]
    fresh = chain(2, 3)
    assert to_verify(subject.on_draft(grown(2, 5, fresh), 0.4)) == [
        VerifyTreeAhead(ID, 1, 1, 2, 4, fresh, MOST)
    ]


def test_what_a_round_came_from_is_counted_and_told_to_the_draft() -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    ahead = VerifiedAhead(3, chain(1, 2, 3))
    came = begun(subject, [2, 9], num_nodes=3, accepted_nodes=[1], ahead=ahead)
    (wish,) = to_draft(subject.on_verify(came, 0.2))
    assert wish.verified_ahead == 3
    assert subject.num_ahead_rounds == 1
    assert subject.statistics.num_accepted == 1
    (wish,) = to_draft(subject.on_verify(begun(subject, [3]), 0.3))
    assert wish.verified_ahead is None


@pytest.mark.parametrize(
    "tree",
    [
        grown(1, 4, chain(9, 2)),  # of another root
        grown(1, 9, chain(1, 2)),  # beyond what there is
        grown(1, 4, Tree((1, 2), (0, 1), (0.0, 0.0))),  # no tree
        grown(1, 4, Tree((), (), ())),
    ],
)
def test_a_tree_ahead_that_does_not_fit_is_not_sent_and_the_draft_opened_anew(
    tree: TreeReady,
) -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    assert subject.on_draft(tree, 0.2) == []
    assert subject.draft_stage is DraftStage.ABSENT
    assert to_verify(subject.on_verify(begun(subject, [2]), 0.3)) == [VerifyAcknowledge(ID, 1, 1)]


def test_a_tree_ahead_that_verify_refuses_costs_no_round() -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    subject.on_draft(grown(1, 4, chain(1, 2)), 0.2)
    actions = subject.on_verify(failed(ErrorCode.INVALID, round_=1), 0.3)
    assert (to_verify(actions), of(Failed, actions)) == ([], [])
    assert subject.draft_stage is DraftStage.ABSENT
    assert of(Emitted, subject.on_verify(begun(subject, [2]), 0.4))[0].text == "b"


@pytest.mark.parametrize("way", [Drafting.NONE, Drafting.SYNCHRONOUS])
def test_a_tree_ahead_that_comes_when_none_is_wanted_is_not_sent(way: Drafting) -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    subject.on_verify(result(subject, [2])._replace(drafting=way), 0.2)
    assert to_verify(subject.on_draft(grown(1, 4, chain(1, 2)), 0.3)) == []


def test_the_way_from_trees_ahead_to_trees_that_are_waited_for() -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    actions = subject.on_verify(result(subject, [2]), 0.2)
    assert to_verify(actions) == []
    assert to_draft(actions) == [DraftExtend(ID, 1, None, 2, 4, [2])]
    assert subject.phase is Phase.TREE
    actions = subject.on_draft(grown(2, 5, chain(2, 3)), 0.3)
    assert to_verify(actions) == [VerifyTree(ID, 1, 1, 2, 4, chain(2, 3))]


def test_after_a_reconnect_the_round_that_runs_is_asked_for_with_its_root() -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    subject.on_verify_down(0.2)
    attach, again = to_verify(subject.on_verify_up(0.3))
    assert isinstance(attach, VerifyAttach)
    assert again == VerifyTree(ID, 2, 0, 1, 3, Tree.root_only(1))
    answer = result(subject, [2], epoch=2)._replace(next_begun=True, drafting=Drafting.AHEAD)
    assert to_verify(subject.on_verify(answer, 0.4)) == [VerifyAcknowledge(ID, 2, 1)]


def test_a_verify_that_stopped_going_on_is_sent_the_next_round() -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    stopped = begun(subject, [2])._replace(next_begun=False)
    actions = subject.on_verify(stopped, 0.2)
    assert to_verify(actions) == [VerifyTree(ID, 1, 1, 2, 4, Tree.root_only(2))]
    assert [wish.ahead for wish in to_draft(actions)] == [True]


def test_a_verify_that_forgot_the_sequence_is_opened_at_the_round_that_ran() -> None:
    subject = started(draft=AHEAD)
    subject.on_verify(begun(subject, [1]), 0.1)
    lost = failed(ErrorCode.UNKNOWN_SEQUENCE, round_=1)
    (opened,) = to_verify(subject.on_verify(lost, 0.2))
    assert (opened.round, list(opened.tokens[-1:]), opened.runs_on) == (1, [1], True)
    assert opened.draft_ahead
    assert SequenceState() == lost.state
