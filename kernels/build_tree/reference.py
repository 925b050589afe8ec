"""Tree building, node by node in numpy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kernels.build_tree.types import HostTree


def reference_build_tree(
    pool_scores: npt.ArrayLike,
    pool_parents: npt.ArrayLike,
    pool_tokens: npt.ArrayLike,
    root_tokens: npt.ArrayLike,
    *,
    num_nodes: int,
) -> HostTree:
    """As `api.build_tree`, on the host: repeatedly take the best candidate whose parent was taken.

    "Best" compares the smallest score on the path from the root (so that a child never stands above
    its parent), then the smaller pool index. NaN and -inf candidates, and all below them, never
    enter.
    """
    scores = np.asarray(pool_scores, np.float32)
    parents, tokens = np.asarray(pool_parents), np.asarray(pool_tokens)
    batch, pool = scores.shape
    out = HostTree.empty(batch, num_nodes)
    for b in range(batch):
        out.tokens[b, 0], out.scores[b, 0] = np.asarray(root_tokens)[b], 0.0
        node_of: dict[int, int] = {-1: 0}
        while len(node_of) < num_nodes:
            best, best_score = -1, -math.inf
            for c in range(pool):
                if c in node_of or int(parents[b, c]) not in node_of:
                    continue
                above = out.scores[b, node_of[int(parents[b, c])]]
                own = float(scores[b, c])
                score = math.nan if math.isnan(own) else min(own, float(above))
                if score > best_score:
                    best, best_score = c, score
            if best < 0:
                break
            node = len(node_of)
            out.tokens[b, node] = tokens[b, best]
            out.parents[b, node] = node_of[int(parents[b, best])]
            out.scores[b, node] = best_score
            out.pool_index[b, node] = best
            node_of[best] = node
        out.num_valid[b] = len(node_of)
    return out
