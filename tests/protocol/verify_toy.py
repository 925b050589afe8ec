"""A deterministic stand-in for the device, for tests of the state machine only.

Its "KV rows" are the tokens themselves, kept in pages. It reads a sequence's prefix from the pages
it is given, so that a page handed to two sequences, or freed too early, shows as a wrong token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from verify_service.step import SequenceOutcome, SequenceWork

VOCAB = 7


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """The toy target's choice after `tokens`: a hash of all of them, their number and the seed."""
    return (
        zlib.crc32(np.array([seed >> 1, seed & 1, len(tokens), *tokens], np.int64).tobytes())
        % VOCAB
    )


def continuation(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """The reference: plain decoding, one token at a time."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class ToyEngine:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self._pages = np.full((num_pages, page_size), -1, np.int64)
        self._page_size = page_size

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        assert len({work.slot for work in works}) == len(works)
        for work in works:
            work.validate(VOCAB, self._page_size)
            if work.page_copy is not None:
                source, target = work.page_copy
                self._pages[target] = self._pages[source]
        return [self._run_one(work) for work in works]

    def _run_one(self, work: SequenceWork) -> SequenceOutcome:
        flat = self._pages[work.page_ids].reshape(-1)
        prefix = flat[: work.kv_len].tolist()
        committed = work.tokens[: work.num_causal].tolist()
        rows, emitted = [], []
        if work.samples:
            rows, emitted = self._walk(work, prefix + committed)
        path = [int(work.tokens[row]) for row in rows]
        self._commit(work, committed + path)
        positions = np.arange(work.kv_len, work.kv_len + len(committed) + len(path))
        features = np.stack([positions, np.array(committed + path)], axis=1).astype(np.float32)
        return SequenceOutcome(
            tokens=np.array(emitted, np.int32),
            margins=np.ones(len(emitted), np.float32),
            logprobs=np.zeros(len(emitted), np.float32),
            accepted_nodes=np.array([row - work.num_causal + 1 for row in rows], np.int32),
            num_nodes=work.num_nodes,
            num_committed=len(committed) + len(path),
            features=features if work.wants_features else None,
        )

    def _walk(self, work: SequenceWork, tokens: list[int]) -> tuple[list[int], list[int]]:
        row, rows, emitted = work.num_causal - 1, [], []
        while True:
            pick = next_token(tokens + emitted, work.sampling.seed)
            emitted.append(pick)
            children = [r for r in range(row + 1, work.num_rows) if work.parents[r] == row]
            matching = [r for r in children if work.tokens[r] == pick]
            if not matching or pick in work.stop_tokens:
                return rows, emitted
            row = matching[0]
            rows.append(row)

    def _commit(self, work: SequenceWork, tokens: list[int]) -> None:
        for offset, token in enumerate(tokens):
            page, row = divmod(work.kv_len + offset, self._page_size)
            self._pages[work.page_ids[page], row] = token
