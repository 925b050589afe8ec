"""Parameters as the CPU's own product reads them (kernels/cpu_matmul)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.cpu_matmul.api import is_available
from kernels.cpu_matmul.packing import pack
from models.layers import PACKED_KERNEL, PACKED_TABLE, Params

MIN_SIZE = 1 << 16
"""Elements of the smallest matrix that is packed: smaller ones stay in cache as they are."""


def wants_packing(params: Params) -> bool:
    """Whether these parameters lie on one CPU, as float32 or int8 (ids as int32), and the product
    is available."""
    leaves = jax.tree.leaves(params)
    devices = {device for leaf in leaves for device in leaf.devices()}
    on_cpu = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    known = {jnp.dtype(kind) for kind in (jnp.float32, jnp.int8, jnp.int32)}
    exact = {leaf.dtype for leaf in leaves} <= known
    return on_cpu and exact and is_available()


def pack_parameters(params: Params, table: str) -> Params:
    """`params` with PACKED_KERNELs in the place of large `kernel`s [in, out], and PACKED_TABLE in
    the place of `table` [V, H], the name of what scores the tokens; beside it where that is the
    embedding, which is read by rows as well.
    """
    changed = _packed(params)
    if params[table].size >= MIN_SIZE:
        changed[PACKED_TABLE] = pack(params[table].T)
        if table != "embedding":
            del changed[table]
    return changed


def _packed(params: Params) -> Params:
    changed: Params = {}
    for name, value in params.items():
        if isinstance(value, dict):
            changed[name] = _packed(value)
        elif name == "kernel" and value.ndim == 2 and value.size >= MIN_SIZE:
            changed[PACKED_KERNEL] = pack(value)
        else:
            changed[name] = value
    return changed
