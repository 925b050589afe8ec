"""Recorded text and a real head's proposals for the simulated slices. `overlap_record` makes files.

A sequence goes through the answers one after the other, from its own place on, again and again. A
round rooted at a position has the tree that the head grew there, and the truth is what the target
wrote behind that position, so acceptance, beliefs and outcomes are the head's own. What the
recording does not hold: trees beyond its depth, nodes and children, stems longer than recorded
(the longest is taken: the head had fewer of its own states behind it), and text at a temperature.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import StartupError
from common.types import DraftTree, TreeShape
from draft_service.foresight import Outcome, likeliest_outcomes
from draft_service.stepper import cut_to

NO_SCORE = -np.inf
FIELDS = ("depth", "tokens", "starts", "firsts", "nodes", "parents", "scores")
MANY = 1 << 20  # more children than any node has


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """See `overlap_record`. `depth`: of the trees."""

    depth: int
    tokens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    firsts: npt.NDArray[np.int32]
    nodes: npt.NDArray[np.uint16]
    parents: npt.NDArray[np.uint8]
    scores: npt.NDArray[np.float16]

    @staticmethod
    def load(path: Path) -> Recording:
        """Raises StartupError."""
        try:
            with np.load(path) as file:
                fields: dict[str, Any] = {name: file[name] for name in FIELDS}
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise StartupError(
                f"recorded: {path} is no recording ({error}); make one with"
                " python -m benchmarks.overlap_record --out FILE"
            ) from None
        return Recording(**fields | {"depth": int(fields["depth"])})

    def save(self, path: Path) -> None:
        fields: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        np.savez_compressed(path, **fields)

    def facts(self) -> dict[str, Any]:
        return {
            "answers": len(self.firsts),
            "positions": self.num_positions,
            "depth": self.depth,
            "nodes": int(self.nodes.shape[2]),
            "stems": self.num_stems,
            "accepted_of_whole_trees": [self.mean_accepted(s) for s in range(self.num_stems + 1)],
        }

    @property
    def num_positions(self) -> int:
        return int(self.nodes.shape[0])

    @property
    def num_stems(self) -> int:
        return int(self.nodes.shape[1]) - 1

    @property
    def vocab_size(self) -> int:
        return 1 + max(int(self.tokens.max()), int(self.nodes.max()))

    def places(self) -> npt.NDArray[np.int64]:
        """Index into `tokens` of each position."""
        begins = self.starts[:-1] + self.firsts
        answers = zip(begins, self.counts, strict=True)
        return np.concatenate([np.arange(b, b + n) for b, n in answers]).astype(np.int64)

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Positions of each answer: behind the last of them stand the tree's depth and a bonus."""
        return np.diff(self.starts) - self.firsts - self.depth - 1

    def tree(self, position: int, stem: int) -> DraftTree:
        """As it was grown; its root is the text's token."""
        stem = min(stem, self.num_stems)
        scores = self.scores[position, stem].astype(np.float32)
        count = int(np.isfinite(scores).sum())
        parents = self.parents[position, stem, :count].astype(np.int32)
        parents[0] = -1
        # In half precision a child may come to equal its better neighbour, never to pass it.
        return DraftTree(
            self.nodes[position, stem, :count].astype(np.int32), parents, scores[:count]
        )

    def mean_accepted(self, stem: int) -> float:
        """Nodes that the whole tree would have had accepted, over all positions."""
        text = RecordedText(self, 0)
        total = sum(walk(self.tree(p, stem), text, p) for p in range(self.num_positions))
        return round(total / self.num_positions, 4)


class RecordedText:
    """One sequence's way through a recording; the same questions as `overlap_text.Text` answers."""

    def __init__(self, recording: Recording, sequence: int) -> None:
        self._recording, self._places = recording, recording.places()
        answers = len(recording.firsts)
        self._first = int(recording.counts[: sequence % answers].sum())
        self.vocab_size = recording.vocab_size

    def token(self, position: int, depth: int, stem: int = 0) -> int:
        """What the target picks `depth` behind `position`, whatever the tree there."""
        place = self._places[self._at(position)]
        return int(self._recording.tokens[place + depth])

    def tree(self, position: int, depth: int, num_nodes: int, stem: int = 0) -> DraftTree:
        return _cut(self._recording, self._at(position), stem, depth, num_nodes)

    def outcomes(
        self, position: int, depth: int, num_nodes: int, count: int, *, size: int, stem: int = 0
    ) -> tuple[Outcome, ...]:
        """What is left over of the recorded tree, as in the draft; `size` plays no part."""
        grown = _tree(self._recording, self._at(position), stem)
        return likeliest_outcomes(grown, self.tree(position, depth, num_nodes, stem), count)

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


@lru_cache(maxsize=1 << 16)
def _tree(recording: Recording, position: int, stem: int) -> DraftTree:
    return recording.tree(position, stem)


@lru_cache(maxsize=1 << 16)
def _cut(recording: Recording, position: int, stem: int, depth: int, num_nodes: int) -> DraftTree:
    grown = _tree(recording, position, stem)
    return cut_to(grown, TreeShape(max_depth=depth, top_k=MANY, max_nodes=num_nodes))
