"""Log-probabilities of one row in float64 numpy, by sorting."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def reference_logprobs(logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[V] of one row."""
    row = np.asarray(logits, np.float64)
    best = row.max()
    total = np.log(np.exp(row - best).sum())
    logprobs: npt.NDArray[np.float64] = row - best - total
    return logprobs


def reference_top(logits: npt.ArrayLike, count: int) -> npt.NDArray[np.intp]:
    """The `count` likeliest tokens, best first; the lower id first among equals."""
    return np.argsort(-np.asarray(logits, np.float64), kind="stable")[:count]
