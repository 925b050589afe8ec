"""A sequence's part of a step: planned, launched, and the result of its round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.types import Drafting, Int32Array
from verify_service.events import RoundResult, VerifiedAhead
from verify_service.follow_up import FollowUp
from verify_service.following import FollowingRound
from verify_service.sequences import NOT_AHEAD, PendingRound, VerifySequence
from verify_service.step import SequenceOutcome, SequenceWork


@dataclass(slots=True)
class Block:
    """While a step is planned.

    `first`: position of its first row. `round`: what it verifies; None: a prefill chunk that is not
    the last. Behind a block that runs: `before` is that one; `following` and `follow_up` say what
    of a round whose root is not known yet.
    """

    sequence: VerifySequence
    num_causal: int
    first: int
    round: PendingRound | None = None
    before: Launched | None = None
    following: FollowingRound | None = None
    follow_up: FollowUp | None = None

    @property
    def work(self) -> SequenceWork:
        if self.follow_up is None:
            return _work(self)
        assert self.before is not None
        sequence = self.sequence
        pages = np.array(sequence.pages, np.int32)
        return self.before.work.followed_by(self.follow_up, sequence.committed_len - 1, pages)


@dataclass(slots=True, eq=False)
class Launched:
    """Until its step is retired. `round`: as cut for this step; None for a prefill chunk that is
    not the last, and for a round that follows one that has not ended. `is_void`: such a round, the
    one before having ended the sequence: whatever comes of it is thrown away.
    """

    sequence: VerifySequence
    work: SequenceWork
    step: int
    at: float
    round: PendingRound | None
    following: FollowingRound | None = None
    is_void: bool = False

    @property
    def is_chunk(self) -> bool:
        """Whether all that it commits is known before it has ended."""
        return self.round is None and self.following is None


def _work(block: Block) -> SequenceWork:
    sequence, num_causal, first = block.sequence, block.num_causal, block.first
    causal = sequence.tokens[first : first + num_causal]
    parents = np.arange(-1, num_causal - 1, dtype=np.int32)
    tokens = np.array(causal, np.int32)
    if block.round is not None and block.round.tree.num_nodes > 1:
        tree = block.round.tree
        tokens = np.concatenate([tokens, tree.tokens[1:]])
        # Node i is row num_causal - 1 + i of the block; the root, node 0, is its last causal row.
        parents = np.concatenate([parents, tree.parents[1:] + np.int32(num_causal - 1)])
    return SequenceWork(
        slot=sequence.slot,
        tokens=tokens,
        parents=parents,
        num_causal=num_causal,
        samples=block.round is not None,
        kv_len=first,
        page_ids=np.array(sequence.pages, np.int32),
        page_copy=sequence.copy if block.before is None else None,  # else it was made by that one
        sampling=sequence.sampling,
        stop_tokens=() if sequence.sampling.ignore_eos else sequence.stop_tokens,
        wants_features=sequence.wants_features,
        history=sequence.history,
        scored=_scored(sequence, num_causal, block.round is not None),
    )


def _scored(sequence: VerifySequence, num_causal: int, samples: bool) -> Int32Array:
    """The prompt's tokens that follow the block's causal rows below the root."""
    if not sequence.scores_prompt:
        return np.zeros(0, np.int32)
    first = sequence.kv_len + 1
    end = min(first + num_causal - samples, sequence.num_prompt_tokens)
    return np.array(sequence.tokens[first:end], np.int32)


def result_of(
    launched: Launched,
    round_: PendingRound,
    outcome: SequenceOutcome,
    step_seconds: float,
    drafting: Drafting,
) -> RoundResult:
    """`round_`: what `launched` verified."""
    wants_logprobs = launched.work.sampling.logprobs
    told = launched.sequence.has_told_prompt
    is_ahead = round_.ahead_from != NOT_AHEAD and round_.tree.num_nodes > 1
    return RoundResult(
        round=round_.round,
        kv_len=launched.sequence.committed_len - 1,
        tokens=tuple(outcome.tokens.tolist()),
        margins=tuple(outcome.margins.tolist()),
        logprobs=tuple(outcome.logprobs.tolist()) if wants_logprobs else (),
        top_logprobs=outcome.top_logprobs,
        accepted_nodes=_sent_nodes(round_, outcome.accepted_nodes, is_ahead),
        num_nodes=round_.tree.num_nodes,
        step_seconds=step_seconds,
        queue_seconds=max(0.0, launched.at - round_.since),
        drafting=drafting,
        ahead=VerifiedAhead(round_.ahead_from, round_.tree) if is_ahead else None,
        num_cached_tokens=launched.sequence.num_found,
        prompt_logprobs=() if told else tuple(launched.sequence.prompt_logprobs),
        prompt_top_logprobs=() if told else tuple(launched.sequence.prompt_top_logprobs),
    )


def _sent_nodes(round_: PendingRound, nodes: Int32Array, is_ahead: bool) -> tuple[int, ...]:
    """Of a tree ahead it is told what was verified; of a router's own tree, its nodes."""
    return tuple((nodes if is_ahead else round_.nodes[nodes]).tolist())
