"""The commands and events that both engine machines know, as plain frozen values: what a router can
ask of a sequence, and what is said of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from common.types import ErrorCode, SequenceFailure, SequenceState

NO_ROUND = -1
"""`acked_round` when nothing is acknowledged yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCommand:
    """`epoch`: the link epoch. `acked_round`: the last round of which the router has the result (of
    verify) or has or gave up the tree (of draft).
    """

    sequence_id: bytes
    epoch: int
    acked_round: int = NO_ROUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback(BaseCommand):
    """Cuts to `committed_len` tokens; `round` is the next one."""

    committed_len: int
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(BaseCommand):
    """Ends the sequence and frees what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEvent:
    """`stream`: the one it goes to, of the sequence's owner or of whoever asked."""

    stream: int
    sequence_id: bytes
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport(BaseEvent):
    """Answers Open, Attach and Rollback."""

    state: SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(BaseEvent):
    """One command, or one block of features, failed. `epoch` is the command's; `state.epoch` the
    sequence's.
    """

    code: ErrorCode
    message: str
    round: int
    state: SequenceState

    @classmethod
    def of(cls, stream: int, sequence_id: bytes, epoch: int, failure: SequenceFailure) -> Self:
        return cls(
            stream=stream, sequence_id=sequence_id, epoch=epoch, code=failure.code,
            message=failure.message, round=failure.round, state=failure.state,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(BaseEvent):
    pass
