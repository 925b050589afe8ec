"""The steps that an engine has launched and not finished, and what is known of their roots.

With at most two in flight, the step before the latest has always ended when another is launched; so
the host knows the roots of the latest one's rounds, if not what they will emit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from verify_service.follow_up import Chosen, FollowUp
from verify_service.step import Launched, SequenceOutcome, SequenceWork

MAX_IN_FLIGHT = 2

Output = TypeVar("Output")


class _Root(NamedTuple):
    position: int
    token: int


@dataclass(slots=True, eq=False)
class Flight(Generic[Output]):
    """A launched step. By slot: `places` of its works, `roots` of its rounds as far as known,
    `emitted_before` of the rounds that its follow-ups follow; `emitted` when it has ended.
    """

    launched: Launched
    output: Output
    places: dict[int, int]
    roots: dict[int, _Root]
    emitted_before: dict[int, list[int]] = field(default_factory=dict)
    emitted: dict[int, list[int]] | None = None

    @property
    def works(self) -> Sequence[SequenceWork]:
        return self.launched.works

    def follow(self, before: Flight[Output]) -> None:
        """`before` has ended: the rounds that follow its own now have roots."""
        assert before.emitted is not None
        for work in self.works:
            if work.follows is None:
                continue
            emitted = self.emitted_before[work.slot] = before.emitted[work.slot]
            if emitted:
                position = before.roots[work.slot].position + len(emitted)
                self.roots[work.slot] = _Root(position, emitted[-1])

    def chosen(self) -> list[Chosen | None]:
        """What each work verifies that follows another; None where the other emitted nothing."""
        return [
            work.follows.choose(emitted)
            if work.follows is not None and (emitted := self.emitted_before[work.slot])
            else None
            for work in self.works
        ]

    def kv_lens(self, outcomes: Sequence[SequenceOutcome]) -> list[int]:
        """What each work's sequence has in pages after the step; -1 where it had no root."""
        starts = [
            work.kv_len if work.follows is None else self._root_position(work.slot)
            for work in self.works
        ]
        committed = [outcome.num_committed for outcome in outcomes]
        return [a + b if a >= 0 else -1 for a, b in zip(starts, committed, strict=True)]

    def _root_position(self, slot: int) -> int:
        return self.roots[slot].position if slot in self.roots else -1


class Flights(Generic[Output]):
    """In the order of their launches."""

    def __init__(self) -> None:
        self._in_flight: deque[Flight[Output]] = deque()
        self._latest: Flight[Output] | None = None  # in flight, or ended
        self._num_launched = 0

    @property
    def places(self) -> Mapping[int, int]:
        """Of the slots in the latest step."""
        return {} if self._latest is None else self._latest.places

    @property
    def slots(self) -> frozenset[int]:
        """Those in flight."""
        return frozenset(slot for flight in self._in_flight for slot in flight.places)

    def check(self, works: Sequence[SequenceWork], page_size: int, max_ahead_nodes: int) -> None:
        """Raises ValueError if they cannot be launched now, or follow what is not there."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise ValueError(f"launch: {MAX_IN_FLIGHT} steps are in flight; finish one first")
        for work in works:
            if work.follows is not None:
                self._check_follow_up(work, work.follows, page_size, max_ahead_nodes)

    def check_none(self) -> None:
        """Raises ValueError if any step is in flight."""
        if self._in_flight:
            raise ValueError(f"run: {len(self._in_flight)} steps are in flight; finish them first")

    def add(self, works: Sequence[SequenceWork], output: Output) -> Launched:
        """Works that were checked."""
        self._num_launched += 1
        roots = {}
        for work in works:
            if work.follows is None and work.samples:
                last = work.num_causal - 1
                roots[work.slot] = _Root(work.kv_len + last, int(work.tokens[last]))
        flight = Flight(
            launched=Launched(works, self._num_launched),
            output=output,
            places={work.slot: place for place, work in enumerate(works)},
            roots=roots,
        )
        if self._latest is not None and self._latest.emitted is not None:
            flight.follow(self._latest)
        self._in_flight.append(flight)
        self._latest = flight
        return flight.launched

    def oldest(self, launched: Launched) -> Flight[Output]:
        """Raises ValueError if `launched` is not that one."""
        if not self._in_flight or self._in_flight[0].launched is not launched:
            numbers = [flight.launched.number for flight in self._in_flight]
            raise ValueError(
                f"finish: step {launched.number} is not the oldest of those in flight, {numbers};"
                " a step that failed takes those behind it along"
            )
        return self._in_flight[0]

    def retire(self, outcomes: Sequence[SequenceOutcome]) -> None:
        """The oldest has ended and gave these."""
        flight = self._in_flight.popleft()
        pairs = zip(flight.works, outcomes, strict=True)
        flight.emitted = {work.slot: outcome.tokens.tolist() for work, outcome in pairs}
        if self._in_flight:
            self._in_flight[0].follow(flight)

    def forget(self) -> None:
        """A step failed: nothing is in flight, and nothing can be followed."""
        self._in_flight.clear()
        self._latest = None

    def _check_follow_up(
        self, work: SequenceWork, follows: FollowUp, page_size: int, max_ahead_nodes: int
    ) -> None:
        if follows.tree.num_nodes > max_ahead_nodes:
            raise ValueError(
                f"follows.tree: {follows.tree.num_nodes} nodes; at most {max_ahead_nodes}, the"
                " engine's max_ahead_nodes"
            )
        latest = self._latest
        root = None if latest is None else latest.roots.get(work.slot)
        if latest is None or root is None:
            raise ValueError(
                f"follows: slot {work.slot} had no round in the step launched before this one"
            )
        theirs = _Root(work.kv_len, int(follows.tree.tokens[0]))
        if theirs != root:
            raise ValueError(
                f"follows: the round before has token {root.token} at position {root.position} as"
                f" its root, the candidates have {theirs.token} at kv_len {theirs.position}"
            )
        if latest.emitted is None:
            most = 1 + latest.works[latest.places[work.slot]].max_depth
        else:
            most = len(latest.emitted[work.slot])
        needed = root.position + most + 1 + follows.most_depth
        room = work.page_ids.size * page_size
        if room < needed:
            raise ValueError(
                f"page_ids: {work.page_ids.size} pages of {page_size} tokens hold {room} tokens;"
                f" prefix and deepest paths of this round and the one before need {needed}"
            )
