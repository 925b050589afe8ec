"""Recorded text and a real head's proposals for the simulated slices. `overlap_record` makes files.

A sequence goes through the answers one after the other, from its own place on, again and again. A
round rooted at a position has the tree that the head grew there, and the truth is what the target
wrote behind that position, so acceptance and beliefs are the head's own. What the recording does
not hold: trees beyond its depth, nodes and children, and text at a temperature. An answer's end is
followed by another answer's beginning: a tree ahead that was rooted before it leads nowhere behind
it.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.errors import StartupError
from common.types import DraftTree, TreeShape

NO_SCORE = -np.inf
MANY = 1 << 20  # more children than any node has
MOST_BEHIND = 8


class Trees(NamedTuple):
    """A tree for each of P positions, of up to N nodes; [P, N]."""

    nodes: npt.NDArray[np.uint16]
    parents: npt.NDArray[np.uint8]
    scores: npt.NDArray[np.float16]

    def of(self, position: int) -> DraftTree:
        """As it was grown; its root is the text's token."""
        scores = self.scores[position].astype(np.float32)
        count = int(np.isfinite(scores).sum())
        parents = self.parents[position, :count].astype(np.int32)
        parents[0] = -1
        # In half precision a child may come to equal its better neighbour, never to pass it.
        return DraftTree(self.nodes[position, :count].astype(np.int32), parents, scores[:count])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """See `overlap_record`. `depth` and `ahead_depth`: of the trees."""

    depth: int
    ahead_depth: int
    tokens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    firsts: npt.NDArray[np.int32]
    ordinary: Trees
    ahead: Trees

    @staticmethod
    def load(path: Path) -> Recording:
        """Raises StartupError."""
        try:
            with np.load(path) as file:
                text: dict[str, Any] = {name: file[name] for name in ("tokens", "starts", "firsts")}
                ordinary, ahead = (
                    Trees(*(file[prefix + name] for name in Trees._fields))
                    for prefix in ("", "ahead_")
                )
                text |= {name: int(file[name]) for name in ("depth", "ahead_depth")}
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise StartupError(
                f"recorded: {path} is no recording ({error}); make one with"
                " python -m benchmarks.overlap_record --out FILE"
            ) from None
        return Recording(**text, ordinary=ordinary, ahead=ahead)

    def save(self, path: Path) -> None:
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("depth", "ahead_depth", "tokens", "starts", "firsts")
        }
        for prefix, trees in (("", self.ordinary), ("ahead_", self.ahead)):
            fields |= {prefix + name: array for name, array in trees._asdict().items()}
        np.savez_compressed(path, **fields)

    def facts(self) -> dict[str, Any]:
        return {
            "answers": len(self.firsts),
            "positions": self.num_positions,
            "depth": self.depth,
            "nodes": int(self.ordinary.nodes.shape[1]),
            "ahead_depth": self.ahead_depth,
            "ahead_nodes": int(self.ahead.nodes.shape[1]),
            "accepted_of_whole_trees": round(float(np.mean(self.accepted())), 4),
            "accepted_of_trees_ahead_by_tokens_behind": [
                round(float(np.mean(accepted)), 4)
                for behind in range(MOST_BEHIND + 1)
                if (accepted := self.accepted_behind(behind))
            ],
        }

    @property
    def num_positions(self) -> int:
        return int(self.ordinary.nodes.shape[0])

    @property
    def vocab_size(self) -> int:
        nodes = max(int(self.ordinary.nodes.max()), int(self.ahead.nodes.max()))
        return 1 + max(int(self.tokens.max()), nodes)

    def places(self) -> npt.NDArray[np.int64]:
        """Index into `tokens` of each position."""
        begins = self.starts[:-1] + self.firsts
        answers = zip(begins, self.counts, strict=True)
        return np.concatenate([np.arange(b, b + n) for b, n in answers]).astype(np.int64)

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Positions of each answer: behind the last of them stand any tree's depth and a bonus."""
        return np.diff(self.starts) - self.firsts - max(self.depth, self.ahead_depth) - 1

    def accepted(self) -> list[int]:
        """Nodes of the whole tree that are accepted at each position."""
        text = RecordedText(self, 0)
        return [walk(self.ordinary.of(p), text, p) for p in range(self.num_positions)]

    def accepted_behind(self, behind: int) -> list[int]:
        """The same of what is left of trees ahead that were rooted `behind` tokens before; at all
        positions of their answers that have so many before them.
        """
        text, places, found = RecordedText(self, 0), self.places(), list[int]()
        for position in range(behind, self.num_positions):
            root = position - behind
            if places[position] - places[root] != behind:
                continue  # of another answer
            told = [text.token(root, depth) for depth in range(1, behind + 1)]
            tree = self.ahead.of(root).below(told)
            found.append(0 if tree is None else walk(tree, text, position))
        return found


