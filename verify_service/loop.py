"""The engine loop: plan → device → retire → frames out, while commands come in beside it.

One asyncio task drives the machine; `engine.run` blocks on a thread of its own. Commands are
handled on arrival, also while the device runs. The next step is planned and launched before the
results of the last one are put into frames, so that encoding costs the device nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from common.log import get_logger
from common.types import FeatureRows
from verify_service.commands import Command
from verify_service.events import Event, Failed
from verify_service.machine import VerifyMachine
from verify_service.metrics import VerifyMetrics
from verify_service.step import SequenceOutcome, SequenceWork, VerifyEngine
from verify_service.stepper import Plan

_logger = get_logger("verify.loop")

TICK_SECONDS = 0.25
"""For leases, gauges, and sequences that wait for one that pauses."""

RECENT_SECONDS = 0.25
"""A sequence that ended its round within this time may be back any moment."""

MAX_FAILURES = 3
"""So many failed steps in a row, and the device is given up."""


class DeviceLost(Exception):
    """Several steps in a row failed: the process should end and be started again."""


class VerifyLoop:
    """Owns machine and engine. All methods run on the event loop's thread.

    `deliver` takes events to their streams; `on_features` is called when rows may wait.
    """

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
        self._machine = machine
        self._engine = engine
        self._deliver_events = deliver
        self._on_features = on_features
        self._metrics = metrics
        self._gather_seconds = gather_seconds
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()  # a frame was handled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify-engine")
        self._finished: list[Event] = []  # of the last step, not delivered yet
        self._failures = 0
        self._next_tick = 0.0

    # -- from the servicer

    def connect(self, stream: int) -> None:
        self._machine.connect(stream)

    def disconnect(self, stream: int) -> None:
        self._machine.disconnect(stream, time.monotonic())

    def submit(self, stream: int, commands: Iterable[Command], errors: Iterable[Failed]) -> None:
        """Handles a frame's commands at once. `errors`: of those that could not be read."""
        self._flush([self._machine.with_state(error) for error in errors])
        events = self._machine.handle(stream, commands, time.monotonic())
        self._flush(events)
        self._on_features()
        self._wake.set()
        self._changed.set()

    def next_features(self, stream: int, max_bytes: int) -> FeatureRows | None:
        return self._machine.next_features(stream, max_bytes)

    # -- life

    async def run(self) -> None:
        """Until cancelled. Raises DeviceLost when the device fails again and again."""
        while True:
            plan = await self._next_plan()
            begun = time.monotonic()
            step = asyncio.get_running_loop().run_in_executor(self._thread, self._run, plan.works)
            self._flush(plan.events)
            await self._retire(plan, step, begun)

    async def drain(self) -> None:
        """Takes no new sequences; returns when the last one is closed."""
        self._machine.drain()
        while self._machine.num_sequences:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):  # leases end without a command
                async with asyncio.timeout(TICK_SECONDS):
                    await self._changed.wait()

    def stop(self) -> None:
        """Waits for a running step; the device must not outlive its thread."""
        self._thread.shutdown(wait=True)

    # -- one turn

    async def _next_plan(self) -> Plan:
        """The next step that holds anything."""
        while True:
            now = time.monotonic()
            self._tick(now)
            if self._machine.has_ready:
                now = await self._gather(now)
                plan = self._machine.plan(now)
                if plan.works:
                    return plan
                self._flush(plan.events)
            self._flush()
            await self._sleep(TICK_SECONDS)

    async def _gather(self, now: float) -> float:
        """Waits a moment for sequences that just ended a round; returns the time."""
        deadline = now + self._gather_seconds
        while now < deadline and self._machine.expects_more(now, RECENT_SECONDS):
            self._flush()
            await self._sleep(deadline - now)
            now = time.monotonic()
        return now

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    def _run(self, works: Sequence[SequenceWork]) -> tuple[list[SequenceOutcome], float]:
        """On the engine's thread."""
        begun = time.monotonic()
        outcomes = self._engine.run(works)
        return outcomes, time.monotonic() - begun

    async def _retire(
        self,
        plan: Plan,
        step: asyncio.Future[tuple[list[SequenceOutcome], float]],
        begun: float,
    ) -> None:
        try:
            outcomes, step_seconds = await step
        except Exception as error:  # whatever the device does, its sequences must learn of it
            self._fail(plan, error)
            return
        self._failures = 0
        back = time.monotonic()
        self._finished += self._machine.retire(plan.works, outcomes, back, step_seconds)
        self._on_features()
        host_seconds = (time.monotonic() - begun) - step_seconds
        self._metrics.note_step(plan, step_seconds, host_seconds)

    def _fail(self, plan: Plan, error: Exception) -> None:
        _logger.exception("a step failed", num_sequences=len(plan.works))
        self._metrics.note_failed_step()
        self._failures += 1
        message = f"the verify step failed: {type(error).__name__}; open the sequence again"
        self._finished += self._machine.fail(plan.works, message, time.monotonic())
        if self._failures >= MAX_FAILURES:
            self._flush()
            raise DeviceLost(f"{MAX_FAILURES} verify steps in a row failed: {error}") from error

    def _flush(self, events: Sequence[Event] = ()) -> None:
        """Sends what the last step gave, then `events`: order within a sequence is kept."""
        finished, self._finished = self._finished, []
        self._deliver([*finished, *events])

    def _deliver(self, events: Sequence[Event]) -> None:
        if events:
            self._metrics.note_events(events)
            self._deliver_events(events)

    def _tick(self, now: float) -> None:
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._machine.tick(now)
            self._metrics.note_state(self._machine)
            self._metrics.note_compiles(getattr(self._engine, "compiles_after_warm_up", 0))
