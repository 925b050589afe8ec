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

jax.config.update("jax_numpy_dtype_promotion", "strict")
