"""Random calls of tree attention: shared by the tests of every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels.tree_attention.shapes import AttentionShape


@dataclass(frozen=True)
class AttentionCase:
    """Host arrays of one call; unused page slots and rows hold NaN."""

    arrays: dict[str, np.ndarray]
    window: int | None
    scale: float

    def device(self, dtype: Any = jnp.float32) -> dict[str, Any]:
        floats = ("q", "block_kv", "pages")
        return {
            name: jnp.asarray(array, dtype if name in floats else None)
            for name, array in self.arrays.items()
        }


def random_parents(rng: np.random.Generator, num_nodes: int) -> np.ndarray:
    """int [num_nodes]: node 0 is the root (-1), the others hang anywhere before themselves."""
    return np.array([-1] + [int(rng.integers(0, i)) for i in range(1, num_nodes)])


def ancestor_bits(parents: np.ndarray, num_words: int) -> np.ndarray:
    """uint32 [num_nodes - 1, W]: bit k-1 of a non-root node names node k of its path."""
    bits = np.zeros((len(parents) - 1, num_words), np.uint32)
    for node in range(1, len(parents)):
        at = node
        while at > 0:
            bits[node - 1, (at - 1) // 32] |= np.uint32(1 << ((at - 1) % 32))
            at = parents[at]
    return bits


def make_case(shape: AttentionShape, seed: int, extra_rows: int = 0) -> AttentionCase:
    """A random call of `shape` whose rows are followed by `extra_rows` of NaN."""
    rng = np.random.default_rng(seed)
    counts = [causal + tree for _, causal, tree in shape.blocks]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    num_rows = int(starts[-1]) + extra_rows
    words = max(1, -(-max((tree for _, _, tree in shape.blocks), default=0) // 32))
    pages_of = [-(-prefix // shape.page_size) for prefix, _, _ in shape.blocks]
    num_pages = sum(pages_of) + 2
    ids = rng.permutation(num_pages).astype(np.int32)
    table = np.full((len(shape.blocks), max(1, *pages_of, 1)), num_pages - 1, np.int32)
    pages = np.full((2, num_pages, shape.kv_heads, shape.page_size, 2 * shape.head_dim), np.nan)
    ancestors = np.zeros((num_rows, words), np.uint32)
    used = 0
    for b, (prefix, causal, tree) in enumerate(shape.blocks):
        table[b, : pages_of[b]] = ids[used : used + pages_of[b]]
        used += pages_of[b]
        for position in range(prefix):
            page = table[b, position // shape.page_size]
            pages[:, page, :, position % shape.page_size] = rng.normal(
                size=(2, shape.kv_heads, 2 * shape.head_dim)
            )
        if tree:
            bits = ancestor_bits(random_parents(rng, tree + 1), words)
            ancestors[starts[b] + causal : starts[b + 1]] = bits
    q = rng.normal(size=(num_rows, shape.q_heads, shape.head_dim))
    block_kv = rng.normal(size=(num_rows, shape.kv_heads, 2 * shape.head_dim))
    q[starts[-1] :] = np.nan
    block_kv[starts[-1] :] = np.nan
    batch = len(shape.blocks)
    arrays = {
        "q": q.astype(np.float32),
        "block_kv": block_kv.astype(np.float32),
        "pages": pages.astype(np.float32),
        "layer": np.int32(1),
        "page_table": table,
        "kv_lens": np.array([prefix for prefix, _, _ in shape.blocks], np.int32),
        "q_starts": starts,
        "block_starts": starts,
        "num_causal": np.array([causal for _, causal, _ in shape.blocks], np.int32),
        "ancestors": ancestors,
        "q_offsets": np.zeros(batch, np.int32),
    }
    return AttentionCase(arrays, shape.window, shape.head_dim**-0.5)
