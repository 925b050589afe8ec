"""The draft service's engine loop: commands and features in, trees out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from common.engine_loop import DeviceLost as DeviceLost
from common.engine_loop import EngineLoop
from common.types import FeatureRows
from draft_service.commands import Command
from draft_service.events import Event
from draft_service.machine import DraftMachine
from draft_service.metrics import DraftMetrics
from draft_service.step import DraftEngine, SequenceOutcome, SequenceWork


class DraftLoop(EngineLoop[SequenceWork, SequenceOutcome, Event]):
    """`on_room` gets the bytes of waiting features, whenever they may have changed. See
    `common.engine_loop`.
    """

    _machine: DraftMachine
    _metrics: DraftMetrics

    def __init__(
        self,
        machine: DraftMachine,
        engine: DraftEngine,
        *,
        deliver: Callable[[Sequence[Event]], None],
        on_room: Callable[[int], None],
        metrics: DraftMetrics,
        gather_seconds: float,
    ) -> None:
        super().__init__("draft", machine, engine, deliver, metrics, gather_seconds)
        self._on_room = on_room

    def submit(self, stream: int, commands: Iterable[Command]) -> None:
        """Handles a frame's commands at once."""
        self._flush(self._machine.handle(stream, commands, time.monotonic()))
        self._note_frame()

    def receive(self, blocks: Iterable[FeatureRows]) -> None:
        """Hands a frame's feature rows to their sequences."""
        for block in blocks:
            self._metrics.note_features(block.rows.nbytes)
            self._flush(self._machine.receive(block, time.monotonic()))
        self.share_room()
        self._wake.set()

    def refuse(self, sequence_id: bytes, epoch: int, message: str) -> None:
        """Notes a block of features that could not be read."""
        self._metrics.note_bad_block()
        self._flush(self._machine.refuse(sequence_id, epoch, message))

    def share_room(self) -> None:
        self._on_room(self._machine.waiting_feature_bytes)

    def _after_turn(self) -> None:
        self.share_room()

    def _wait_until(self, now: float, deadline: float) -> float:
        # Features of fresh wishes: they should share one step.
        more = self._machine.expects_features(now - self._gather_seconds)
        return max(now, deadline) if more else now
