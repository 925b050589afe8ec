"""The tree building kernel in TPU interpret mode against the step-by-step reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import failing_on_faults
from jax.experimental.pallas import tpu as pltpu
from test_kernels_build_tree import random_pool

from kernels.backend import Backend
from kernels.build_tree.api import build_tree
from kernels.build_tree.kernel import build_tree_pallas
from kernels.build_tree.reference import reference_build_tree
from kernels.build_tree.shapes import EDGE_SHAPES, PRODUCTION_SHAPES, PoolShape

pytestmark = pytest.mark.interpret

TWO_BLOCKS = PoolShape(name="two blocks of rows", batch=37, top_k=2, depth=4, num_nodes=9)
SHAPES = (*EDGE_SHAPES, PRODUCTION_SHAPES[0], TWO_BLOCKS)


@functools.cache
def compiled(num_nodes: int):
    params = pltpu.InterpretParams(detect_races=True)
    return jax.jit(functools.partial(build_tree_pallas, num_nodes=num_nodes, interpret=params))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_trees_equal_the_reference(shape: PoolShape) -> None:
    @settings(max_examples=5, deadline=None)
    @given(seed=st.integers(0, 2**16), spoilt=st.sampled_from([0.0, 0.3, 1.0]))
    def check(seed: int, spoilt: float) -> None:
        pool = random_pool(shape, np.random.default_rng(seed), spoilt)
        with failing_on_faults():
            got = jax.device_get(compiled(shape.num_nodes)(*(jnp.asarray(a) for a in pool)))
        want = reference_build_tree(*pool, num_nodes=shape.num_nodes)
        for name in want._fields:
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)

    check()


def test_the_public_entry_takes_the_kernel() -> None:
    pool = [jnp.asarray(a) for a in random_pool(EDGE_SHAPES[1], np.random.default_rng(0), 0.0)]
    got, want = (
        build_tree(*pool, num_nodes=8, max_depth=7, backend=backend)
        for backend in (Backend.INTERPRET, Backend.XLA)
    )
    np.testing.assert_array_equal(got.parents, want.parents)
