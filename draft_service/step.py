"""What one draft step takes and gives: plain values between the state machine and the device.

The machine plans a list of `SequenceWork`, an engine turns it into as many `SequenceOutcome`s, in
the same order. Nothing here knows jax or protobuf. Axes: n pairs of one sequence, F features.

A **pair** is what the head reads at one position: the token at position t+1 and the target's true
features of position t. It has one row in the head's KV. A step either extends and drafts, for
all its works, or only extends (a chunk of a long prompt); if it drafts, all its trees are for the
next round or all are ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from common.types import DraftTree, Int32Array

FeatureArray = npt.NDArray[Any]
"""[n, F], float32 or bfloat16, on the host."""

ALL_LEVELS = 1 << 30


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """What the target's noise depends on. `seed`: 64 bits, the choice's own. `pick_position`: of
    the token that the target picks behind the last of a work's `tokens`.
    """

    seed: int
    temperature: float
    pick_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceWork:
    """One sequence's part of a step.

    `tokens` int32 [n], n ≥ 1: the later token of each pair, target vocabulary. `features` [n, F].
    `kv_len`: pairs in pages before these; pair i goes to KV place kv_len + i. `page_ids` int32:
    page j holds places [j·page_size, (j+1)·page_size), reserved for kv_len + n. If it drafts, the
    root of the tree is the last of `tokens`; `ahead`: it is as wide and deep as trees for rounds to
    come are. `noise`: that children are ordered with; None: by the head's probabilities alone.
    `max_levels`: of the tree below its root; `least_reach`: no level below nodes that are less
    likely reached (draft_service/levels.py).
    `page_copy`: a page of others and one of `page_ids`, into which the first is copied, all layers,
    before anything else happens.
    """

    sequence_id: bytes
    tokens: Int32Array
    features: FeatureArray = field(repr=False)
    kv_len: int
    page_ids: Int32Array
    page_copy: tuple[int, int] | None = None
    drafts: bool
    ahead: bool = False
    noise: NoiseKey | None = None
    max_levels: int = ALL_LEVELS
    least_reach: float = 0.0

    @property
    def num_rows(self) -> int:
        return int(self.tokens.shape[0])

    def validate(self, vocab_size: int, feature_size: int, page_size: int) -> None:
        """Raises ValueError naming the first rule that the work breaks, with value and limit."""
        n = self.num_rows
        if n < 1:
            raise ValueError("tokens: empty; a work has at least one pair")
        if self.features.shape != (n, feature_size):
            raise ValueError(f"features: shape {self.features.shape} must be {(n, feature_size)}")
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            raise ValueError(f"tokens: one is outside [0, {vocab_size})")
        if self.ahead and not self.drafts:
            raise ValueError("ahead: of no use in a work that does not draft")
        if self.kv_len < 0:
            raise ValueError(f"kv_len: {self.kv_len} is negative")
        if self.page_copy is not None and self.page_copy[1] not in self.page_ids:
            raise ValueError(f"page_copy: to page {self.page_copy[1]}, which is none of page_ids")
        room = int(self.page_ids.shape[0]) * page_size
        if room < self.kv_len + n:
            raise ValueError(
                f"page_ids: {self.page_ids.size} pages of {page_size} hold {room} pairs;"
                f" {self.kv_len} + {n} are needed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutcome:
    """What a step gave one sequence: its tree, of the engine's full shape; None where it only
    extended.

    All pairs of the work are in pages now.
    """

    tree: DraftTree | None


class DraftEngine(Protocol):
    """Runs steps on a device. Blocking; called from the engine's thread only."""

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        """One step over all `works`; outcomes in the same order.

        Commits the K/V of the works' pairs into their pages and nothing else: what the head sees of
        tree nodes never enters the pages. Raises ValueError, before anything runs, if the works
        exceed the engine's largest bucket or are not all of one kind (extend, draft, ahead).
        """
        ...


def as_tokens(tokens: Sequence[int]) -> Int32Array:
    return np.array(tokens, np.int32)
