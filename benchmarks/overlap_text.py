"""Made-up text and a made-up head for the simulated slices: given chances, no model.

A position is easy or hard, and its truth is one of the head's `WIDTH` candidates, by rank, or none.
The chance that it is one, under an accepted parent, is given per depth; easy positions miss 0.4
times as often as the mean, hard ones 1.6 times. Candidates fall with the square of their rank. What
is drawn belongs to (sequence, position): every way to decode meets the same text.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Protocol

import numpy as np

from common.types import DraftTree

WIDTH = 8
TRUTH = WIDTH  # as a token
RANK_POWER = 2.0
SPREAD = 0.6  # an easy position misses so much less often than the mean, a hard one more
_FALL = np.arange(1, WIDTH + 1) ** -RANK_POWER
_SHARES = _FALL / _FALL.sum()  # of each candidate; the first has 0.65


@dataclass(frozen=True, slots=True)
class Head:
    """`chances[d]`: that the truth at depth d + 1 below a tree's root is a candidate; deeper ones
    the last. They fall, for the head runs on ever more of its own states. `surety`: what the head
    believes over what is so.
    """

    chances: tuple[float, ...]
    surety: float = 1.0

    def hit_chances(self, depth: int, is_hard: bool) -> tuple[float, ...]:
        """Of each candidate to be the truth, [WIDTH]; `depth` from 1."""
        return _hit_chances(self, depth, is_hard)

    def beliefs(self, depth: int, is_hard: bool) -> tuple[float, ...]:
        """What the head says of its candidates."""
        return tuple(min(0.99, c * self.surety) for c in self.hit_chances(depth, is_hard))


@cache
def _hit_chances(head: Head, depth: int, is_hard: bool) -> tuple[float, ...]:
    given = head.chances[min(depth, len(head.chances)) - 1]
    missed = 1.0 - given
    apart = min(SPREAD * missed, 0.9 * given)  # a bad head is a bad one at easy positions, too
    chance = 1.0 - missed - apart if is_hard else 1.0 - missed + apart
    return tuple((chance * _SHARES).tolist())


class Text:
    """What the target will say, for one sequence, as ranks."""

    def __init__(self, sequence: int, seed: int, num_positions: int = 1 << 15) -> None:
        random = np.random.default_rng((seed, sequence))
        self._hard = (random.random(num_positions) < 0.5).tolist()
        self._draws = random.random(num_positions).tolist()

    def levels(self, position: int, count: int) -> tuple[bool, ...]:
        """Whether the `count` positions behind `position` are hard."""
        return tuple(self._hard[position + 1 : position + 1 + count])

    def truth(self, head: Head, position: int, depth: int) -> int:
        """Rank of the token at `position + depth`, for a tree rooted at `position`."""
        draw = self._draws[position + depth]
        chances = head.hit_chances(depth, self._hard[position + depth])
        for rank, upto in enumerate(itertools.accumulate(chances)):
            if draw < upto:
                return rank
        return WIDTH


@dataclass(frozen=True)
class Grown:
    """A tree and where its paths end: `paths[i]` are the ranks down to node i, () at the root."""

    tree: DraftTree
    paths: tuple[tuple[int, ...], ...]

    @cached_property
    def places(self) -> dict[tuple[int, ...], int]:
        return {path: node for node, path in enumerate(self.paths)}


@lru_cache(maxsize=4096)
def grow(head: Head, levels: tuple[bool, ...], num_nodes: int) -> Grown:
    """The best `num_nodes` nodes, root included, no deeper than `levels`; best first."""
    beliefs = [np.log(head.beliefs(d + 1, level)).tolist() for d, level in enumerate(levels)]
    tokens, parents, scores = [0], [-1], [0.0]
    paths: list[tuple[int, ...]] = [()]
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if levels:
        heap.append((-beliefs[0][0], (0,), 0))
    while heap and len(tokens) < num_nodes:
        negative, path, parent = heapq.heappop(heap)
        node, depth, rank = len(tokens), len(path), path[-1]
        tokens.append(rank)
        parents.append(parent)
        scores.append(-negative)
        paths.append(path)
        if rank + 1 < WIDTH:
            step = beliefs[depth - 1][rank] - beliefs[depth - 1][rank + 1]
            heapq.heappush(heap, (negative + step, (*path[:-1], rank + 1), parent))
        if depth < len(levels):
            heapq.heappush(heap, (negative - beliefs[depth][0], (*path, 0), node))
    tree = DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32)
    )
    return Grown(tree, tuple(paths))


class SimulatedText(Protocol):
    """What one sequence's target says and its head proposes. `position`: the root's."""

    @property
    def vocab_size(self) -> int: ...

    def token(self, position: int, depth: int) -> int:
        """What the target says `depth` behind the root."""

    def tree(self, position: int, depth: int, num_nodes: int) -> DraftTree:
        """What the head grows for one round; shared, not to be changed. Its root's token means
        nothing.
        """

    def tree_ahead(self, position: int, width: int, depth: int, num_nodes: int) -> DraftTree:
        """What it grows for rounds to come, `width` nodes a level."""


class MadeUpText:
    """Implements `SimulatedText` with given chances. The truth is `TRUTH` everywhere, other
    candidates are their ranks: so a tree that was grown earlier names the same token the same.
    """

    vocab_size = WIDTH + 1

    def __init__(self, head: Head, text: Text) -> None:
        self._head, self._text = head, text

    def token(self, position: int, depth: int) -> int:
        return TRUTH

    def tree(self, position: int, depth: int, num_nodes: int) -> DraftTree:
        grown = grow(self._head, self._text.levels(position, depth), num_nodes)
        tokens, path = grown.tree.tokens.copy(), tuple[int, ...]()
        places = grown.places
        for level in range(1, depth + 1):
            path = (*path, self._text.truth(self._head, position, level))
            if path not in places:
                break
            tokens[places[path]] = TRUTH
        return DraftTree(tokens, grown.tree.parents, grown.tree.scores)

    def tree_ahead(self, position: int, width: int, depth: int, num_nodes: int) -> DraftTree:
        """Best first, whatever the width."""
        return self.tree(position, depth, num_nodes)
