"""How often a node with such a score at such a depth is accepted, learnt from verified nodes.

A score is the head's log-probability of the path: exp(score) would be the chance, were the head
right. It is surer than it should be, the more so the deeper. The chance is therefore exp(score)
times a ratio, accepted over expected, kept per depth and in it per cell of scores (one per halving
of the chance). Few observations count little: a cell leans towards its depth's ratio,
a depth towards 1. Old ones are forgotten as new ones come, not as time passes, so that a pause
changes nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.types import Float32Array, Int32Array
from verify_service.step_cost import Float64Array

NUM_CELLS = 12  # the last takes every chance below 2^-11
PRIOR = 8.0
"""So many expected acceptances weigh as much as what was believed before them."""
MEMORY = 200.0
"""Expected acceptances that a cell, or a depth, remembers."""


class Calibration:
    """Depths beyond `max_depth` count as the deepest."""

    def __init__(self, max_depth: int) -> None:
        self._accepted = np.zeros((max_depth + 1, NUM_CELLS))
        self._expected = np.zeros((max_depth + 1, NUM_CELLS))
        self._accepted_at = np.zeros(max_depth + 1)  # by depth, all cells
        self._expected_at = np.zeros(max_depth + 1)

    def chances(self, scores: Float32Array, depths: Int32Array) -> Float64Array:
        """Of one tree, float64 [N]: 1 at the root, then never rising, so that cuts are prefixes.

        Where the learnt ratios would lift a node above one that stands before it, it gets the
        earlier one's chance.
        """
        guess, depth, cell = self._places(scores, depths)
        by_depth = (PRIOR + self._accepted_at) / (PRIOR + self._expected_at)
        ratio = (PRIOR * by_depth[depth] + self._accepted[depth, cell]) / (
            PRIOR + self._expected[depth, cell]
        )
        chances: Float64Array = np.minimum(1.0, guess * ratio)
        chances[0] = 1.0
        return np.minimum.accumulate(chances)

    def learn(
        self, scores: Float32Array, depths: Int32Array, accepted: npt.NDArray[np.bool_]
    ) -> None:
        """Verified nodes, [N] each, of one tree or several; roots (depth 0) are left out."""
        below = depths > 0
        guess, depth, cell = self._places(scores[below], depths[below])
        taken = accepted[below].astype(np.float64)
        np.add.at(self._accepted, (depth, cell), taken)
        np.add.at(self._expected, (depth, cell), guess)
        np.add.at(self._accepted_at, depth, taken)
        np.add.at(self._expected_at, depth, guess)
        _forget(self._accepted, self._expected)
        _forget(self._accepted_at, self._expected_at)

    def _places(
        self, scores: Float32Array, depths: Int32Array
    ) -> tuple[Float64Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """What the head believes, and where it is kept: depth and cell."""
        # A score that is no number, or above 0, is a draft's mistake: it must cost speed only.
        falling = np.nan_to_num(scores.astype(np.float64), nan=-50.0, posinf=0.0, neginf=-50.0)
        falling = np.clip(falling, -50.0, 0.0)
        cell = np.minimum((falling / -np.log(2.0)).astype(np.int64), NUM_CELLS - 1)
        depth = np.minimum(depths, self._accepted_at.size - 1).astype(np.int64)
        return np.exp(falling), depth, cell


def _forget(accepted: Float64Array, expected: Float64Array) -> None:
    """In place: nowhere more than MEMORY is remembered."""
    keep = np.minimum(1.0, MEMORY / np.maximum(expected, MEMORY))
    accepted *= keep
    expected *= keep
