"""One generation's rounds as a plain state machine: event in, actions out, clock injected, no I/O.

    start -> opening -> (waiting for a tree -> waiting for a result)* -> finished

Verify is the authority: a round is done when its result is here. The draft is help that may be
late, wrong or gone; then the root alone is sent and the draft catches up with the next Extend.
Everything that arrives twice, late or from an earlier life of a link is dropped by round and epoch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.types import DraftTree, ErrorCode, SequenceState, TreeShape
from router.actions import (
    Action,
    AttachVerify,
    Closed,
    CloseDraft,
    CloseVerify,
    CommandFailed,
    Emit,
    Event,
    ExtendDraft,
    Fail,
    Finish,
    OpenDraft,
    OpenVerify,
    Paused,
    ReplayFeatures,
    RoundResult,
    RoundTrace,
    SendTree,
    StateKnown,
    TreeReady,
)
from router.requests import ErrorKind, Generation, RequestError
from router.stats import GenerationStats
from router.textstream import TextStream

MAX_REOPENS_WITHOUT_PROGRESS = 3


class Phase(enum.Enum):
    NEW = "new"
    WAITING_FOR_RESULT = "waiting for a result"
    WAITING_FOR_TREE = "waiting for a tree"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the machine waits, in seconds."""

    tree_seconds: float


