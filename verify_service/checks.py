"""What a command must satisfy before the machine acts on it. Every refusal is a SequenceFailure."""

from __future__ import annotations

import numpy as np

from common.types import ErrorCode, SequenceFailure
from verify_service.commands import Open, Rollback, TreeAhead, VerifyTree
from verify_service.limits import VerifyLimits
from verify_service.sequences import VerifySequence

MAX_AHEAD_NODES = 256
"""Nodes of a tree ahead, root included."""

MAX_ROUNDS = 1 << 63
"""Round numbers stay below; the wire has 64 bits."""


def check_open(command: Open, limits: VerifyLimits) -> None:
    """INVALID for malformed values, NEVER_FITS if the pool could not hold the sequence alone."""

    def invalid(message: str) -> SequenceFailure:
        return SequenceFailure(ErrorCode.INVALID, message, round_=command.round)

    num_tokens = len(command.tokens)
    if command.round >= MAX_ROUNDS:
        raise invalid(f"round: {command.round} is not below {MAX_ROUNDS}")
    if not num_tokens:
        raise invalid("tokens: empty; send the prompt's tokens, at least one")
    if min(command.tokens) < 0 or max(command.tokens) >= limits.vocab_size:
        raise invalid(f"tokens: one is outside the vocabulary [0, {limits.vocab_size})")
    if not 1 <= command.num_prompt_tokens <= num_tokens:
        raise invalid(
            f"num_prompt_tokens: {command.num_prompt_tokens} is outside [1, {num_tokens}],"
            " the number of tokens"
        )
    if not num_tokens < command.max_total_tokens <= limits.max_context_len:
        raise invalid(
            f"max_total_tokens: {command.max_total_tokens} is outside ({num_tokens},"
            f" {limits.max_context_len}]; it must leave room for one more token than sent and"
            " stay within the context"
        )
    if len(command.stop_tokens) > limits.max_stop_tokens:
        raise invalid(
            f"stop_token_ids: {len(command.stop_tokens)} of them; at most {limits.max_stop_tokens}"
        )
    if any(not 0 <= token < limits.vocab_size for token in command.stop_tokens):
        raise invalid(f"stop_token_ids: one is outside the vocabulary [0, {limits.vocab_size})")
    if any(not 0 <= token < limits.vocab_size for token, _ in command.sampling.logit_bias):
        raise invalid(f"sampling.logit_bias: a token is outside [0, {limits.vocab_size})")
    try:
        command.sampling.validate()
    except ValueError as error:
        raise invalid(f"sampling.{error}") from error
    # The last token of a sequence never needs a KV row.
    pages = limits.pages_for(command.max_total_tokens - 1)
    if pages > limits.num_pages:
        message = (
            f"max_total_tokens: {command.max_total_tokens} tokens need {pages} KV pages, the pool"
            f" has {limits.num_pages}; ask for fewer tokens"
        )
        raise SequenceFailure(ErrorCode.NEVER_FITS, message, round_=command.round)


def check_round(command: VerifyTree, sequence: VerifySequence, limits: VerifyLimits) -> None:
    """WRONG_ROUND where round or lengths do not fit the sequence, INVALID for a malformed tree."""

    def wrong(message: str) -> SequenceFailure:
        return SequenceFailure(ErrorCode.WRONG_ROUND, message, sequence.state, command.round)

    if command.round != sequence.next_round:
        raise wrong(f"round: {command.round} sent, {sequence.next_round} is next")
    if len(sequence.results) >= limits.max_unacknowledged:
        raise wrong(
            f"acked_round: {len(sequence.results)} results are unacknowledged, the most kept;"
            " acknowledge them first"
        )
    if command.kv_len != sequence.committed_len - 1:
        raise wrong(f"kv_len: {command.kv_len} sent, {sequence.committed_len - 1} expected")
    try:
        command.tree.validate(limits.vocab_size, limits.max_tree_nodes)
        if not np.isfinite(command.tree.scores).all():
            raise ValueError("tree has a score that is not finite")
    except ValueError as error:
        message = f"tree: {error}"
        state = sequence.state
        raise SequenceFailure(ErrorCode.INVALID, message, state, command.round) from error
    root = int(command.tree.tokens[0])
    if root != sequence.tokens[-1]:
        raise wrong(f"tree: its root is token {root}, the last committed one {sequence.tokens[-1]}")
    if sequence.committed_len >= sequence.max_total_tokens:
        raise wrong(f"round: the sequence has its max_total_tokens, {sequence.max_total_tokens}")


def check_ahead(command: TreeAhead, sequence: VerifySequence, limits: VerifyLimits) -> None:
    """INVALID for a malformed tree, or one that is not rooted in a committed token; nothing else,
    for it costs no round.
    """
    try:
        if command.round > sequence.next_round:
            raise ValueError(f"round {command.round} has not begun, {sequence.next_round} is next")
        command.tree.validate(limits.vocab_size, MAX_AHEAD_NODES)
        if not np.isfinite(command.tree.scores).all():
            raise ValueError("it has a score that is not finite")
        last = sequence.committed_len - 1
        if command.kv_len > last:
            raise ValueError(
                f"kv_len is {command.kv_len}, the last committed token stands at {last}; root the"
                " tree in a committed one"
            )
        root, there = int(command.tree.tokens[0]), sequence.tokens[command.kv_len]
        if root != there:
            raise ValueError(f"its root is token {root}, at kv_len stands {there}")
    except ValueError as error:
        message = f"tree_ahead: {error}"
        raise SequenceFailure(ErrorCode.INVALID, message, sequence.state, command.round) from error


def check_rollback(command: Rollback, sequence: VerifySequence) -> None:
    """WRONG_ROUND unless the sequence can be cut to that length."""
    if command.round >= MAX_ROUNDS:
        message = f"round: {command.round} is not below {MAX_ROUNDS}"
        raise SequenceFailure(ErrorCode.INVALID, message, sequence.state, command.round)
    if not 1 <= command.committed_len <= sequence.committed_len:
        message = (
            f"committed_len: {command.committed_len} is outside [1, {sequence.committed_len}];"
            " open the sequence again to lengthen it"
        )
        raise SequenceFailure(ErrorCode.WRONG_ROUND, message, sequence.state, command.round)
