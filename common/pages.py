"""The page pool: which KV pages are free, reserved, live or cached, and who refers to them.

Page numbers are 0 .. num_pages-1. A page is always in exactly one state:

    FREE      nobody refers to it and its content means nothing
    RESERVED  held by one sequence, no committed row in it yet
    LIVE      held by one or more sequences, with committed rows
    CACHED    published and held by nobody: kept for the next sequence with the same content

so that `live + cached + reserved + free = num_pages` holds after every call. Pure Python; the
device never sees this object. Reservations take free pages first, then cached ones, least recently
used first.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class PageState(enum.IntEnum):
    FREE = 0
    RESERVED = 1
    LIVE = 2
    CACHED = 3


class OutOfPages(Exception):
    """A reservation asked for more pages than are free or cached. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; the four add up to the size of the pool."""

    live: int
    cached: int
    reserved: int
    free: int

    @property
    def total(self) -> int:
        return self.live + self.cached + self.reserved + self.free

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return self.cached + self.free


class PagePool:
    """Allocator with reference counts. Every method either does all it was asked or raises
    unchanged.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages} is below 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; page 0 goes out first
        self._state = [PageState.FREE] * num_pages
        self._references = [0] * num_pages
        self._key_of: dict[int, bytes] = {}  # published pages
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_live = 0
        self.num_evicted = 0  # cached pages given to somebody else, since the start

    @property
    def num_available(self) -> int:
        """Pages that a reservation can take: free and cached."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PageCounts:
        free, cached = len(self._free), len(self._cached)
        reserved = self.num_pages - free - cached - self._num_live
        return PageCounts(live=self._num_live, cached=cached, reserved=reserved, free=free)

    def reserve(self, num_pages: int) -> list[int]:
        """Takes pages for one holder; raises OutOfPages when not all of them can be had."""
        if num_pages > self.num_available:
            raise OutOfPages(f"{num_pages} pages asked, {self.num_available} available")
        pages = []
        for _ in range(num_pages):
            page = self._free.pop() if self._free else self._evict()
            self._state[page] = PageState.RESERVED
            self._references[page] = 1
            pages.append(page)
        return pages

    def commit(self, pages: Iterable[int]) -> None:
        """Notes that these held pages now have committed rows. Again: no change."""
        for page in pages:
            if self._state[page] is PageState.RESERVED:
                self._state[page] = PageState.LIVE
                self._num_live += 1
            elif self._state[page] is not PageState.LIVE:
                raise ValueError(f"page {page} is {self._state[page].name}; only held pages commit")

    def commit_first(self, pages: Sequence[int], num_pages: int) -> None:
        """The same for the first pages of a sequence, which gets its rows in order: what stands
        before a page with rows has them, too.
        """
        first = num_pages
        while first and self._state[pages[first - 1]] is PageState.RESERVED:
            first -= 1
        self.commit(pages[first:num_pages])

    def release(self, pages: Iterable[int]) -> None:
        """Gives back one reference to each. The last frees the page, or caches it if published."""
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} is {self._state[page].name}; nobody holds it")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._state[page] is PageState.LIVE:
                self._num_live -= 1
            if page in self._key_of:
                self._state[page] = PageState.CACHED
                self._cached[page] = None
            else:
                self._state[page] = PageState.FREE
                self._free.append(page)

    def publish(self, page: int, key: bytes) -> bool:
        """Offers a full live page to others under its content's key; from then on it is immutable.

        False, and nothing changed, when another page already stands for this content.
        """
        if self._state[page] is not PageState.LIVE:
            raise ValueError(f"page {page} is {self._state[page].name}; only live pages publish")
        if key in self._page_of or page in self._key_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def is_published(self, page: int) -> bool:
        """Whether the page is immutable; cutting a sequence into such a page needs a page of its
        own.
        """
        return page in self._key_of

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Takes a reference to the pages of the longest run of known keys, from the first on."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._state[page] is PageState.CACHED:
                del self._cached[page]
                self._state[page] = PageState.LIVE
                self._num_live += 1
            self._references[page] += 1
            pages.append(page)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Takes one more reference to each of these held pages: a fork shares them."""
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} is {self._state[page].name}; nobody holds it")
            self._references[page] += 1

    def is_writable(self, page: int) -> bool:
        """Whether its one holder may put rows in: no other has it, nor could find it by its key."""
        return self._references[page] == 1 and page not in self._key_of

    def shared_tail(self, pages: Sequence[int], num_rows: int, page_size: int) -> int | None:
        """Index in a sequence's `pages` of the one that its next row goes into, if that has earlier
        rows which others may read. `num_rows`: that it has.
        """
        index, used = divmod(num_rows, page_size)
        return None if not used or self.is_writable(pages[index]) else index

    def is_sole(self, page: int) -> bool:
        """Whether exactly one holder refers to it."""
        return self._references[page] == 1

    def withdraw(self, page: int) -> None:
        """Takes a published page that one holder has off the books: it is writable again."""
        if self._state[page] is not PageState.LIVE or self._references[page] != 1:
            raise ValueError(
                f"page {page} is {self._state[page].name} with {self._references[page]} holders;"
                " only a live page of one holder is withdrawn"
            )
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def forget_keys(self) -> None:
        """Takes every page off the books: cached pages become free, held ones private."""
        self._page_of.clear()
        self._key_of.clear()
        for page in self._cached:
            self._state[page] = PageState.FREE
            self._free.append(page)
        self._cached.clear()

    def num_freed(self, holders: Iterable[Iterable[int]]) -> int:
        """How many pages would become available if these holders gave back all of theirs."""
        given_back = Counter(page for pages in holders for page in pages)
        return sum(self._references[page] == count for page, count in given_back.items())

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the books agree with the page lists of all holders."""
        references = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                references[page] += 1
        assert references == self._references, "references differ from what the holders hold"
        by_state = [self._state.count(state) for state in PageState]
        counts = self.counts()
        assert by_state == [counts.free, counts.reserved, counts.live, counts.cached], counts
        assert counts.total == self.num_pages, counts
        held = [r > 0 for r in references]
        states = [s in (PageState.RESERVED, PageState.LIVE) for s in self._state]
        assert held == states, "a page is held and free, or nobody's and not free"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self.num_evicted += 1
        del self._page_of[self._key_of.pop(page)]
        return page
