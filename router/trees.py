"""A draft tree as it passes through the router: plain lists, as the wire has them.

The same rules as `common.types.DraftTree`. Lists, because the router reads each tree once and sends
it on: three numpy arrays per tree and back cost more than all else that it does in a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tree(NamedTuple):
    """N nodes, the root first; `parents[0]` is 0 and means nothing, else `parents[i] < i`."""

    tokens: Sequence[int]
    parents: Sequence[int]
    scores: Sequence[float]

    @staticmethod
    def root_only(token: int) -> Tree:
        return Tree((token,), (0,), (0.0,))

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int] | None:
        """Per node; the root is at depth 0. None if this is no tree with the root first.

        Vocabulary and scores are verify's to judge.
        """
        num_nodes = len(self.tokens)
        if not num_nodes or len(self.parents) != num_nodes or len(self.scores) != num_nodes:
            return None
        depths = [0]
        for node in range(1, num_nodes):
            parent = self.parents[node]
            if not 0 <= parent < node:
                return None
            depths.append(depths[parent] + 1)
        return depths

    def capped(self, depths: Sequence[int], max_nodes: int, max_depth: int) -> Tree:
        """The first `max_nodes` of the nodes no deeper than `max_depth`, parents renumbered."""
        if len(depths) <= max_nodes and max(depths) <= max_depth:
            return self
        keep = [node for node, depth in enumerate(depths) if depth <= max_depth][:max_nodes]
        place = {node: index for index, node in enumerate(keep)}
        return Tree(
            [self.tokens[node] for node in keep],
            [place[self.parents[node]] if node else 0 for node in keep],
            [self.scores[node] for node in keep],
        )

    def prefix(self, num_nodes: int) -> Tree:
        """The first nodes: a tree again, since parents stand before children."""
        return Tree(self.tokens[:num_nodes], self.parents[:num_nodes], self.scores[:num_nodes])
