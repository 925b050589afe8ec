"""A draft engine without a device: its pages hold the pairs themselves, its trees say what it read.

The one child of every tree is a digest of all pairs that the sequence has in pages, so a single
wrong, missing or foreign row shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from common.types import DraftTree
from draft_service.step import SequenceOutcome, SequenceWork

VOCAB = 1 << 20
PAGE_SIZE = 4

Pair = tuple[int, float, float]  # token t+1, feature t


def digest(pairs: Sequence[Pair]) -> int:
    return zlib.crc32(repr(list(pairs)).encode()) % VOCAB


class ToyEngine:
    def __init__(self, num_pages: int) -> None:
        self.pages: list[list[Pair | None]] = [[None] * PAGE_SIZE for _ in range(num_pages)]
        self.num_pairs_fed = 0

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        for work in works:
            if work.page_copy is not None:
                source, target = work.page_copy
                self.pages[target] = list(self.pages[source])
        return [self._one(work) for work in works]

    def _one(self, work: SequenceWork) -> SequenceOutcome:
        work.validate(VOCAB, 2, PAGE_SIZE)
        self.num_pairs_fed += work.num_rows
        for i, (token, row) in enumerate(zip(work.tokens, work.features, strict=True)):
            place = work.kv_len + i
            page = self.pages[work.page_ids[place // PAGE_SIZE]]
            page[place % PAGE_SIZE] = (int(token), float(row[0]), float(row[1]))
        if not work.drafts:
            return SequenceOutcome(tree=None)
        read = [
            self.pages[work.page_ids[p // PAGE_SIZE]][p % PAGE_SIZE]
            for p in range(work.kv_len + work.num_rows)
        ]
        assert None not in read
        pairs = [pair for pair in read if pair is not None]
        tokens = np.array([work.tokens[-1], digest(pairs)], np.int32)
        scores = np.array([0.0, -1.0], np.float32)
        return SequenceOutcome(tree=DraftTree(tokens, np.array([-1, 0], np.int32), scores))
