"""Rounds that are launched while the round before them still runs.

Neither their root nor their tree is known then: the device takes the tree from candidates
(`follow_up.FollowUp`), which are the sequence's newest tree ahead, rooted at the root of the round
before. What the budget needs to know is what each row set aside for such a round is worth:

    chance(row k) = sum, over the tokens that the round before may emit, of the chance of the node
                    that then is the k-th below the new root

A new root is a token that the round before does not verify, below one that it does, so these
outcomes exclude each other, and a candidate's chance (of its whole path) already holds that of the
outcome. Rows of outcomes that are no candidates are never filled: they are worth nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from common.types import Drafting, DraftTree, Float32Array, Int32Array, TreeShape
from verify_service.follow_up import FollowUp
from verify_service.sequences import NOT_AHEAD, AheadTree, Float64Array, PendingRound

LEAST_CHANCE = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class FollowingRound:
    """A round to be planned behind one that runs. `way`: that is taken meanwhile.

    `tree`: candidates, rooted at the root of the round before. `row_of` int32 [nodes]: the row
    below the new root that a candidate takes if the round before leads to what it hangs below; 0
    where it hangs below nothing that can be a root. `max_depth`: below the new root.
    """

    tree: DraftTree
    row_of: Int32Array
    max_depth: int
    way: Drafting
    ahead_from: int = NOT_AHEAD
    stem: int = 0

    @staticmethod
    def root_only(token: int, way: Drafting) -> FollowingRound:
        return FollowingRound(DraftTree.root_only(token), np.zeros(1, np.int32), 0, way)

    @staticmethod
    def of(
        ahead: AheadTree, verified: DraftTree, max_depth: int, max_rows: int, max_nodes: int
    ) -> FollowingRound:
        """`verified`: by the round before. At most `max_nodes` candidates; a round takes of them
        what `ahead.most` allows, and no more than `max_rows`, its root included.
        """
        most = TreeShape(
            max_depth=max(0, min(max_depth, ahead.most.max_depth)),
            top_k=ahead.most.top_k,
            max_nodes=min(max_rows, ahead.most.max_nodes),
        )
        nodes, row_of = _candidates(ahead.tree, verified, most, max_nodes)
        tree = ahead.tree.subtree(nodes)
        way = Drafting.AHEAD
        return FollowingRound(tree, row_of, most.max_depth, way, ahead.kv_len, ahead.stem)

    @property
    def max_rows(self) -> int:
        """Rows of a step that it can use, the root's included."""
        return 1 + int(self.row_of.max())

    @property
    def grown_depths(self) -> Int32Array:
        """As `PendingRound.grown_depths`."""
        depths = self.tree.depths()
        return np.where(depths > 0, depths + np.int32(self.stem), np.int32(0))

    def row_chances(self, chances: Float64Array) -> Float64Array:
        """Of each row below the root; `chances`: of each candidate, from the root before."""
        return np.bincount(self.row_of, weights=chances)[1:].astype(np.float64)

    @property
    def row_scores(self) -> Float32Array:
        """float32 [max_rows]: logarithms of what the head believes of the rows."""
        falling = np.minimum(0.0, self.tree.scores.astype(np.float64))
        believed = self.row_chances(np.exp(falling))
        scores = np.log(np.maximum(believed, LEAST_CHANCE))
        return np.concatenate([[0.0], scores]).astype(np.float32)

    def follow_up(self, num_rows: int, max_depth: int) -> FollowUp:
        if num_rows == 1:
            return FollowUp(self.tree.prefix(1), 1, 0)
        return FollowUp(self.tree, num_rows, min(max_depth, self.max_depth))

    def begin(
        self, follow_up: FollowUp, round_: int, emitted: Sequence[int], now: float
    ) -> tuple[PendingRound, int]:
        """The round, once the one before has emitted its tokens: what is verified, and how many
        nodes could have been. `follow_up`: as it was launched.
        """
        tree = FollowUp(self.tree, self.max_rows, self.max_depth).choose(emitted).tree
        whole = PendingRound.of(round_, tree, self.max_depth, now)
        cut = whole.within_depth(follow_up.max_depth).prefix(follow_up.num_rows)
        if tree.num_nodes > 1:
            cut = replace(cut, ahead_from=self.ahead_from, stem=self.stem + len(emitted))
        return replace(cut, is_own=True), tree.num_nodes


def _candidates(
    tree: DraftTree,
    verified: DraftTree,
    most: TreeShape,
    max_nodes: int,
) -> tuple[Int32Array, Int32Array]:
    """Nodes of `tree` that are worth being candidates, and for each the row that it can take.

    Such are the nodes that the round before verifies; those right below them, each of which may be
    the new root; and below each of these what `most` allows.
    """
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    pairs = zip(verified.parents.tolist(), verified.tokens.tolist(), strict=True)
    there: dict[tuple[int, int], int] = {}
    for node, place in enumerate(pairs):
        there.setdefault(place, node)
    same = {0: 0}  # nodes that the round before verifies -> theirs
    root_of: dict[int, int] = {}  # of the others: which of them would be the new root
    row_of: dict[int, int] = {0: 0}
    depth: dict[int, int] = {}
    num_below: dict[int, int] = {}
    num_children: dict[int, int] = {}
    for node in range(1, len(parents)):
        if len(row_of) >= max_nodes:
            break
        parent = parents[node]
        if parent in same:
            known = there.get((same[parent], tokens[node]))
            if known is not None:
                same[node] = known
            else:
                root_of[node], depth[node], num_below[node] = node, 0, 0
            row_of[node] = 0
        elif parent in root_of:
            root = root_of[parent]
            num_children[parent] = num_children.get(parent, 0) + 1
            if num_children[parent] > most.top_k or depth[parent] >= most.max_depth:
                continue
            if num_below[root] + 1 >= most.max_nodes:
                continue
            num_below[root] += 1
            root_of[node], depth[node] = root, depth[parent] + 1
            row_of[node] = num_below[root]
    return np.array([*row_of], np.int32), np.array([*row_of.values()], np.int32)
