"""How many nodes of each tree a step verifies: those that pay.

    rate(n) = (roots + chances of the n likeliest nodes) / (step seconds with n nodes + idle)

over all ready sequences together. The n with the highest rate is taken, which is one threshold on
chances; because chances never rise along a tree's order, every sequence keeps a prefix of its tree.
n = 0 is plain decoding, so under what is believed a step never does worse than that. `idle` is the
time that the device waits between two steps for trees to come back: the draft's and the network's
share of a round, spent whatever the step verifies. Sorting is all that it costs: N log N.

What is not verified is not learnt of. Each step that leaves nodes out therefore puts PROBE_SHARE of
its seconds aside, and as soon as they pay for the next larger row bucket, one step takes it. More
nodes never emit fewer tokens, so probing costs at most that share.

Deterministic, without a clock; seconds come from the measured curve and from the stepper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from common.types import Float32Array, Int32Array
from verify_service.calibration import Calibration
from verify_service.following import FollowingRound
from verify_service.sequences import PendingRound
from verify_service.step_cost import Float64Array, StepCurve

AnyRound: TypeAlias = PendingRound | FollowingRound

PROBE_SHARE = 0.01
IDLE_WEIGHT = 1 / 8  # of the newest gap in the running mean
MAX_IDLE_SECONDS = 1.0  # longer gaps are pauses of a client, not turnarounds


class TreeBudget:
    def __init__(self, curve: StepCurve, max_depth: int) -> None:
        self._curve = curve
        self._calibration = Calibration(max_depth)
        self._idle_seconds = 0.0
        self._saved_seconds = 0.0  # for the next probe

    @property
    def idle_seconds(self) -> float:
        """Mean wait of the device between two steps."""
        return self._idle_seconds

    def share(
        self, rounds: Sequence[AnyRound], *, num_causal: int, max_rows: int, num_kv_tokens: int
    ) -> list[int]:
        """Nodes of each round's tree to verify, or rows to set aside for them, root included.

        `num_causal`: rows of the step that are there anyhow, roots among them. `max_rows`: of a
        step; roots and causal rows are never cut. `num_kv_tokens`: in pages, all sequences.
        """
        sizes = [round_.max_rows - 1 for round_ in rounds]
        most = min(sum(sizes), max_rows - num_causal)
        if most <= 0:
            return [1] * len(rounds)
        flat = self._chances(rounds)
        order = np.argsort(-flat, kind="stable")[:most]
        seconds = self._curve.seconds(num_causal + np.arange(most + 1), num_kv_tokens, len(rounds))
        best = best_count(flat[order], len(rounds), seconds + self._idle_seconds)
        taken = order[: self._or_probe(best, seconds)]
        owner = np.repeat(np.arange(len(sizes)), sizes)
        return [1 + int(n) for n in np.bincount(owner[taken], minlength=len(sizes))]

    def best_step(
        self, rounds: Sequence[PendingRound], *, max_rows: int, num_kv_tokens: int
    ) -> Callable[[int, float], tuple[float, float]]:
        """(number of sequences, seconds spent besides) -> expected tokens and seconds of a step of
        so many sequences like those of `rounds`, with the nodes that are best for it.

        `num_kv_tokens`: of `rounds`.
        """
        roots = len(rounds)
        flat = -np.sort(-self._chances(rounds))
        emitted_by_nodes = roots + np.concatenate([[0.0], np.cumsum(flat)])

        def best(num_sequences: int, wait: float) -> tuple[float, float]:
            times = num_sequences / roots
            most = max(0, min(flat.size, int(max_rows / times) - roots))
            emitted = times * emitted_by_nodes[: most + 1]
            num_rows = np.ceil(times * (roots + np.arange(most + 1))).astype(np.int64)
            seconds = self._curve.seconds(num_rows, int(times * num_kv_tokens), num_sequences)
            count = int(np.argmax(emitted / np.maximum(seconds + wait, 1e-9)))
            return float(emitted[count]), float(seconds[count])

        return best

    def learn(self, verified: Sequence[tuple[PendingRound, Int32Array]]) -> None:
        """What came of a step: trees as they were cut, and their `accepted_nodes`."""
        if not verified:
            return
        scores, parents, depths, starts = _flat([round_ for round_, _ in verified])
        accepted = np.zeros(scores.size, np.bool_)
        for (_, nodes), start in zip(verified, starts, strict=True):
            accepted[start + nodes] = True
        self._calibration.learn(scores, parents, depths, accepted)

    def note_idle(self, seconds: float) -> None:
        """The device waited so long for the step that is planned now."""
        gap = min(max(0.0, seconds), MAX_IDLE_SECONDS)
        self._idle_seconds += (gap - self._idle_seconds) * IDLE_WEIGHT

    def _chances(self, rounds: Sequence[AnyRound]) -> Float64Array:
        """Of all rows below the roots, one round behind the other, falling within each."""
        scores, parents, depths, starts = _flat(rounds)
        chances = self._calibration.chances(scores, parents, depths)
        # Where calibration would lift a node above one that stands before it, it counts as much as
        # that one: a cut is a prefix.
        trees = zip(rounds, np.split(chances, starts[1:]), strict=True)
        return np.concatenate([np.minimum.accumulate(r.row_chances(tree)) for r, tree in trees])

    def _or_probe(self, best: int, seconds: Float64Array) -> int:
        """`best`, or all of the next larger bucket when enough was put aside for it."""
        dearer = int(np.searchsorted(seconds, seconds[best], side="right"))
        if dearer >= seconds.size:
            return best
        probe = int(np.searchsorted(seconds, seconds[dearer], side="right")) - 1
        self._saved_seconds += PROBE_SHARE * float(seconds[best] + self._idle_seconds)
        cost = float(seconds[probe] - seconds[best])
        if self._saved_seconds < cost:
            return best
        self._saved_seconds = 0.0  # not kept: costs differ, and a later probe may be cheap
        return probe


def best_count(chances: Float64Array, num_roots: int, seconds: Float64Array) -> int:
    """The number of nodes with the highest expected rate; the fewest of equals.

    `chances` [N] falling; `seconds` [N + 1] of a whole round with 0 to N nodes below the roots.
    """
    emitted = num_roots + np.concatenate([[0.0], np.cumsum(chances)])
    return int(np.argmax(emitted / np.maximum(seconds, 1e-9)))


def _flat(
    rounds: Sequence[AnyRound],
) -> tuple[Float32Array, Int32Array, Int32Array, list[int]]:
    """Scores, parents and depths of the trees one behind the other, and where each begins."""
    sizes = [round_.tree.num_nodes for round_ in rounds]
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.int32)
    parents = np.concatenate([round_.tree.parents for round_ in rounds])
    parents = np.where(parents < 0, np.int32(-1), parents + np.repeat(starts, sizes))
    return (
        np.concatenate([round_.tree.scores for round_ in rounds]),
        parents,
        np.concatenate([round_.grown_depths for round_ in rounds]),
        starts.tolist(),
    )
