"""What a router can ask of the verify machine, as plain frozen values. `codec.py` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from common.messages import NO_ROUND as NO_ROUND
from common.messages import BaseCommand
from common.messages import Close as Close
from common.messages import Rollback as Rollback
from common.tracing import UNTRACED, Trace
from common.types import DraftTree, SamplingParams, TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(BaseCommand):
    """Begins a sequence, or re-begins it after a loss, with all its tokens so far.

    `tokens`: prompt and what was emitted before, at least one. `round`: the round that rides on the
    prefill's last chunk. `stop_tokens`: where the walk stops. `max_total_tokens`: never more than
    these. `cache_salt`: pages are shared among sequences with the same. `fork_of`: the first choice
    of the same request, whose rows of tokens that both begin with are taken over. `runs_on`: the
    next round may be begun here where none is to be waited for. `draft_ahead`: trees ahead can
    come.
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_total_tokens: int
    stop_tokens: tuple[int, ...] = ()
    round: int = 0
    wants_features: bool = False
    cache_salt: bytes = b""
    fork_of: bytes = b""
    trace: Trace = UNTRACED
    runs_on: bool = False
    draft_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(BaseCommand):
    """Takes the sequence over after a reconnect. `features_from` None: of replayed results."""

    features_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTree(BaseCommand):
    """One round. `kv_len`: where the root's KV row goes."""

    round: int
    kv_len: int
    tree: DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFeatures(BaseCommand):
    """Sends features again from `position`, or from the oldest row still held."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAhead(BaseCommand):
    """A tree for rounds to come, rooted at position `kv_len`, where `round` was, or is, rooted.
    `most`: what one round may take of it; None: whatever verify takes.
    """

    round: int
    kv_len: int
    tree: DraftTree
    most: TreeShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge(BaseCommand):
    """Nothing but its `acked_round`."""


Command: TypeAlias = (
    Open | Attach | VerifyTree | TreeAhead | Acknowledge | Rollback | Close | ReplayFeatures
)
