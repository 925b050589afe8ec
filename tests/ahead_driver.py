"""Generations with two steps always in flight, rounds that follow each other among ordinary ones;
and the same rounds again, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.types import DraftTree, SamplingParams
from verify_service.engine import DeviceEngine
from verify_service.follow_up import FollowUp
from verify_service.step import Launched, SequenceOutcome, SequenceWork, TokenHistory

Candidates = Callable[[int, list[int]], DraftTree]
"""(sequence, its tokens up to the root of its latest round) -> a tree rooted there."""


@dataclass
class Ahead:
    """One sequence. `chunks`: rows of its prompt in each step; `opens`: its first step; `pauses`:
    steps at which its round does not follow, so that an ordinary one comes after."""

    prompt: list[int]
    sampling: SamplingParams
    chunks: tuple[int, ...]
    opens: int = 0
    pauses: frozenset[int] = frozenset()
    stop_tokens: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    latest: SequenceWork | None = None  # while it is in flight
    ended: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.history = TokenHistory(self.tokens, len(self.prompt))

    @property
    def response(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


@dataclass
class Record:
    """Every step's works, as ordinary ones, and what they gave."""

    works: list[list[SequenceWork]] = field(default_factory=list)
    outcomes: list[list[SequenceOutcome]] = field(default_factory=list)
    num_followed: int = 0
    num_chosen: int = 0  # nodes of candidates that were verified
    num_accepted: int = 0  # of these


def tree_below(root: int, nodes: Sequence[int], parents: Sequence[int]) -> DraftTree:
    count = len(nodes) + 1
    return DraftTree(
        np.array([root, *nodes], np.int32), np.array([-1, *parents], np.int32),
        -np.arange(count, dtype=np.float32),
    )  # fmt: skip


def generate_ahead(
    engine: DeviceEngine,
    sequences: Sequence[Ahead],
    num_tokens: int,
    candidates: Candidates,
    num_rows: int,
    max_depth: int,
) -> Record:
    """`num_tokens` or more of each, or up to a stop token. What was launched for a sequence that
    ended meanwhile is in the record and in no sequence's tokens.
    """
    record = Record()
    in_flight = deque[Launched]()
    step = 0
    while in_flight or not all(one.ended for one in sequences):
        works = []
        for i, one in enumerate(sequences):
            work = _next(engine, i, one, step, candidates, num_rows, max_depth)
            if work is not None:
                one.latest = work
                works.append(work)
        if works:
            in_flight.append(engine.launch(works))
        step += 1
        if len(in_flight) == 2 or (in_flight and not works):
            launched = in_flight.popleft()
            outcomes = engine.finish(launched)
            _note(record, sequences, launched.works, outcomes, num_tokens)
    return record


def _next(
    engine: DeviceEngine,
    i: int,
    one: Ahead,
    step: int,
    candidates: Candidates,
    num_rows: int,
    max_depth: int,
) -> SequenceWork | None:
    pages = engine.config.shape.pages_per_sequence
    page_ids = np.arange(i * pages, (i + 1) * pages, dtype=np.int32)
    if one.ended or step < one.opens:
        return None
    chunk = step - one.opens
    if chunk < len(one.chunks):
        first = sum(one.chunks[:chunk])
        count = one.chunks[chunk]
        return SequenceWork(
            slot=i, tokens=np.array(one.prompt[first : first + count], np.int32),
            parents=np.arange(-1, count - 1, dtype=np.int32), num_causal=count,
            samples=first + count == len(one.prompt), kv_len=first, page_ids=page_ids,
            sampling=one.sampling, stop_tokens=one.stop_tokens, history=one.history,
        )  # fmt: skip
    tree = candidates(i, one.tokens)
    if one.latest is not None:
        if step in one.pauses or not one.latest.samples:
            return None
        follows = FollowUp(tree, num_rows, max_depth)
        return one.latest.followed_by(follows, len(one.tokens) - 1, page_ids)
    tree = tree.prefix(num_rows).within_depth(max_depth)
    return SequenceWork(
        slot=i, tokens=tree.tokens, parents=tree.parents, num_causal=1, samples=True,
        kv_len=len(one.tokens) - 1, page_ids=page_ids, sampling=one.sampling,
        stop_tokens=one.stop_tokens, history=one.history,
    )  # fmt: skip


def _note(
    record: Record,
    sequences: Sequence[Ahead],
    works: Sequence[SequenceWork],
    outcomes: list[SequenceOutcome],
    num_tokens: int,
) -> None:
    known = []
    for work, outcome in zip(works, outcomes, strict=True):
        one = sequences[work.slot]
        if work.follows is None:
            known.append(work)
        else:
            assert outcome.chosen is not None
            known.append(_as_ordinary(record, work, outcome))
            record.num_followed += 1
            record.num_chosen += outcome.num_nodes - 1
            record.num_accepted += outcome.num_accepted
        if one.latest is work:
            one.latest = None
        if not one.ended:
            one.tokens += outcome.tokens.tolist()
            stopped = outcome.num_emitted > 0 and one.tokens[-1] in one.stop_tokens
            one.ended = stopped or len(one.response) >= num_tokens
    record.works.append(known)
    record.outcomes.append(outcomes)


def _as_ordinary(record: Record, work: SequenceWork, outcome: SequenceOutcome) -> SequenceWork:
    """The round's work, had its root been known: it stands behind what was committed before."""
    slot = work.slot
    assert outcome.chosen is not None
    before = next(
        (theirs, got)
        for theirs, got in zip(record.works[-1], record.outcomes[-1], strict=True)
        if theirs.slot == slot
    )
    return replace(
        work, follows=None, tokens=outcome.chosen.tree.tokens,
        parents=outcome.chosen.tree.parents, kv_len=before[0].kv_len + before[1].num_committed,
    )  # fmt: skip


def run_again(engine: DeviceEngine, record: Record) -> list[list[SequenceOutcome]]:
    """The same rounds, each step ended before the next begins."""
    return [engine.run(works) for works in record.works]
