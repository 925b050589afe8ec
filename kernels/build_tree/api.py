"""`build_tree`: the best candidates of a draft's pool as a tree ordered by score."""

from __future__ import annotations

import jax
from jax.experimental.pallas import tpu as pltpu

from kernels.backend import Backend
from kernels.build_tree.kernel import build_tree_pallas
from kernels.build_tree.types import BuiltTree
from kernels.build_tree.xla import build_tree_xla
from kernels.checks import check_dtype, check_shape


def build_tree(
    pool_scores: jax.Array,
    pool_parents: jax.Array,
    pool_tokens: jax.Array,
    root_tokens: jax.Array,
    *,
    num_nodes: int,
    max_depth: int,
    backend: Backend,
) -> BuiltTree:
    """The `num_nodes` - 1 best candidates below the root, ordered by score: every prefix is a tree.

    pool_scores  float32 [B, C], log-probability of the path from the root; -inf or NaN: no
                 candidate
    pool_parents int32 [B, C], pool index of the parent, always below the child's own; -1: the root
    pool_tokens  int32 [B, C]
    root_tokens  int32 [B]
    `max_depth`  of the pool: a candidate below the root has depth 1. Deeper ones would lose the
                 protection against a score above their parent's.

    A candidate ranks by the smallest score on its path, then by pool index: ties and NaN cannot
    part a child from its parent, and whatever hangs below a NaN is left out.
    """
    batch, pool = pool_scores.shape
    check_dtype("pool_scores", pool_scores, "float32")
    for name, array in (("pool_parents", pool_parents), ("pool_tokens", pool_tokens)):
        check_shape(name, array, (batch, pool))
        check_dtype(name, array, "int32")
    check_shape("root_tokens", root_tokens, (batch,))
    check_dtype("root_tokens", root_tokens, "int32")
    if num_nodes < 1:
        raise ValueError(f"num_nodes: {num_nodes} must be at least 1, the root")
    if max_depth < 1:
        raise ValueError(f"max_depth: {max_depth} must be at least 1")
    if backend.uses_kernel:
        # No block size depends on the chip, so none is asked for.
        return build_tree_pallas(
            pool_scores,
            pool_parents,
            pool_tokens,
            root_tokens,
            num_nodes=num_nodes,
            interpret=pltpu.InterpretParams() if backend is Backend.INTERPRET else False,
        )
    return build_tree_xla(
        pool_scores,
        pool_parents,
        pool_tokens,
        root_tokens,
        num_nodes=num_nodes,
        max_depth=max_depth,
    )
