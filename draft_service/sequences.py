"""One sequence as the draft machine knows it: tokens, feature rows, rounds, and what it holds.

`kv_len` here is physical: pairs in the head's pages. Pair t = (token t+1, feature t) is fed at
place t - features_from, so that a sequence whose old features never came starts at place 0. (Rotary
positions are relative: numbering from anywhere is right if the whole sequence agrees.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.page_keys import PageKeys
from common.types import GREEDY_TEMPERATURE, DraftTree, SequenceState, TreeShape
from draft_service.ahead import SentAhead
from draft_service.commands import Command
from draft_service.events import GrownTree
from draft_service.features import FeatureStore
from draft_service.step import NoiseKey


@dataclass(frozen=True, slots=True)
class PendingTree:
    """A wish for a tree. `shape`: the most that may be sent. `since`: seconds, machine's clock.
    `ahead`: nobody waits for it.
    """

    round: int
    shape: TreeShape
    since: float
    ahead: bool = False

    @property
    def is_root_only(self) -> bool:
        return is_root_only(self.shape)


def is_root_only(shape: TreeShape) -> bool:
    return shape.max_nodes <= 1 or shape.max_depth < 1 or shape.top_k < 1


@dataclass(slots=True, kw_only=True, eq=False)
class DraftSequence:
    """Mutable; only the machine and its parts touch it."""

    sequence_id: bytes
    epoch: int
    stream: int  # the owner: trees go there
    arrival: int  # order of Open; lower is older
    tokens: list[int]  # committed
    features_from: int
    shape: TreeShape  # of Open, within the engine's
    max_total_tokens: int
    features: FeatureStore
    temperature: float = 0.0  # of the target's picks; 0: candidates by the head alone
    seed: int = 0
    page_keys: PageKeys
    next_round: int = 0

    pending: PendingTree | None = None
    grown: GrownTree | None = None  # unacknowledged
    last_wish: PendingTree | None = None  # since the last Rollback
    sent_ahead: SentAhead = field(default_factory=SentAhead)
    deferred: deque[tuple[int, Command]] = field(default_factory=deque)  # behind a running step

    kv_len: int = 0
    pages: list[int] = field(default_factory=list)
    num_published: int = 0  # of `pages`, from the first on
    copy: tuple[int, int] | None = None  # a page, still held, to be copied to one of `pages` first
    in_flight: bool = False
    closed: bool = False
    used_at: float = 0.0  # last Open, Extend or step
    orphaned_since: float | None = None

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def held_pages(self) -> list[int]:
        """Every page that it has a reference to."""
        return self.pages if self.copy is None else [*self.pages, self.copy[0]]

    @property
    def num_pairs(self) -> int:
        """Pairs that a tree below the last token stands on."""
        return max(0, self.committed_len - 1 - self.features_from)

    @property
    def num_missing(self) -> int:
        """Pairs not in pages yet."""
        return self.num_pairs - self.kv_len

    @property
    def num_feedable(self) -> int:
        """Of the missing pairs, those whose features are there, without a gap."""
        return min(self.num_missing, self.features.num_available)

    @property
    def can_draft(self) -> bool:
        """Whether every pair is in pages or can be fed."""
        return self.num_feedable == self.num_missing

    @property
    def can_redo_last(self) -> bool:
        """Whether the last pair, which is in pages, can be fed once more for its output."""
        return self.kv_len > 0 and self.features.has(self.features_from + self.kv_len - 1)

    @property
    def waits(self) -> bool:
        """Whether its next round waits for a tree."""
        return self.pending is not None and not self.pending.ahead

    @property
    def state(self) -> SequenceState:
        """What routers are told; `kv_len` is the position of the first feature row still wanted."""
        return SequenceState(
            epoch=self.epoch,
            next_round=self.next_round,
            committed_len=self.committed_len,
            kv_len=self.features.available_until,
        )

    def acknowledge(self, acked_round: int) -> None:
        """Forgets the tree that the router has."""
        if self.grown is not None and self.grown.round <= acked_round:
            self.grown = None

    @property
    def noise(self) -> NoiseKey | None:
        """The noise of the target's next pick; None: it is greedy."""
        if self.temperature < GREEDY_TEMPERATURE:
            return None
        return NoiseKey(self.seed, self.temperature, self.committed_len)

    def root_only(self) -> DraftTree:
        return DraftTree.root_only(self.tokens[-1])
