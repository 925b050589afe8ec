"""One running generation: its machine, its timer, its client's queue. All on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from canopy.v1 import types_pb2
from common.callers import ANYBODY, Caller
from router.actions import Action, Emitted, Failed, Finished, ReleaseFeatures, ToDraft, ToVerify
from router.codec import num_data_bytes
from router.draft_link import DraftLink
from router.drafting import DraftStage, FeatureRoute
from router.errors import Failure, GenerationError
from router.fleet import Returned
from router.machine import GenerationMachine
from router.messages import (
    DraftCommand,
    DraftEvent,
    DraftExtend,
    VerifyCommand,
    VerifyEvent,
    VerifyOpen,
    VerifyTree,
)
from router.responses import Response, encode_chunk, encode_completion
from router.tokenizer import ModelTokenizer
from router.verify_link import VerifyLink


class Wire(Protocol):
    """Where a session's commands and features go: to the replicas that have it."""

    def to_verify(self, session: Session, command: VerifyCommand) -> None: ...

    def to_draft(self, session: Session, command: DraftCommand) -> None: ...

    def features_to_draft(
        self, session: Session, block: types_pb2.FeatureBlock, returned: Returned
    ) -> None: ...

    def ended(self, session: Session, ending: Finished | Failed | None) -> None: ...


@dataclass(slots=True)
class Seat:
    """The replicas that have a sequence. `refused_by`: those that were asked in vain, full or
    draining, since the last one that took it.
    """

    verify: VerifyLink
    draft: DraftLink | None
    refused_by: set[VerifyLink] = field(default_factory=set)


