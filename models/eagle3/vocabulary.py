"""The map from draft ids to target ids: read, checked, written.

On disk it is `d2t`, integer offsets: target id = draft id + d2t[draft id]; `t2d` says which target
tokens are in the draft vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.checkpoint import FETCH_AGAIN, TensorEntry
from models.errors import CheckpointError

Int32Array = npt.NDArray[np.int32]


def read_draft_to_target(
    d2t: TensorEntry | None, t2d: TensorEntry | None, draft_vocab_size: int, target_vocab_size: int
) -> Int32Array:
    """int32 [draft_vocab_size] of distinct target ids; without d2t the identity.

    Raises CheckpointError: a map of another length, not of integers, pointing outside the target's
    vocabulary, naming a token twice, or at odds with t2d.
    """
    drafts = np.arange(draft_vocab_size, dtype=np.int64)
    if d2t is None:
        return drafts.astype(np.int32)
    if d2t.shape != (draft_vocab_size,):
        raise CheckpointError(
            f"{d2t.file}: tensor {d2t.name} has shape {list(d2t.shape)}, wanted is"
            f" [{draft_vocab_size}], the rows of lm_head; {FETCH_AGAIN}"
        )
    if d2t.dtype.kind not in "iu":
        raise CheckpointError(
            f"{d2t.file}: tensor {d2t.name} is stored as {d2t.dtype}, which cannot hold every token"
            " id; export the head again with d2t as int64"
        )
    offsets = d2t.read().astype(np.int64)
    targets = drafts + offsets
    outside = np.flatnonzero((targets < 0) | (targets >= target_vocab_size))
    if outside.size:
        hint = (
            "it seems to hold target ids instead of offsets: subtract the draft id"
            if _looks_absolute(offsets, target_vocab_size)
            else "this head was made for another target"
        )
        raise CheckpointError(
            f"{d2t.file}: tensor {d2t.name} maps draft id {outside[0]} to {targets[outside[0]]},"
            f" outside the target's vocabulary of {target_vocab_size}; {hint}"
        )
    ordered = np.sort(targets)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        raise CheckpointError(
            f"{d2t.file}: tensor {d2t.name} maps two draft ids to target id {ordered[twice[0]]};"
            " export the head again"
        )
    if t2d is not None:
        _check_against_mask(t2d, ordered, target_vocab_size)
    return targets.astype(np.int32)


def offsets_and_mask(
    draft_to_target: Int32Array, target_vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """d2t int64 [K] and t2d bool [V] of ascending target ids."""
    drafts = np.arange(draft_to_target.size, dtype=np.int64)
    mask = np.zeros(target_vocab_size, np.bool_)
    mask[draft_to_target] = True
    return draft_to_target.astype(np.int64) - drafts, mask


def _looks_absolute(values: npt.NDArray[np.int64], target_vocab_size: int) -> bool:
    ascending = bool((np.diff(values) > 0).all())
    return ascending and bool(values[0] >= 0 and values[-1] < target_vocab_size)


def _check_against_mask(
    t2d: TensorEntry, targets: npt.NDArray[np.int64], target_vocab_size: int
) -> None:
    mask = t2d.read()
    if mask.shape != (target_vocab_size,):
        raise CheckpointError(
            f"{t2d.file}: tensor {t2d.name} has shape {list(mask.shape)}, wanted is"
            f" [{target_vocab_size}], the target's vocabulary; this head was made for"
            " another target"
        )
    if not np.array_equal(np.flatnonzero(mask), targets):
        raise CheckpointError(
            f"{t2d.file}: tensors d2t and {t2d.name} name different tokens; export the head again"
        )
