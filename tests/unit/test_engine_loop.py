"""The engine loop: the next step runs while what the last one gave is put into frames."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.engine_loop import EngineLoop


@dataclass
class Plan:
    works: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


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
