"""Settings that every test runs under."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests build the same small engine again and again: compiled once, for its subprocesses as well.
# One directory a worker, because jax does not write its files atomically.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(
        Path(__file__).parents[1]
        / ".pytest_cache/programs"
        / os.environ.get("PYTEST_XDIST_WORKER", "alone")
    ),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

LONGEST = (
    "test_tensor_parallel.py",
    "test_split_over_chips.py",
    "test_slice_hosts.py",
    "test_draft_trees.py",
    "test_tree_attention_pallas.py",
    "test_sample_rows_pallas.py",
    "test_verify_program.py",
    "test_draft_tensor_parallel.py",
)
"""Files that take half a minute and more, begun first: else one core waits for them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
