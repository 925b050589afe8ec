"""The part of a head that turns captured features into its state, alone: fc and the norms before
it (`head_fuse`).

For a verify service that fuses on its drafts' behalf: a row on the wire then has H numbers, not
k·Ht. No other tensor of the head is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.checkpoint import TensorEntry, open_checkpoint
from models.config import check_shares
from models.eagle3.description import HeadConfig
from models.eagle3.layouts import canonical_tensors
from models.eagle3.loader import Leaf, checkpoint_name, read_leaf
from models.eagle3.module import Fuse
from models.identity import weights_hash
from models.layers import Params
from models.loading import place_whole
from models.trees import flatten, unflatten

FUSE = "fuse"
"""Where the parameters of `head_fuse` are among the head's."""


@dataclass(frozen=True, slots=True)
class FusingHead:
    """`params`: what `head_fuse` reads, split over the mesh if there is one. `hash`: of the tensors
    that they are (`fusing_hash`)."""

    config: HeadConfig
    params: Params
    hash: str


def load_fusing_head(
    config: HeadConfig, tensors: Mapping[str, TensorEntry], mesh: Mesh | None = None
) -> FusingHead:
    """Of a head that `open_head` described; on the default device or over the chips of `mesh`.

    Raises ModelError: tensors that are missing or misshapen; features that the chips cannot share.
    """
    names, shapes = _names(config, tensors), _leaves(config)
    found = fusing_hash(config, tensors)
    if mesh is None or mesh.size == 1:
        mesh = None
    else:
        # Only fc is split: how many heads of attention the rest has does not matter here.
        check_shares(mesh.size, "head", {"features": config.feature_size}, num_kv_heads=1)
        config = replace(config, num_shards=mesh.size)
    local = _leaves(config)
    placed = {
        path: place_whole(
            read_leaf(tensors[names[path]], path, shape, config), path, local[path], config, mesh
        )
        for path, shape in shapes.items()
    }
    return FusingHead(config, {FUSE: unflatten(placed)[FUSE]}, found)


def fusing_hash(config: HeadConfig, tensors: Mapping[str, TensorEntry]) -> str:
    """Hex SHA-256 that two heads share if they fuse alike: of those tensors' names, shapes and
    sampled bytes (`models.identity.weights_hash`), the kind of norm and its epsilon.
    """
    own = {name: tensors[name] for name in _names(config, tensors).values()}
    how = f"{config.fuse_norm} {config.norm_eps} {weights_hash(own)}"
    return hashlib.sha256(how.encode()).hexdigest()


def fusing_hash_of(directory: str | Path, config: HeadConfig) -> str:
    """`fusing_hash` of a head that was loaded from `directory`."""
    return fusing_hash(config, canonical_tensors(open_checkpoint(Path(directory))))


def _leaves(config: HeadConfig) -> dict[Leaf, tuple[int, ...]]:
    """Shapes of one chip's parts, by path within the head's parameters."""
    features = jnp.zeros((1, config.feature_size), config.dtype)
    made: Any = jax.eval_shape(lambda key: Fuse(config).init(key, features), jax.random.key(0))
    return {(FUSE, *path): tuple(leaf.shape) for path, leaf in flatten(made["params"])}


def _names(config: HeadConfig, tensors: Mapping[str, TensorEntry]) -> dict[Leaf, str]:
    """The canonical tensor names; `open_head` has seen that they are there."""
    return {path: checkpoint_name(path, config, tensors) for path in _leaves(config)}
