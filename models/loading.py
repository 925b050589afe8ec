"""Parameters from files into device arrays, tensor by tensor, split over a mesh where there is one.

A tensor is read in blocks of rows; each block is turned, cast and cut straight into the buffers of
the chips that hold a part of it. Host memory at its peak: those buffers, which together are one
tensor as it is kept, and one block; a tensor that lies on several chips is read once. A host of
several reads the rows that its own chips hold; where a split runs across rows, all. Of stacked
experts "one tensor" is the stack of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from models.checkpoint import Checkpoint, HostArray, TensorEntry
from models.config import TargetConfig
from models.families import family_named
from models.row_major import is_looked_up, lay_by_rows
from models.sharding import Share, Split, global_shape, parameter_spec, share_of, split_axis

MAX_BLOCK_BYTES = 64 << 20

Path = tuple[str, ...]
Progress = Callable[[int, int], None]
"""(parameters placed, parameters in all), called after each."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One parameter and where it comes from."""

    path: Path
    shape: tuple[int, ...]  # of one chip's part
    names: tuple[str, ...]  # of its tensors: one, or one for each expert
    turned: bool  # stored [out, in], kept [in, out]

    @property
    def is_stack(self) -> bool:
        return "experts" in self.path and self.path[-1] != "router"


def load_parameters(
    checkpoint: Checkpoint,
    config: TargetConfig,
    shapes: Mapping[Path, tuple[int, ...]],
    mesh: Mesh | None,
    progress: Progress | None,
) -> dict[Path, jax.Array]:
    """By path; `shapes` are those of a chip's parts. `mesh` None: on the default device.

    Raises CheckpointError for tensors that are missing, too many or of another shape.
    """
    leaves = [_leaf(config, path, shape) for path, shape in shapes.items()]
    wanted = [name for leaf in leaves for name in leaf.names]
    checkpoint.check_names(wanted, allowed=_redundant(config, checkpoint))
    placed: dict[Path, jax.Array] = {}
    for leaf in leaves:
        placed[leaf.path] = _place(leaf, checkpoint, config, mesh)
        if progress is not None:
            progress(len(placed), len(leaves))
    return placed


def _leaf(config: TargetConfig, path: Path, shape: tuple[int, ...]) -> _Leaf:
    name = family_named(config.family).tensor_name(path)
    names: tuple[str, ...] = (name,)
    if "{expert}" in name:
        names = tuple(name.format(expert=expert) for expert in range(shape[0]))
    return _Leaf(path, shape, names, turned=path[-1] == "kernel" or len(names) > 1)


def _place(
    leaf: _Leaf, checkpoint: Checkpoint, config: TargetConfig, mesh: Mesh | None
) -> jax.Array:
    """The parameter on its device, or split over the mesh's; blocks until it is there."""
    entries = [checkpoint.checked_entry(name, _stored(leaf, config)) for name in leaf.names]
    if mesh is None:
        [(_, buffer)] = _filled(leaf, entries, config, [0])
        return _on_default_device(buffer, leaf.path)
    here = _of_this_host(mesh)
    is_split = split_axis(leaf.path) is not None
    buffers = dict(
        _filled(leaf, entries, config, [shard for shard, _ in here] if is_split else [0])
    )
    parts = []
    for shard, device in here:
        buffer = buffers.pop(shard) if is_split else buffers[0]
        parts.append(jax.device_put(buffer, device).block_until_ready())
        del buffer
    return _joined(parts, leaf.path, leaf.shape, config, mesh)


def place_whole(
    host: HostArray, path: Path, shape: tuple[int, ...], config: Split, mesh: Mesh | None
) -> jax.Array:
    """A tensor that is on the host as one, cut for the chips; `shape`: of one chip's part."""
    if mesh is None:
        return _on_default_device(host, path)
    parts = []
    for shard, device in _of_this_host(mesh):
        part, share = host, share_of(config, path, shape, shard)
        if share is not None:
            part = np.zeros(shape, host.dtype)
            offset = [0] * host.ndim
            offset[share.axis] = share.start
            _copy_common(part, offset, host, [0] * host.ndim)
        parts.append(jax.device_put(part, device).block_until_ready())
    return _joined(parts, path, shape, config, mesh)


def _on_default_device(host: HostArray, path: Path) -> jax.Array:
    return _laid_out(jax.device_put(host).block_until_ready(), path)


