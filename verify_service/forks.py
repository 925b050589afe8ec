"""Choices of one request: those after the first take over its rows of what both begin with.

The first choice prefills; the others wait for that, not for a second prefill, and then hold its
pages by reference. The page in which their tokens part is copied before one of them writes into it
(`verify_service/residency.py`). A first choice that is gone, put out, or another caller's costs a
prefill and nothing else: then the sequence is admitted like any other.
"""

from __future__ import annotations

import itertools

from verify_service.registry import VerifyRegistry
from verify_service.sequences import VerifySequence


def source_of(sequence: VerifySequence, registry: VerifyRegistry) -> VerifySequence | None:
    """The sequence to fork from; None: there is none, or its rows are not this one's to take."""
    source = registry.get(sequence.fork_of) if sequence.fork_of else None
    if source is None or source is sequence or not source.is_resident:
        return None
    if source.stream != sequence.stream or not source.page_keys.has_salt_of(sequence.page_keys):
        return None
    return source


def must_wait(source: VerifySequence) -> bool:
    """Whether rows of the source are still being computed."""
    return source.num_missing > 0 and source.pending is not None


def num_common_rows(source: VerifySequence, sequence: VerifySequence) -> int:
    """Rows that the source has of the tokens that both begin with, but for the root's.

    0 where features of these rows are wanted and the source has none.
    """
    most = min(source.kv_len, sequence.committed_len - 1)
    pairs = enumerate(itertools.islice(zip(source.tokens, sequence.tokens, strict=False), most))
    rows = next((place for place, (a, b) in pairs if a != b), most)
    if sequence.wants_features and source.window.end < rows:
        return 0
    return rows


def take_features(source: VerifySequence, sequence: VerifySequence) -> None:
    """Of the rows that were taken over, those that the source still has."""
    if sequence.wants_features:
        sequence.window.take_over(source.window, sequence.kv_len)
