"""Who is connected: command streams with their outboxes, feature receivers with their credit.

A router's two streams meet by their link id. Everything is bounded: an outbox that its router does
not read ends the stream, features wait in the machine's windows until credit pulls them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.outbox import Outbox, Outboxes
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


class StreamHub(Outboxes[Event]):
    """The outboxes, and the receivers of features."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """`tracing`: gets a span for each round that was run for a traced request."""
        super().__init__()
        self._tracing = tracing or Tracing()
        self._stream_of_link: dict[str, int] = {}  # the newest
        self._receivers: dict[str, FeatureReceiver] = {}

    def open(self, link_id: str) -> tuple[int, Outbox[Event]]:
        stream, outbox = self.open_outbox()
        self._stream_of_link[link_id] = stream
        return stream, outbox

    def close(self, stream: int, link_id: str) -> None:
        self.close_outbox(stream)
        if self._stream_of_link.get(link_id) == stream:
            del self._stream_of_link[link_id]

    def close_all(self) -> None:
        super().close_all()
        for receiver in self._receivers.values():
            receiver.end()

    def deliver(self, events: Sequence[Event]) -> None:
        if self._tracing.on:
            self._note_rounds(events)
        super().deliver(events)

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
