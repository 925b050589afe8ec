"""What the router says to verify and draft, and hears from them: plain frozen values.

`codec.py` is where they meet protobuf. Every one names its sequence and the link epoch. Those of
every round are named tuples: a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from common.tracing import UNTRACED, Trace
from common.types import (
    Drafting,
    ErrorCode,
    SamplingParams,
    SequenceState,
    TopLogprobs,
    TreeShape,
)
from router.trees import Tree


@dataclass(frozen=True, slots=True)
class _Addressed:
    sequence_id: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class _Command(_Addressed):
    """`acked_round`: the last round whose answer the router has; None: none yet."""

    acked_round: int | None


@dataclass(frozen=True, slots=True)
class VerifyOpen(_Command):
    """`fork_of`: the sequence of the request's first choice, whose prompt's pages may be shared."""

    tokens: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: Sequence[int]
    max_total_tokens: int
    round: int
    wants_features: bool
    cache_salt: bytes = b""
    prompt_logprobs: int | None = None
    choice_index: int = 0
    fork_of: bytes | None = None
    trace: Trace = UNTRACED
    runs_on: bool = True
    draft_ahead: bool = False


@dataclass(frozen=True, slots=True)
class VerifyAttach(_Command):
    """`features_from` None: only features of results that are sent again."""

    features_from: int | None


class VerifyTree(NamedTuple):
    sequence_id: bytes
    epoch: int
    acked_round: int | None
    round: int
    kv_len: int
    tree: Tree


@dataclass(frozen=True, slots=True)
class VerifyTreeAhead(_Command):
    """A tree for rounds to come, rooted at position `kv_len`, where `round` was rooted. `most`:
    what one of them may take.
    """

    round: int
    kv_len: int
    tree: Tree
    most: TreeShape


@dataclass(frozen=True, slots=True)
class VerifyAcknowledge(_Command):
    """Further results may come."""


@dataclass(frozen=True, slots=True)
class Rollback(_Command):
    """Cuts to `committed_len` tokens; `round` is the next. To either service."""

    committed_len: int
    round: int


@dataclass(frozen=True, slots=True)
class Close(_Command):
    """To either service."""


@dataclass(frozen=True, slots=True)
class DraftOpen(_Command):
    tokens: Sequence[int]
    sampling: SamplingParams
    tree: TreeShape
    max_total_tokens: int
    features_from: int
    cache_salt: bytes = b""
    choice_index: int = 0
    trace: Trace = UNTRACED


@dataclass(frozen=True, slots=True)
class DraftAttach(_Command):
    pass


class DraftExtend(NamedTuple):
    """`tree`: at most so much; None: the shape of Open. `ahead`: nobody waits for it.
    `verified_ahead`: where the tree ahead was rooted that verify's last round had nodes of.
    """

    sequence_id: bytes
    epoch: int
    acked_round: int | None
    round: int
    base_len: int
    tokens: Sequence[int]
    tree: TreeShape | None = None
    ahead: bool = False
    verified_ahead: int | None = None


VerifyCommand: TypeAlias = (
    VerifyOpen | VerifyAttach | VerifyTree | VerifyTreeAhead | VerifyAcknowledge | Rollback | Close
)
DraftCommand: TypeAlias = DraftOpen | DraftAttach | DraftExtend | Rollback | Close


@dataclass(frozen=True, slots=True)
class StateReport(_Addressed):
    """Answers Open, Attach and Rollback."""

    state: SequenceState


@dataclass(frozen=True, slots=True)
class SequenceFailed(_Addressed):
    """A command failed. `epoch` is the command's, `state.epoch` the sequence's."""

    code: ErrorCode
    message: str
    round: int
    state: SequenceState


class VerifiedAhead(NamedTuple):
    """`kv_len`: where the tree ahead was rooted. `tree`: verified, rooted at the round's root."""

    kv_len: int
    tree: Tree


class RoundResult(NamedTuple):
    """`tokens[i]` stands at position kv_len + 1 + i; the last is the bonus. `logprobs` and
    `top_logprobs` have one entry per token where they were asked for, else none. `drafting`:
    verify's advice for the next rounds. `next_begun`: the next one runs already. `ahead`: what was
    verified of a tree ahead.
    `num_cached_tokens`: found computed at the Open that this round rode on; with that
    comes `prompt_logprobs`, from the second token on, where asked for.
    """

    sequence_id: bytes
    epoch: int
    round: int
    kv_len: int
    tokens: Sequence[int]
    pick_margins: Sequence[float]
    num_nodes: int
    accepted_nodes: Sequence[int]
    step_seconds: float
    queue_seconds: float
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    drafting: Drafting = Drafting.SYNCHRONOUS
    next_begun: bool = False
    ahead: VerifiedAhead | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[float] = ()
    prompt_top_logprobs: Sequence[TopLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Preempted(_Addressed):
    """Verify ran out of pages; the pending round still runs, later."""


class TreeReady(NamedTuple):
    sequence_id: bytes
    epoch: int
    round: int
    committed_len: int
    tree: Tree
    step_seconds: float
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class Evicted(_Addressed):
    """The draft ran out of pages: it knows the sequence no more."""


VerifyEvent: TypeAlias = StateReport | SequenceFailed | RoundResult | Preempted
DraftEvent: TypeAlias = StateReport | SequenceFailed | TreeReady | Evicted
