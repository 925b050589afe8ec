"""What the verify machine says, as plain frozen values. `codec.py` puts them on the wire.

Every event names the stream it goes to: results to the owner of the sequence, errors and answers to
whoever asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from common.messages import BaseEvent
from common.messages import Closed as Closed
from common.messages import Failed as Failed
from common.messages import StateReport as StateReport
from common.types import Drafting, DraftTree, TopLogprobs


@dataclass(frozen=True, slots=True)
class VerifiedAhead:
    """`kv_len`: where the tree ahead was rooted. `tree`: verified, rooted at the round's root."""

    kv_len: int
    tree: DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What one round emitted; kept until it is acknowledged.

    `kv_len`: before the round, so that `tokens[i]` stands at position kv_len + 1 + i. `tokens`: the
    accepted path and the bonus. `margins`: one per token; so `logprobs` and `top_logprobs`, where
    asked for. `accepted_nodes`: indices into the tree as the router sent it, or into `ahead`'s.
    `num_nodes`: verified, root included. `drafting`: advice for the next rounds. `next_begun`: the
    next round runs already. `ahead`: what was verified of a tree ahead.
    `num_cached_tokens`: of the first result since Open, tokens whose rows were found;
    with it go the prompt's log-probabilities.
    """

    round: int
    kv_len: int
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    logprobs: tuple[float, ...] = ()
    accepted_nodes: tuple[int, ...] = ()
    num_nodes: int = 1
    step_seconds: float = 0.0
    queue_seconds: float = 0.0
    top_logprobs: tuple[TopLogprobs, ...] = ()
    drafting: Drafting = Drafting.SYNCHRONOUS
    next_begun: bool = False
    ahead: VerifiedAhead | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone(BaseEvent):
    """`traceparent`: of the request, if it is traced; an answer from store has none."""

    result: RoundResult
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(BaseEvent):
    """Put out for want of pages or a slot; recomputed later, and the pending round still runs."""


Event: TypeAlias = StateReport | RoundDone | Failed | Preempted | Closed
