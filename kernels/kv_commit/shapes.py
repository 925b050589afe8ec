"""Shapes of KV commit that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitShape:
    """Sizes of one call: R rows of B sequences into P pages of L layers."""

    name: str
    num_layers: int
    num_pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    num_sequences: int
    pages_per_sequence: int
    num_rows: int


EDGE_SHAPES = (
    CommitShape(
        name="one row",
        num_layers=1,
        num_pages=2,
        kv_heads=1,
        page_size=4,
        head_dim=8,
        num_sequences=1,
        pages_per_sequence=1,
        num_rows=1,
    ),
    CommitShape(
        name="more rows than places",
        num_layers=2,
        num_pages=5,
        kv_heads=2,
        page_size=4,
        head_dim=8,
        num_sequences=2,
        pages_per_sequence=2,
        num_rows=24,
    ),
)

PRODUCTION_SHAPES = (
    CommitShape(
        name="smollm2 tree of 16",
        num_layers=30,
        num_pages=64,
        kv_heads=3,
        page_size=64,
        head_dim=64,
        num_sequences=4,
        pages_per_sequence=16,
        num_rows=16,
    ),
    CommitShape(
        name="llama-3.1-8b, a chip of four, batch 16",
        num_layers=32,
        num_pages=2048,
        kv_heads=2,
        page_size=128,
        head_dim=128,
        num_sequences=16,
        pages_per_sequence=64,
        num_rows=512,
    ),
)
