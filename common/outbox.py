"""Events on their way to streams, bounded: a reader that does not read ends its own stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


class Addressed(Protocol):
    """An event that names its stream."""

    @property
    def stream(self) -> int: ...


EventT = TypeVar("EventT", bound=Addressed)

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


class Outboxes(Generic[EventT]):
    """Numbers the command streams and finds their outboxes."""

    def __init__(self) -> None:
        self._outboxes: dict[int, Outbox[EventT]] = {}
        self._num_streams = 0

    def open_outbox(self) -> tuple[int, Outbox[EventT]]:
        self._num_streams += 1
        outbox = self._outboxes[self._num_streams] = Outbox[EventT]()
        return self._num_streams, outbox

    def close_outbox(self, stream: int) -> None:
        del self._outboxes[stream]

    def deliver(self, events: Sequence[EventT]) -> None:
        """Events of streams that are gone are dropped: an Attach has them sent again."""
        for event in events:
            outbox = self._outboxes.get(event.stream)
            if outbox is not None:
                outbox.put(event)

    def close_all(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()


@contextlib.asynccontextmanager
async def beside(
    reader: Coroutine[Any, Any, None], context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncIterator[None]:
    """Runs `reader` of a call's requests as a task while the block lasts.

    Bytes that are no request end the call with INVALID_ARGUMENT.
    """
    task = asyncio.create_task(reader)
    try:
        yield
    finally:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except DecodeError:
            message = "a frame is no message of this stream; use the stubs of protos/canopy/v1"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
