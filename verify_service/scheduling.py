"""How the rows of one step are shared out. Pure functions of counts and scores.

    rows of a step:  [ every ready root ][ prefill chunks, oldest first ][ tree nodes, best first ]

Roots always fit (`VerifyLimits` sees to it). While anyone decodes, prefill gets at most
`max_prefill_tokens`, so that a long prompt delays a running sequence by a bounded time. Tree nodes
take what is left, by score across all sequences; since a child never scores above its parent this
is one threshold, and each sequence keeps a prefix of its tree, which is a tree again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.types import Float32Array


def share_prefill(
    wanted: Sequence[int], num_roots: int, max_prefill: int, max_rows: int
) -> list[int]:
    """Rows of each prefill chunk; `wanted` oldest first. 0 means: not in this step."""
    left = max_prefill if num_roots else max_rows
    chunks = []
    for rows in wanted:
        chunk = min(rows, left)
        chunks.append(chunk)
        left -= chunk
    return chunks


def share_nodes(scores: Sequence[Float32Array], budget: int) -> list[int]:
    """Nodes of each tree to verify, root included; the roots are not counted against `budget`.

    `scores[i]` float32 [N_i], root first. Equal scores: earlier sequences and nodes win.
    """
    sizes = [int(s.shape[0]) for s in scores]
    if sum(sizes) - len(sizes) <= budget:
        return sizes
    if budget <= 0:
        return [1] * len(sizes)
    # A score that rises towards the leaves counts as its ancestors' least: prefixes stay trees.
    falling = [np.minimum.accumulate(s)[1:] for s in scores]
    owner = np.repeat(np.arange(len(sizes)), [size - 1 for size in sizes])
    best = np.argsort(-np.concatenate(falling), kind="stable")[:budget]
    return [1 + int(n) for n in np.bincount(owner[best], minlength=len(sizes))]
