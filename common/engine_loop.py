"""The loop of an engine service: plan → device → retire → frames out, commands coming in beside it.

One asyncio task drives the state machine; `engine.run` blocks on a thread of its own. Commands are
handled on arrival, also while the device runs. The next step is planned and launched before what
the last one gave is put into frames, so that encoding costs the device nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from common.group.terms import GroupLost
from common.log import get_logger

TICK_SECONDS = 0.25
"""For leases, gauges, and whatever waits for time to pass."""

MAX_FAILURES = 3
"""So many failed steps in a row, and the device is given up."""


class DeviceLost(Exception):
    """Several steps in a row failed: the process should end and be started again."""


Work = TypeVar("Work")
Outcome = TypeVar("Outcome")
Event = TypeVar("Event")
Work_contra = TypeVar("Work_contra", contravariant=True)
Outcome_contra = TypeVar("Outcome_contra", contravariant=True)


class Plan(Protocol):
    """The next step's works, and events that need no step."""

    @property
    def works(self) -> Sequence[Any]: ...

    @property
    def events(self) -> Sequence[Any]: ...


class Machine(Protocol[Work_contra, Outcome_contra, Event]):
    """What the loop asks of a state machine; times are of a monotonic clock, in seconds."""

    @property
    def num_sequences(self) -> int: ...

    def connect(self, stream: int) -> None: ...

    def disconnect(self, stream: int, now: float) -> None: ...

    def plan(self, now: float) -> Any: ...

    def retire(
        self,
        works: Sequence[Work_contra],
        outcomes: Sequence[Outcome_contra],
        now: float,
        step_seconds: float,
    ) -> list[Event]: ...

    def fail(self, works: Sequence[Work_contra], message: str, now: float) -> list[Event]: ...

    def tick(self, now: float) -> None: ...

    def drain(self) -> None: ...


class Engine(Protocol[Work_contra, Outcome]):
    """Blocks while the device works."""

    def run(self, works: Sequence[Work_contra]) -> list[Outcome]: ...


class LoopMetrics(Protocol):
    """Where the loop notes what it saw."""

    def note_events(self, events: Any) -> None: ...

    def note_step(self, plan: Any, step_seconds: float, host_seconds: float) -> None: ...

    def note_failed_step(self) -> None: ...

    def note_state(self, machine: Any) -> None: ...

    def note_compiles(self, count: int) -> None: ...


class EngineLoop(ABC, Generic[Work, Outcome, Event]):
    """Owns machine and engine. All methods run on the event loop's thread.

    `deliver` takes events to their streams; `gather_seconds`: how long a step waits for sequences
    that are about to join it, where `_wait_until` has no better measure.
    """

    def __init__(
        self,
        service: str,
        machine: Machine[Work, Outcome, Event],
        engine: Engine[Work, Outcome],
        deliver: Callable[[Sequence[Event]], None],
        metrics: LoopMetrics,
        gather_seconds: float,
    ) -> None:
        self._service = service
        self._logger = get_logger(f"{service}.loop")
        self._machine = machine
        self._engine = engine
        self._deliver = deliver
        self._metrics = metrics
        self._gather_seconds = gather_seconds
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()  # a frame was handled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{service}-engine")
        self._finished: list[Event] = []  # of the last step, not delivered yet
        self._failures = 0
        self._next_tick = 0.0

    # -- what a service adds

    def _has_ready(self) -> bool:
        """Whether planning now could give a step."""
        return True

    @abstractmethod
    def _wait_until(self, now: float, deadline: float) -> float:
        """Until when to wait for sequences about to join the next step; `now`: not at all.
        `deadline`: what `gather_seconds` allow.
        """

    def _after_turn(self) -> None:
        """Called whenever a step or time has changed the machine."""

    # -- from the servicer

    def connect(self, stream: int) -> None:
        self._machine.connect(stream)

    def disconnect(self, stream: int) -> None:
        self._machine.disconnect(stream, time.monotonic())

    def _note_frame(self) -> None:
        """A frame was handled: what waits for one looks again."""
        self._wake.set()
        self._changed.set()

    # -- life

    async def run(self) -> None:
        """Until cancelled. Raises DeviceLost when the device fails again and again, GroupLost when
        another host of its slice is gone.
        """
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
            if self._has_ready():
                plan: Plan = self._machine.plan(await self._gather(now))
                if plan.works:
                    return plan
                self._flush(plan.events)
            self._flush()
            await self._sleep(TICK_SECONDS)

    async def _gather(self, now: float) -> float:
        """Waits a moment for those that are about to come; returns the time."""
        deadline = now + self._gather_seconds
        while (until := self._wait_until(now, deadline)) > now:
            self._flush()
            await self._sleep(until - now)
            now = time.monotonic()
        return now

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    def _run(self, works: Sequence[Work]) -> tuple[list[Outcome], float]:
        """On the engine's thread."""
        begun = time.monotonic()
        outcomes = self._engine.run(works)
        return outcomes, time.monotonic() - begun

    async def _retire(
        self,
        plan: Plan,
        step: asyncio.Future[tuple[list[Outcome], float]],
        begun: float,
    ) -> None:
        try:
            outcomes, step_seconds = await step
        except GroupLost:
            raise
        except Exception as error:  # whatever the device does, its sequences must learn of it
            self._fail(plan, error)
            return
        self._failures = 0
        back = time.monotonic()
        self._finished += self._machine.retire(plan.works, outcomes, back, step_seconds)
        self._after_turn()
        host_seconds = (time.monotonic() - begun) - step_seconds
        self._metrics.note_step(plan, step_seconds, host_seconds)

    def _fail(self, plan: Plan, error: Exception) -> None:
        self._logger.exception("a step failed", num_sequences=len(plan.works))
        self._metrics.note_failed_step()
        self._failures += 1
        service = self._service
        message = f"the {service} step failed: {type(error).__name__}; open the sequence again"
        self._finished += self._machine.fail(plan.works, message, time.monotonic())
        self._after_turn()
        if self._failures >= MAX_FAILURES:
            self._flush()
            raise DeviceLost(f"{MAX_FAILURES} {service} steps in a row failed: {error}") from error

    def _flush(self, events: Sequence[Event] = ()) -> None:
        """Sends what the last step gave, then `events`: order within a sequence is kept."""
        finished, self._finished = self._finished, []
        sent = [*finished, *events]
        if sent:
            self._metrics.note_events(sent)
            self._deliver(sent)

    def _tick(self, now: float) -> None:
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._machine.tick(now)
            self._after_turn()
            self._metrics.note_state(self._machine)
            self._metrics.note_compiles(getattr(self._engine, "compiles_after_warm_up", 0))
