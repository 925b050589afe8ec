"""Who holds pages of the head's KV, and who is put out when they run short.

Draft state is a cache, so whoever is put out is gone: the router decodes on with root-only rounds
and may open the sequence again. Victims, in this order: those whose stream is gone, the idle, least
recently used first; then those that wait for a tree but came after the one that asks, youngest
first. So the oldest always goes on. A sequence in a launched step is never touched.

Full pages are published under their tokens' hash, and a sequence that begins with the same tokens
begins with them: its features below are not needed. Published pages are immutable: before a
sequence writes into a page that it does not have for itself it gets one of its own, and the step
copies the rows. The page that is copied from stays held until that step has retired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.page_keys import PageKeys
from common.pages import PageCounts, PagePool
from draft_service.limits import DraftLimits
from draft_service.sequences import DraftSequence


class Residency:
    def __init__(self, limits: DraftLimits) -> None:
        self._limits = limits
        self._pool = PagePool(limits.num_pages)
        self.num_looked_up_tokens = 0  # pairs of sequences that were opened
        self.num_found_tokens = 0  # of them, those that were there

    @property
    def num_evicted_pages(self) -> int:
        """Cached pages that were given to somebody else."""
        return self._pool.num_evicted

    @property
    def counts(self) -> PageCounts:
        return self._pool.counts()

    def check(self, holders: Iterable[DraftSequence]) -> None:
        """Raises AssertionError unless the pages balance."""
        self._pool.check([sequence.held_pages for sequence in holders])

    def find(
        self, tokens: Sequence[int], keys: PageKeys, features_from: int, max_total_tokens: int
    ) -> list[int]:
        """References to pages that hold the pairs of `tokens` from the first on, never all of
        them: the last is fed for its output. Empty unless they reach to `features_from`.
        """
        if not self._limits.prefix_cache:
            return []
        num_pairs = max(0, len(tokens) - 1)
        self.num_looked_up_tokens += num_pairs
        if self._limits.pages_for(max(1, max_total_tokens - 1)) > self._limits.num_pages:
            return []  # it fits only if it begins late
        size = self._limits.page_size
        pages = self._pool.share(keys.of(tokens, max(0, num_pairs - 1) // size))
        if len(pages) * size < features_from:
            self._pool.release(pages)
            return []
        self.num_found_tokens += len(pages) * size
        return pages

    def forget_cached(self) -> None:
        """Nothing that was computed before is found by content any more."""
        self._pool.forget_keys()

    def grow(
        self, sequence: DraftSequence, num_pairs: int, others: Iterable[DraftSequence]
    ) -> list[DraftSequence] | None:
        """Makes the KV rows from the sequence's own up to `num_pairs` its to write.

        Returns whom of `others` must be forgotten first; `[]` when the pages are the sequence's
        now. None: not even that would make room.
        """
        missing = max(0, self._limits.pages_for(num_pairs) - len(sequence.pages))
        shared = self._pool.shared_tail(sequence.pages, sequence.kv_len, self._limits.page_size)
        wanted = missing + (shared is not None)
        available = self._pool.num_available
        if shared is not None and available < wanted and self._pool.is_sole(sequence.pages[shared]):
            # Copying would put somebody out: better that nobody finds the page any more.
            self._pool.withdraw(sequence.pages[shared])
            shared, wanted = None, missing
        if wanted > available:
            return self._victims(sequence, wanted - available, others)
        if shared is not None:
            [target] = self._pool.reserve(1)
            sequence.copy = (sequence.pages[shared], target)
            sequence.pages[shared] = target
        sequence.pages += self._pool.reserve(missing)
        return []

    def settle(self, sequence: DraftSequence) -> None:
        """After a step: pages with committed rows become live, full ones are published."""
        self._end_copy(sequence)
        self._pool.commit_first(sequence.pages, self._limits.pages_for(sequence.kv_len))
        full = sequence.kv_len // self._limits.page_size
        if self._limits.prefix_cache and sequence.features_from == 0:
            keys = sequence.page_keys.of(sequence.tokens, full)
            for place in range(sequence.num_published, full):
                self._pool.publish(sequence.pages[place], keys[place])
            sequence.num_published = full

    def cut(self, sequence: DraftSequence, kv_len: int) -> None:
        """Forgets rows from `kv_len` on and releases the pages behind them."""
        sequence.kv_len = min(sequence.kv_len, kv_len)
        full = sequence.kv_len // self._limits.page_size
        sequence.num_published = min(sequence.num_published, full)
        kept = self._limits.pages_for(sequence.kv_len)
        self._pool.release(reversed(sequence.pages[kept:]))
        del sequence.pages[kept:]
        if sequence.copy is not None and sequence.copy[1] not in sequence.pages:
            self._end_copy(sequence)

    def put_out(self, sequence: DraftSequence) -> None:
        """Takes all pages back."""
        self.cut(sequence, 0)

    def _end_copy(self, sequence: DraftSequence) -> None:
        if sequence.copy is not None:
            self._pool.release([sequence.copy[0]])
            sequence.copy = None

    def _victims(
        self, sequence: DraftSequence, num_pages: int, others: Iterable[DraftSequence]
    ) -> list[DraftSequence] | None:
        victims: list[DraftSequence] = []
        candidates = [
            other
            for other in others
            if other is not sequence and not other.in_flight and other.pages
            and (_is_idle(other) or other.arrival > sequence.arrival)
        ]  # fmt: skip
        for victim in sorted(candidates, key=eviction_order):
            victims.append(victim)
            if self._pool.num_freed(other.held_pages for other in victims) >= num_pages:
                return victims
        return None


def eviction_order(sequence: DraftSequence) -> tuple[bool, bool, float]:
    """Sorts those first that are missed least."""
    waits = sequence.pending is not None
    age = float(-sequence.arrival) if waits else sequence.used_at
    return (sequence.orphaned_since is None, waits, age)


def _is_idle(sequence: DraftSequence) -> bool:
    return sequence.pending is None or sequence.orphaned_since is not None
