"""Who holds pages of the head's KV, and who is put out when they run short.

Draft state is a cache, so whoever is put out is gone: the router decodes on with root-only rounds
and may open the sequence again. Victims, in this order: those whose stream is gone, the idle, least
recently used first; then those that wait for a tree but came after the one that asks, youngest
first. So the oldest always goes on. A sequence in a launched step is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.pages import PageCounts, PagePool
from draft_service.limits import DraftLimits
from draft_service.sequences import DraftSequence


class Residency:
    def __init__(self, limits: DraftLimits) -> None:
        self._limits = limits
        self._pool = PagePool(limits.num_pages)

    @property
    def counts(self) -> PageCounts:
        return self._pool.counts()

    def check(self, holders: Iterable[DraftSequence]) -> None:
        """Raises AssertionError unless the pages balance."""
        self._pool.check([sequence.pages for sequence in holders])

    def grow(
        self, sequence: DraftSequence, num_pairs: int, others: Iterable[DraftSequence]
    ) -> list[DraftSequence] | None:
        """Reserves pages up to `num_pairs` KV rows.

        Returns whom of `others` must be forgotten first; `[]` when the pages are the sequence's
        now. None: not even that would make room.
        """
        missing = self._limits.pages_for(num_pairs) - len(sequence.pages)
        if missing > self._pool.num_available:
            return self._victims(sequence, missing - self._pool.num_available, others)
        if missing > 0:
            sequence.pages += self._pool.reserve(missing)
        return []

    def settle(self, sequence: DraftSequence) -> None:
        """After a step: pages with committed rows become live."""
        self._pool.commit(sequence.pages[: self._limits.pages_for(sequence.kv_len)])

    def cut(self, sequence: DraftSequence, kv_len: int) -> None:
        """Forgets rows from `kv_len` on and releases the pages behind them."""
        sequence.kv_len = min(sequence.kv_len, kv_len)
        kept = self._limits.pages_for(sequence.kv_len)
        self._pool.release(sequence.pages[kept:])
        del sequence.pages[kept:]

    def put_out(self, sequence: DraftSequence) -> None:
        """Takes all pages back."""
        self.cut(sequence, 0)

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
            num_pages -= len(victim.pages)
            if num_pages <= 0:
                return victims
        return None


def eviction_order(sequence: DraftSequence) -> tuple[bool, bool, float]:
    """Sorts those first that are missed least."""
    waits = sequence.pending is not None
    age = float(-sequence.arrival) if waits else sequence.used_at
    return (sequence.orphaned_since is None, waits, age)


def _is_idle(sequence: DraftSequence) -> bool:
    return sequence.pending is None or sequence.orphaned_since is not None
