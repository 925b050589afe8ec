"""A round whose root is not known yet: which tree it takes once it is, on the host.

The device makes the same choice from the same arrays (verify_service/resolve.py); this one says
afterwards what was verified, and is what the device's is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.types import DraftTree, Int32Array


@dataclass(frozen=True, slots=True)
class FollowUp:
    """What the next round of a sequence may verify, whatever its present one emits.

    `tree`: candidates, rooted at the root of the round before. Its nodes that hang where the tokens
    emitted there lead are the round's tree: the first `num_rows - 1` in the tree's order, none
    deeper than `max_depth` below the new root. `num_rows`: rows of the step set aside, the root's
    included; those that no node takes are inert.
    """

    tree: DraftTree
    num_rows: int
    max_depth: int

    @property
    def most_depth(self) -> int:
        """Most nodes that the round can accept."""
        return min(self.max_depth, self.num_rows - 1)

    def validate(self, vocab_size: int) -> None:
        """Raises ValueError naming the first rule that is broken, with value and limit."""
        if self.num_rows < 1:
            raise ValueError(f"follows.num_rows: {self.num_rows} must be 1 or more, for the root")
        if self.max_depth < 0:
            raise ValueError(f"follows.max_depth: {self.max_depth} is negative")
        try:
            self.tree.validate(vocab_size, self.tree.num_nodes)
        except ValueError as error:
            raise ValueError(f"follows.tree: {error}") from None

    def choose(self, emitted: Sequence[int]) -> Chosen:
        """The tree of the round that follows one that emitted these tokens, at least one."""
        root = self.tree.node_at(emitted)
        if root < 0:
            return Chosen(DraftTree.root_only(emitted[-1]), np.full(1, -1, np.int32))
        nodes = self.tree.nodes_below(root, self.num_rows, self.max_depth)
        return Chosen(self.tree.subtree(nodes), nodes)


@dataclass(frozen=True, slots=True)
class Chosen:
    """`tree`: what a follow-up verified. `nodes` int32 [its nodes]: the candidates that they were;
    -1 for a root to which the candidates do not lead.
    """

    tree: DraftTree
    nodes: Int32Array


def places_of(tree: DraftTree) -> tuple[list[int], list[int], list[int]]:
    """Depth of each node, and its place in a walk through the tree, parents first: node k is m's
    ancestor, or m itself, if `entered[k] <= entered[m] < left[k]`.
    """
    parents = tree.parents.tolist()
    sizes = [1] * len(parents)  # with what hangs below
    for node in range(len(parents) - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    depths, entered = [0] * len(parents), [0] * len(parents)
    following = [1] * len(parents)  # where its next child is entered
    for node in range(1, len(parents)):
        parent = parents[node]
        depths[node] = depths[parent] + 1
        entered[node] = following[parent]
        following[parent] += sizes[node]
        following[node] = entered[node] + 1
    return depths, entered, [a + b for a, b in zip(entered, sizes, strict=True)]
