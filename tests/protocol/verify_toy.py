"""A deterministic stand-in for the device, for tests of the state machine only.

Its "KV rows" are the tokens themselves, kept in pages. It reads a sequence's prefix from the pages
it is given, so that a page handed to two sequences, or freed too early, shows as a wrong token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verify_service.flights import Flights
from verify_service.follow_up import Chosen
from verify_service.step import Launched, SequenceOutcome, SequenceWork

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


class AheadToyEngine(ToyEngine):
    """With two steps in flight. Of what was launched nothing happens before `finish`."""

    def __init__(self, num_pages: int, page_size: int, max_ahead_nodes: int) -> None:
        super().__init__(num_pages, page_size)
        self._max_ahead_nodes = max_ahead_nodes
        self._flights = Flights[None]()
        self.num_followed = 0  # works whose round was chosen here
        self.num_chosen = 0  # candidates that they verified

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        self._flights.check_none()
        return self.finish(self.launch(works))

    def launch(self, works: Sequence[SequenceWork]) -> Launched:
        assert len({work.slot for work in works}) == len(works)
        for work in works:
            work.validate(VOCAB, self._page_size)
        self._flights.check(works, self._page_size, self._max_ahead_nodes)
        return self._flights.add(works, None)

    def finish(self, launched: Launched) -> list[SequenceOutcome]:
        flight = self._flights.oldest(launched)
        works = [
            self._known(work, chosen, flight.kv_lens([_NOTHING] * len(flight.works))[place])
            for place, (work, chosen) in enumerate(zip(flight.works, flight.chosen(), strict=True))
        ]
        for work in works:
            if work is not None and work.page_copy is not None:
                source, target = work.page_copy
                self._pages[target] = self._pages[source]
        outcomes = [
            _NOTHING if work is None else replace(self._run_one(work), chosen=chosen)
            for work, chosen in zip(works, flight.chosen(), strict=True)
        ]
        self._flights.retire(outcomes)
        return outcomes

    def lose(self) -> None:
        """The device is gone, and back."""
        self._flights.forget()

    def _known(self, work: SequenceWork, chosen: Chosen | None, kv_len: int) -> SequenceWork | None:
        """As an ordinary one; None where there is no root."""
        if work.follows is None:
            return work
        if chosen is None:
            return None
        self.num_followed += 1
        self.num_chosen += chosen.tree.num_nodes - 1
        tokens, parents = chosen.tree.tokens, chosen.tree.parents
        return replace(work, follows=None, tokens=tokens, parents=parents, kv_len=kv_len)


_NOTHING = SequenceOutcome(
    tokens=np.zeros(0, np.int32), margins=np.zeros(0, np.float32), logprobs=np.zeros(0, np.float32),
    accepted_nodes=np.zeros(0, np.int32), num_nodes=0, num_committed=0,
)  # fmt: skip