class RecordedText:
    """One sequence's way through a recording; the same questions as `overlap_text.Text` answers."""

    def __init__(self, recording: Recording, sequence: int) -> None:
        self._recording, self._places = recording, recording.places()
        answers = len(recording.firsts)
        self._first = int(recording.counts[: sequence % answers].sum())
        self.vocab_size = recording.vocab_size

    def token(self, position: int, depth: int) -> int:
        """What the target picks `depth` behind `position`, whatever the tree there."""
        place = self._places[self._at(position)]
        return int(self._recording.tokens[place + depth])

    def tree(self, position: int, depth: int, num_nodes: int) -> DraftTree:
        """That of a round which waits for it."""
        return _cut(self._recording, self._at(position), depth, num_nodes)

    def tree_ahead(self, position: int, width: int, depth: int, num_nodes: int) -> DraftTree:
        """The one grown ahead; below the recorded width it is what `narrowed` says."""
        return _cut_ahead(self._recording, self._at(position), width, depth, num_nodes)

    def _at(self, position: int) -> int:
        return (self._first + position) % self._recording.num_positions


def walk(tree: DraftTree, text: RecordedText, position: int) -> int:
    """Nodes accepted."""
    children = {
        (int(p), int(t)): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    node = depth = 0
    while (below := children.get((node, text.token(position, depth + 1)))) is not None:
        node, depth = below, depth + 1
    return depth


def narrowed(tree: DraftTree, width: int) -> DraftTree:
    """What a frontier of `width` would have found of it: `width` children of the root, then nodes
    below the best `width` of each level. An approximation: nodes that it had found instead, worse
    than all of the recorded, are missing.
    """
    depths, parents = tree.depths().tolist(), tree.parents.tolist()
    renumbered, kept = {0: 0}, [0]
    frontier, sizes = {0}, dict[int, int]()
    for node in range(1, tree.num_nodes):  # parents first, each level best first
        depth = depths[node]
        size = sizes.get(depth, 0)
        if parents[node] not in frontier or (depth == 1 and size == width):
            continue
        sizes[depth] = size + 1
        renumbered[node] = len(kept)
        kept.append(node)
        if size < width:
            frontier.add(node)
    above = [-1, *(renumbered[parents[node]] for node in kept[1:])]
    return DraftTree(tree.tokens[kept], np.array(above, np.int32), tree.scores[kept])


@lru_cache(maxsize=1 << 16)
def _cut(recording: Recording, position: int, depth: int, num_nodes: int) -> DraftTree:
    shape = TreeShape(max_depth=depth, top_k=MANY, max_nodes=num_nodes)
    return recording.ordinary.of(position).within(shape)


@lru_cache(maxsize=1 << 16)
def _cut_ahead(
    recording: Recording, position: int, width: int, depth: int, num_nodes: int
) -> DraftTree:
    shape = TreeShape(max_depth=depth, top_k=MANY, max_nodes=num_nodes)
    return narrowed(recording.ahead.of(position), width).within(shape)
