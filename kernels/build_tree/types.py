"""The result of tree building, on the device and on the host."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt


class BuiltTree(NamedTuple):
    """B trees of up to N nodes, root first, then by falling score.

    tokens     int32 [B, N], 0 in padding
    parents    int32 [B, N], node index; -1 at the root and in padding
    scores     float32 [B, N], smallest score on the path; 0 at the root, -inf in padding
    pool_index int32 [B, N], the candidate that the node came from; -1 at the root and in padding
    num_valid  int32 [B], nodes with the root
    """

    tokens: jax.Array
    parents: jax.Array
    scores: jax.Array
    pool_index: jax.Array
    num_valid: jax.Array


class HostTree(NamedTuple):
    """The same as host arrays."""

    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    pool_index: npt.NDArray[np.int32]
    num_valid: npt.NDArray[np.int32]

    @staticmethod
    def empty(batch: int, num_nodes: int) -> HostTree:
        """All padding."""
        return HostTree(
            tokens=np.zeros((batch, num_nodes), np.int32),
            parents=np.full((batch, num_nodes), -1, np.int32),
            scores=np.full((batch, num_nodes), -np.inf, np.float32),
            pool_index=np.full((batch, num_nodes), -1, np.int32),
            num_valid=np.zeros(batch, np.int32),
        )
