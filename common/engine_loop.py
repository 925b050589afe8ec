"""The loop of an engine service: plan → device → retire → frames out, commands coming in beside it.

One asyncio task drives the state machine; the engine blocks on a thread of its own. Commands are
handled on arrival, also while the device runs. The next step is planned and launched before what
the last one gave is put into frames, so that encoding costs the device nothing.

Where the engine can take a step before the last has ended, and the service plans one (see
`_plan_behind`), two are in flight: the device goes from one to the next without the host. The
second is planned late, just before the first should end, with all that has come until then.

    device   | step 1                    | step 2                    | step 3
    host     |                   plan 2  | retire 1, frames   plan 3 | retire 2, frames   plan 4
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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

    @property
    def num_rows(self) -> int: ...


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


class AheadEngine(Engine[Work_contra, Outcome], Protocol):
    """Has up to two steps in flight. If `finish` raises, those behind are lost as well."""

    def launch(self, works: Sequence[Work_contra]) -> Any: ...

    def finish(self, launched: Any) -> list[Outcome]: ...


class LoopMetrics(Protocol):
    """Where the loop notes what it saw."""

    def note_events(self, events: Any) -> None: ...

    def note_step(self, plan: Any, step_seconds: float, host_seconds: float) -> None: ...

    def note_failed_step(self) -> None: ...

    def note_state(self, machine: Any) -> None: ...

    def note_compiles(self, count: int) -> None: ...


class StepClock:
    """How long steps take, and how long the host needs to launch one: when to plan the next.

    Of steps of about as many rows. Where a step had ended before anybody waited for it, its seconds
    are only known to be fewer: then less is believed from then on, and ever less the more such
    steps come in a row, for until then the device idles. So a step that was slow once, as a first
    one or on a busy host may be, is soon forgotten.
    """

    MARGIN_SECONDS = 0.0005
    LATE_SHARE = 0.1  # that is taken off for the first step in a row that had ended
    MOST_OF_KNOWN = 4.0  # a longer step was not the device's doing

    def __init__(self) -> None:
        self._step_seconds: dict[int, float] = {}  # by halvings of the rows
        self._num_late: dict[int, int] = {}  # of the same, in a row
        self._launch_seconds = 0.0

    def note_launch(self, seconds: float) -> None:
        """From the beginning of a plan until the device had it."""
        weight = 1 / 2 if seconds > self._launch_seconds else 1 / 8
        self._launch_seconds += weight * (seconds - self._launch_seconds)

    def note_step(self, num_rows: int, seconds: float, waited_seconds: float) -> None:
        key = num_rows.bit_length()
        known = self._step_seconds.get(key, seconds)
        if waited_seconds < self.MARGIN_SECONDS / 2:
            late = self._num_late[key] = self._num_late.get(key, 0) + 1
            off = min(1.0, self.LATE_SHARE * 2.0 ** min(late - 1, 8))
            self._step_seconds[key] = (1.0 - off) * min(known, seconds)
        else:
            self._num_late[key] = 0
            seconds = min(seconds, self.MOST_OF_KNOWN * known) if known else seconds
            weight = 1 / 2 if seconds < known else 1 / 8
            self._step_seconds[key] = known + weight * (seconds - known)

    def spare_seconds(self, num_rows: int, since: float, now: float) -> float:
        """How long to leave the next step open, beside one of so many rows that began `since`."""
        fewer = [key for key in self._step_seconds if key <= num_rows.bit_length()]
        known = self._step_seconds[max(fewer)] if fewer else 0.0  # more rows take no less
        return since + known - self._launch_seconds - self.MARGIN_SECONDS - now


@dataclass(slots=True, eq=False)
class _Step(Generic[Outcome]):
    """On the engine's thread, which does all in the order it was asked. `launched`: the device has
    it; None where that is no job of its own. `finished`: outcomes and the device's seconds, once
    they are waited for.
    """

    plan: Plan
    begun: float
    launched: Future[Any] | None = None
    finished: Future[tuple[list[Outcome], float]] | None = None

    @property
    def is_refused(self) -> bool:
        """Whether it never ran, as far as that is known."""
        launched = self.launched
        return launched is not None and launched.done() and launched.exception() is not None


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
        ahead_engine: AheadEngine[Work, Outcome] | None = None,
    ) -> None:
        """`ahead_engine`: `engine`, where it may have two steps in flight."""
        self._service = service
        self._logger = get_logger(f"{service}.loop")
        self._machine = machine
        self._engine = engine
        self._ahead_engine = ahead_engine
        self._in_flight = deque[_Step[Outcome]]()
        self._noted_at = 0.0  # when a step was last retired
        self._ended = 0.0  # when the last step did; set on the engine's thread
        self._clock = StepClock()  # for two in flight
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

    def _may_plan_behind(self) -> bool:
        """Whether a step can be planned while one runs."""
        return False

    def _plan_behind(self, now: float) -> Plan | None:
        """That step; None: the next one is planned when the running one has ended."""
        return None

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
            if self._in_flight:
                self._tick(time.monotonic())
            else:
                plan = await self._next_plan()
                self._launch(plan, time.monotonic())
            self._flush()
            await self._launch_behind()
            await self._retire()

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

    def _launch(self, plan: Plan, begun: float) -> None:
        """`begun`: when it was begun to be planned."""
        step = _Step[Outcome](plan, begun)
        if self._ahead_engine is None:
            step.finished = self._thread.submit(self._run, plan.works)
        else:
            step.launched = self._thread.submit(self._begin, self._ahead_engine, plan.works)
        self._in_flight.append(step)
        self._flush(plan.events)

    async def _launch_behind(self) -> None:
        if self._ahead_engine is None or not self._may_plan_behind():
            return
        (before,) = self._in_flight
        now = time.monotonic()
        since = max(before.begun, self._ended)
        spare = self._clock.spare_seconds(before.plan.num_rows, since, now)
        if spare > 0:
            await asyncio.sleep(spare)
        if before.is_refused:
            return
        begun = time.monotonic()
        plan = self._plan_behind(begun)
        if plan is not None and plan.works:
            self._launch(plan, begun)
        elif plan is not None:
            self._flush(plan.events)

    # On the engine's thread.

    def _run(self, works: Sequence[Work]) -> tuple[list[Outcome], float]:
        begun = time.monotonic()
        outcomes = self._engine.run(works)
        return outcomes, time.monotonic() - begun

    @staticmethod
    def _begin(
        engine: AheadEngine[Work, Outcome], works: Sequence[Work]
    ) -> tuple[Any, float, float]:
        begun = time.monotonic()
        return engine.launch(works), begun, time.monotonic()

    def _end(
        self, engine: AheadEngine[Work, Outcome], step: _Step[Outcome]
    ) -> tuple[list[Outcome], float]:
        """The seconds are from the end of the step before, if that still ran when this one was
        launched: from then on the device was this one's.
        """
        assert step.launched is not None
        launched, begun, launched_at = step.launched.result()
        asked = time.monotonic()
        outcomes = engine.finish(launched)
        now = time.monotonic()
        seconds, self._ended = now - max(begun, self._ended), now
        self._clock.note_launch(launched_at - step.begun)
        self._clock.note_step(step.plan.num_rows, seconds, now - asked)
        return outcomes, seconds

    async def _retire(self) -> None:
        """Waits for the oldest step."""
        step = self._in_flight[0]
        if step.finished is None:
            assert self._ahead_engine is not None
            step.finished = self._thread.submit(self._end, self._ahead_engine, step)
        try:
            outcomes, step_seconds = await asyncio.wrap_future(step.finished)
        except GroupLost:
            raise
        except Exception as error:  # whatever the device does, its sequences must learn of it
            self._fail(error)
            return
        self._in_flight.popleft()
        self._failures = 0
        back = time.monotonic()
        works = step.plan.works
        self._finished += self._machine.retire(works, outcomes, back, step_seconds)
        self._after_turn()
        now = time.monotonic()
        host_seconds = now - max(step.begun, self._noted_at) - step_seconds
        self._noted_at = now
        self._metrics.note_step(step.plan, step_seconds, max(0.0, host_seconds))

    def _fail(self, error: Exception) -> None:
        """The oldest step has failed, and those behind it with it unless it never ran."""
        lost = [self._in_flight.popleft()]
        ran = not lost[0].is_refused
        while self._in_flight and (ran or self._in_flight[0].is_refused):
            lost.append(self._in_flight.popleft())
        num_sequences = sum(len(step.plan.works) for step in lost)
        self._logger.exception("a step failed", num_sequences=num_sequences)
        self._metrics.note_failed_step()
        self._failures += 1
        service = self._service
        message = f"the {service} step failed: {type(error).__name__}; open the sequence again"
        for step in lost:
            self._finished += self._machine.fail(step.plan.works, message, time.monotonic())
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
