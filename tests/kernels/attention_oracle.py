"""A float64 oracle of tree attention in plain numpy loops, and random steps for it.

It shares nothing with the kernels: visibility is decided key by key from parents, never from bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Step:
    """One call's arguments on the host, and what the oracle needs to know of them."""

    arrays: dict[str, Any]
    scale: float
    window: int | None
    parents: list[np.ndarray] = field(default_factory=list)  # block-relative, causal rows chain


@dataclass(frozen=True)
class Sequence:
    """`num_causal` rows in a chain, then `num_nodes` tree rows; the first `skipped` rows have no
    query.
    """

    kv_len: int
    num_causal: int
    num_nodes: int = 0
    skipped: int = 0

    @property
    def block_len(self) -> int:
        return self.num_causal + self.num_nodes

    @property
    def num_rows(self) -> int:
        return self.block_len - self.skipped


def random_parents(rng: np.random.Generator, sequence: Sequence) -> np.ndarray:
    """Chains, bushes and all between: each node under any earlier row from the last causal one
    on.
    """
    parents = np.arange(sequence.block_len) - 1
    for row in range(max(sequence.num_causal, 1), sequence.block_len):
        parents[row] = rng.integers(max(sequence.num_causal - 1, 0), row)
    return parents


def make_step(
    rng: np.random.Generator,
    sequences: list[Sequence],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    num_words: int = 1,
    num_layers: int = 2,
    layer: int = 1,
    num_rows: int = 0,
    num_pages: int = 0,
    pages_per_sequence: int = 0,
    window: int | None = None,
    dtype: Any = np.float32,
) -> Step:
    """Random normal arrays; every slot that no query may read is NaN.

    `num_rows` (of q and block), `num_pages` and `pages_per_sequence`: at least so many, so that
    steps of one test share a compiled kernel.
    """
    longest = max(-(-s.kv_len // page_size) for s in sequences)
    pages_per_sequence = max(pages_per_sequence, longest + 1)
    num_pages = max(num_pages, sum(-(-s.kv_len // page_size) for s in sequences) + 2)
    free = list(rng.permutation(np.arange(1, num_pages)))
    nan = np.nan
    pages = np.full((num_layers, num_pages, kv_heads, page_size, 2 * head_dim), nan, np.float32)
    table = np.zeros((len(sequences), pages_per_sequence), np.int32)  # page 0 is all NaN
    total_q = sum(s.num_rows for s in sequences)
    total_k = sum(s.block_len for s in sequences)
    q_rows, block_rows = max(num_rows, total_q + 3), max(num_rows, total_k + 3)
    q = np.full((q_rows, kv_heads * group, head_dim), nan, np.float32)
    block = np.full((block_rows, kv_heads, 2 * head_dim), nan, np.float32)
    q[:total_q] = rng.standard_normal((total_q, kv_heads * group, head_dim))
    block[:total_k] = rng.standard_normal((total_k, kv_heads, 2 * head_dim))
    bits = np.zeros((q_rows, num_words), np.uint32)
    all_parents = []
    row = 0
    for index, sequence in enumerate(sequences):
        for start in range(0, sequence.kv_len, page_size):
            page = int(free.pop())
            table[index, start // page_size] = page
            live = min(page_size, sequence.kv_len - start)
            pages[layer, page, :, :live] = rng.standard_normal((kv_heads, live, 2 * head_dim))
        parents = random_parents(rng, sequence)
        all_parents.append(parents)
        for local in range(sequence.skipped, sequence.block_len):
            walk = local
            while walk >= sequence.num_causal:
                node = walk - sequence.num_causal
                bits[row, node // 32] |= np.uint32(1 << (node % 32))
                walk = int(parents[walk])
            row += 1
    arrays = {
        "q": q.astype(dtype),
        "block_kv": block.astype(dtype),
        "pages": pages.astype(dtype),
        "layer": np.int32(layer),
        "page_table": table,
        "kv_lens": np.array([s.kv_len for s in sequences], np.int32),
        "q_starts": np.cumsum([0] + [s.num_rows for s in sequences], dtype=np.int32),
        "block_starts": np.cumsum([0] + [s.block_len for s in sequences], dtype=np.int32),
        "num_causal": np.array([s.num_causal for s in sequences], np.int32),
        "ancestors": bits,
        "q_offsets": np.array([s.skipped for s in sequences], np.int32),
    }
    return Step(arrays, head_dim**-0.5, window, all_parents)


def oracle(step: Step) -> np.ndarray:
    """float64 [Tq, q_heads, head_dim]; rows of no sequence are zero."""
    a = step.arrays
    q = a["q"].astype(np.float64)
    out = np.zeros(q.shape)
    pages = a["pages"][int(a["layer"])].astype(np.float64)
    page_size, head_dim = pages.shape[2], q.shape[2]
    group = q.shape[1] // pages.shape[1]
    for index, parents in enumerate(step.parents):
        kv_len = int(a["kv_lens"][index])
        prefix = [
            pages[a["page_table"][index, p // page_size], :, p % page_size] for p in range(kv_len)
        ]
        begin, end = a["block_starts"][index : index + 2]
        rows = [
            *prefix,
            *a["block_kv"][begin:end].astype(np.float64),
        ]  # each [kv_heads, 2*head_dim]
        depth = np.zeros(len(parents), int)
        for local, parent in enumerate(parents):
            depth[local] = depth[parent] + 1 if parent >= 0 else 0
        for offset, row in enumerate(range(*a["q_starts"][index : index + 2])):
            local = int(a["q_offsets"][index]) + offset
            position = kv_len + depth[local]
            seen = {p: p for p in range(kv_len)}  # index in rows -> position
            walk = local
            while walk >= 0:
                seen[kv_len + walk] = kv_len + depth[walk]
                walk = int(parents[walk])
            keys = [
                k for k, at in seen.items() if step.window is None or position - at < step.window
            ]
            kv = np.stack([rows[k] for k in keys])  # [n, kv_heads, 2*head_dim]
            for head in range(q.shape[1]):
                scores = kv[:, head // group, :head_dim] @ q[row, head] * step.scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ kv[:, head // group, head_dim:] / weights.sum()
    return out
