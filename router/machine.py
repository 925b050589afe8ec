"""One generation's rounds, sans-IO: events in, actions out, the clock an argument.

    start ─▶ RESULT ─ tokens ─▶ TREE ─ tree, or deadline ─▶ RESULT ─ … ─▶ ENDED
               ▲  └─ client slow ─▶ HELD ─┘                   │
               └──── RETRY ◀─ verify full or draining ────────┘

Round 0 rides on the prefill that Open starts. After each result the draft is told the new tokens
(Extend) and has until a deadline to answer with a tree; else the round runs root-only. Verify is
the authority: what it has forgotten is opened again with all tokens so far, at the same position.

Every frame carries an epoch; frames of another than the present one are dropped. Epochs rise with
each Open, Attach and Rollback. Rounds are answered once: repeated results change nothing.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.types import Drafting, ErrorCode, SequenceState, TreeShape
from router.actions import (
    Action,
    Emitted,
    Failed,
    Finished,
    FinishReason,
    ReleaseFeatures,
    RoundTrace,
    ToDraft,
    ToVerify,
)
from router.drafting import DraftSettings, DraftSide, DraftStage, FeatureRoute
from router.emission import Emission
from router.errors import ErrorKind, Failure
from router.generation import Generation
from router.messages import (
    DraftEvent,
    Evicted,
    Preempted,
    RoundResult,
    SequenceFailed,
    StateReport,
    TreeReady,
    VerifyEvent,
    VerifyTree,
)
from router.output_text import OutputText
from router.statistics import Clock, RoundStatistics
from router.trees import Tree
from router.verifying import VerifySide

_RETRY_SECONDS = 0.5
_MAX_SENT_AHEAD = 8  # an error about an older one is an error


class Phase(enum.Enum):
    NEW = enum.auto()
    RESULT = enum.auto()  # verify runs, or will run, the present round
    TREE = enum.auto()  # the draft grows the present round's tree
    HELD = enum.auto()  # the tree is ready, the client has not taken its tokens
    RETRY = enum.auto()  # verify could not take the sequence; opened again later
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings:
    """`draft` None: there is no draft service. `verify_lost_seconds`: how long a generation waits
    for a verify service that is gone, full or draining. `max_recoveries`: how often it is opened
    again without a result between; a sequence that brings verify down must not do so for ever.
    """

    draft: DraftSettings | None = None
    max_tree_nodes: int = 64
    verify_lost_seconds: float = 30.0
    max_recoveries: int = 6


class GenerationMachine:
    """`round`: the present one. The halves are `VerifySide` and `DraftSide`; here is the round."""

    def __init__(
        self,
        generation: Generation,
        sequence_id: bytes,
        text: OutputText,
        settings: MachineSettings,
        now: float,
        fork_of: bytes | None = None,
    ) -> None:
        """`fork_of`: the sequence of the request's first choice, if this is another of them."""
        self.generation = generation
        self.sequence_id = sequence_id
        self.round, self.round_began_at = 0, now
        self.phase = Phase.NEW
        self.statistics = RoundStatistics()
        self.clock = Clock(started=now)
        self.paused = False
        self.num_preemptions = 0
        self.num_reopened = 0
        self.num_draft_misses = 0
        self.num_ahead_rounds = 0  # verified with nodes of a tree ahead
        self.num_undrafted_rounds = 0  # verify advised against a tree
        self._settings = settings
        self._most_of_a_tree = _most_of_a_tree(generation.tree, settings.max_tree_nodes)
        self._emission = Emission(generation, text)
        self.tokens = self._emission.tokens
        """Prompt and all emitted."""
        self._tree = Tree.root_only(self.tokens[-1])
        self._depths: Sequence[int] = (0,)
        self._tree_wanted = False
        self._drafting = Drafting.SYNCHRONOUS  # as verify advises
        self._verified_ahead: int | None = None  # root of the tree ahead of the last round
        self._sent_ahead: deque[int] = deque(maxlen=_MAX_SENT_AHEAD)  # rounds of trees ahead
        self._owes_ack = False  # of a result, until the client takes more
        self._round_draft_seconds = 0.0
        self._retry_at = 0.0
        self._tree_deadline = 0.0
        self._sent_at = now
        self._draft: DraftSide | None = None
        if settings.draft is not None and generation.tree is not None:
            self._draft = DraftSide(sequence_id, generation, generation.tree, settings.draft)
        self._verify = VerifySide(
            *(sequence_id, generation),
            wants_features=self._draft is not None and self._draft.settings.needs_features,
            max_recoveries=settings.max_recoveries,
            draft_ahead=self._draft is not None and self._draft.settings.draft_ahead,
            fork_of=fork_of,
        )

    # -- for the service

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.generation.prompt_tokens)

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def draft_stage(self) -> DraftStage | None:
        return None if self._draft is None else self._draft.stage

    def awaits_verify(self, epoch: int) -> bool:
        """Whether an event of this epoch concerns what is under way now."""
        return epoch == self._verify.epoch and not self.ended

    def deadline(self) -> float | None:
        """When `tick` has something to do; None: never."""
        due = None
        if self.phase is Phase.TREE:
            due = self._tree_deadline
        elif self.phase is Phase.RETRY:
            due = self._retry_at
        if self._verify.lost_at is not None and self.phase is not Phase.ENDED:
            lost = self._verify.lost_at + self._settings.verify_lost_seconds
            due = lost if due is None else min(due, lost)
        return due

    # -- what happens to it

    def start(self, now: float, *, draft_up: bool) -> list[Action]:
        """Opens on both services."""
        if self._draft is not None:
            self._draft.link_up = draft_up
        actions = self._open(now)
        if self._draft is not None:
            actions += [ToDraft(command) for command in self._draft.start(self.tokens)]
        return actions

    def cancel(self) -> list[Action]:
        """The client is gone: both services free the sequence."""
        return [] if self.ended else self._end()

    def abort(self, now: float) -> list[Action]:
        """Ends in good order, with what there is."""
        if self.ended:
            return []
        nothing = Emitted((), self._emission.finish(), (), None)
        return [nothing, Finished(FinishReason.ABORTED), *self._end()]

    def pause(self) -> None:
        """The client does not take its tokens: no further round is begun."""
        self.paused = True

    def resume(self, now: float) -> list[Action]:
        self.paused = False
        if self.phase is Phase.HELD:
            return self._send(self._tree, self._depths, now)
        return self._acknowledge() if self._owes_ack else []

    def tick(self, now: float) -> list[Action]:
        lost = self._verify.lost_at
        if lost is not None and now >= lost + self._settings.verify_lost_seconds:
            return self._fail(
                ErrorKind.UNAVAILABLE,
                f"verify service: not back after {self._settings.verify_lost_seconds:g} s; send the"
                " request again",
                retry_seconds=1.0,
            )
        if self.phase is Phase.TREE and now >= self._tree_deadline:
            assert self._draft is not None
            self._draft.miss(self.round)
            self.num_draft_misses += 1
            waited = now - self._sent_at
            self.clock.add_draft(waited, waited)
            return self._go_root_only(now)
        if self.phase is Phase.RETRY and now >= self._retry_at and self._verify.link_up:
            return self._open(now)
        return []

    def mark_sent(self, now: float) -> None:
        """The round's command is on its way: what went before was the router's own time."""
        self._sent_at = now

    # -- verify

    def on_verify(self, event: VerifyEvent, now: float) -> list[Action]:
        if event.epoch != self._verify.epoch or self.ended:
            return []
        match event:
            case RoundResult():
                return self._on_result(event, now)
            case SequenceFailed():
                return self._on_verify_error(event, now)
            case Preempted():
                self.num_preemptions += 1  # its round still runs; nothing to do but wait
        return []

    def on_verify_down(self, now: float) -> list[Action]:
        self._verify.on_link_down(now)
        return []

    def on_verify_up(self, now: float) -> list[Action]:
        """A new stream: takes the sequence over, and asks for what may have been lost."""
        self._verify.link_up = True
        if self.phase is Phase.RETRY or self.ended:
            return []
        self._verify.lost_at = None
        if self._verify.epoch == 0:
            return self._open(now)
        return self._attach(now)

    def on_verify_moved(self, now: float, *, lost: bool) -> list[Action]:
        """Another replica takes over: it is given all tokens so far.

        `lost`: the one before was lost; else it would not take the sequence.
        """
        self._verify.link_up = True
        if self.ended:
            return []
        if self._verify.epoch == 0 or not lost:
            return self._open(now)
        self._verify.lost_at = None
        return self._reopen("its replicas were lost one after the other", now)

    def _on_result(self, event: RoundResult, now: float) -> list[Action]:
        if event.round != self.round or self.phase is not Phase.RESULT:
            return []  # a repetition
        if event.kv_len != len(self.tokens) - 1 or not event.tokens:
            return self._recover("a result does not fit the sequence", SequenceState(), now)
        self._verify.on_result(self.round)
        if self.statistics.num_rounds == 0:
            self.clock.queue_seconds += event.queue_seconds
        waited = now - self._sent_at
        self.clock.add_verify(waited, event.step_seconds + event.queue_seconds)
        self._verified_ahead = None
        if event.ahead is not None and (depths := event.ahead.tree.depths()) is not None:
            self._tree, self._depths = event.ahead.tree, depths
            self._verified_ahead = event.ahead.kv_len
            self.num_ahead_rounds += 1
        self.statistics.add_round(self._depths, event, self._tree_wanted)
        trace = self._trace(event, waited) if self.generation.returns.trace else None
        return self._take(event, trace, now)

    def _take(self, event: RoundResult, trace: RoundTrace | None, now: float) -> list[Action]:
        taken = self._emission.take(event.tokens)
        self.clock.add_tokens(now)
        count = taken.num_tokens
        emitted = Emitted(
            event.tokens[:count],
            taken.text,
            event.pick_margins[:count],
            trace,
            event.logprobs[:count],
            event.top_logprobs[:count],
            event.prompt_logprobs,
            event.prompt_top_logprobs,
        )
        if taken.finished is not None:
            return [emitted, taken.finished, *self._end()]
        self.round, self.round_began_at = self.round + 1, now
        self._drafting = event.drafting
        if event.next_begun:
            return [emitted, *self._go_on(now)]
        return [emitted, *self._begin_round(now)]

    def _go_on(self, now: float) -> list[Action]:
        """Verify runs the round already: it hears that it may go on, the draft what was emitted."""
        self._verify.rides_on_open = False
        self._round_draft_seconds = 0.0
        self._tree, self._depths = Tree.root_only(self.tokens[-1]), (0,)
        self.phase = Phase.RESULT
        self._sent_at = now
        actions = [] if self.paused else self._acknowledge()
        self._owes_ack = self.paused
        return actions + self._tell_draft(now)

    def _acknowledge(self) -> list[Action]:
        self._owes_ack = False
        return [ToVerify(self._verify.acknowledge())] if self._verify.link_up else []

    def _tell_draft(self, now: float) -> list[Action]:
        """What was emitted, where the round waits for no tree; with a wish for one ahead, if verify
        takes such.
        """
        self._tree_wanted = False
        if self._draft is None or self._emission.room <= 1:
            return []
        if self._drafting is Drafting.AHEAD and self._draft.settings.draft_ahead:
            self._tree_wanted = True
            actions = self._restart_draft(now)
            extend = self._draft.extend(
                self.round, self.tokens, ahead=True, verified_ahead=self._verified_ahead
            )
        else:
            actions = []
            extend = self._draft.keep_up(self.round, self.tokens)
            self.num_undrafted_rounds += 1
        return actions if extend is None else [*actions, ToDraft(extend)]

    def _restart_draft(self, now: float) -> list[Action]:
        """Opens the draft again where it is gone and may be had."""
        assert self._draft is not None
        if not self._draft.wants_restart(self.round):
            return []
        if not self._draft.settings.needs_features:
            return [ToDraft(command) for command in self._draft.start(self.tokens[:-1])]
        self._draft.expect_rows()
        return self._attach(now)

    def _begin_round(self, now: float) -> list[Action]:
        """Asks the draft for a tree where one can be had and pays; else goes root-only."""
        self.phase = Phase.TREE  # nothing of this round is sent yet
        self._verify.rides_on_open = False
        self._round_draft_seconds = 0.0
        useful = self._draft is not None and self._emission.room > 1
        self._tree_wanted = useful and self._drafting is Drafting.SYNCHRONOUS
        if self._draft is None or not self._tree_wanted:
            return self._go_root_only(now) + self._tell_draft(now)
        actions = self._restart_draft(now)
        extend = self._draft.extend(self.round, self.tokens)
        if extend is None:
            return actions + self._go_root_only(now)
        if self._draft.is_catching_up:  # its tree will tell when it has; nobody waits for that
            return [*actions, ToDraft(extend), *self._go_root_only(now)]
        self._sent_at = now
        self._tree_deadline = now + self._draft.settings.deadline_seconds
        return [*actions, ToDraft(extend)]

    def _go_root_only(self, now: float) -> list[Action]:
        return self._send(Tree.root_only(self.tokens[-1]), (0,), now)

    def _send(self, tree: Tree, depths: Sequence[int], now: float) -> list[Action]:
        """Sends the round to verify, unless the client must catch up or verify come back first."""
        self._tree, self._depths = tree, depths
        if self.paused:
            self.phase = Phase.HELD
            return []
        self.phase = Phase.RESULT
        self._sent_at = now
        return [ToVerify(self._round_command())] if self._verify.link_up else []

    def _round_command(self) -> VerifyTree:
        return self._verify.verify_tree(self.round, len(self.tokens), self._tree)

    def _trace(self, event: RoundResult, verify_seconds: float) -> RoundTrace:
        return RoundTrace(
            round=self.round,
            tree=self._tree.prefix(max(1, event.num_nodes)),
            accepted_nodes=event.accepted_nodes,
            bonus_token=event.tokens[-1],
            draft_seconds=self._round_draft_seconds,
            verify_seconds=verify_seconds,
        )

    # -- verify forgets, refuses, comes back

    def _open(self, now: float) -> list[Action]:
        """Opens with all tokens so far; the present round rides on the prefill."""
        self._tree, self._depths = Tree.root_only(self.tokens[-1]), (0,)
        self.phase = Phase.RESULT
        self._sent_at = now
        command = self._verify.open(self.tokens, self.round)
        if command is None:
            return []
        if self._draft is not None and self._draft.stage is DraftStage.ABSENT:
            self._draft.expect_rows()
        return [ToVerify(command)]

    def _attach(self, now: float) -> list[Action]:
        """Takes the sequence over under a new epoch; features come again from where they are due.

        The present round is sent again with it: its answer may have been lost, and a round that was
        run is answered from store.
        """
        features_from = None
        if self._draft is not None and self._verify.link_up:
            features_from = self._draft.features_from(len(self.tokens))
        command = self._verify.attach(features_from)
        if command is None:
            return []
        actions: list[Action] = [ToVerify(command)]
        if self.phase is Phase.RESULT and not self._verify.rides_on_open:
            actions.append(ToVerify(self._round_command()))
        return actions

    def _on_verify_error(self, event: SequenceFailed, now: float) -> list[Action]:
        match event.code:
            case ErrorCode.OVERLOADED:
                return self._refused(ErrorKind.RESOURCE_EXHAUSTED, event.message, now)
            case ErrorCode.NOT_SERVING:
                return self._refused(ErrorKind.UNAVAILABLE, event.message, now)
            case ErrorCode.NEVER_FITS:
                return self._fail(ErrorKind.INVALID_ARGUMENT, event.message, field="max_tokens")
            case ErrorCode.UNIMPLEMENTED:
                return self._fail(ErrorKind.UNIMPLEMENTED, event.message)
            case ErrorCode.INVALID if event.round in self._sent_ahead:
                self._sent_ahead.clear()  # it costs no more than that
                if self._draft is not None:
                    self._draft.on_malformed_tree(self.round)
                return []
            case ErrorCode.INVALID if event.round == self.round and self._has_sent_tree:
                if self._draft is not None:
                    self._draft.on_malformed_tree(self.round)
                return self._go_root_only(now)
            case ErrorCode.INVALID:
                return self._fail(ErrorKind.INTERNAL, f"verify refused: {event.message}")
        return self._recover(event.message, event.state, now)

    @property
    def _has_sent_tree(self) -> bool:
        """Whether an INVALID of this round can be a tree's fault."""
        return self._tree.num_nodes > 1

    def _refused(self, kind: ErrorKind, message: str, now: float) -> list[Action]:
        """Verify takes no more sequences. What the client has seen the start of waits."""
        if self.num_emitted == 0:
            return self._fail(kind, message, retry_seconds=1.0)
        self._verify.on_refusal(now)
        self.phase = Phase.RETRY
        self._retry_at = now + _RETRY_SECONDS
        return []

    def _recover(self, message: str, state: SequenceState, now: float) -> list[Action]:
        """Brings verify to what the router has: by Rollback where it is ahead, else by Open."""
        self._verify.epoch = max(self._verify.epoch, state.epoch)
        if state.committed_len <= len(self.tokens):
            return self._reopen(message, now)
        if not self._verify.may_recover():
            return self._give_up(message)
        self.statistics.num_rollbacks += 1
        rollback = self._verify.roll_back(len(self.tokens), self.round)
        return [ToVerify(rollback), *self._go_root_only(now)]

    def _reopen(self, message: str, now: float) -> list[Action]:
        if not self._verify.may_recover():
            return self._give_up(message)
        self.num_reopened += 1
        return self._open(now)

    def _give_up(self, message: str) -> list[Action]:
        return self._fail(ErrorKind.INTERNAL, f"verify could not be brought in step: {message}")

    # -- draft

    def on_draft(self, event: DraftEvent, now: float) -> list[Action]:
        draft = self._draft
        if draft is None or self.ended:
            return []
        match event:
            case TreeReady():
                return self._on_tree(draft, event, now)
            case StateReport():
                return self._on_draft_state(draft, event, now)
            case SequenceFailed():
                draft.on_error(event, self.round)
            case Evicted():
                draft.on_evicted(event.epoch, self.round)
        return self._without_draft(now)

    def on_draft_down(self, now: float) -> list[Action]:
        if self._draft is None or self.ended:
            return []
        self._draft.on_link_down()
        return self._without_draft(now)

    def on_draft_up(self) -> list[Action]:
        """A new stream. A draft that was open is attached; another is opened at the next round."""
        if self._draft is None or self.ended:
            return []
        return [ToDraft(command) for command in self._draft.on_link_up()]

    def on_draft_moved(self) -> None:
        """Another replica is linked; it is opened at the next round."""
        if self._draft is not None and not self.ended:
            self._draft.on_moved()

    def _on_tree(self, draft: DraftSide, event: TreeReady, now: float) -> list[Action]:
        if draft.on_tree_ahead(event):
            return self._send_ahead(draft, event)
        awaited = self.round if self.phase is Phase.TREE else None
        if not draft.on_tree(event, awaited):
            return []
        waited = now - self._sent_at
        self._round_draft_seconds = waited
        self.clock.add_draft(waited, event.step_seconds + event.queue_seconds)
        tree, depths = event.tree, event.tree.depths()
        if depths is None or tree.tokens[0] != self.tokens[-1]:
            draft.on_malformed_tree(self.round)
            return self._go_root_only(now)
        most = self._most_of_a_tree
        # A path of d nodes emits d + 1 tokens.
        depth = min(most.max_depth, self._emission.room - 1)
        capped = tree.capped(depths, most.max_nodes, depth)
        if capped is not tree:
            depths = capped.depths()
            assert depths is not None
        return self._send(capped, depths, now)

    def _send_ahead(self, draft: DraftSide, event: TreeReady) -> list[Action]:
        """A tree ahead goes to verify as it is: what of it is still of use is known there."""
        place = event.committed_len
        if event.tree.depths() is None or not 0 < place <= len(self.tokens):
            draft.on_malformed_tree(self.round)
            return []
        if event.tree.tokens[0] != self.tokens[place - 1]:
            draft.on_malformed_tree(self.round)
            return []
        if self.paused or self._drafting is not Drafting.AHEAD or not self._verify.link_up:
            return []
        self._sent_ahead.append(event.round)
        command = self._verify.tree_ahead(event.round, place - 1, event.tree, self._most_of_a_tree)
        return [ToVerify(command)]

    def _on_draft_state(self, draft: DraftSide, event: StateReport, now: float) -> list[Action]:
        was = draft.stage
        if not draft.on_state(event, len(self.tokens)):
            return []
        if was is DraftStage.OPENING:
            return [ReleaseFeatures(draft.epoch)]
        # Attached: rows that were under way when the link broke are lost.
        return self._attach(now) if draft.settings.needs_features else []

    def _without_draft(self, now: float) -> list[Action]:
        """After the draft was lost: a round that waits for its tree goes at once."""
        assert self._draft is not None
        if self.phase is not Phase.TREE or self._draft.is_growing:
            return []
        waited = now - self._sent_at
        self._round_draft_seconds = waited
        self.clock.add_draft(waited, waited)
        return self._go_root_only(now)

    def route_features(
        self, epoch: int, position: int, num_rows: int
    ) -> tuple[FeatureRoute, int, list[Action]]:
        """What to do with a block of verify's: route, the draft's epoch, what goes first."""
        if self._draft is None or self.ended or epoch != self._verify.epoch:
            return FeatureRoute.DROP, 0, []
        route, commands = self._draft.route(position, num_rows, self.tokens)
        return route, self._draft.epoch, [ToDraft(command) for command in commands]

    # -- the end

    def _end(self) -> list[Action]:
        self.phase = Phase.ENDED
        actions: list[Action] = []
        if (close := self._verify.close()) is not None:
            actions.append(ToVerify(close))
        if self._draft is not None:
            actions += [ToDraft(command) for command in self._draft.close()]
        return actions

    def _fail(
        self,
        kind: ErrorKind,
        message: str,
        *,
        retry_seconds: float | None = None,
        field: str = "",
    ) -> list[Action]:
        return [Failed(Failure(kind, message, retry_seconds, field)), *self._end()]


def _most_of_a_tree(asked: TreeShape | None, max_nodes: int) -> TreeShape:
    """What is sent of a tree at most: as asked for, within what verify takes."""
    shape = TreeShape() if asked is None else asked
    return replace(shape, max_nodes=min(shape.max_nodes, max_nodes))
