"""The engine loop: the next step runs while what the last one gave is put into frames."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.engine_loop import EngineLoop, StepClock


@dataclass
class Plan:
    works: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    num_rows: int = 1


class Machine:
    """Has three steps to do."""

    num_sequences = 1

    def __init__(self) -> None:
        self._next = 0

    def plan(self, now: float) -> Plan:
        self._next += 1
        return Plan([self._next] if self._next <= 3 else [])

    def retire(self, works: Sequence[int], *_: Any) -> list[str]:
        return [f"done {work}" for work in works]

    def tick(self, now: float) -> None: ...


class Metrics:
    def note_events(self, events: Any) -> None: ...

    def note_step(self, plan: Any, step_seconds: float, host_seconds: float) -> None: ...

    def note_failed_step(self) -> None: ...

    def note_state(self, machine: Any) -> None: ...

    def note_compiles(self, count: int) -> None: ...


class Loop(EngineLoop[int, None, str]):
    def _wait_until(self, now: float, deadline: float) -> float:
        return now


async def test_a_step_runs_while_the_last_ones_events_are_delivered() -> None:
    """Each waits for the other: neither goes on unless both are under way."""
    begun = {step: threading.Event() for step in (1, 2, 3)}
    delivered = {f"done {step}": threading.Event() for step in (1, 2, 3)}
    seen: list[bool] = []

    class Engine:
        def run(self, works: Sequence[int]) -> list[None]:
            (step,) = works
            begun[step].set()
            if step > 1:
                seen.append(delivered[f"done {step - 1}"].wait(20))
            return [None]

    def deliver(events: Sequence[str]) -> None:
        (event,) = events
        step = int(event.split()[1])
        if step < 3:
            seen.append(begun[step + 1].wait(20))
        delivered[event].set()

    loop = Loop("draft", Machine(), Engine(), deliver, Metrics(), 0.0)  # type: ignore[arg-type]
    running = asyncio.create_task(loop.run())
    assert await asyncio.to_thread(delivered["done 3"].wait, 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    loop.stop()
    assert seen == [True] * 4


class AheadEngine:
    """Two steps in flight. `failing`: (what fails, the step)."""

    def __init__(self, failing: tuple[str, int] = ("", 0)) -> None:
        self.calls: list[str] = []
        self._failing = failing

    def _do(self, what: str, step: int) -> None:
        self.calls.append(f"{what} {step}")
        if (what, step) == self._failing:
            raise RuntimeError("the device is gone")

    def run(self, works: Sequence[int]) -> list[None]:
        raise AssertionError("it is given steps one by one")

    def launch(self, works: Sequence[int]) -> int:
        (step,) = works
        self._do("launch", step)
        return step

    def finish(self, launched: int) -> list[None]:
        self._do("finish", launched)
        return [None]


class AheadMachine(Machine):
    """Everything follows everything."""

    def fail(self, works: Sequence[int], message: str, now: float) -> list[str]:
        return [f"failed {work}" for work in works]


class AheadLoop(Loop):
    def _may_plan_behind(self) -> bool:
        return len(self._in_flight) == 1

    def _plan_behind(self, now: float) -> Plan | None:
        return self._machine.plan(now)


async def run_ahead(engine: AheadEngine, last: str) -> list[str]:
    """What was delivered, up to `last`."""
    delivered: list[str] = []
    ended = asyncio.Event()

    def deliver(events: Sequence[str]) -> None:
        delivered.extend(events)
        if last in events:
            ended.set()

    machine: Any = AheadMachine()
    metrics: Any = Metrics()
    loop = AheadLoop("verify", machine, engine, deliver, metrics, 0.0, engine)
    running = asyncio.create_task(loop.run())
    async with asyncio.timeout(20):
        await ended.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    loop.stop()
    return delivered


async def test_a_step_is_launched_before_the_last_has_ended() -> None:
    engine = AheadEngine()
    assert await run_ahead(engine, "done 3") == ["done 1", "done 2", "done 3"]
    assert engine.calls == [
        "launch 1", "launch 2", "finish 1", "launch 3", "finish 2", "finish 3"
    ]  # fmt: skip


async def test_a_step_that_fails_takes_the_one_behind_it_along() -> None:
    engine = AheadEngine(("finish", 1))
    assert await run_ahead(engine, "done 3") == ["failed 1", "failed 2", "done 3"]
    assert "finish 2" not in engine.calls


async def test_a_step_that_is_refused_fails_alone_and_none_is_launched_behind_it() -> None:
    engine = AheadEngine(("launch", 2))
    assert await run_ahead(engine, "done 3") == ["done 1", "failed 2", "done 3"]
    assert engine.calls == ["launch 1", "launch 2", "finish 1", "launch 3", "finish 3"]


def test_the_step_behind_is_left_open_until_just_before_the_first_ends() -> None:
    clock = StepClock()
    assert clock.spare_seconds(8, since=10.0, now=10.0) < 0, "nothing is known"
    clock.note_launch(0.004)  # counts by half: the first
    clock.note_step(8, 0.030, waited_seconds=0.020)
    spare = clock.spare_seconds(8, since=10.0, now=10.001)
    assert spare == pytest.approx(0.030 - 0.002 - clock.MARGIN_SECONDS - 0.001)
    assert clock.spare_seconds(100, 10.0, 10.001) == pytest.approx(spare), "more rows, no less"
    assert clock.spare_seconds(1, 10.0, 10.0) < 0
    # It had ended when it was looked at: how much earlier, nobody knows.
    clock.note_step(8, 0.032, waited_seconds=0.0)
    assert clock.spare_seconds(8, 10.0, 10.001) < spare - 0.002


def idle_after(clock: StepClock, step_seconds: list[float]) -> float:
    """What the device idles in all, if each step's successor is planned when the clock says."""
    idle = 0.0
    for seconds in step_seconds:
        planned = max(0.0, clock.spare_seconds(8, 0.0, 0.0))
        found = max(seconds, planned)
        clock.note_step(8, found, waited_seconds=found - planned)
        idle += found - seconds
    return idle


def test_one_slow_step_is_soon_forgotten() -> None:
    calm = [0.010] * 60
    assert idle_after(StepClock(), [1.0, *calm]) < 3.5, "a first one, with nothing to compare"
    clock = StepClock()
    assert idle_after(clock, calm) == 0.0
    assert idle_after(clock, [10.0, *calm]) < 0.010
    assert clock.spare_seconds(8, 0.0, 0.0) > 0.005, "what steps take is known as before"
