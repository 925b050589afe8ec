"""Adjusted logits in float64 numpy, from whole token lists, without slots or trees: the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


def reference_adjust(
    logits: npt.ArrayLike,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    bias: Mapping[int, float] | None = None,
    min_tokens: int = 0,
    stop_tokens: Sequence[int] = (),
    token_mask: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    """One row [V], for the token that comes after `prompt` and `answer`."""
    row = np.array(logits, np.float64)
    for token in set(prompt) | set(answer):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(answer):
        row[token] -= presence + frequency * list(answer).count(token)
    for token, value in (bias or {}).items():
        row[token] += value
    if len(answer) < min_tokens:
        for token in stop_tokens:
            row[token] = -np.inf
    if token_mask is not None:
        row[~np.asarray(token_mask, bool)] = -np.inf
    return row