class Session:
    """Carries out what the machine asks for.

    Chunks are encoded when the client takes them, several rounds in one if it is slow. Beyond
    `max_unread_tokens` its own sequence pauses; its neighbours go on.
    """

    def __init__(
        self,
        machine: GenerationMachine,
        seat: Seat,
        tokenizer: ModelTokenizer,
        wire: Wire,
        clock: Callable[[], float],
        max_unread_tokens: int,
        readable: asyncio.Event,
        caller: Caller = ANYBODY,
    ) -> None:
        """`readable`: set whenever the client has something to take."""
        self.machine = machine
        self.seat = seat
        self.caller = caller
        self.span: object = None  # of the request, if it is traced
        self.is_read = False  # the client has the completion
        self._tokenizer = tokenizer
        self._wire = wire
        self._clock = clock
        self._max_unread_tokens = max_unread_tokens
        self._unread: deque[Emitted] = deque()
        self._num_unread_tokens = 0
        self._ending: Finished | Failed | None = None
        self._ended_at = 0.0
        self._readable = readable
        self._is_first_chunk = True
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._held_blocks: list[tuple[types_pb2.FeatureBlock, Returned]] = []

    @property
    def sequence_id(self) -> bytes:
        return self.machine.sequence_id

    @property
    def request_id(self) -> str:
        return self.machine.generation.request_id

    # -- what happens to it

    def start(self, *, draft_up: bool) -> None:
        self._perform(self.machine.start(self._clock(), draft_up=draft_up))

    def on_verify(self, event: VerifyEvent, now: float) -> None:
        self._perform(self.machine.on_verify(event, now))

    def on_draft(self, event: DraftEvent, now: float) -> None:
        self._perform(self.machine.on_draft(event, now))
        if self._held_blocks and self.machine.draft_stage is not DraftStage.OPENING:
            self._drop_held_blocks()

    def on_verify_up(self) -> None:
        self._perform(self.machine.on_verify_up(self._clock()))

    def on_verify_down(self) -> None:
        self.machine.on_verify_down(self._clock())
        self._set_timer()

    def on_draft_up(self) -> None:
        self._perform(self.machine.on_draft_up())

    def on_draft_down(self) -> None:
        self._drop_held_blocks()
        self._perform(self.machine.on_draft_down(self._clock()))

    def move_verify(self, link: VerifyLink, *, lost: bool) -> None:
        """Another replica takes over; `lost`: because the one before was lost, not full."""
        self.seat.verify = link
        self._perform(self.machine.on_verify_moved(self._clock(), lost=lost))

    def move_draft(self, link: DraftLink) -> None:
        """Another replica will be given the sequence at the next round."""
        self.seat.draft = link
        self.machine.on_draft_moved()

    def on_features(self, block: types_pb2.FeatureBlock, returned: Returned) -> None:
        """Rows from verify, on to the draft under the draft's own epoch."""
        route, epoch, actions = self.machine.route_features(
            block.epoch, block.position, block.num_rows
        )
        self._perform(actions)
        match route:
            case FeatureRoute.FORWARD:
                block.epoch = epoch
                self._wire.features_to_draft(self, block, returned)
            case FeatureRoute.HOLD:
                self._held_blocks.append((block, returned))
            case FeatureRoute.DROP:
                returned(num_data_bytes(block))

    def fail(self, failure: Failure) -> None:
        """Ends the generation from outside."""
        if not self.machine.ended:
            self._perform([Failed(failure), *self.machine.cancel()])

    def abort(self) -> None:
        """Asked to end: the client gets its completion."""
        self._perform(self.machine.abort(self._clock()))

    def cancel(self) -> None:
        """The client is gone. Nothing happens if the generation is over."""
        if not self.machine.ended:
            self._perform(self.machine.cancel())
            self._wire.ended(self, None)

    # -- the client's side

    def take_response(self) -> Response | None:
        """The next chunk or the completion; None: nothing has come.

        Raises GenerationError if the generation failed.
        """
        if not self._unread:
            if isinstance(self._ending, Failed):
                raise GenerationError(self._ending.failure)
            if self._ending is None:
                return None
            self.is_read = True
            return encode_completion(self._ending, self.machine, self._ended_at)
        parts = self._take_parts()
        response = encode_chunk(
            parts, self.machine.generation, self._tokenizer, first=self._is_first_chunk
        )
        self._is_first_chunk = False
        return response

    def _take_parts(self) -> list[Emitted]:
        """All that is unread, up to the first with a trace: a chunk has room for one."""
        parts: list[Emitted] = []
        while self._unread and not (parts and parts[-1].trace is not None):
            parts.append(self._unread.popleft())
        self._num_unread_tokens -= sum(len(part.tokens) for part in parts)
        if self.machine.paused and self._num_unread_tokens < self._max_unread_tokens:
            self._perform(self.machine.resume(self._clock()))
        return parts

    # -- within

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ToVerify():
                    self._wire.to_verify(self, action.command)
                    if isinstance(action.command, VerifyTree | VerifyOpen):
                        self.machine.mark_sent(self._clock())
                case ToDraft():
                    self._wire.to_draft(self, action.command)
                    if isinstance(action.command, DraftExtend):
                        self.machine.mark_sent(self._clock())
                case Emitted():
                    self._unread.append(action)
                    self._num_unread_tokens += len(action.tokens)
                    self._readable.set()
                    if self._num_unread_tokens >= self._max_unread_tokens:
                        self.machine.pause()
                case ReleaseFeatures():
                    self._release_held_blocks(action.epoch)
                case Finished() | Failed():
                    self._end(action)
        self._set_timer()

    def _end(self, ending: Finished | Failed) -> None:
        self._ending = ending
        self._ended_at = self._clock()
        self._readable.set()
        self._drop_held_blocks()
        self._wire.ended(self, ending)

    def _release_held_blocks(self, epoch: int) -> None:
        blocks, self._held_blocks = self._held_blocks, []
        for block, returned in blocks:
            block.epoch = epoch
            self._wire.features_to_draft(self, block, returned)

    def _drop_held_blocks(self) -> None:
        blocks, self._held_blocks = self._held_blocks, []
        for block, returned in blocks:
            returned(num_data_bytes(block))

    def _set_timer(self) -> None:
        """Rounds set a deadline each and seldom reach it: a timer that is early enough stays."""
        deadline = self.machine.deadline()
        if self.machine.ended:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer_due <= deadline:
                return
            self._timer.cancel()
        wait = max(0.0, deadline - self._clock())
        self._timer_due = deadline
        self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._perform(self.machine.tick(self._clock()))
