"""What a generation's rounds came to: counts by depth and length, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.messages import RoundResult

_NO_TREE = -1


class RoundObserver(Protocol):
    """Told of every round as it happens; the router's metrics."""

    def emitted(self, num_emitted: int, num_drafted: int, root_only: bool) -> None:
        """`num_drafted`: nodes verified, without root. `root_only`: no tree, though wanted."""

    def waited_for_draft(self, draft_seconds: float, transport_seconds: float) -> None: ...

    def waited_for_verify(self, verify_seconds: float, transport_seconds: float) -> None: ...

    def token_gap(self, seconds: float) -> None:
        """From one round's tokens to the next's."""


@dataclass(slots=True)
class RoundStatistics:
    """Counts over rounds; the fields are those of `canopy.v1.SpeculationStats`.

    The first round rides on the prefill and never has a tree: `acceptance_length` leaves it out.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_rollbacks: int = 0
    num_root_only_rounds: int = 0
    num_emitted_first: int = 0
    num_cached_tokens: int = 0  # of the prompt, found computed by verify
    observer: RoundObserver | None = None
    alike: dict[tuple[int, int], int] = field(default_factory=dict)
    """How many rounds went as deep and emitted as much: (depth of the tree's used part, tokens)."""

    def add_round(self, depths: Sequence[int], result: RoundResult, wanted_tree: bool) -> None:
        """`depths`: of the tree that was sent; [0]: the root alone.

        `wanted_tree`: this round could have had a tree, had the draft delivered one.
        """
        num_emitted = len(result.tokens)
        if self.num_rounds == 0:
            self.num_emitted_first = num_emitted
            self.num_cached_tokens = result.num_cached_tokens
        self.num_rounds += 1
        self.num_emitted += num_emitted
        self.num_accepted += num_emitted - 1
        used = depths[: result.num_nodes] or (0,)
        if self.observer is not None:
            root_only = wanted_tree and len(depths) == 1
            self.observer.emitted(num_emitted, len(used) - 1, root_only)
        deepest = _NO_TREE
        if len(depths) == 1:
            self.num_root_only_rounds += wanted_tree
        else:
            self.num_drafted += len(used) - 1
            deepest = max(used)
        kind = (deepest, num_emitted)
        self.alike[kind] = self.alike.get(kind, 0) + 1

    @property
    def num_drafted_per_depth(self) -> list[int]:
        """[d]: rounds whose tree went deeper than d."""
        return self._at_least([(deepest, n) for (deepest, _), n in self.alike.items()])

    @property
    def num_accepted_per_depth(self) -> list[int]:
        """[d]: rounds with a tree that accepted a node at depth d below the root, from 0."""
        trees = [(emitted - 1, n) for (deepest, emitted), n in self.alike.items() if deepest >= 0]
        return self._at_least(trees)

    @property
    def num_emitted_histogram(self) -> list[int]:
        """[n]: rounds that emitted n + 1 tokens."""
        counts = [0] * max((emitted for _, emitted in self.alike), default=0)
        for (_, emitted), number in self.alike.items():
            counts[emitted - 1] += number
        return counts

    @staticmethod
    def _at_least(lengths: Sequence[tuple[int, int]]) -> list[int]:
        """[d]: how many of the (length, number) are longer than d."""
        longest = max((length for length, _ in lengths), default=0)
        return [sum(n for length, n in lengths if length > d) for d in range(longest)]

    @property
    def acceptance_length(self) -> float:
        """Mean `num_emitted` of the rounds after the first; 0 if there were none."""
        if self.num_rounds < 2:
            return 0.0
        return (self.num_emitted - self.num_emitted_first) / (self.num_rounds - 1)


@dataclass(slots=True)
class Clock:
    """Where a generation's seconds went. Shares are kept as they happen; the rest is the router's.

    A wait for a service splits into what the service says it took (queue and step) and transport.
    """

    started: float
    first_token: float | None = None
    last_token: float | None = None
    queue_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    transport_seconds: float = 0.0
    observer: RoundObserver | None = None

    def add_draft(self, waited: float, reported: float) -> None:
        spent = min(waited, reported)
        self.draft_seconds += spent
        self.transport_seconds += waited - spent
        if self.observer is not None:
            self.observer.waited_for_draft(spent, waited - spent)

    def add_verify(self, waited: float, reported: float) -> None:
        spent = min(waited, reported)
        self.verify_seconds += spent
        self.transport_seconds += waited - spent
        if self.observer is not None:
            self.observer.waited_for_verify(spent, waited - spent)

    def add_tokens(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        elif self.observer is not None and self.last_token is not None:
            self.observer.token_gap(now - self.last_token)
        self.last_token = now

    def router_seconds(self, now: float) -> float:
        others = self.draft_seconds + self.verify_seconds + self.transport_seconds
        return max(0.0, now - self.started - others)

    @property
    def time_to_first_token_seconds(self) -> float:
        return 0.0 if self.first_token is None else self.first_token - self.started

    @property
    def decode_seconds(self) -> float:
        if self.first_token is None or self.last_token is None:
            return 0.0
        return self.last_token - self.first_token
