"""The parts of draft's and verify's messages that are alike: a command's head, errors, states.

A command that cannot be read becomes a `Failed` event of its own sequence; nothing a router sends
ends its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from canopy.v1 import types_pb2
from common.messages import NO_ROUND, Failed
from common.types import DraftTree, ErrorCode, SequenceFailure, SequenceState

SEQUENCE_ID_BYTES = 16


class Head(TypedDict):
    """What every command has."""

    sequence_id: bytes
    epoch: int
    acked_round: int


class CommandMessage(Protocol):
    """DraftCommand or VerifyCommand."""

    @property
    def sequence_id(self) -> bytes: ...

    @property
    def epoch(self) -> int: ...

    @property
    def acked_round(self) -> int: ...

    def HasField(self, field_name: Literal["acked_round"]) -> bool: ...


Message = TypeVar("Message", bound=CommandMessage)
Command = TypeVar("Command")


def decode_commands(
    stream: int, messages: Iterable[Message], decode: Callable[[Message], Command]
) -> tuple[list[Command], list[Failed]]:
    """The commands, and an error for each message that `decode` refused by SequenceFailure."""
    commands: list[Command] = []
    errors: list[Failed] = []
    for message in messages:
        try:
            commands.append(decode(message))
        except SequenceFailure as failure:
            errors.append(Failed.of(stream, message.sequence_id, message.epoch, failure))
    return commands, errors


def head_of(message: CommandMessage) -> Head:
    """Raises SequenceFailure for an id of another length."""
    sequence_id = message.sequence_id
    if len(sequence_id) != SEQUENCE_ID_BYTES:
        raise invalid(f"sequence_id: {len(sequence_id)} bytes; must be {SEQUENCE_ID_BYTES}")
    acked = message.acked_round if message.HasField("acked_round") else NO_ROUND
    return Head(sequence_id=sequence_id, epoch=message.epoch, acked_round=acked)


def unknown_command() -> SequenceFailure:
    return invalid("command: none given, or one that this version does not know")


def invalid(message: str, round_: int = 0) -> SequenceFailure:
    return SequenceFailure(ErrorCode.INVALID, message, round_=round_)


def encode_state(state: SequenceState) -> types_pb2.SequenceState:
    return types_pb2.SequenceState(
        epoch=state.epoch,
        next_round=state.next_round,
        committed_len=state.committed_len,
        kv_len=state.kv_len,
    )


def encode_error(failed: Failed) -> types_pb2.SequenceError:
    code: Any = f"SEQUENCE_ERROR_CODE_{failed.code.name}"
    return types_pb2.SequenceError(
        code=code, message=failed.message, round=failed.round, state=encode_state(failed.state)
    )


def wire_tree(tree: DraftTree) -> types_pb2.DraftTree:
    parents = tree.parents.tolist()
    parents[0] = 0  # means nothing on the wire
    return types_pb2.DraftTree(
        tokens=tree.tokens.tolist(), parents=parents, scores=tree.scores.tolist()
    )
