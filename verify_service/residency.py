"""Who holds a slot and pages, and who is put out when they run short.

A sequence is resident while it holds a slot (its place in the device's per-sequence arrays). It
enters with pages for all its committed tokens, grows by the deepest path of each tree, and gives
back what was not accepted. Victims of a preemption are, in this order: those whose stream is gone,
those that have paused long, the youngest. A sequence that is neither orphaned nor long paused gives
way only to an older one, so that the oldest always goes on and nobody waits in a circle. A sequence
in a launched step is never touched.

Pages may be shared (verify_service/prefix_cache.py), and published ones are immutable: before a
sequence writes into one that it does not have for itself it gets a page of its own, and the step
copies the rows (copy-on-write). The page that is copied from stays held until that step retired.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.pages import PageCounts, PagePool
from verify_service.limits import VerifyLimits
from verify_service.prefix_cache import PrefixCache, PrefixCounts
from verify_service.sequences import NO_SLOT, VerifySequence


class Residency:
    def __init__(self, limits: VerifyLimits) -> None:
        self._limits = limits
        self._pool = PagePool(limits.num_pages)
        self._cache = PrefixCache(self._pool, limits)
        self._free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self._residents: dict[int, VerifySequence] = {}

    def __iter__(self) -> Iterator[VerifySequence]:
        return iter(list(self._residents.values()))

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def counts(self) -> PageCounts:
        return self._pool.counts()

    @property
    def prefix_counts(self) -> PrefixCounts:
        return self._cache.counts

    @property
    def num_evicted_pages(self) -> int:
        return self._pool.num_evicted

    def forget_cached(self) -> None:
        """Nothing that was computed before is found by content any more."""
        self._cache.forget()

    def check(self) -> None:
        """Raises AssertionError unless pages and slots balance."""
        self._pool.check([sequence.held_pages for sequence in self._residents.values()])
        assert len(self._free_slots) + len(self._residents) == self._limits.max_sequences
        for slot, sequence in self._residents.items():
            assert sequence.slot == slot, (sequence.slot, slot)

    def admit(self, sequence: VerifySequence, now: float) -> list[VerifySequence] | None:
        """Gives the sequence a slot and pages for its committed tokens; returns whom it put out.

        None, and nothing changed, when there is no room yet. Beside its own pages one more must be
        there for each older resident, which would otherwise put the newcomer out at once.
        """
        pages = self._limits.pages_for(sequence.committed_len)
        headroom = sum(other.arrival < sequence.arrival for other in self._residents.values())
        found = self._cache.take(sequence)
        missing = pages - len(found)
        put_out = self._make_room(sequence, missing + headroom, slot=True, now=now)
        if put_out is None:
            self._pool.release(found)
            return None
        self._cache.counts.looked_up += sequence.committed_len
        self._enter(sequence, found + self._pool.reserve(missing), 0)
        self._note_found(sequence, len(found))
        return put_out

    def catch_up(self, sequence: VerifySequence) -> None:
        """Takes rows that another has computed since, in place of computing them again."""
        found = self._cache.take(sequence)
        if found:
            first = sequence.kv_len // self._limits.page_size
            replaced = slice(first, first + len(found))
            self._pool.release(sequence.pages[replaced])
            sequence.pages[replaced] = found
            self._note_found(sequence, len(found))

    def fork(
        self,
        parent: VerifySequence,
        child: VerifySequence,
        now: float,
        most_rows: int | None = None,
    ) -> list[VerifySequence] | None:
        """Gives `child` a slot and the rows that `parent` has, by reference; returns whom it put
        out. `most_rows`: those of the tokens that both begin with; None: the child begins with all.

        No page is copied until one of the two writes into it. `parent` may be in a launched step:
        what that writes is beyond its `kv_len`, and not looked at here. None, and nothing changed,
        when there is no slot yet.
        """
        put_out = self._make_room(child, 0, slot=True, now=now, keep=parent)
        if put_out is None:
            return None
        rows = min(parent.kv_len, child.committed_len - 1)
        rows = rows if most_rows is None else min(rows, most_rows)
        shared = parent.pages[: self._limits.pages_for(rows)]
        if parent.copy is not None:  # not made yet: the rows are still where they come from
            source, target = parent.copy
            shared = [source if page == target else page for page in shared]
        self._pool.hold(shared)
        self._enter(child, shared, rows)
        self._cache.counts.looked_up += child.committed_len
        self._cache.counts.found += rows
        child.num_found += rows
        return put_out

    def grow(
        self, sequence: VerifySequence, num_rows: int, now: float
    ) -> list[VerifySequence] | None:
        """Makes the rows from `kv_len` up to `num_rows` the sequence's to write, putting others
        out if it must; None: no room yet.

        Reserves what pages are missing. A page that holds rows below `kv_len` and is not the
        sequence's alone is replaced by one to copy it to.
        """
        missing = max(0, self._limits.pages_for(num_rows) - len(sequence.pages))
        shared = self._pool.shared_tail(sequence.pages, sequence.kv_len, self._limits.page_size)
        wanted = missing + (shared is not None)
        if shared is not None and self._pool.num_available < wanted:
            # Copying would put somebody out: better that nobody finds the page any more.
            wanted -= self._withdraw(sequence.pages[shared])
        put_out = self._make_room(sequence, wanted, slot=False, now=now)
        if put_out is None:
            return None
        # Those put out may have been its other holders.
        shared = self._pool.shared_tail(sequence.pages, sequence.kv_len, self._limits.page_size)
        if shared is not None:
            [target] = self._pool.reserve(1)
            sequence.copy = (sequence.pages[shared], target)
            sequence.pages[shared] = target
        sequence.pages += self._pool.reserve(missing)
        return put_out

    def extend(self, sequence: VerifySequence, num_rows: int) -> bool:
        """Reserves pages for rows up to `num_rows` of a sequence in a launched step, which has made
        its last page its own; False, and nothing changed, where that would put anybody out.
        """
        missing = max(0, self._limits.pages_for(num_rows) - len(sequence.pages))
        if missing > self._pool.num_available:
            return False
        sequence.pages += self._pool.reserve(missing)
        return True

    def room_rows(self, sequence: VerifySequence) -> int:
        """KV rows that the sequence could have without putting anyone out."""
        return (len(sequence.pages) + self._pool.num_available) * self._limits.page_size

    def settle(self, sequence: VerifySequence) -> None:
        """After a step: pages with committed rows become live, full ones are published, those
        beyond the next root are released, and so is the one that was copied from. While a further
        step holds the sequence, all pages stay.
        """
        self._end_copy(sequence)
        self._pool.commit_first(sequence.pages, self._limits.pages_for(sequence.kv_len))
        self._cache.publish(sequence)
        if not sequence.in_flight:
            self._shorten(sequence, self._limits.pages_for(sequence.committed_len))

    def cut(self, sequence: VerifySequence, kv_len: int) -> None:
        """Forgets rows from `kv_len` on and releases the pages behind them."""
        sequence.kv_len = min(sequence.kv_len, kv_len)
        full = sequence.kv_len // self._limits.page_size
        sequence.num_published = min(sequence.num_published, full)
        self._shorten(sequence, self._limits.pages_for(sequence.kv_len))
        if sequence.copy is not None and sequence.copy[1] not in sequence.pages:
            self._end_copy(sequence)

    def put_out(self, sequence: VerifySequence) -> None:
        """Takes slot and pages back. Again: no change."""
        if not sequence.is_resident:
            return
        self._end_copy(sequence)
        self._pool.release(reversed(sequence.pages))  # the beginning is what others may share
        del self._residents[sequence.slot]
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.pages, sequence.kv_len = NO_SLOT, [], 0
        sequence.num_published = 0

    def _enter(self, sequence: VerifySequence, pages: list[int], kv_len: int) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.pages, sequence.kv_len = pages, kv_len
        self._residents[sequence.slot] = sequence

    def _note_found(self, sequence: VerifySequence, num_pages: int) -> None:
        rows = num_pages * self._limits.page_size
        sequence.kv_len += rows
        sequence.num_found += rows
        sequence.num_published = sequence.kv_len // self._limits.page_size
        self._cache.counts.found += rows

    def _withdraw(self, page: int) -> bool:
        """Makes a published page that one sequence has for itself writable; False: others hold
        it.
        """
        if not self._pool.is_sole(page):
            return False
        self._pool.withdraw(page)
        return True

    def _end_copy(self, sequence: VerifySequence) -> None:
        if sequence.copy is not None:
            self._pool.release([sequence.copy[0]])
            sequence.copy = None

    def _shorten(self, sequence: VerifySequence, num_pages: int) -> None:
        self._pool.release(sequence.pages[num_pages:])
        del sequence.pages[num_pages:]

    def _make_room(
        self,
        sequence: VerifySequence,
        pages: int,
        *,
        slot: bool,
        now: float,
        keep: VerifySequence | None = None,
    ) -> list[VerifySequence] | None:
        """Puts out as few as needed for `pages` (and a slot), `keep` never; None, and nobody, if
        in vain.
        """
        victims: list[VerifySequence] = []
        available, slots = self._pool.num_available, len(self._free_slots)
        if available < pages or slots < slot:
            for victim in self._victims(sequence, now):
                if victim is keep:
                    continue
                victims.append(victim)
                freed = self._pool.num_freed(v.held_pages for v in victims)
                if available + freed >= pages and slots + len(victims) >= slot:
                    break
            else:
                return None
        for victim in victims:
            self.put_out(victim)
        return victims

    def _victims(self, sequence: VerifySequence, now: float) -> list[VerifySequence]:
        if sequence.orphaned_since is not None:
            return []  # nobody waits for it: it takes what is free

        def is_idle(other: VerifySequence) -> bool:
            paused = (
                other.pending is None and now - other.paused_since >= self._limits.pause_seconds
            )
            return paused or other.orphaned_since is not None

        candidates = [
            other
            for other in self._residents.values()
            if other is not sequence
            and not other.in_flight
            and (is_idle(other) or other.arrival > sequence.arrival)
        ]

        def order(other: VerifySequence) -> tuple[bool, bool, int]:
            return (other.orphaned_since is None, other.pending is not None, -other.arrival)

        return sorted(candidates, key=order)
