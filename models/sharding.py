"""How a target, or a head, is split over the chips of a slice: tensor parallel along one mesh axis.

Attention by heads, MLPs and experts by their inner width, embedding and lm_head by rows of the
vocabulary; norms, the experts' router and what is added after a sum lie whole on every chip. Where
chips are more than KV heads, each head lies on several. The step runs inside one `jax.shard_map`:
a chip sees its own share of every array, and the modules add up what the chips found (two sums a
layer, one for the embedding). Logits stay split: sampling exchanges a few numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from models.config import MODEL_AXIS
from models.errors import ModelError
from models.layers import Params
from models.trees import flatten, unflatten

_BY_OUTPUT = ("q", "k", "v", "gate", "up")  # kernel [in, out] and bias [out] split at `out`
_BY_INPUT = ("o", "down", "fc")  # kernel [in, out] split at `in`; the bias comes after the sum


def model_mesh(num_shards: int) -> Mesh:
    """The first `num_shards` devices as one axis. Raises ModelError if there are fewer, or if there
    are more and they belong to several hosts, one of which would have no part.
    """
    devices = jax.devices()
    if jax.process_count() > 1 and num_shards < len(devices):
        raise ModelError(
            f"tensor_parallel: {num_shards} chips asked for, but the slice's hosts have"
            f" {len(devices)}; use them all"
        )
    if num_shards > len(devices):
        raise ModelError(
            f"tensor_parallel: {num_shards} chips asked for, and {len(devices)} are here; ask for"
            f" at most {len(devices)}"
        )
    return Mesh(np.array(devices[:num_shards]), (MODEL_AXIS,))


def split_axis(path: tuple[str, ...]) -> int | None:
    """Which axis of a parameter is split over the chips; None: it lies whole on every chip.

    Experts' weights have the experts first and are counted from there: [E, in, out].
    """
    if path in (("embedding",), ("lm_head",), ("lm_head_scale",)):
        return 0
    if len(path) == 1:  # of a head: draft_service/scoring.py turns the lm_head
        return 1 if path == ("lm_head_turned",) else None
    if "experts" in path:
        return {"gate": 2, "up": 2, "down": 1}.get(path[-1])
    name, leaf = path[-2:]
    if name in _BY_OUTPUT:
        return 1 if leaf == "kernel" else 0
    if name in _BY_INPUT and leaf == "kernel":
        return 0
    return None


def parameter_spec(path: tuple[str, ...]) -> PartitionSpec:
    """`split_axis` as jax wants it."""
    axis = split_axis(path)
    names = () if axis is None else (*[None] * axis, MODEL_AXIS)
    return PartitionSpec(*names)  # type: ignore[no-untyped-call]


PAGES_SPEC = PartitionSpec(None, None, MODEL_AXIS)  # type: ignore[no-untyped-call]
"""KV pages: by KV head (kernels/kv_layout.py has the order of the axes)."""

VOCABULARY_SPEC = PartitionSpec(None, MODEL_AXIS)  # type: ignore[no-untyped-call]
"""Of [rows, tokens]: by token."""

WHOLE_SPEC = PartitionSpec()  # type: ignore[no-untyped-call]


def parameter_specs(params: Params) -> Params:
    """The same tree with a PartitionSpec in the place of each array."""
    return unflatten({path: parameter_spec(path) for path, _ in flatten(params)})


def split_over(
    mesh: Mesh | None, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` run by every chip on its own shares; as it is without a mesh."""
    if mesh is None:
        return function
    split: Callable[..., Any] = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return split


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one axis that a chip holds: `length` from `start`; beyond the end it is zero."""

    axis: int
    start: int
    length: int


class Split(Protocol):
    """A target's description, or a head's."""

    @property
    def num_shards(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...


def share_of(
    config: Split, path: tuple[str, ...], shape: tuple[int, ...], shard: int
) -> Share | None:
    """What chip `shard` holds of a parameter whose own part has `shape`; None: all of it."""
    axis = split_axis(path)
    if axis is None or config.num_shards == 1:
        return None
    length = shape[axis]
    start = shard * length
    if len(path) > 1 and path[-2] in ("k", "v") and config.num_kv_heads < config.num_shards:
        start = shard * config.num_kv_heads // config.num_shards * length
    return Share(axis, start, length)


def global_shape(config: Split, path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the whole array, padding and repeated heads included, of a chip's `shape`."""
    axis = split_axis(path)
    if axis is None:
        return shape
    return (*shape[:axis], shape[axis] * config.num_shards, *shape[axis + 1 :])
