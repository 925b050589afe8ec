"""Tree building against the step-by-step reference, with ties and NaN."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import DraftTree
from kernels.backend import Backend
from kernels.build_tree.api import build_tree
from kernels.build_tree.reference import reference_build_tree
from kernels.build_tree.shapes import EDGE_SHAPES, PRODUCTION_SHAPES, PoolShape


@functools.cache
def compiled(num_nodes: int, max_depth: int):
    return jax.jit(
        functools.partial(build_tree, num_nodes=num_nodes, max_depth=max_depth, backend=Backend.XLA)
    )


def random_pool(shape: PoolShape, rng: np.random.Generator, spoilt: float) -> list[np.ndarray]:
    """A pool as drafting grows it; a share `spoilt` of its scores is NaN, -inf, tied or rising."""
    f, each, size = shape.num_first, shape.num_first * shape.top_k, shape.pool_size
    parents = np.full((shape.batch, size), -1, np.int32)
    scores = np.zeros((shape.batch, size), np.float32)
    for b in range(shape.batch):
        frontier_from = 0
        for c in range(size):
            if c >= f:
                level = (c - f) // each
                frontier_from = 0 if level == 0 else f + (level - 1) * each
                width = f if level == 0 else each
                parents[b, c] = frontier_from + int(rng.integers(0, width))
            above = 0.0 if parents[b, c] < 0 else scores[b, parents[b, c]]
            scores[b, c] = above - rng.exponential()
    odd = rng.random(scores.shape) < spoilt
    values = rng.choice([np.nan, -np.inf, -1.0, -1.0, 0.5], scores.shape)
    scores = np.where(odd, values, scores).astype(np.float32)
    tokens = rng.integers(0, 1000, scores.shape).astype(np.int32)
    roots = rng.integers(0, 1000, shape.batch).astype(np.int32)
    return [scores, parents, tokens, roots]


SHAPES = (*EDGE_SHAPES, PRODUCTION_SHAPES[0])


@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, len(SHAPES) - 1),
    seed=st.integers(0, 2**16),
    spoilt=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_trees_equal_the_reference_and_every_prefix_is_one(which, seed, spoilt) -> None:
    shape = SHAPES[which]
    pool = random_pool(shape, np.random.default_rng(seed), spoilt)
    got = compiled(shape.num_nodes, shape.depth)(*(jnp.asarray(a) for a in pool))
    want = reference_build_tree(*pool, num_nodes=shape.num_nodes)
    for name in want._fields:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for b in range(shape.batch):
        n = int(got.num_valid[b])
        tree = DraftTree(*(np.asarray(column[b][:n]) for column in got[:3]))
        tree.validate(vocab_size=1000, max_nodes=shape.num_nodes)
        assert (np.diff(tree.scores) <= 0).all()
        assert np.isfinite(tree.scores).all()


def test_a_literal_pool_gives_the_literal_tree() -> None:
    scores = np.array([[-0.5, -1.0, -0.7, -2.0, -1.0, np.nan]], np.float32)
    parents = np.array([[-1, -1, 0, 0, 1, 1]], np.int32)
    tokens = np.array([[10, 11, 12, 13, 14, 15]], np.int32)
    tree = compiled(5, 2)(*map(jnp.asarray, (scores, parents, tokens, np.array([9], np.int32))))
    assert np.asarray(tree.tokens).tolist() == [[9, 10, 12, 11, 14]]
    assert np.asarray(tree.parents).tolist() == [[-1, 0, 1, 0, 3]]
    assert np.asarray(tree.pool_index).tolist() == [[-1, 0, 2, 1, 4]]
    assert np.asarray(tree.num_valid).tolist() == [5]


def test_misfits_are_refused_with_both_values() -> None:
    pool = [jnp.asarray(a) for a in random_pool(SHAPES[1], np.random.default_rng(0), 0.0)]
    with pytest.raises(ValueError, match="num_nodes: 0 must be at least 1"):
        build_tree(*pool, num_nodes=0, max_depth=7, backend=Backend.XLA)
    pool[1] = pool[1][:, :3]
    with pytest.raises(ValueError, match=r"pool_parents: shape \(2, 3\) must be \(2, 7\)"):
        build_tree(*pool, num_nodes=4, max_depth=7, backend=Backend.XLA)
