from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.pages import OutOfPages, PageCounts, PagePool


def counts(pool: PagePool) -> tuple[int, int, int, int]:
    c = pool.counts()
    return (c.live, c.cached, c.reserved, c.free)


def test_page_goes_from_free_over_reserved_and_live_back_to_free() -> None:
    pool = PagePool(4)
    pages = pool.reserve(3)
    assert pages == [0, 1, 2]
    assert counts(pool) == (0, 0, 3, 1)
    pool.commit(pages[:2])
    pool.commit(pages[:2])
    assert counts(pool) == (2, 0, 1, 1)
    pool.check([pages])
    pool.release(pages)
    assert counts(pool) == (0, 0, 0, 4)
    pool.check([])


def test_refused_reservation_changes_nothing() -> None:
    pool = PagePool(2)
    held = pool.reserve(1)
    with pytest.raises(OutOfPages, match="2 pages asked, 1 available"):
        pool.reserve(2)
    assert counts(pool) == (0, 0, 1, 1)
    pool.check([held])


def test_page_of_nobody_cannot_be_released_twice() -> None:
    pool = PagePool(2)
    pages = pool.reserve(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="page 0 is FREE; nobody holds it"):
        pool.release(pages)


def test_published_page_is_shared_then_cached_then_evicted_oldest_first() -> None:
    pool = PagePool(2)
    first, second = pool.reserve(2)
    pool.commit([first, second])
    assert pool.publish(first, b"a")
    assert pool.publish(second, b"b")
    assert not pool.publish(second, b"c")
    assert pool.share([b"a", b"x", b"b"]) == [first]
    assert pool.num_freed([[first, second]]) == 1
    assert pool.num_freed([[first, second], [first]]) == 2
    pool.release([first, second])
    assert counts(pool) == (1, 1, 0, 0)
    pool.release([first])
    assert counts(pool) == (0, 2, 0, 0)
    assert pool.reserve(1) == [second]  # released before `first`
    assert not pool.is_published(second)
    assert pool.share([b"a"]) == [first]
    assert pool.share([b"b"]) == []
    pool.check([[first], [second]])


def test_held_page_is_freed_by_its_last_holder() -> None:
    pool = PagePool(2)
    pages = pool.reserve(2)
    pool.commit(pages)
    assert pool.is_writable(pages[0])
    pool.hold(pages[:1])
    assert not pool.is_writable(pages[0])
    pool.release(pages)
    assert counts(pool) == (1, 0, 0, 1)
    pool.check([pages[:1]])
    pool.release(pages[:1])
    assert counts(pool) == (0, 0, 0, 2)
    with pytest.raises(ValueError, match="page 0 is FREE; nobody holds it"):
        pool.hold([0])


def test_a_tail_is_shared_where_others_may_read_its_rows() -> None:
    pool = PagePool(2)
    pages = pool.reserve(2)
    pool.commit(pages)
    assert pool.shared_tail(pages, 5, page_size=4) is None  # its own
    pool.hold(pages[1:])
    assert pool.shared_tail(pages, 5, page_size=4) == 1
    assert pool.shared_tail(pages, 4, page_size=4) is None  # the next row begins a page


def test_withdrawn_page_is_found_no_more_and_is_writable() -> None:
    pool = PagePool(2)
    [page] = pool.reserve(1)
    pool.commit([page])
    pool.publish(page, b"a")
    [again] = pool.share([b"a"])
    with pytest.raises(ValueError, match="page 0 is LIVE with 2 holders"):
        pool.withdraw(page)
    pool.release([again])
    pool.withdraw(page)
    assert pool.is_writable(page)
    assert pool.share([b"a"]) == []


def test_check_finds_a_page_that_nobody_admits_to_hold() -> None:
    pool = PagePool(2)
    pool.reserve(1)
    with pytest.raises(AssertionError, match="references differ"):
        pool.check([])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_books_balance_under_any_history(data: st.DataObject) -> None:
    pool = PagePool(6)
    holders: list[list[int]] = []
    for step in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["reserve", "commit", "publish", "share", "release"]))
        if action == "reserve" and pool.num_available:
            holders.append(pool.reserve(data.draw(st.integers(1, pool.num_available))))
        elif action == "share":
            holders.append(pool.share([bytes([data.draw(st.integers(0, 25))])]))
        elif holders:
            pages = data.draw(st.sampled_from(holders))
            if action == "commit":
                pool.commit(pages)
            elif action == "publish" and pages:
                pool.commit(pages)
                pool.publish(pages[0], bytes([step]))
            elif action == "release":
                holders.remove(pages)
                pool.release(pages)
        pool.check(holders)
    for pages in holders:
        pool.release(pages)
    assert pool.counts().live == pool.counts().reserved == 0
    assert PageCounts(live=0, cached=2, reserved=0, free=4).total == 6
