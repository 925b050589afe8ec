"""Loads a published head beside its target's embedding, and refuses what it does not understand.

A head that loads wrong never changes the text; it only makes acceptance collapse, silently. So
every tensor must be used, every needed one be there, and each shape be the one described.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.checkpoint import FETCH_AGAIN, HostArray, TensorEntry, open_checkpoint, read_json
from models.eagle3.description import HeadConfig, HeadOverrides, TableSource
from models.eagle3.layouts import Fields, canonical_tensors
from models.eagle3.module import head_shapes
from models.eagle3.normalise import normalise
from models.eagle3.vocabulary import read_draft_to_target
from models.errors import CheckpointError, ModelError
from models.layers import Params
from models.loading import place_whole
from models.target import Progress, flatten, unflatten
from models.target_tables import (
    TargetFacts,
    read_embedding,
    read_output_table,
    read_target_facts,
)

Leaf = tuple[str, ...]
"""The path of a parameter."""

_MODULES = {
    "embed_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_FUSE = {"norm": "input_norm", "fc": "fc"}


def open_head(
    directory: Path,
    facts: TargetFacts | None,
    overrides: HeadOverrides,
    dtype: DTypeLike,
) -> tuple[HeadConfig, Mapping[str, TensorEntry]]:
    """(description, tensors by canonical name), without reading weights. Raises ModelError."""
    fields = Fields(read_json(directory / "config.json"), directory / "config.json")
    tensors = canonical_tensors(open_checkpoint(directory))
    return normalise(fields, tensors, facts, overrides, dtype), tensors


def load_head(
    directory: str | Path,
    target_directory: str | Path,
    *,
    dtype: DTypeLike = np.float32,
    overrides: HeadOverrides | None = None,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
) -> tuple[HeadConfig, Params]:
    """Description and parameters of a published head, on the default device or split over a mesh.

    Args:
      target_directory: the target's own directory, of which only the embedding and, where the head
        borrows it, the lm_head are read; or a bundle.
      overrides: what the operator decides against the files (models/eagle3/description.py).

    The parameters hold the module's own, and `embedding` [V, H], `lm_head` [K, H],
    `draft_to_target` int32 [K].

    Raises:
      ModelError and its kinds: a layout, feature, tensor or number that does not fit, by name.
    """
    directory = Path(directory)
    facts = read_target_facts(Path(target_directory))
    config, tensors = open_head(directory, facts, overrides or HeadOverrides(), dtype)
    shapes = _shapes(config)
    names = {path: checkpoint_name(path, config, tensors) for path in shapes}
    check_tensors(directory, config, tensors, set(names.values()))
    if mesh is not None and mesh.size > 1:
        config = config.with_shards(mesh.size)
    else:
        mesh = None
    local = _shapes(config)
    leaves: dict[Leaf, jax.Array] = {}
    shares_table = _shares_table(config, facts)
    total = len(shapes) + (2 if shares_table else 3)

    def place(path: Leaf, host: HostArray, shape: tuple[int, ...]) -> None:
        leaves[path] = place_whole(host, path, shape, config, mesh)
        if progress is not None:
            progress(len(leaves), total)

    for path, shape in shapes.items():
        place(path, read_leaf(tensors[names[path]], path, shape, config), local[path])
    for table in ("embedding", "lm_head"):
        if table == "lm_head" and shares_table:
            leaves[("lm_head",)] = leaves[("embedding",)]  # held once
        else:
            host = _read_table(table, config, tensors, facts)
            place((table,), host, _table_shape(table, config))
    draft_to_target = read_draft_to_target(
        tensors.get("d2t"), tensors.get("t2d"), config.draft_vocab_size, config.target_vocab_size
    )
    place(("draft_to_target",), draft_to_target, draft_to_target.shape)
    return config, unflatten(leaves)


def _shapes(config: HeadConfig) -> dict[Leaf, tuple[int, ...]]:
    """Of the module's own parameters, as one chip holds them."""
    return {path: tuple(leaf.shape) for path, leaf in flatten(head_shapes(config))}


def _table_shape(table: str, config: HeadConfig) -> tuple[int, ...]:
    """As one chip holds it."""
    if table == "embedding":
        return (config.local_target_vocab_size, config.hidden_size)
    return (config.local_draft_vocab_size, config.hidden_size)


