"""How often a node is accepted once its parent is, learnt online per depth from verified nodes.

Scores are the head's log-probabilities of paths: exp(score - parent's score) is what it believes of
a node under an accepted parent. It tends to be too sure, the more so the deeper. The chance is
therefore that belief times a ratio, accepted over expected, kept per depth and in it per cell of
beliefs (one per halving); a path's chance is the product along it. Few observations count little:
a cell leans towards its depth's ratio, a depth towards 1. Old ones are forgotten as new ones come,
not as time passes, so that a pause changes nothing; a bad stretch at depth 1 says nothing of depth
2.

Depths are below the root that a tree was grown from: further down the head runs on more of its own
states, also where a round is rooted within the tree (`PendingRound.stem`).

Axes: N nodes of one tree, or of several one behind the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.types import Float32Array, Int32Array
from verify_service.step_cost import Float64Array

NUM_CELLS = 8  # the last takes every belief below 2^-7
PRIOR = 8.0
"""So many expected acceptances weigh as much as what was believed before them."""
MEMORY = 200.0
"""Expected acceptances that a cell, or a depth, remembers."""
LEAST_SCORE = -50.0


class Calibration:
    """Depths beyond `max_depth` count as the deepest."""

    def __init__(self, max_depth: int) -> None:
        self._accepted = np.zeros((max_depth + 1, NUM_CELLS))
        self._expected = np.zeros((max_depth + 1, NUM_CELLS))
        self._accepted_at = np.zeros(max_depth + 1)  # by depth, all cells
        self._expected_at = np.zeros(max_depth + 1)

    def chances(
        self, scores: Float32Array, parents: Int32Array, depths: Int32Array
    ) -> Float64Array:
        """That the whole path down to a node is accepted, float64 [N]; 1 at roots.

        Never above the parent's. `parents` index the same arrays; -1 at roots.
        """
        belief, depth, cell = self._places(scores, parents, depths)
        by_depth = (PRIOR + self._accepted_at) / (PRIOR + self._expected_at)
        ratio = (PRIOR * by_depth[depth] + self._accepted[depth, cell]) / (
            PRIOR + self._expected[depth, cell]
        )
        chances: Float64Array = np.where(depths > 0, np.minimum(1.0, belief * ratio), 1.0)
        for level in range(2, int(depths.max(initial=0)) + 1):
            at = np.flatnonzero(depths == level)
            chances[at] *= chances[parents[at]]
        return chances

    def learn(
        self,
        scores: Float32Array,
        parents: Int32Array,
        depths: Int32Array,
        accepted: npt.NDArray[np.bool_],
    ) -> None:
        """Verified nodes: those below an accepted node, or below a root, were put to the test."""
        tested = (depths > 0) & ((depths[parents] == 0) | accepted[parents])
        belief, depth, cell = (each[tested] for each in self._places(scores, parents, depths))
        taken = accepted[tested].astype(np.float64)
        np.add.at(self._accepted, (depth, cell), taken)
        np.add.at(self._expected, (depth, cell), belief)
        np.add.at(self._accepted_at, depth, taken)
        np.add.at(self._expected_at, depth, belief)
        _forget(self._accepted, self._expected)
        _forget(self._accepted_at, self._expected_at)

    def _places(
        self, scores: Float32Array, parents: Int32Array, depths: Int32Array
    ) -> tuple[Float64Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """What the head believes of each node, and where it is kept: depth and cell."""
        # A score that is no number, or rises, is a draft's mistake: it must cost speed only.
        sane = np.nan_to_num(scores.astype(np.float64), nan=LEAST_SCORE, posinf=0.0)
        sane = np.clip(sane, LEAST_SCORE, 0.0)
        fall = np.minimum(0.0, sane - sane[parents])
        cell = np.minimum((fall / -np.log(2.0)).astype(np.int64), NUM_CELLS - 1)
        depth = np.minimum(depths, self._accepted_at.size - 1).astype(np.int64)
        return np.exp(fall), depth, cell


def _forget(accepted: Float64Array, expected: Float64Array) -> None:
    """In place: nowhere more than MEMORY is remembered."""
    keep = np.minimum(1.0, MEMORY / np.maximum(expected, MEMORY))
    accepted *= keep
    expected *= keep
