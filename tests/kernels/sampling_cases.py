"""Requests, logits and trees of sampling: shared by the tests of every form."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from kernel_cases import random_parents

from kernels.sample_and_accept.types import SamplerParams

requests = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, 64, 1000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.6, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "seed_lo": st.integers(0, 2**32 - 1),
        "seed_hi": st.integers(0, 2**32 - 1),
    }
)


def params_of(*requests: dict) -> SamplerParams:
    default = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed_lo": 0}
    default["seed_hi"] = 0
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.uint32, jnp.uint32)
    columns = [[(default | r)[name] for r in requests] for name in SamplerParams._fields]
    return SamplerParams(*(jnp.asarray(c, d) for c, d in zip(columns, dtypes, strict=True)))


def random_logits(rng: np.random.Generator, rows: int, vocab: int, ties: bool) -> np.ndarray:
    logits = rng.normal(size=(rows, vocab)) * 3
    if ties:
        logits = np.round(logits)
    logits[:, rng.integers(0, vocab, 3)] = -np.inf
    return logits.astype(np.float32)


def roots_call(logits: np.ndarray, positions: np.ndarray, wanted: list[dict]) -> dict:
    """Every row the root of a sequence of its own."""
    n = logits.shape[0]
    return {
        "logits": jnp.asarray(logits, jnp.float32),
        "tokens": jnp.zeros(n, jnp.int32),
        "parents": jnp.full(n, -1, jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
        "node_sequence": jnp.arange(n, dtype=jnp.int32),
        "params": params_of(*wanted),
        "stop_tokens": jnp.full((n, 1), -1, jnp.int32),
    }


def tree_call(rng: np.random.Generator, num_nodes: int, batch: int, vocab: int) -> dict:
    """Trees over few tokens, so that paths are accepted; nodes of the sequences interleaved."""
    owner = rng.integers(-1, batch, num_nodes).astype(np.int32)
    parents = np.full(num_nodes, -1, np.int32)
    for b in range(batch):
        rows = np.flatnonzero(owner == b)
        local = random_parents(rng, len(rows)) if len(rows) else []
        for i, parent in enumerate(local):
            parents[rows[i]] = -1 if parent < 0 else rows[parent]
    logits = rng.normal(size=(num_nodes, vocab)).astype(np.float32)
    spoilt = rng.random(num_nodes)
    logits[spoilt < 0.05, 0] = np.nan
    logits[(spoilt > 0.05) & (spoilt < 0.08)] = -np.inf
    return {
        "logits": logits,
        "tokens": rng.integers(0, vocab, num_nodes).astype(np.int32),
        "parents": parents,
        "positions": rng.integers(0, 99, num_nodes).astype(np.int32),
        "node_sequence": owner,
        "stop_tokens": np.array([[0, -1]] * (batch - 1) + [[-1, -1]], np.int32),
    }
