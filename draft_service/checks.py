"""What a command must satisfy before the machine acts on it. Every refusal is a SequenceFailure."""

from __future__ import annotations

from collections.abc import Sequence

from common.tensors import is_finite
from common.types import ErrorCode, FeatureRows, SequenceFailure, TreeShape
from draft_service.commands import Extend, Open, Rollback
from draft_service.limits import DraftLimits
from draft_service.sequences import DraftSequence


def check_open(command: Open, limits: DraftLimits) -> None:
    """INVALID for malformed values, NEVER_FITS if the pool could not hold the sequence alone."""
    num_tokens = len(command.tokens)
    if not num_tokens:
        raise _invalid("tokens: empty; send all committed tokens, at least one")
    _check_tokens(command.tokens, limits)
    if not num_tokens <= command.max_total_tokens <= limits.max_context_len:
        raise _invalid(
            f"max_total_tokens: {command.max_total_tokens} is outside [{num_tokens},"
            f" {limits.max_context_len}]; it must hold the tokens sent and stay within the context"
        )
    if not 0.0 <= command.temperature <= 100.0:  # also refuses NaN
        raise _invalid(f"sampling.temperature: {command.temperature} is outside [0, 100]")
    if not 0 <= command.features_from <= num_tokens:
        raise _invalid(
            f"features_from: {command.features_from} is outside [0, {num_tokens}], the tokens sent"
        )
    # The last two tokens of a sequence never make a pair that a tree could stand on.
    pages = limits.pages_for(max(1, command.max_total_tokens - command.features_from - 1))
    if pages > limits.num_pages:
        message = (
            f"max_total_tokens: {command.max_total_tokens} tokens need {pages} KV pages, the pool"
            f" has {limits.num_pages}; ask for fewer tokens, or begin features later"
        )
        raise SequenceFailure(ErrorCode.NEVER_FITS, message)


def check_extend(command: Extend, sequence: DraftSequence, limits: DraftLimits) -> None:
    """WRONG_ROUND where round or lengths do not fit the sequence, INVALID for malformed tokens."""

    def wrong(message: str) -> SequenceFailure:
        return SequenceFailure(ErrorCode.WRONG_ROUND, message, sequence.state, command.round)

    if command.round < sequence.next_round:
        raise wrong(f"round: {command.round} is past; {sequence.next_round} is the next")
    if command.base_len != sequence.committed_len:
        raise wrong(f"base_len: {command.base_len} sent, {sequence.committed_len} expected")
    if command.ahead and limits.ahead is None:
        message = (
            "ahead: this service grows no trees ahead; start it with --draft-ahead, or wish without"
        )
        raise _invalid(message, sequence, command.round)
    total = command.base_len + len(command.tokens)
    if total > sequence.max_total_tokens:
        raise wrong(f"tokens: {total} in all, beyond max_total_tokens {sequence.max_total_tokens}")
    if command.tokens:
        _check_tokens(command.tokens, limits, sequence, command.round)


def check_rollback(command: Rollback, sequence: DraftSequence) -> None:
    """WRONG_ROUND unless the sequence can be cut to that length."""
    if not 1 <= command.committed_len <= sequence.committed_len:
        message = (
            f"committed_len: {command.committed_len} is outside [1, {sequence.committed_len}];"
            " open the sequence again to lengthen it"
        )
        raise SequenceFailure(ErrorCode.WRONG_ROUND, message, sequence.state, command.round)


def check_features(block: FeatureRows, sequence: DraftSequence, limits: DraftLimits) -> None:
    """INVALID for rows of another width, for positions that the sequence will never have, and for
    values that are no numbers: their KV rows would be found by other sequences, too.
    """
    width = int(block.rows.shape[1])
    if width != limits.feature_size:
        raise _invalid(f"row_width: {width} sent, {limits.feature_size} expected", sequence)
    end = block.position + int(block.rows.shape[0])
    if block.position < 0 or end > sequence.max_total_tokens:
        raise _invalid(
            f"position: rows [{block.position}, {end}) leave [0, {sequence.max_total_tokens}),"
            " the sequence's max_total_tokens",
            sequence,
        )
    if not is_finite(block.rows):
        message = f"data: rows [{block.position}, {end}) hold NaN or infinity; verify made them so"
        raise _invalid(message, sequence)


def shape_within(asked: TreeShape | None, most: TreeShape) -> TreeShape:
    """What is asked for, capped by `most`; None asks for all of it."""
    if asked is None:
        return most
    return TreeShape(
        max_depth=min(asked.max_depth, most.max_depth),
        top_k=min(asked.top_k, most.top_k),
        max_nodes=min(asked.max_nodes, most.max_nodes),
    )


def _check_tokens(
    tokens: Sequence[int], limits: DraftLimits, sequence: DraftSequence | None = None,
    round_: int = 0,
) -> None:  # fmt: skip
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        message = f"tokens: one is outside the vocabulary [0, {limits.vocab_size})"
        raise _invalid(message, sequence, round_)


def _invalid(
    message: str, sequence: DraftSequence | None = None, round_: int = 0
) -> SequenceFailure:
    state = None if sequence is None else sequence.state
    return SequenceFailure(ErrorCode.INVALID, message, state, round_)