def _shares_table(config: HeadConfig, facts: TargetFacts) -> bool:
    """Whether lm_head and embedding are one table, the target's."""
    tables = (config.embedding_source, config.lm_head_source)
    return facts.tied_embeddings and tables == (TableSource.TARGET, TableSource.TARGET)


def checkpoint_name(
    path: tuple[str, ...], config: HeadConfig, tensors: Mapping[str, TensorEntry]
) -> str:
    """The canonical tensor name of a parameter of the module.

    A layer without the embedding has one norm before attention, which files call `input_layernorm`
    or `hidden_norm`: whichever is there.
    """
    *modules, leaf = path
    if modules[0] == "final_norm":
        return "norm.weight"
    if modules[0] == "fuse":
        name = modules[1]
        module = _FUSE.get(name) or f"fc_norm.{name.removeprefix('norm_')}"
        return f"{module}.{_LEAVES[leaf]}"
    layer = int(modules[0].removeprefix("layer_"))
    rest = [_MODULES.get(module, module) for module in modules[1:]]
    if modules[1] == "hidden_norm" and not config.embedding_layers[layer]:
        plain = f"layers.{layer}.input_layernorm.weight"
        if plain in tensors:
            return plain
    return ".".join(["layers", str(layer), *rest, _LEAVES[leaf]])


def check_tensors(
    directory: Path,
    config: HeadConfig,
    tensors: Mapping[str, TensorEntry],
    module_names: set[str],
) -> None:
    """Every needed tensor is there, and none that would go unused. Raises CheckpointError."""
    missing = sorted(module_names - tensors.keys())
    if missing:
        raise CheckpointError(f"{directory}: tensor {missing[0]} is missing; {FETCH_AGAIN}")
    used = module_names | {"lm_head.weight", "d2t", "t2d"}
    if config.embedding_source is TableSource.HEAD:
        used.add("embed_tokens.weight")
    unexpected = sorted(tensors.keys() - used)
    if unexpected:
        raise CheckpointError(
            f"{directory}: tensor {tensors[unexpected[0]].name} is not part of the head that"
            " config.json describes; without it the head would guess badly: check config.json, or"
            " report the layout"
        )


def read_leaf(
    entry: TensorEntry, path: tuple[str, ...], shape: tuple[int, ...], config: HeadConfig
) -> HostArray:
    """One parameter; a kernel is stored [out, in] in files and kept [in, out] here."""
    is_kernel = path[-1] == "kernel"
    stored_shape = shape[::-1] if is_kernel else shape
    if entry.shape != stored_shape:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, wanted is"
            f" {list(stored_shape)}; config.json and weights do not belong together: {FETCH_AGAIN}"
        )
    host = _floats(entry, entry.read(), config)
    return np.ascontiguousarray(host.T) if is_kernel else host


def _read_table(
    table: str,
    config: HeadConfig,
    tensors: Mapping[str, TensorEntry],
    facts: TargetFacts,
) -> HostArray:
    """The embedding [V, H] or lm_head [K, H], from the head's files or the target's."""
    is_embedding = table == "embedding"
    source = config.embedding_source if is_embedding else config.lm_head_source
    if source is TableSource.HEAD:
        entry = tensors["embed_tokens.weight" if is_embedding else "lm_head.weight"]
        rows = config.target_vocab_size if is_embedding else config.draft_vocab_size
        if entry.shape != (rows, config.hidden_size):
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, wanted is"
                f" {[rows, config.hidden_size]}; this head was made for another target"
            )
        return _floats(entry, entry.read(), config)
    stored = read_embedding(facts) if is_embedding else read_output_table(facts)
    return stored.astype(config.dtype, copy=False)


def _floats(entry: TensorEntry, stored: HostArray, config: HeadConfig) -> HostArray:
    if entry.dtype.kind in "iub":
        raise ModelError(
            f"{entry.file}: tensor {entry.name} is stored as {entry.dtype}; quantised heads are not"
            " supported: use the head in bfloat16 or float32"
        )
    return stored.astype(config.dtype, copy=False)
