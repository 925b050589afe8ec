"""Which sequences exist, who owns them, and what is remembered of those that are gone.

Streams come and go; a sequence whose stream went is kept for the grace time, for an Attach, then
freed. A closed id leaves a tombstone for as long, so that a late frame cannot bring it back.
"""

from __future__ import annotations

from collections import OrderedDict

from common.types import ErrorCode, SequenceFailure, SequenceState
from verify_service.limits import VerifyLimits
from verify_service.residency import Residency
from verify_service.sequences import VerifySequence

MAX_TOMBSTONES = 65536
"""Beyond these the oldest tombstone goes before its time: a flood of closes must not cost memory.
"""


class Registry:
    def __init__(self, limits: VerifyLimits, residency: Residency) -> None:
        self._limits = limits
        self._residency = residency
        self._sequences: dict[bytes, VerifySequence] = {}
        self._tombstones: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # epoch, expiry
        self._streams: set[int] = set()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, sequence_id: bytes) -> VerifySequence | None:
        return self._sequences.get(sequence_id)

    def need(self, sequence_id: bytes, round_: int = 0) -> VerifySequence:
        """The sequence, or SequenceFailure CLOSED or UNKNOWN_SEQUENCE."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            return sequence
        epoch = self.tombstone(sequence_id)
        if epoch is not None:
            state = SequenceState(epoch=epoch)
            raise SequenceFailure(ErrorCode.CLOSED, "the sequence was closed", state, round_)
        message = "no such sequence: never opened, expired or lost with a restart; open it again"
        raise SequenceFailure(ErrorCode.UNKNOWN_SEQUENCE, message, round_=round_)

    def add(self, sequence: VerifySequence) -> None:
        self._tombstones.pop(sequence.sequence_id, None)
        self._sequences[sequence.sequence_id] = sequence

    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    @property
    def num_owned(self) -> int:
        """Sequences whose stream is there."""
        return sum(s.orphaned_since is None for s in self._sequences.values())

    def waiting(self) -> list[VerifySequence]:
        """Sequences with a round to run and no slot, oldest first, orphans last."""
        waiting = [s for s in self._sequences.values() if not s.is_resident and s.pending]
        return sorted(waiting, key=lambda s: (s.orphaned_since is not None, s.arrival))

    @property
    def has_ready(self) -> bool:
        return any(s.pending is not None and not s.in_flight for s in self._sequences.values())

    def forget(self, sequence: VerifySequence) -> None:
        """Removes the sequence; what it holds is freed now, or when its step retires."""
        if self._sequences.get(sequence.sequence_id) is sequence:  # not a later life under its id
            del self._sequences[sequence.sequence_id]
        sequence.closed = True
        if not sequence.in_flight:
            self._residency.put_out(sequence)

    def connect(self, stream: int) -> None:
        self._streams.add(stream)

    def disconnect(self, stream: int, now: float) -> None:
        """Its sequences become orphans; of too many, those go that were orphaned first."""
        self._streams.discard(stream)
        for sequence in self._sequences.values():
            if sequence.stream == stream and sequence.orphaned_since is None:
                sequence.orphaned_since = now
        orphans = [s for s in self._sequences.values() if s.orphaned_since is not None]
        surplus = len(orphans) - self._limits.max_open_sequences
        if surplus > 0:
            orphans.sort(key=lambda s: (s.orphaned_since or 0.0, s.arrival))
            for sequence in orphans[:surplus]:
                self.forget(sequence)

    def hand_over(self, sequence: VerifySequence, stream: int, epoch: int, now: float) -> None:
        """Makes `stream` the owner under a new epoch."""
        sequence.stream, sequence.epoch = stream, epoch
        sequence.orphaned_since = None if stream in self._streams else now

    def bury(self, sequence_id: bytes, epoch: int, now: float) -> None:
        """Leaves a tombstone."""
        self._tombstones.pop(sequence_id, None)
        self._tombstones[sequence_id] = (epoch, now + self._limits.grace_seconds)
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def tombstone(self, sequence_id: bytes) -> int | None:
        """The epoch under which the id was closed, while that is remembered."""
        entry = self._tombstones.get(sequence_id)
        return None if entry is None else entry[0]

    def expire(self, now: float) -> list[VerifySequence]:
        """Frees orphans past the grace time and old tombstones; returns the freed."""
        while self._tombstones:
            sequence_id, (_, expiry) = next(iter(self._tombstones.items()))
            if expiry > now:
                break
            del self._tombstones[sequence_id]
        expired = [
            s
            for s in self._sequences.values()
            if s.orphaned_since is not None
            and now - s.orphaned_since >= self._limits.grace_seconds
            and not s.deferred
        ]
        for sequence in expired:
            self.forget(sequence)
        return expired
