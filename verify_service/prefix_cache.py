"""What of a sequence's beginning is there already: full pages by content, and their features.

A page is published once all its rows are committed; from then on it never changes, and any sequence
that begins with the same tokens under the same salt may hold it too. Aux features of published
pages are kept on the host beside them, by the same keys, so that a sequence whose rows were not
computed again still has features for its draft. Where they are missing (the sequence that computed
the page wanted none, or the store was full), a sequence that wants features computes the rows once
more, and they are there for the next one: acceptance never depends on what was cached.

Least recently used goes first: pages in the pool (`common/pages.py`), features here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.pages import PagePool
from verify_service.features import Rows
from verify_service.limits import VerifyLimits
from verify_service.sequences import VerifySequence


@dataclass(slots=True)
class PrefixCounts:
    """Since the start, in tokens. `looked_up`: committed tokens of sequences that were admitted;
    `found`: of them, those whose rows were there.
    """

    looked_up: int = 0
    found: int = 0


class PrefixCache:
    """Finds and publishes pages of `pool`; holds nothing of it itself."""

    def __init__(self, pool: PagePool, limits: VerifyLimits) -> None:
        self._pool, self._limits = pool, limits
        self._features: OrderedDict[bytes, Rows] = OrderedDict()  # least recently used first
        self.counts = PrefixCounts()

    @property
    def num_feature_rows(self) -> int:
        return len(self._features) * self._limits.page_size

    def take(self, sequence: VerifySequence) -> list[int]:
        """References to the pages that follow the sequence's own rows and are there already.

        Empty unless its rows end with a page, and where the logits of all rows are wanted. The root
        is never among them: its row is computed for its logits. Features of the rows are added to
        the sequence's window.
        """
        size = self._limits.page_size
        first, rest = divmod(sequence.kv_len, size)
        if rest or not self._limits.prefix_cache or sequence.scores_prompt:
            return []
        keys = sequence.page_keys.of(sequence.tokens, (sequence.committed_len - 1) // size)[first:]
        if sequence.wants_features:
            keys = keys[: self._num_with_features(sequence, first, keys)]
        pages = self._pool.share(keys)
        if sequence.wants_features:
            for place, key in enumerate(keys[: len(pages)], start=first):
                if (place + 1) * size > sequence.window.end:
                    self._features.move_to_end(key)
                    sequence.window.borrow(place * size, self._features[key])
        return pages

    def publish(self, sequence: VerifySequence) -> None:
        """Offers the sequence's full pages, all rows of which are committed, to others."""
        size = self._limits.page_size
        full = sequence.kv_len // size
        if full <= sequence.num_published or not self._limits.prefix_cache:
            return
        keys = sequence.page_keys.of(sequence.tokens, full)
        for place in range(sequence.num_published, full):
            key = keys[place]
            self._pool.publish(sequence.pages[place], key)
            if sequence.wants_features and key not in self._features:
                self._keep(key, sequence.window.rows(place * size, size))
        sequence.num_published = full

    def forget(self) -> None:
        """Nothing that was published is found any more."""
        self._pool.forget_keys()
        self._features.clear()

    def _num_with_features(
        self, sequence: VerifySequence, first: int, keys: Sequence[bytes]
    ) -> int:
        """How many of the pages from number `first` on have features, known to the window or
        here.
        """
        for place, key in enumerate(keys, start=first):
            known = (place + 1) * self._limits.page_size <= sequence.window.end
            if not known and key not in self._features:
                return place - first
        return len(keys)

    def _keep(self, key: bytes, rows: Rows | None) -> None:
        if rows is None or self._limits.page_size > self._limits.cached_feature_tokens:
            return
        self._features[key] = np.array(rows)  # a view would keep a whole step's array alive
        while self.num_feature_rows > self._limits.cached_feature_tokens:
            self._features.popitem(last=False)