class GenerationMachine:
    """Holds text, parameters and round; tells the caller what to send. Not thread-safe.

    `deadline`: call `on_deadline` at this time, or None. Nothing comes after `Finish` or `Fail`.
    """

    def __init__(
        self, generation: Generation, text: TextStream, patience: Patience, *, has_draft: bool
    ) -> None:
        self.generation = generation
        self.phase = Phase.NEW
        self.deadline: float | None = None
        self._text = text
        self._patience = patience
        self._tokens = list(generation.prompt_ids)
        self._round = 0
        self._tree = DraftTree.root_only(generation.prompt_ids[-1])
        self._sent_at = 0.0
        self._verify_epoch = 0
        self._reopens = 0
        self._has_draft = has_draft and generation.speculate
        self._draft_open = False
        self._draft_epoch = 0
        self._draft_len = 0  # tokens that the draft was told
        self._tree_seconds = 0.0

    # -- what the caller reports ---------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        self.stats = GenerationStats(started=now, num_prompt_tokens=len(self.generation.prompt_ids))
        return [*self._open_draft(features_from=0), *self._open_verify(now)]

    def on_verify(self, event: Event, now: float) -> list[Action]:
        if self.phase is Phase.FINISHED or event.epoch != self._verify_epoch:
            return []
        match event:
            case RoundResult():
                return self._on_result(event, now)
            case StateKnown():
                return self._on_verify_state(event.state, now)
            case CommandFailed():
                return self._on_verify_failure(event, now)
            case Closed():
                return self._reopen_verify(now, "verify closed the sequence")
            case _:  # Paused: the pending round still runs
                return []

    def on_draft(self, event: Event, now: float) -> list[Action]:
        if self.phase is Phase.FINISHED or event.epoch != self._draft_epoch:
            return []
        match event:
            case TreeReady():
                return self._on_tree(event, now)
            case CommandFailed() | Paused() | Closed():
                self._draft_open = False
                return self._root_only(now) if self.phase is Phase.WAITING_FOR_TREE else []
            case _:
                return []

    def on_deadline(self, now: float) -> list[Action]:
        """The tree is late: this round goes without one."""
        if self.phase is not Phase.WAITING_FOR_TREE or self.deadline is None or now < self.deadline:
            return []
        return self._root_only(now)

    def on_verify_lost(self) -> list[Action]:
        """The link is down. What was sent may be lost; `on_verify_up` asks."""
        return []

    def on_verify_up(self, now: float) -> list[Action]:
        """The link is up again: take the sequence over under a new epoch."""
        if self.phase in (Phase.FINISHED, Phase.NEW):
            return []
        self._verify_epoch += 1
        return [AttachVerify(epoch=self._verify_epoch, acked_round=self._acked)]

    def on_draft_lost(self, now: float) -> list[Action]:
        self._draft_open = False
        return self._root_only(now) if self.phase is Phase.WAITING_FOR_TREE else []

    def on_draft_available(self, available: bool) -> None:
        """Whether there is a draft to open a sequence on."""
        self._has_draft = available and self.generation.speculate

    def cancel(self, now: float, reason: str = "aborted") -> list[Action]:
        if self.phase is Phase.FINISHED:
            return []
        return self._finish(reason, now)

    @property
    def draft_epoch(self) -> int:
        """The epoch under which the draft holds the sequence; 0: it does not."""
        return self._draft_epoch if self._draft_open else 0

    # -- verify --------------------------------------------------------------------------------

    @property
    def _acked(self) -> int | None:
        return self._round - 1 if self._round > 0 else None

    def _open_verify(self, now: float) -> list[Action]:
        self._verify_epoch += 1
        self.phase, self.deadline = Phase.WAITING_FOR_RESULT, None
        self._tree = DraftTree.root_only(self._tokens[-1])
        self._sent_at = now
        return [
            OpenVerify(
                epoch=self._verify_epoch,
                acked_round=self._acked,
                tokens=tuple(self._tokens),
                num_prompt_tokens=len(self.generation.prompt_ids),
                round=self._round,
                wants_features=self.generation.speculate,
            )
        ]

    def _reopen_verify(self, now: float, why: str) -> list[Action]:
        self._reopens += 1
        if self._reopens > MAX_REOPENS_WITHOUT_PROGRESS:
            return self._fail(RequestError("", f"verify: {why}; try again", ErrorKind.UNAVAILABLE))
        self.stats.num_rollbacks += 1
        return self._open_verify(now)

    def _on_verify_state(self, state: SequenceState, now: float) -> list[Action]:
        if state.next_round > self._round:
            return []  # the result is on its way: Attach sends it again
        if state.committed_len != len(self._tokens):
            return self._reopen_verify(now, "verify and router disagree on the sequence's length")
        if self.phase is Phase.WAITING_FOR_RESULT and self._verify_epoch > 1:
            return self._send_tree(self._tree, now)  # lost with the old link, or a repeat: harmless
        return []

    def _on_verify_failure(self, event: CommandFailed, now: float) -> list[Action]:
        message = f"verify: {event.message}"
        match event.code:
            case ErrorCode.NEVER_FITS:
                return self._fail(RequestError("max_tokens", message))
            case ErrorCode.OVERLOADED:
                return self._fail(RequestError("", message, ErrorKind.OVERLOADED))
            case ErrorCode.NOT_SERVING:
                return self._fail(RequestError("", message, ErrorKind.UNAVAILABLE))
            case ErrorCode.UNIMPLEMENTED:
                return self._fail(RequestError("", message, ErrorKind.UNIMPLEMENTED))
            case ErrorCode.INVALID | ErrorCode.INTERNAL:
                return self._fail(RequestError("", message, ErrorKind.INTERNAL))
        self._verify_epoch = max(self._verify_epoch, event.state.epoch)
        return self._reopen_verify(now, event.message)

    def _on_result(self, result: RoundResult, now: float) -> list[Action]:
        expected = len(self._tokens) - 1
        if result.round != self._round or self.phase is not Phase.WAITING_FOR_RESULT:
            return []
        if result.kv_len != expected or not result.tokens:
            return self._reopen_verify(
                now, f"round {result.round} came for kv_len {result.kv_len}, not {expected}"
            )
        self._reopens = 0
        used = self._tree.prefix(max(1, result.num_nodes))
        self._count(result, used, now)
        trace = self._trace(result, used)
        room = self.generation.max_tokens - self.stats.num_completion_tokens
        tokens = result.tokens[:room]
        step = self._text.push(tokens)
        tokens = tokens[: step.num_tokens]
        self._tokens.extend(tokens)
        self.stats.num_completion_tokens += len(tokens)
        self._round += 1
        stop_token = next((t for t in tokens if t in self.generation.stop_token_ids), None)
        full = self.stats.num_completion_tokens >= self.generation.max_tokens
        ended = step.matched is not None or stop_token is not None or full
        text, matched = step.text, step.matched
        if ended and matched is None:
            rest = self._text.finish()
            text, matched = text + rest.text, rest.matched
        margins = result.pick_margins[: len(tokens)]
        emitted = Emit(text=text, token_ids=tokens, pick_margins=margins, trace=trace)
        if not ended:
            return [emitted, *self._next_round(now)]
        if matched is not None:
            return [emitted, *self._finish("stop", now, stop_string=matched)]
        if stop_token is not None:
            return [emitted, *self._finish("stop", now, stop_token_id=stop_token)]
        return [emitted, *self._finish("length", now)]

    def _count(self, result: RoundResult, used: DraftTree, now: float) -> None:
        wanted = self.generation.speculate and self._round > 0 and self._room_for_tree(1)
        self.stats.count_round(used, len(result.tokens), now, wanted_tree=wanted)
        elapsed = max(0.0, now - self._sent_at)
        in_verify = min(elapsed, result.step_seconds + result.queue_seconds)
        if self._round == 0:
            self.stats.queue_seconds = min(elapsed, result.queue_seconds)
        else:
            self.stats.verify_seconds += in_verify
            self.stats.transport_seconds += elapsed - in_verify

    def _trace(self, result: RoundResult, used: DraftTree) -> RoundTrace | None:
        if not self.generation.return_trace:
            return None
        return RoundTrace(
            round=result.round,
            tree=used,
            accepted_nodes=result.accepted_nodes,
            bonus_token=result.tokens[-1],
            draft_seconds=self._tree_seconds,
            verify_seconds=result.step_seconds,
        )

    def _send_tree(self, tree: DraftTree, now: float) -> list[Action]:
        self.phase, self.deadline = Phase.WAITING_FOR_RESULT, None
        self._tree, self._sent_at = tree, now
        return [
            SendTree(
                epoch=self._verify_epoch,
                acked_round=self._acked,
                round=self._round,
                kv_len=len(self._tokens) - 1,
                tree=tree,
            )
        ]

    def _root_only(self, now: float) -> list[Action]:
        self._tree_seconds = max(0.0, now - self._sent_at) if self.deadline else 0.0
        self.stats.draft_seconds += self._tree_seconds
        return self._send_tree(DraftTree.root_only(self._tokens[-1]), now)

    # -- draft ---------------------------------------------------------------------------------

    def _room_for_tree(self, depth: int) -> bool:
        """Whether a node at `depth` could still be emitted beside the bonus token."""
        return self.generation.max_tokens - self.stats.num_completion_tokens > depth

    def _next_round(self, now: float) -> list[Action]:
        self.deadline = None
        if not (self._has_draft and self._room_for_tree(1)) or self.generation.tree.max_nodes < 2:
            return self._root_only(now)
        actions: list[Action] = []
        if not self._draft_open:
            actions = [
                *self._open_draft(features_from=0),
                ReplayFeatures(epoch=self._verify_epoch, acked_round=self._acked, position=0),
            ]
        fresh = tuple(self._tokens[self._draft_len :])
        extend = ExtendDraft(
            epoch=self._draft_epoch,
            round=self._round,
            base_len=self._draft_len,
            tokens=fresh,
            tree=self._tree_cap(),
        )
        self._draft_len = len(self._tokens)
        self.phase, self._sent_at = Phase.WAITING_FOR_TREE, now
        self.deadline = now + self._patience.tree_seconds
        return [*actions, extend]

    def _tree_cap(self) -> TreeShape:
        asked = self.generation.tree
        room = self.generation.max_tokens - self.stats.num_completion_tokens - 1
        return TreeShape(
            max_depth=min(asked.max_depth, room), top_k=asked.top_k, max_nodes=asked.max_nodes
        )

    def _open_draft(self, features_from: int) -> list[Action]:
        if not self._has_draft:
            return []
        self._draft_open = True
        self._draft_epoch += 1
        # All but the newest tokens: those come with the Extend that asks for the first tree.
        known = self._tokens if self._round == 0 else self._tokens[:-1]
        self._draft_len = len(known)
        return [
            OpenDraft(epoch=self._draft_epoch, tokens=tuple(known), features_from=features_from)
        ]

    def _on_tree(self, event: TreeReady, now: float) -> list[Action]:
        fits = event.round == self._round and event.committed_len == len(self._tokens)
        if self.phase is not Phase.WAITING_FOR_TREE or not fits:
            return []
        if int(event.tree.tokens[0]) != self._tokens[-1]:
            self._draft_open = False  # it lost the thread: a fresh one next round
            return self._root_only(now)
        elapsed = max(0.0, now - self._sent_at)
        in_draft = min(elapsed, event.step_seconds + event.queue_seconds)
        self._tree_seconds = event.step_seconds
        self.stats.draft_seconds += in_draft
        self.stats.transport_seconds += elapsed - in_draft
        cap = self._tree_cap()
        tree = event.tree.within_depth(cap.max_depth).prefix(cap.max_nodes)
        return self._send_tree(tree, now)

    # -- the end -------------------------------------------------------------------------------

    def _close_all(self) -> list[Action]:
        self.phase, self.deadline = Phase.FINISHED, None
        actions: list[Action] = []
        if self._verify_epoch:
            actions.append(CloseVerify(epoch=self._verify_epoch, acked_round=self._acked))
        if self._draft_open:
            actions.append(CloseDraft(epoch=self._draft_epoch))
        return actions

    def _finish(
        self,
        reason: str,
        now: float,
        stop_string: str | None = None,
        stop_token_id: int | None = None,
    ) -> list[Action]:
        finish = Finish(
            reason=reason,
            stop_string=stop_string,
            stop_token_id=stop_token_id,
            stats=self.stats,
        )
        return [finish, *self._close_all()]

    def _fail(self, error: RequestError) -> list[Action]:
        return [Fail(error), *self._close_all()]
