"""Sequences that share pages: each reads its own rows, whatever the others write, cut or fork."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.page_keys import PageKeys
from common.types import SamplingParams
from verify_service.features import FeatureWindow
from verify_service.limits import VerifyLimits
from verify_service.residency import Residency
from verify_service.sequences import VerifySequence
from verify_service.step import TokenHistory

LIMITS = VerifyLimits(
    vocab_size=7, max_context_len=24, max_tree_nodes=8, max_tree_depth=4, max_sequences=4,
    max_waiting_sequences=4, page_size=4, num_pages=8, max_step_tokens=16, max_prefill_tokens=8,
    prefix_cache=False,
)  # fmt: skip


def sequence(arrival: int, tokens: Sequence[int]) -> VerifySequence:
    owned = list(tokens)
    return VerifySequence(
        sequence_id=bytes([arrival]) * 16, epoch=1, stream=1, arrival=arrival, tokens=owned,
        num_prompt_tokens=1, sampling=SamplingParams(), stop_tokens=(), max_total_tokens=24,
        wants_features=False, next_round=0, window=FeatureWindow(64),
        history=TokenHistory(owned, 1), page_keys=PageKeys(LIMITS.page_size),
    )  # fmt: skip


class Rows:
    """KV rows that are the tokens themselves."""

    def __init__(self) -> None:
        self.residency = Residency(LIMITS)
        self._pages = np.full((LIMITS.num_pages, LIMITS.page_size), -1)

    def write(self, one: VerifySequence) -> bool:
        """A step of the sequence: all rows up to its root; False: it has to wait."""
        if self.residency.grow(one, one.committed_len, 0.0) is None:
            return False
        if one.copy is not None:
            source, target = one.copy
            self._pages[target] = self._pages[source]
        for place in range(one.kv_len, one.committed_len - 1):
            page, row = divmod(place, LIMITS.page_size)
            self._pages[one.pages[page], row] = one.tokens[place]
        one.kv_len = one.committed_len - 1
        self.residency.settle(one)
        self.residency.check()
        return True

    def read(self, one: VerifySequence) -> list[int]:
        return self._pages[one.pages].reshape(-1)[: one.kv_len].tolist()


def resident(rows: Rows, arrival: int, tokens: Sequence[int]) -> VerifySequence:
    one = sequence(arrival, tokens)
    assert rows.residency.admit(one, 0.0) == []
    assert rows.write(one)
    return one


def test_forks_share_pages_until_one_of_them_writes() -> None:
    rows = Rows()
    parent = resident(rows, 1, [1, 2, 3, 4, 5, 6, 0])
    child = sequence(2, parent.tokens)
    assert rows.residency.fork(parent, child, 0.0) == []
    assert child.pages == parent.pages
    assert rows.residency.counts.live == 2
    parent.tokens += [1, 2]
    child.tokens += [3]
    assert rows.write(parent)
    assert rows.write(child)
    assert child.pages[0] == parent.pages[0]
    assert child.pages[1] != parent.pages[1]
    assert (rows.read(parent), rows.read(child)) == (parent.tokens[:-1], child.tokens[:-1])
    for one in (parent, child):
        rows.residency.put_out(one)
    assert rows.residency.counts.free == LIMITS.num_pages


def test_fork_of_a_fork_that_has_not_copied_yet_reads_the_first_ones_rows() -> None:
    rows = Rows()
    parent = resident(rows, 1, [1, 2, 3, 4, 5, 6, 0])
    child, grandchild = sequence(2, parent.tokens), sequence(3, parent.tokens)
    assert rows.residency.fork(parent, child, 0.0) == []
    assert rows.residency.grow(child, child.committed_len, 0.0) == []  # planned, not yet run
    assert rows.residency.fork(child, grandchild, 0.0) == []
    rows.residency.check()
    assert rows.read(grandchild) == parent.tokens[:-1]
    rows.residency.put_out(child)
    rows.residency.check()
    assert rows.read(grandchild) == parent.tokens[:-1]


def test_sharers_are_put_out_together_where_each_alone_frees_nothing() -> None:
    rows = Rows()
    parent = resident(rows, 2, [1] * 24)
    child = sequence(3, parent.tokens)
    assert rows.residency.fork(parent, child, 0.0) == []
    oldest = sequence(1, [2] * 12)
    assert rows.residency.admit(oldest, 0.0) == [child, parent]
    rows.residency.check()


def test_parent_is_not_put_out_for_its_own_fork() -> None:
    rows = Rows()
    others = [resident(rows, arrival, [arrival] * 4) for arrival in (2, 3, 4, 5)]
    oldest = sequence(1, others[3].tokens)
    assert rows.residency.fork(others[3], oldest, 0.0) == [others[2]]
    assert rows.read(oldest) == oldest.tokens[:-1]


@pytest.mark.parametrize("num_free", [0, 1])
def test_cut_into_a_shared_page_leaves_the_others_their_rows(num_free: int) -> None:
    rows = Rows()
    parent = resident(rows, 1, [1, 2, 3, 4, 5, 6, 0])
    child = sequence(2, parent.tokens)
    assert rows.residency.fork(parent, child, 0.0) == []
    filler = resident(rows, 3, [1])
    filler.tokens += [1] * (4 * (LIMITS.num_pages - 2 - num_free) - 1)
    assert rows.write(filler)
    del child.tokens[3:]
    rows.residency.cut(child, 2)
    child.tokens[2:] = [5, 6]
    assert rows.write(child)  # page 0 is copied; without a free one the younger filler goes
    assert filler.is_resident == bool(num_free)
    assert rows.read(child) == [1, 2, 5]
    assert rows.read(parent) == [1, 2, 3, 4, 5, 6]


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_everyone_reads_its_own_rows_under_any_history(data: st.DataObject) -> None:
    rows = Rows()
    all_: list[VerifySequence] = []
    for arrival in range(data.draw(st.integers(2, 30))):
        there = [one for one in all_ if one.is_resident]
        action = data.draw(st.sampled_from(["new", "fork", "write", "plan", "cut", "put out"]))
        if action == "new":
            tokens = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
            one = sequence(arrival, tokens)
            if rows.residency.admit(one, 0.0) is not None:
                all_.append(one)
        elif there:
            one = data.draw(st.sampled_from(there))
            if action == "fork":
                child = sequence(arrival, one.tokens)
                if rows.residency.fork(one, child, 0.0) is not None:
                    all_.append(child)
            elif action == "write" and one.committed_len < 20:
                one.tokens += data.draw(st.lists(st.integers(0, 6), max_size=4))
                rows.write(one)
            elif action == "plan":
                rows.residency.grow(one, one.committed_len, 0.0)
            elif action == "cut":
                length = data.draw(st.integers(1, one.committed_len))
                del one.tokens[length:]
                rows.residency.cut(one, length - 1)
            elif action == "put out":
                rows.residency.put_out(one)
        rows.residency.check()
        for one in all_:
            if one.is_resident and one.copy is None:
                assert rows.read(one) == one.tokens[: one.kv_len]
    for one in all_:
        rows.residency.put_out(one)
    assert rows.residency.counts.free == LIMITS.num_pages
