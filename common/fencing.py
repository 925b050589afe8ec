"""Which sequences a service holds, who owns them, and what fences off frames of an earlier life.

The same for draft and verify. Streams come and go; a sequence whose stream went is kept for the
grace time, for an Attach, then freed. A closed id leaves a tombstone for as long, so that a late
frame cannot bring it back. Pure Python; the clock is an argument.

Epochs, per sequence: a command that takes over (Open, Attach, Rollback) is performed under a
greater epoch, answered with the present state under an equal one, refused under a smaller one.
Every other command must carry exactly the sequence's epoch, on the stream that owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from common.types import ErrorCode, SequenceFailure, SequenceState

MAX_TOMBSTONES = 65536
"""Beyond these the oldest tombstone goes before its time: a flood of closes must not cost
memory.
"""


class Fenced(Protocol):
    """What a sequence must show to be kept in a `Registry`."""

    sequence_id: bytes
    epoch: int
    stream: int  # the owner: its results go there
    arrival: int  # order of Open; lower is older
    closed: bool  # forgotten while in flight: frees what it holds when the step retires
    orphaned_since: float | None  # when its stream went

    @property
    def in_flight(self) -> bool:
        """Whether it is in a launched step."""
        ...

    @property
    def state(self) -> SequenceState: ...


SequenceT = TypeVar("SequenceT", bound=Fenced)


class Registry(Generic[SequenceT]):
    """Sequences by id, tombstones, streams. `free(sequence)` gives back what a sequence holds."""

    def __init__(self, grace_seconds: float, free: Callable[[SequenceT], None]) -> None:
        self._grace_seconds = grace_seconds
        self._free = free
        self._sequences: dict[bytes, SequenceT] = {}
        self._tombstones: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # epoch, expiry
        self._streams: set[int] = set()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceT]:
        return iter(list(self._sequences.values()))

    def get(self, sequence_id: bytes) -> SequenceT | None:
        return self._sequences.get(sequence_id)

    def need(self, sequence_id: bytes, round_: int = 0) -> SequenceT:
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

    def need_owned(self, stream: int, sequence_id: bytes, epoch: int, round_: int = 0) -> SequenceT:
        """The sequence, if the command belongs to its present life; else SequenceFailure."""
        sequence = self.need(sequence_id, round_)
        if epoch > sequence.epoch:
            message = f"epoch: {epoch} was never attached here; attach first"
            raise SequenceFailure(ErrorCode.WRONG_ROUND, message, sequence.state, round_)
        if epoch < sequence.epoch or stream != sequence.stream:
            raise stale(sequence, epoch, round_)
        return sequence

    def add(self, sequence: SequenceT) -> None:
        self._tombstones.pop(sequence.sequence_id, None)
        self._sequences[sequence.sequence_id] = sequence

    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def forget(self, sequence: SequenceT) -> None:
        """Removes the sequence; what it holds is freed now, or when the step that holds it
        retires.
        """
        if self._sequences.get(sequence.sequence_id) is sequence:  # not a later life under its id
            del self._sequences[sequence.sequence_id]
        sequence.closed = True
        if not sequence.in_flight:
            self._free(sequence)

    def connect(self, stream: int) -> None:
        self._streams.add(stream)

    def disconnect(self, stream: int, now: float) -> None:
        self._streams.discard(stream)
        for sequence in self._sequences.values():
            if sequence.stream == stream and sequence.orphaned_since is None:
                sequence.orphaned_since = now

    def hand_over(self, sequence: SequenceT, stream: int, epoch: int, now: float) -> None:
        """Makes `stream` the owner under a new epoch."""
        sequence.stream, sequence.epoch = stream, epoch
        sequence.orphaned_since = None if stream in self._streams else now

    def bury(self, sequence_id: bytes, epoch: int, now: float) -> None:
        """Leaves a tombstone."""
        self._tombstones.pop(sequence_id, None)
        self._tombstones[sequence_id] = (epoch, now + self._grace_seconds)
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def tombstone(self, sequence_id: bytes) -> int | None:
        """The epoch under which the id was closed, while that is remembered."""
        entry = self._tombstones.get(sequence_id)
        return None if entry is None else entry[0]

    def expire(self, now: float) -> list[SequenceT]:
        """Frees orphans past the grace time and old tombstones; returns the freed."""
        while self._tombstones:
            sequence_id, (_, expiry) = next(iter(self._tombstones.items()))
            if expiry > now:
                break
            del self._tombstones[sequence_id]
        expired = [s for s in self._sequences.values() if self._is_expired(s, now)]
        for sequence in expired:
            self.forget(sequence)
        return expired

    def _is_expired(self, sequence: SequenceT, now: float) -> bool:
        since = sequence.orphaned_since
        return (
            since is not None and now - since >= self._grace_seconds and not self._keeps(sequence)
        )

    def _keeps(self, sequence: SequenceT) -> bool:
        """Whether an orphan past its time still has something to wait for."""
        return sequence.in_flight


def is_new_epoch(sequence: Fenced, epoch: int, round_: int = 0) -> bool:
    """Of a command that takes over. Greater: True. Equal: False, nothing to do. Smaller: raises
    SequenceFailure STALE_EPOCH.
    """
    if epoch < sequence.epoch:
        raise stale(sequence, epoch, round_)
    return epoch > sequence.epoch


def stale(sequence: Fenced, epoch: int, round_: int = 0) -> SequenceFailure:
    """The refusal of a frame of an earlier life, or of another stream."""
    message = (
        f"epoch: {epoch} is of an earlier life of the link, or of another stream;"
        f" the sequence is at {sequence.epoch}"
    )
    return SequenceFailure(ErrorCode.STALE_EPOCH, message, sequence.state, round_)
