"""One sequence as the verify machine knows it: tokens, rounds, kept results, and what it holds.

`kv_len` here is physical: rows in pages. What routers are told is `committed_len - 1`, where the
next root's row goes; the two differ while prefill, or recompute after a preemption, is still at
work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from common.page_keys import PageKeys
from common.tracing import UNTRACED, Trace
from common.types import (
    Drafting,
    DraftTree,
    Float32Array,
    Int32Array,
    SamplingParams,
    SequenceState,
    TopLogprobs,
    TreeShape,
)
from verify_service.commands import Command
from verify_service.events import RoundResult
from verify_service.features import FeatureWindow
from verify_service.step import TokenHistory

Float64Array = npt.NDArray[np.float64]

NO_SLOT = -1
NOT_AHEAD = -1


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round that waits for its step.

    `tree` is what may be verified, `nodes[i]` the index of its node i in the tree as it was sent,
    and `depths[i]` how deep that node is. `is_own`: begun here, without a router's word; then it
    may take a tree ahead: `ahead_from` is where that was rooted, `stem` how far above the round's
    root.
    """

    round: int
    tree: DraftTree
    nodes: Int32Array
    depths: Int32Array
    since: float  # seconds on the machine's clock
    is_own: bool = False
    ahead_from: int = NOT_AHEAD
    stem: int = 0

    @staticmethod
    def of(round_: int, tree: DraftTree, max_depth: int, since: float) -> PendingRound:
        """Keeps the nodes no deeper than `max_depth`: deeper ones could never be emitted."""
        nodes = np.arange(tree.num_nodes, dtype=np.int32)
        whole = PendingRound(round_, tree, nodes, tree.depths(), since)
        return whole if whole.depth <= max_depth else whole.within_depth(max_depth)

    @staticmethod
    def root_only(round_: int, token: int, since: float) -> PendingRound:
        return PendingRound.of(round_, DraftTree.root_only(token), 0, since)

    def prefix(self, num_nodes: int) -> PendingRound:
        return replace(
            self,
            tree=self.tree.prefix(num_nodes),
            nodes=self.nodes[:num_nodes],
            depths=self.depths[:num_nodes],
        )

    def within_depth(self, max_depth: int) -> PendingRound:
        keep = np.flatnonzero(self.depths <= max_depth)
        tree = self.tree.within_depth(max_depth)
        return replace(self, tree=tree, nodes=self.nodes[keep], depths=self.depths[keep])

    @property
    def depth(self) -> int:
        return int(self.depths.max())

    @property
    def max_rows(self) -> int:
        """Rows of a step that it can use."""
        return self.tree.num_nodes

    def row_chances(self, chances: Float64Array) -> Float64Array:
        """That each row below the root is accepted; `chances`: each node, the root included."""
        return chances[1:]

    @property
    def row_scores(self) -> Float32Array:
        """float32 [max_rows]: log-probabilities, as the head has it; 0 for the root."""
        return self.tree.scores

    @property
    def grown_depths(self) -> Int32Array:
        """Of the nodes below the root: below that of the tree that was grown."""
        if not self.stem:
            return self.depths
        return np.where(self.depths > 0, self.depths + np.int32(self.stem), np.int32(0))


BRIEFLY_SECONDS = 0.25
"""A sequence that ended its round within this time may be back any moment."""


@dataclass(frozen=True, slots=True)
class AheadTree:
    """What hangs below a sequence's present root of a tree that was grown at `kv_len`, `stem`
    tokens before it. `most`: what one round may take.
    """

    kv_len: int
    stem: int
    tree: DraftTree
    most: TreeShape

    def after(self, tokens: Sequence[int]) -> AheadTree | None:
        """The same once `tokens` were emitted; None where nothing hangs below them."""
        tree = self.tree.below(tokens)
        if tree is None or tree.num_nodes == 1:
            return None
        return replace(self, tree=tree, stem=self.stem + len(tokens))


@dataclass(frozen=True, slots=True)
class RoundTurn:
    """What the last result said, and when: how the round behind it was to be drafted.

    `drafted`: whether any round of the sequence had a tree.
    """

    since: float
    asked: Drafting
    drafted: bool


@dataclass(slots=True, kw_only=True, eq=False)
class VerifySequence:
    """Mutable; only the machine and its parts touch it."""

    sequence_id: bytes
    epoch: int
    stream: int  # the owner: results and features go there
    arrival: int  # order of Open; lower is older
    tokens: list[int]  # committed: prompt and every emitted token
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_tokens: tuple[int, ...]
    max_total_tokens: int
    wants_features: bool
    next_round: int
    window: FeatureWindow
    history: TokenHistory
    page_keys: PageKeys
    runs_on: bool = False
    draft_ahead: bool = False

    trace: Trace = UNTRACED
    fork_of: bytes = b""  # until it was admitted: whose rows it takes over

    pending: PendingRound | None = None
    results: dict[int, RoundResult] = field(default_factory=dict)  # unacknowledged
    deferred: deque[tuple[int, Command]] = field(default_factory=deque)  # behind a running step

    kv_len: int = 0
    slot: int = NO_SLOT
    pages: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # of tokens from the second on
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    has_told_prompt: bool = False  # they went out with a result
    num_found: int = 0  # rows found since Open, until a result has told of them
    num_published: int = 0  # of `pages`, from the first on
    copy: tuple[int, int] | None = None  # a page, still held, to be copied to one of `pages` first
    num_in_flight: int = 0  # launched steps that hold it
    closed: bool = False  # while in flight: frees its pages when the last of these retires
    paused_since: float = 0.0  # when it last became idle
    ahead: AheadTree | None = None  # for rounds that begin here
    turn: RoundTurn | None = None  # since its last result; None: nothing to compare with
    orphaned_since: float | None = None  # when its stream went

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def is_resident(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def in_flight(self) -> bool:
        return self.num_in_flight > 0

    @property
    def is_ready(self) -> bool:
        """Whether its round waits for a step."""
        return self.pending is not None and not self.in_flight

    def is_briefly_away(self, now: float) -> bool:
        """Whether it ended a round so lately that its next is likely on the way."""
        waits = self.pending is None and self.orphaned_since is None and self.is_resident
        return waits and now - self.paused_since < BRIEFLY_SECONDS

    @property
    def held_pages(self) -> list[int]:
        """Every page that it has a reference to."""
        return self.pages if self.copy is None else [*self.pages, self.copy[0]]

    @property
    def num_missing(self) -> int:
        """Rows below the root that prefill still has to compute."""
        return len(self.tokens) - 1 - self.kv_len

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be found."""
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def state(self) -> SequenceState:
        return SequenceState(
            epoch=self.epoch,
            next_round=self.next_round,
            committed_len=self.committed_len,
            kv_len=self.committed_len - 1,
        )

    def acknowledge(self, acked_round: int) -> None:
        """Forgets results that the router has."""
        for round_ in [r for r in self.results if r <= acked_round]:
            del self.results[round_]
