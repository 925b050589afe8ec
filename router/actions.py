"""What the generation machine asks of the world around it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from common.types import TopLogprobs
from router.errors import Failure
from router.messages import DraftCommand, VerifyCommand
from router.trees import Tree


class FinishReason(enum.Enum):
    STOP = enum.auto()  # a stop token or a stop string
    LENGTH = enum.auto()  # max_tokens, or the end of the context
    ABORTED = enum.auto()


@dataclass(frozen=True, slots=True)
class ToVerify:
    command: VerifyCommand


@dataclass(frozen=True, slots=True)
class ToDraft:
    command: DraftCommand


@dataclass(frozen=True, slots=True)
class ReleaseFeatures:
    """The draft is open: blocks held for it may go, under this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round as it happened: the nodes that verify used, and what became of them."""

    round: int
    tree: Tree
    accepted_nodes: Sequence[int]
    bonus_token: int
    draft_seconds: float
    verify_seconds: float


class Emitted(NamedTuple):
    """Tokens that are final, and the text that they made final."""

    tokens: Sequence[int]
    text: str
    pick_margins: Sequence[float]
    trace: RoundTrace | None
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    prompt_logprobs: Sequence[float] = ()
    prompt_top_logprobs: Sequence[TopLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation is over. At most one of the two stops is set; the token 0 is a token."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The generation cannot go on."""

    failure: Failure


Action: TypeAlias = ToVerify | ToDraft | ReleaseFeatures | Emitted | Finished | Failed
