"""Picks and walk in float64 numpy with sorts and loops: the oracle.

Shares the noise bits with nothing: threefry runs here on Python integers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
GREEDY_TEMPERATURE = 1e-5
_WORD = 0xFFFFFFFF


def reference_threefry2x32(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds on Python integers."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + key[0]) & _WORD, (counter[1] + key[1]) & _WORD
    for i in range(20):
        r = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x = (x + y) & _WORD
        y = (((y << r) | (y >> (32 - r))) & _WORD) ^ x
        if i % 4 == 3:
            s = i // 4 + 1
            x = (x + schedule[s % 3]) & _WORD
            y = (y + schedule[(s + 1) % 3] + s) & _WORD
    return x, y


def reference_noise(seed_lo: int, seed_hi: int, position: int, token: int) -> float:
    """The Gumbel quantile of (bits + 0.5)/2**32, in double precision."""
    bits, _ = reference_threefry2x32((seed_lo, seed_hi), (position, token))
    return -math.log(-math.log((bits + 0.5) / 2.0**32))


def keep_mask(
    scores: Float64Array, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.bool_]:
    """Tokens that pass top_k, then top_p on what it left, then min_p; ties at an edge stay."""
    kept = np.isfinite(scores)
    if 0 < top_k < scores.shape[0]:
        kept &= scores >= np.sort(scores)[::-1][top_k - 1]
    weights = np.where(kept, np.exp(scores - scores.max()), 0.0)
    weights /= weights.sum()
    if top_p < 1.0:
        above = np.array([weights[scores > s].sum() for s in scores])
        kept &= above < top_p
    if min_p > 0.0:
        kept &= scores >= scores.max() + math.log(min_p)
    return kept


class HostPick(NamedTuple):
    """A row's pick, its perturbed scores' gap among the kept, and the kept tokens."""

    pick: int
    gap: float
    kept: npt.NDArray[np.bool_]
    logprob: float


def reference_pick(
    logits: npt.ArrayLike,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed_lo: int = 0,
    seed_hi: int = 0,
    position: int = 0,
    token_mask: npt.ArrayLike | None = None,
) -> HostPick:
    """The pick of one row of logits [V]. pick -1 if there is no valid one."""
    row = np.asarray(logits, np.float64).copy()
    nothing = np.zeros(row.shape, bool)
    if np.isnan(row).any() or np.isposinf(row).any():
        return HostPick(-1, 0.0, nothing, 0.0)
    log_total = np.log(np.exp(row - row.max()).sum()) + row.max() if np.isfinite(row.max()) else 0.0
    if token_mask is not None:
        row[~np.asarray(token_mask, bool)] = -np.inf
    if not np.isfinite(row.max()):
        return HostPick(-1, 0.0, nothing, 0.0)
    if temperature < GREEDY_TEMPERATURE:
        kept, perturbed = np.isfinite(row), row
    else:
        scores = row / temperature
        kept = keep_mask(scores, top_k, top_p, min_p)
        noise = [reference_noise(seed_lo, seed_hi, position, v) for v in range(row.shape[0])]
        perturbed = np.where(kept, scores + np.array(noise), -np.inf)
    pick = int(np.argmax(perturbed))
    others = np.delete(perturbed, pick)
    gap = float(perturbed[pick] - others.max()) if others.size else math.inf
    return HostPick(pick, gap, kept, float(row[pick] - log_total))


def reference_walk(
    picks: npt.ArrayLike,
    tokens: npt.ArrayLike,
    parents: npt.ArrayLike,
    node_sequence: npt.ArrayLike,
    stop_tokens: npt.ArrayLike,
) -> list[tuple[list[int], list[int]]]:
    """Per sequence: rows of the accepted path without the root, and emitted tokens."""
    chosen, held = np.asarray(picks), np.asarray(tokens)
    above, owner, stops = np.asarray(parents), np.asarray(node_sequence), np.asarray(stop_tokens)
    results: list[tuple[list[int], list[int]]] = []
    for b in range(stops.shape[0]):
        roots = [n for n in range(held.shape[0]) if owner[n] == b and above[n] < 0]
        path: list[int] = []
        emitted: list[int] = []
        node: Any = roots[0] if roots and chosen[roots[0]] >= 0 else None
        while node is not None:
            pick = int(chosen[node])
            emitted.append(pick)
            children = [
                n
                for n in range(held.shape[0])
                if above[n] == node and held[n] == pick and chosen[n] >= 0
            ]
            node = None
            if pick not in stops[b] and children:
                node = children[0]
                path.append(node)
        results.append((path, emitted))
    return results
