"""Tree attention, row by row in float64 numpy: the oracle for every other form of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


def visible_block_rows(
    row: int, num_causal: int, num_block_rows: int, bits: npt.NDArray[np.uint32]
) -> list[int]:
    """Rows of its block that block row `row` sees."""
    if row < num_causal:
        return list(range(row + 1))
    named = [
        num_causal + k
        for k in range(num_block_rows - num_causal)
        if k // 32 < bits.shape[0] and (int(bits[k // 32]) >> (k % 32)) & 1
    ]
    return list(range(num_causal)) + named


def reference_tree_attention(
    q: npt.ArrayLike,
    block_kv: npt.ArrayLike,
    pages: npt.ArrayLike,
    layer: int,
    page_table: npt.ArrayLike,
    kv_lens: npt.ArrayLike,
    q_starts: npt.ArrayLike,
    block_starts: npt.ArrayLike,
    num_causal: npt.ArrayLike,
    ancestors: npt.ArrayLike,
    q_offsets: npt.ArrayLike,
    *,
    scale: float,
    window: int | None = None,
) -> Float64Array:
    """float64 [Tq, q_heads, head_dim]; arguments as those of `api.tree_attention`, as host
    arrays."""
    q64 = np.asarray(q, np.float64)
    block64 = np.asarray(block_kv, np.float64)
    store = np.asarray(pages)[layer].astype(np.float64)  # [P, kv_heads, page_size, 2·head_dim]
    table, lens = np.asarray(page_table), np.asarray(kv_lens)
    starts, b_starts = np.asarray(q_starts), np.asarray(block_starts)
    causal, bits = np.asarray(num_causal), np.asarray(ancestors)
    offsets = np.asarray(q_offsets)
    head_dim, page_size = q64.shape[2], store.shape[2]
    group = q64.shape[1] // store.shape[1]
    out = np.zeros_like(q64)
    for b in range(lens.shape[0]):
        first, num_rows = int(b_starts[b]), int(b_starts[b + 1] - b_starts[b])
        for t in range(int(starts[b]), int(starts[b + 1])):
            row = int(offsets[b]) + t - int(starts[b])
            seen = visible_block_rows(row, int(causal[b]), num_rows, bits[t])
            # A tree node's depth below the root is the number of tree rows that it sees.
            position = int(lens[b]) + len([k for k in seen if k < causal[b]]) - 1
            position += len([k for k in seen if k >= causal[b]])
            low = 0 if window is None else position - window + 1
            prefix = range(max(0, low), int(lens[b]))
            keys = [store[table[b, p // page_size], :, p % page_size] for p in prefix]
            keys += [block64[first + k] for k in seen if k >= causal[b] or int(lens[b]) + k >= low]
            rows = np.stack(keys)  # [S, kv_heads, 2·head_dim]
            for head in range(q64.shape[1]):
                scores = rows[:, head // group, :head_dim] @ q64[t, head] * scale
                weights = np.exp(scores - scores.max())
                out[t, head] = weights @ rows[:, head // group, head_dim:] / weights.sum()
    return out
