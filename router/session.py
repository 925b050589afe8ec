"""One running generation: its state machine, its place on the links, its client's queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from canopy.v1 import generation_pb2, types_pb2
from router import actions as act
from router.codec import encode_chunk, encode_completion
from router.machine import GenerationMachine
from router.requests import RequestError
from router.tokenizer import ModelTokenizer

Output = generation_pb2.GenerateResponse | RequestError


class Wire(Protocol):
    """Where a session's commands and features go."""

    def to_verify(self, session: Session, command: act.VerifyCommand) -> None: ...

    def to_draft(self, session: Session, command: act.DraftCommand) -> None: ...

    def features_to_draft(self, block: types_pb2.FeatureBlock) -> None: ...

    def features_dropped(self, num_bytes: int) -> None: ...

    def ended(self, session: Session, action: act.Finish | act.Fail) -> None: ...


class Session:
    """Carries out what the machine asks for. All methods run on the event loop's thread.

    A client that does not read fills its queue; then this sequence's next commands are held back
    until there is room. Its neighbours go on.
    """

    def __init__(
        self,
        sequence_id: bytes,
        machine: GenerationMachine,
        tokenizer: ModelTokenizer,
        wire: Wire,
        clock: Callable[[], float],
        max_buffered: int,
    ) -> None:
        self.sequence_id = sequence_id
        self.machine = machine
        self._tokenizer = tokenizer
        self._wire = wire
        self._clock = clock
        self._max_buffered = max_buffered
        self._outputs: deque[Output] = deque()
        self._readable = asyncio.Event()
        self._held: list[act.VerifyCommand | act.DraftCommand] = []
        self._first_chunk = True
        self._timer: asyncio.TimerHandle | None = None
        self._draft_epoch = 0  # the epoch at which the draft acknowledged Open; 0: not yet
        self._early_blocks: list[types_pb2.FeatureBlock] = []

    # -- in ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._perform(self.machine.start(self._clock()))

    def on_verify(self, event: act.Event) -> None:
        self._perform(self.machine.on_verify(event, self._clock()))

    def on_draft(self, event: act.Event) -> None:
        if isinstance(event, act.StateKnown):
            self._draft_epoch = event.epoch
            self._flush_early_blocks()
        self._perform(self.machine.on_draft(event, self._clock()))

    def on_verify_up(self) -> None:
        self._perform(self.machine.on_verify_up(self._clock()))

    def on_draft_down(self) -> None:
        self._draft_epoch = 0
        self._drop_early_blocks()
        self.machine.on_draft_available(False)
        self._perform(self.machine.on_draft_lost(self._clock()))

    def on_draft_up(self) -> None:
        self.machine.on_draft_available(True)

    def fail(self, error: RequestError) -> None:
        """Ends the generation from outside, as when verify stays lost."""
        ending = self.machine.cancel(self._clock())
        if ending:  # Finish, then the closes
            self._perform([act.Fail(error), *ending[1:]])

    def cancel(self) -> None:
        """The client is gone or asked to abort."""
        self._perform(self.machine.cancel(self._clock()))

    def on_features(self, block: types_pb2.FeatureBlock) -> None:
        """Rows from verify. They wait here until the draft has acknowledged the sequence."""
        wanted = self.machine.draft_epoch
        if wanted == 0:
            self._wire.features_dropped(len(block.data))
            return
        self._early_blocks.append(block)
        if self._draft_epoch == wanted:
            self._flush_early_blocks()

    # -- out -----------------------------------------------------------------------------------

    async def next_output(self) -> Output:
        while not self._outputs:
            self._readable.clear()
            await self._readable.wait()
        output = self._outputs.popleft()
        if self._held and len(self._outputs) < self._max_buffered:
            held, self._held = self._held, []
            for command in held:
                self._send(command)
        return output

    # -- inside --------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Emit():
                    self._put(
                        encode_chunk(
                            action,
                            self.machine.generation,
                            self._tokenizer,
                            first=self._first_chunk,
                        )
                    )
                    self._first_chunk = False
                case act.Finish():
                    self._held.clear()
                    self._put(encode_completion(action, self.machine.generation, self._clock()))
                    self._end(action)
                case act.Fail():
                    self._held.clear()
                    self._put(action.error)
                    self._end(action)
                case act.VerifyCommand() | act.DraftCommand():
                    if self._is_full and not isinstance(action, act.CloseVerify | act.CloseDraft):
                        self._held.append(action)
                    else:
                        self._send(action)
        self._set_timer()

    @property
    def _is_full(self) -> bool:
        return bool(self._held) or len(self._outputs) >= self._max_buffered

    def _send(self, command: act.VerifyCommand | act.DraftCommand) -> None:
        if isinstance(command, act.VerifyCommand):
            self._wire.to_verify(self, command)
        else:
            self._wire.to_draft(self, command)

    def _put(self, output: Output) -> None:
        self._outputs.append(output)
        self._readable.set()

    def _end(self, action: act.Finish | act.Fail) -> None:
        self._drop_early_blocks()
        self._wire.ended(self, action)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.machine.deadline is not None:
            wait = max(0.0, self.machine.deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = max(self._clock(), self.machine.deadline or 0.0)
        self._perform(self.machine.on_deadline(now))

    def _flush_early_blocks(self) -> None:
        blocks, self._early_blocks = self._early_blocks, []
        for block in blocks:
            block.epoch = self._draft_epoch
            self._wire.features_to_draft(block)

    def _drop_early_blocks(self) -> None:
        blocks, self._early_blocks = self._early_blocks, []
        self._wire.features_dropped(sum(len(block.data) for block in blocks))
