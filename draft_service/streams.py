"""Who is connected: command streams with their outboxes, feature senders with their credit.

Credit is shared memory: what all senders may still send and what waits in the machine together stay
within `max_bytes`, give or take a piece, so that senders that run ahead stop instead of filling the
host.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from common.outbox import Outboxes
from common.tensors import MAX_PIECE_BYTES
from draft_service.events import Event

WINDOW_BYTES = 4 << 20
"""Credit that one sender has at most."""


@dataclass(eq=False)
class FeatureSender:
    """One SendFeatures stream."""

    outstanding_bytes: int = 0  # granted and not yet received
    to_grant_bytes: int = 0  # granted and not yet told
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False

    def end(self) -> None:
        self.ended = True
        self.wake.set()


class StreamHub(Outboxes[Event]):
    """The outboxes, and the credit that is shared out."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._senders: list[FeatureSender] = []

    def close_all(self) -> None:
        super().close_all()
        for sender in self._senders:
            sender.end()

    def add_sender(self) -> FeatureSender:
        sender = FeatureSender()
        self._senders.append(sender)
        return sender

    def remove_sender(self, sender: FeatureSender) -> None:
        self._senders.remove(sender)

    def share_credit(self, waiting_bytes: int) -> None:
        """Grants what `waiting_bytes` in the machine leave room for."""
        on_the_way = sum(max(0, sender.outstanding_bytes) for sender in self._senders)
        room = self._max_bytes - waiting_bytes - on_the_way
        for sender in self._senders:
            grant = min(WINDOW_BYTES - sender.outstanding_bytes, room)
            if sender.outstanding_bytes <= 0 and waiting_bytes < self._max_bytes:
                # Nobody is shut out by what others were granted and do not use.
                grant = max(grant, MAX_PIECE_BYTES)
            if grant >= MAX_PIECE_BYTES or (grant > 0 and sender.outstanding_bytes <= 0):
                room -= grant
                sender.outstanding_bytes += grant
                sender.to_grant_bytes += grant
                sender.wake.set()