def _laid_out(array: jax.Array, path: Path) -> jax.Array:
    return lay_by_rows(array) if is_looked_up(path) else array


def _of_this_host(mesh: Mesh) -> list[tuple[int, jax.Device]]:
    """(shard, device) of the chips that this process has."""
    own = jax.process_index()
    return [(i, chip) for i, chip in enumerate(mesh.devices.flat) if chip.process_index == own]


def _joined(
    parts: list[jax.Array], path: Path, shape: tuple[int, ...], config: Split, mesh: Mesh
) -> jax.Array:
    """One array of the parts on this host's chips, and those on the others'."""
    sharding = NamedSharding(mesh, parameter_spec(path))
    whole = global_shape(config, path, shape)
    return _laid_out(jax.make_array_from_single_device_arrays(whole, sharding, parts), path)


def _stored(leaf: _Leaf, config: TargetConfig) -> tuple[int, ...]:
    """The shape that one of the leaf's tensors must have in its file."""
    whole = _unsharded(leaf, config)
    if leaf.is_stack:
        whole = whole[1:]
    return whole[::-1] if leaf.turned else whole


def _unsharded(leaf: _Leaf, config: TargetConfig) -> tuple[int, ...]:
    """The shape of the parameter on a single chip: no padding, no head twice."""
    if leaf.path in (("embedding",), ("lm_head",)):
        return (config.vocab_size, config.hidden_size)
    if len(leaf.path) > 1 and leaf.path[-2] in ("k", "v"):
        return (*leaf.shape[:-1], config.num_kv_heads * config.head_dim)
    return global_shape(config, leaf.path, leaf.shape)


def _filled(
    leaf: _Leaf, entries: list[TensorEntry], config: TargetConfig, shards: list[int]
) -> Iterator[tuple[int, HostArray]]:
    """(shard, its part) of each of `shards`, after one reading of the tensors."""
    buffers = {shard: np.zeros(leaf.shape, config.dtype) for shard in shards}
    shares = {shard: share_of(config, leaf.path, leaf.shape, shard) for shard in shards}
    start, stop = _rows_of(leaf, list(shares.values()))
    for expert, entry in enumerate(entries):
        for first, rows in entry.read_blocks(MAX_BLOCK_BYTES, start, stop):
            block = rows.T if leaf.turned else rows
            corner = [0] * block.ndim
            corner[-1 if leaf.turned else 0] = first
            for shard, buffer in buffers.items():
                share = shares[shard]
                offset = [0] * _rank(leaf)
                if share is not None:
                    offset[share.axis - leaf.is_stack] = share.start
                _copy_common(buffer[expert] if leaf.is_stack else buffer, offset, block, corner)
            del rows, block
    yield from ((shard, buffers.pop(shard)) for shard in shards)


def _rows_of(leaf: _Leaf, shares: list[Share | None]) -> tuple[int, int | None]:
    """The stored rows [start, stop) that hold any of the shares; all of them, where the split runs
    the other way and each row has a part of every chip's.
    """
    row_axis = _rank(leaf) - 1 if leaf.turned else 0
    held = [share for share in shares if share is not None]
    if len(held) < len(shares) or any(s.axis - leaf.is_stack != row_axis for s in held):
        return 0, None
    return min(s.start for s in held), max(s.start + s.length for s in held)


def _rank(leaf: _Leaf) -> int:
    """Axes of one tensor of the leaf."""
    return len(leaf.shape) - leaf.is_stack


def _copy_common(
    target: HostArray, target_at: list[int], source: HostArray, source_at: list[int]
) -> None:
    """Copies where two boxes of one array overlap; each lies at the place given, axis by axis."""
    into: list[Any] = []
    out_of: list[Any] = []
    for axis in range(target.ndim):
        low = max(target_at[axis], source_at[axis])
        high = min(target_at[axis] + target.shape[axis], source_at[axis] + source.shape[axis])
        if high <= low:
            return
        into.append(slice(low - target_at[axis], high - target_at[axis]))
        out_of.append(slice(low - source_at[axis], high - source_at[axis]))
    target[tuple(into)] = source[tuple(out_of)]


def _redundant(config: TargetConfig, checkpoint: Checkpoint) -> list[str]:
    """Tensors some exporters write that carry nothing: RoPE tables, a tied model's lm_head."""
    tables = [name for name in checkpoint.names if name.endswith("rotary_emb.inv_freq")]
    return [*tables, "lm_head.weight"] if config.tied_embeddings else tables
