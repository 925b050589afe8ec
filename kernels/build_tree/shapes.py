"""Shapes of tree building that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """B pools grown with `top_k` children per frontier node over `depth` levels; `width`: of the
    frontier and the root's children, 0: top_k.
    """

    name: str
    batch: int
    top_k: int
    depth: int
    num_nodes: int
    width: int = 0

    @property
    def num_first(self) -> int:
        """The root's children, and the frontier of each level."""
        return self.width or self.top_k

    @property
    def pool_size(self) -> int:
        """The root's children, then top_k children for each frontier node per level."""
        return self.num_first + (self.depth - 1) * self.num_first * self.top_k


EDGE_SHAPES = (
    PoolShape(name="root alone", batch=1, top_k=1, depth=1, num_nodes=1),
    PoolShape(name="chain", batch=2, top_k=1, depth=7, num_nodes=8),
    PoolShape(name="more nodes than candidates", batch=2, top_k=2, depth=2, num_nodes=16),
    PoolShape(name="wide", batch=2, top_k=2, depth=3, num_nodes=33, width=8),
)

PRODUCTION_SHAPES = (
    PoolShape(name="demo", batch=4, top_k=8, depth=6, num_nodes=16),
    PoolShape(name="papers", batch=1, top_k=10, depth=8, num_nodes=60),
    PoolShape(name="batch of 64", batch=64, top_k=8, depth=6, num_nodes=16),
    PoolShape(name="ahead", batch=2, top_k=8, depth=8, num_nodes=128, width=32),
    PoolShape(name="most ahead", batch=2, top_k=32, depth=16, num_nodes=256, width=32),
)
