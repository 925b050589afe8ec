"""The draft's half of one generation, sans-IO: opening, feeding, losing and regaining it.

The draft is a cache. Whatever goes wrong here costs speculation only: the round runs root-only, and
the sequence is opened again from features that verify still has. At most one Extend is under way,
so that a slow draft is never queued up on.

    ABSENT ─ first feature block, or start ─▶ OPENING ─ state ─▶ LIVE
      ▲  ▲                                                     │ link down
      │  └────── error, evicted, rows missing ─────────────────┤
      └───────── unknown ── ATTACHING ◀── link up ── DETACHED ◀┘
    REFUSED: the draft will never take this sequence.

Feature rows must follow each other. The first block of a verify epoch says where they begin; a
block that leaves a gap means that rows fell out of verify's window: the draft begins anew there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from common.types import ErrorCode, TreeShape
from router.generation import Generation
from router.messages import (
    Close,
    DraftAttach,
    DraftCommand,
    DraftExtend,
    DraftOpen,
    SequenceFailed,
    StateReport,
    TreeReady,
)

_MAX_SKIPPED_ROUNDS = 32
"""The longest that a draft is left alone, after misses or errors in a row."""

_KEEP_UP_TOKENS = 8
"""A draft that no tree is asked of hears of so many new tokens at a time."""

_ROOT_ALONE = TreeShape(max_depth=0, top_k=0, max_nodes=1)

_PERMANENT = (ErrorCode.INVALID, ErrorCode.NEVER_FITS, ErrorCode.UNIMPLEMENTED)
_BUSY = (ErrorCode.OVERLOADED, ErrorCode.NOT_SERVING, ErrorCode.INTERNAL)


class DraftStage(enum.Enum):
    ABSENT = enum.auto()
    OPENING = enum.auto()
    LIVE = enum.auto()
    DETACHED = enum.auto()
    ATTACHING = enum.auto()
    REFUSED = enum.auto()


class FeatureRoute(enum.Enum):
    """What becomes of a block of features."""

    FORWARD = enum.auto()
    HOLD = enum.auto()  # until the draft has said that it is open
    DROP = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """`catch_up_tokens`: how far back a draft opened late begins. `draft_ahead`: trees can be grown
    for rounds to come.
    """

    needs_features: bool = True
    max_context_len: int = 1 << 31
    deadline_seconds: float = 0.5
    catch_up_tokens: int = 2048
    draft_ahead: bool = False


class DraftSide:
    """`epoch`: of the router–draft link, for this sequence."""

    def __init__(
        self, sequence_id: bytes, generation: Generation, tree: TreeShape, settings: DraftSettings
    ) -> None:
        self.settings = settings
        self.stage = DraftStage.ABSENT
        self.epoch = 0
        self.link_up = False
        self.refusal = ""
        self._sequence_id = sequence_id
        self._generation = generation
        self._tree = tree
        self._known_len = 0  # committed tokens that the draft has been told
        self._outstanding: int | None = None  # the round whose tree is under way
        self._keeps_up = False  # the outstanding one only tells tokens
        self._ahead_round = -1  # the last that a tree ahead was wished in
        self._answered: int | None = None  # the last round whose tree is here or not wanted
        self._features_next = 0  # position of the next row that the draft must get
        self._expects_rows = False  # while ABSENT: the next block may open it
        self._misses = 0
        self._failures = 0
        self._skip_until = 0  # rounds below run without it
        self.is_catching_up = False  # opened in mid-generation, no tree since

    # -- what the machine asks of it

    def start(self, tokens: Sequence[int]) -> list[DraftCommand]:
        """Opens at the beginning of the sequence; features come from position 0."""
        return [self._open(tokens, 0)] if self.link_up else []

    def features_from(self, num_tokens: int) -> int | None:
        """Where verify should begin (again) to send features. None: nothing again."""
        if not self.settings.needs_features:
            return None
        if self.stage in (DraftStage.OPENING, DraftStage.LIVE):
            return self._features_next
        if self._expects_rows:
            return max(0, num_tokens - self.settings.catch_up_tokens)
        return None

    def expect_rows(self) -> None:
        """The first block of the next verify epoch will open it anew."""
        self._expects_rows = self.link_up

    @property
    def is_growing(self) -> bool:
        """Whether a tree is under way."""
        return self._outstanding is not None and not self._keeps_up

    def wants_restart(self, round_: int) -> bool:
        """Whether it is absent, could be opened now, and nothing is under way to that end."""
        absent = self.stage is DraftStage.ABSENT and not self._expects_rows
        return absent and self.link_up and round_ >= self._skip_until

    def extend(
        self,
        round_: int,
        tokens: Sequence[int],
        *,
        ahead: bool = False,
        verified_ahead: int | None = None,
    ) -> DraftExtend | None:
        """Asks for the round's tree. None: no tree can be had for this round.

        `ahead`: for a tree that rounds to come may take; nobody waits, and a later wish may follow
        before it is here.
        """
        ready = self.link_up and self.stage in (DraftStage.OPENING, DraftStage.LIVE)
        busy = self._outstanding is not None and not self._keeps_up
        if not ready or busy or round_ < self._skip_until:
            return None
        if len(tokens) > self.settings.max_context_len:
            self._refuse(f"{len(tokens)} tokens are beyond the draft's context")
            return None
        if not ahead:
            return self._extend(round_, tokens, None)
        self._ahead_round = round_
        wish = self._extend(round_, tokens, None)
        self._outstanding = None
        return wish._replace(ahead=True, verified_ahead=verified_ahead)

    def keep_up(self, round_: int, tokens: Sequence[int]) -> DraftExtend | None:
        """Tells new tokens, without waiting for a tree, once there are enough of them: so that the
        draft can feed its features, and a tree is near when one is wanted again.
        """
        ready = self.stage is DraftStage.LIVE and self.link_up and self._outstanding is None
        if not ready or len(tokens) - self._known_len < _KEEP_UP_TOKENS:
            return None
        if len(tokens) > self.settings.max_context_len:
            return None  # refused when a tree is wanted
        return self._extend(round_, tokens, _ROOT_ALONE)

    def miss(self, round_: int) -> None:
        """The round's tree did not come in time. In a row, misses cost ever fewer waits."""
        self._misses += 1
        skipped = min(2 ** (self._misses - 1) - 1, _MAX_SKIPPED_ROUNDS)
        self._skip_until = round_ + 1 + skipped

    def close(self) -> list[DraftCommand]:
        absent = self.stage in (DraftStage.ABSENT, DraftStage.DETACHED)
        self.stage = DraftStage.REFUSED
        if absent or not self.epoch or not self.link_up:
            return []  # nothing there, or its lease ends it
        return [Close(self._sequence_id, self.epoch, self._answered)]

    # -- what the draft says

    def on_tree_ahead(self, event: TreeReady) -> bool:
        """Whether the tree was wished ahead."""
        if event.epoch != self.epoch or event.round == self._outstanding:
            return False
        if event.round > self._ahead_round:
            return False
        self._answered = max(event.round, self._answered or 0)
        self._failures, self._misses, self.is_catching_up = 0, 0, False
        return True

    def on_tree(self, event: TreeReady, awaited: int | None) -> bool:
        """Whether the tree is the `awaited` round's. A late one only shows that it caught up."""
        if event.epoch != self.epoch or event.round != self._outstanding:
            return False
        self._outstanding, self._answered = None, event.round
        self._failures, self.is_catching_up = 0, False
        if event.round != awaited:
            return False
        self._misses = 0
        return True

    def on_state(self, event: StateReport, num_tokens: int) -> bool:
        """Whether held features may go now, or, after an Attach, be sent again by verify.

        After an Attach the draft's own account decides what it is told next.
        """
        if event.epoch != self.epoch:
            return False
        if self.stage is DraftStage.OPENING:
            self.stage = DraftStage.LIVE
            # Rows below are in its KV already: of a sequence that began with the same tokens.
            self._features_next = max(self._features_next, event.state.kv_len)
            return True
        if self.stage is DraftStage.ATTACHING:
            state = event.state
            if not 1 <= state.committed_len <= num_tokens:
                self._lose(0, 0)
                return False
            self.stage = DraftStage.LIVE
            self._known_len, self._features_next = state.committed_len, state.kv_len
            return True
        return False

    def on_error(self, event: SequenceFailed, round_: int) -> None:
        """The draft has lost or refused the sequence."""
        if event.epoch != self.epoch or self.stage is DraftStage.REFUSED:
            return
        if event.code in _PERMANENT:
            self._refuse(event.message)
            return
        self.epoch = max(self.epoch, event.state.epoch)
        self._lose(round_, 8 if event.code in _BUSY else 0)

    def on_evicted(self, epoch: int, round_: int) -> None:
        if epoch == self.epoch and self.stage is not DraftStage.REFUSED:
            self._lose(round_, 8)

    def on_malformed_tree(self, round_: int) -> None:
        """A tree that fits neither round nor root: start over rather than go on with it."""
        self._lose(round_, 8)

    def on_link_down(self) -> None:
        self.link_up = False
        if self.stage in (DraftStage.OPENING, DraftStage.LIVE, DraftStage.ATTACHING):
            self.stage = DraftStage.DETACHED
        self._outstanding = None
        self._expects_rows = False

    def on_moved(self) -> None:
        """Another replica, which knows nothing of the sequence yet, is linked in its place."""
        self.link_up = True
        if self.stage is not DraftStage.REFUSED:
            self.stage = DraftStage.ABSENT

    def on_link_up(self) -> list[DraftCommand]:
        self.link_up = True
        if self.stage is not DraftStage.DETACHED:
            return []
        self.stage = DraftStage.ATTACHING
        self.epoch += 1
        return [DraftAttach(self._sequence_id, self.epoch, self._answered)]

    # -- features on their way through

    def route(
        self, position: int, num_rows: int, tokens: Sequence[int]
    ) -> tuple[FeatureRoute, list[DraftCommand]]:
        """What to do with rows [position, position + num_rows) of the present verify epoch."""
        if not self.link_up:
            return FeatureRoute.DROP, []
        commands: list[DraftCommand] = []
        if self.stage is DraftStage.ABSENT and self._expects_rows:
            commands.append(self._open(tokens, position))
        if self.stage not in (DraftStage.OPENING, DraftStage.LIVE):
            return FeatureRoute.DROP, []
        if position > self._features_next:
            commands.append(self._open(tokens, position))
        if position + num_rows <= self._features_next:
            return FeatureRoute.DROP, commands
        self._features_next = position + num_rows
        opening = self.stage is DraftStage.OPENING
        return (FeatureRoute.HOLD if opening else FeatureRoute.FORWARD), commands

    # -- within

    def _extend(self, round_: int, tokens: Sequence[int], shape: TreeShape | None) -> DraftExtend:
        known, self._known_len = self._known_len, len(tokens)
        self._outstanding = round_
        self._keeps_up = shape is not None
        return DraftExtend(
            *(self._sequence_id, self.epoch, self._answered),
            round=round_,
            base_len=known,
            tokens=tokens[known:],
            tree=shape,
        )

    def _open(self, tokens: Sequence[int], features_from: int) -> DraftOpen:
        self.stage = DraftStage.OPENING
        self.is_catching_up = bool(self.epoch) or len(tokens) > len(self._generation.prompt_tokens)
        self.epoch += 1
        self._known_len = len(tokens)
        self._features_next = features_from
        self._outstanding, self._ahead_round = None, -1
        self._expects_rows = False
        return DraftOpen(
            self._sequence_id,
            self.epoch,
            self._answered,
            tuple(tokens),
            self._generation.sampling,
            self._tree,
            min(self._generation.max_total_tokens, self.settings.max_context_len),
            features_from,
            self._generation.cache_salt,
            self._generation.choice_index,
            self._generation.trace,
        )

    def _lose(self, round_: int, pause_rounds: int) -> None:
        self.stage = DraftStage.ABSENT
        self._outstanding = None
        self._expects_rows = False
        self._failures += 1
        pause = pause_rounds + 2 ** min(self._failures - 1, 5) - 1
        self._skip_until = max(self._skip_until, round_ + min(pause, _MAX_SKIPPED_ROUNDS))

    def _refuse(self, reason: str) -> None:
        self.stage, self.refusal = DraftStage.REFUSED, reason
        self._outstanding = None
