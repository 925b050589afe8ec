"""Who is connected: command streams with their outboxes, feature receivers with their credit.

A router's two streams meet by their link id. Everything is bounded: an outbox that its router does
not read ends the stream, features wait in the machine's windows until credit pulls them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.outbox import Outbox
from common.tracing import Tracing
from verify_service.events import Event, RoundDone


@dataclass(eq=False)
class FeatureReceiver:
    """One ReceiveFeatures stream."""

    credit_bytes: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False

    def grant(self, num_bytes: int) -> None:
        self.credit_bytes += num_bytes
        self.wake.set()

    def end(self) -> None:
        self.ended = True
        self.wake.set()


class StreamHub:
    """Numbers the streams and finds outboxes and receivers."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """`tracing`: gets a span for each round that was run for a traced request."""
        self._tracing = tracing or Tracing()
        self._outboxes: dict[int, Outbox[Event]] = {}
        self._stream_of_link: dict[str, int] = {}  # the newest
        self._receivers: dict[str, FeatureReceiver] = {}
        self._num_streams = 0

    def open(self, link_id: str) -> tuple[int, Outbox[Event]]:
        self._num_streams += 1
        stream = self._num_streams
        self._outboxes[stream] = Outbox[Event]()
        self._stream_of_link[link_id] = stream
        return stream, self._outboxes[stream]

    def close(self, stream: int, link_id: str) -> None:
        del self._outboxes[stream]
        if self._stream_of_link.get(link_id) == stream:
            del self._stream_of_link[link_id]

    def close_all(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()
        for receiver in self._receivers.values():
            receiver.end()

    def deliver(self, events: Sequence[Event]) -> None:
        """Events of streams that are gone are dropped: an Attach has results sent again."""
        if self._tracing.on:
            self._note_rounds(events)
        for event in events:
            outbox = self._outboxes.get(event.stream)
            if outbox is not None:
                outbox.put(event)

    def _note_rounds(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RoundDone) and event.traceparent:
                result = event.result
                self._tracing.note(
                    "canopy.verify.step",
                    event.traceparent,
                    result.step_seconds,
                    {
                        "canopy.round": result.round,
                        "canopy.num_nodes": result.num_nodes,
                        "canopy.num_emitted": len(result.tokens),
                        "canopy.queue_seconds": result.queue_seconds,
                    },
                )

    def stream_of(self, link_id: str) -> int | None:
        return self._stream_of_link.get(link_id)

    def add_receiver(self, link_id: str) -> FeatureReceiver:
        """The link's receiver from now on; an older one ends."""
        older = self._receivers.get(link_id)
        if older is not None:
            older.end()
        receiver = self._receivers[link_id] = FeatureReceiver()
        return receiver

    def remove_receiver(self, link_id: str, receiver: FeatureReceiver) -> None:
        if self._receivers.get(link_id) is receiver:
            del self._receivers[link_id]

    def wake_receivers(self) -> None:
        for receiver in self._receivers.values():
            receiver.wake.set()
