"""Events on their way to one stream, bounded: a reader that does not read ends its own stream."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

EventT = TypeVar("EventT")

MAX_EVENTS = 8192
MAX_FRAME_EVENTS = 256


class Outbox(Generic[EventT]):
    """All methods run on the event loop's thread."""

    def __init__(self) -> None:
        self._events: list[EventT] = []
        self._filled = asyncio.Event()
        self._closed = False
        self.overflowed = False

    def put(self, event: EventT) -> None:
        """Dropped once the outbox is closed; beyond MAX_EVENTS it closes itself."""
        if self._closed:
            return
        if len(self._events) >= MAX_EVENTS:
            self.overflowed = True
            self.close()
            return
        self._events.append(event)
        self._filled.set()

    def close(self) -> None:
        """What is in it still goes out."""
        self._closed = True
        self._filled.set()

    async def take(self) -> list[EventT]:
        """The events of the next frame; empty when the outbox is closed and nothing is left."""
        await self._filled.wait()
        events, self._events = self._events[:MAX_FRAME_EVENTS], self._events[MAX_FRAME_EVENTS:]
        if not self._events and not self._closed:
            self._filled.clear()
        return events
