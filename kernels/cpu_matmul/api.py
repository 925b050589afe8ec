"""A product for CPUs: a few rows times a matrix that streams once through all cores."""

from __future__ import annotations

import functools
import logging
import threading

import jax
import jax.numpy as jnp

from kernels.cpu_matmul.packing import WIDTH, pack, packed_shape

_logger = logging.getLogger(__name__)

TARGET = "canopy_packed_matmul"

_registering = threading.Lock()


def packed_matmul(x: jax.Array, packed: jax.Array, num_columns: int) -> jax.Array:
    """float32 [M, N] = x [M, K] @ w [K, N], of x float32 and `packed` = `packing.pack(w)`, w
    float32 or int8.

    A row's result does not depend on the other rows nor on how many there are. Bytes: the matrix
    once, x once per block of it (from cache), the result once. Call it where `is_available`.
    Raises ValueError for other shapes or dtypes.
    """
    name = _registered(int8=packed.dtype == jnp.int8)
    return call_packed(name, x, packed, num_columns)


def call_packed(name: str, x: jax.Array, packed: jax.Array, num_columns: int) -> jax.Array:
    """`packed_matmul` by the custom call of that name."""
    if x.ndim != 2 or packed.shape != packed_shape(x.shape[1], num_columns) or 0 in x.shape:
        raise ValueError(
            f"x {x.shape}, packed {packed.shape}: of {num_columns} columns"
            " [M, K] and [blocks, K, WIDTH] are wanted, and nothing empty"
        )
    if x.dtype != jnp.float32 or packed.dtype not in (jnp.float32, jnp.int8):
        raise ValueError(f"x {x.dtype}, packed {packed.dtype}: must be float32, the latter or int8")
    width = packed.shape[0] * WIDTH
    out = jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call(name, out)
    y: jax.Array = call(x, packed)
    return y if width == num_columns else y[:, :num_columns]


@functools.cache
def is_available() -> bool:
    """Whether this machine can: a CPU with AVX2 or AVX-512, llvmlite installed, and a jaxlib whose
    custom calls are those that we write. Tries it once, and logs why not.
    """
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            x = jnp.ones((1, 2), jnp.float32)
            works = float(packed_matmul(x, pack(jnp.ones((2, 1))), 1)[0, 0]) == 2.0
    except Exception as error:  # whatever is missing: XLA's own products serve
        _logger.info("not available: %s: %s", type(error).__name__, error)
        return False
    return works


def _registered(*, int8: bool) -> str:
    """The custom call's name for such weights; programs are compiled by several threads."""
    with _registering:
        return _register(int8)


@functools.cache
def _register(int8: bool) -> str:
    """llvmlite, which may be missing, is looked for at the first use."""
    from kernels.cpu_matmul.build import register_handler

    name = f"{TARGET}_int8" if int8 else TARGET
    register_handler(name, int8=int8)
    return name
