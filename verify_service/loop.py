"""The verify service's engine loop: commands and tree rounds in, results and features out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from common.engine_loop import DeviceLost as DeviceLost
from common.engine_loop import EngineLoop
from common.types import FeatureRows
from verify_service.commands import Command
from verify_service.events import Event, Failed
from verify_service.machine import VerifyMachine
from verify_service.metrics import VerifyMetrics
from verify_service.step import AheadEngine, SequenceOutcome, SequenceWork, VerifyEngine
from verify_service.stepper import Plan


class VerifyLoop(EngineLoop[SequenceWork, SequenceOutcome, Event]):
    """`on_features` is called when rows may wait to be sent. An engine that can launch a step while
    another runs gets one behind it wherever the machine lets rounds follow. See
    `common.engine_loop`.
    """

    _machine: VerifyMachine
    _metrics: VerifyMetrics

    def __init__(
        self,
        machine: VerifyMachine,
        engine: VerifyEngine,
        *,
        deliver: Callable[[Sequence[Event]], None],
        on_features: Callable[[], None],
        metrics: VerifyMetrics,
        gather_seconds: float,
    ) -> None:
        ahead = engine if machine.runs_ahead and isinstance(engine, AheadEngine) else None
        super().__init__("verify", machine, engine, deliver, metrics, gather_seconds, ahead)
        self._on_features = on_features

    def submit(self, stream: int, commands: Iterable[Command], errors: Iterable[Failed]) -> None:
        """Handles a frame's commands at once. `errors`: of those that could not be read."""
        self._flush([self._machine.with_state(error) for error in errors])
        self._flush(self._machine.handle(stream, commands, time.monotonic()))
        self._after_turn()
        self._note_frame()

    def next_features(self, stream: int, max_bytes: int) -> FeatureRows | None:
        return self._machine.next_features(stream, max_bytes)

    def _after_turn(self) -> None:
        self._on_features()

    def _has_ready(self) -> bool:
        return self._machine.has_ready

    def _may_plan_behind(self) -> bool:
        return self._machine.may_plan_behind

    def _plan_behind(self, now: float) -> Plan | None:
        return self._machine.plan_behind(now)

    async def _gather(self, now: float) -> float:
        """As all loops do; notes how long it took and what it brought."""
        num_ready = self._machine.num_ready
        then = await super()._gather(now)
        if then > now:
            self._metrics.note_gathering(then - now, self._machine.num_ready - num_ready)
        return then

    def _wait_until(self, now: float, deadline: float) -> float:
        return self._machine.wait_until(now, deadline)
