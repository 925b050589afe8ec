"""Shapes of tree attention that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of one call. `blocks`: per sequence (prefix tokens, causal rows, tree rows)."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    blocks: tuple[tuple[int, int, int], ...]
    window: int | None = None

    @property
    def num_rows(self) -> int:
        return sum(causal + tree for _, causal, tree in self.blocks)


def _smollm2(name: str, *blocks: tuple[int, int, int]) -> AttentionShape:
    return AttentionShape(
        name=name, q_heads=9, kv_heads=3, head_dim=64, page_size=64, blocks=blocks
    )


EDGE_SHAPES = (
    AttentionShape(
        name="no prefix, one row",
        q_heads=1,
        kv_heads=1,
        head_dim=8,
        page_size=4,
        blocks=((0, 1, 0),),
    ),
    AttentionShape(
        name="full last page", q_heads=2, kv_heads=1, head_dim=8, page_size=4, blocks=((8, 1, 3),)
    ),
    AttentionShape(
        name="one slot of the last page",
        q_heads=4,
        kv_heads=2,
        head_dim=8,
        page_size=4,
        blocks=((9, 1, 2), (1, 1, 0)),
    ),
    AttentionShape(
        name="sequence without rows",
        q_heads=2,
        kv_heads=2,
        head_dim=8,
        page_size=8,
        blocks=((5, 1, 4), (3, 0, 0), (7, 2, 0)),
    ),
    AttentionShape(
        name="tree beyond a word",
        q_heads=2,
        kv_heads=1,
        head_dim=16,
        page_size=16,
        blocks=((20, 1, 40), (0, 5, 33)),
    ),
    AttentionShape(
        name="prefill beside roots",
        q_heads=6,
        kv_heads=2,
        head_dim=16,
        page_size=16,
        blocks=((600, 1, 0), (100, 150, 0), (30, 1, 6), (0, 17, 15)),
    ),
    AttentionShape(
        name="window",
        q_heads=2,
        kv_heads=1,
        head_dim=8,
        page_size=8,
        blocks=((700, 1, 5), (90, 100, 0), (10, 3, 2)),
        window=70,
    ),
)

PRODUCTION_SHAPES = (
    _smollm2("smollm2 root", (200, 1, 0)),
    _smollm2("smollm2 tree", (200, 1, 15)),
    _smollm2("smollm2 tree, 2k", (2000, 1, 15)),
    _smollm2("smollm2 roots of 4", (200, 1, 0), (900, 1, 0), (50, 1, 0), (1500, 1, 0)),
    _smollm2("smollm2 trees of 4", (200, 1, 15), (900, 1, 15), (50, 1, 15), (1500, 1, 15)),
    _smollm2("smollm2 prefill", (512, 256, 0)),
    AttentionShape(
        name="llama-3.1-8b, a chip of four, batch 16",
        q_heads=8,
        kv_heads=2,
        head_dim=128,
        page_size=128,
        blocks=((2048, 1, 31),) * 16,
    ),
    AttentionShape(
        name="llama-3.3-70b, a chip of eight, batch 16",
        q_heads=8,
        kv_heads=1,
        head_dim=128,
        page_size=256,
        blocks=((2048, 1, 15),) * 16,
    ),
)
