"""The target model: loaded from a Hugging Face-style directory, run on flattened rows.

The model knows nothing of caches: attention goes through the engine's `attend` callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.checkpoint import Checkpoint, open_checkpoint
from models.config import TargetConfig, read_target_config
from models.decoder import Decoder
from models.families import family_named
from models.layers import Attend, Params, project_to_vocabulary

Progress = Callable[[int, int], None]
"""(tensors read, tensors in all), called after each tensor."""


def target_forward(
    config: TargetConfig, params: Params, tokens: jax.Array, positions: jax.Array, attend: Attend
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All layers over T rows.

    Args:
      tokens, positions: int32 [T]. A token outside the vocabulary reads the nearest row.
      attend: (layer as a Python int, q [T, num_heads, head_dim] after RoPE,
        block_kv [T, num_kv_heads, 2*head_dim], K after RoPE) -> [T, num_heads, head_dim].
        It applies `config.attention_scale` and `config.windows[layer]`.

    Returns:
      hidden [T, Ht] after the final norm; block_kv [L, T, num_kv_heads, 2*head_dim];
      features [T, F], the captured boundaries side by side. All in config.dtype.
    """
    result: Any = Decoder(config).apply({"params": params}, tokens, positions, attend)
    hidden, block_kv, features = result
    return hidden, block_kv, features


def target_logits(config: TargetConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """float32 [N, V] of hidden [N, Ht], which is after the final norm."""
    return project_to_vocabulary(hidden, output_table(config, params))


def output_table(config: TargetConfig, params: Params) -> jax.Array:
    """[V, Ht], whose rows score the tokens: the lm_head, or the embedding where they are tied."""
    table: jax.Array = params["embedding" if config.tied_embeddings else "lm_head"]
    return table


def parameter_shapes(config: TargetConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path -> shape of every parameter, in the order they are run."""

    def keep_q(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        return q

    row = jnp.zeros(1, jnp.int32)
    variables: Any = jax.eval_shape(
        lambda key: Decoder(config).init(key, row, row, keep_q), jax.random.key(0)
    )
    return {path: tuple(leaf.shape) for path, leaf in flatten(variables["params"])}


def flatten(tree: Params, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, leaf) of a nested dict."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


def unflatten(leaves: dict[tuple[str, ...], Any]) -> Params:
    """The nested dict of (path, leaf): the inverse of `flatten`."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def init_target(config: TargetConfig, seed: int) -> Params:
    """Random parameters (normal, 0.02; norms one), for tests and measurements."""
    random = np.random.default_rng(seed)

    def leaf(path: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
        if path[-1] == "scale":
            return jnp.ones(shape, config.dtype)
        return jnp.asarray(random.normal(0.0, 0.02, shape), config.dtype)

    return unflatten({path: leaf(path, s) for path, s in parameter_shapes(config).items()})


def load_target(
    directory: str | Path,
    *,
    dtype: DTypeLike = np.float32,
    boundaries: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> tuple[TargetConfig, Params]:
    """Configuration and parameters (on the default device) of a model directory.

    Tensors are read one at a time; host memory beyond the parameters stays near twice the largest.
    `boundaries` None: the default ones (models/config.py); empty: no features.

    Raises:
      ModelError and its kinds (models/errors.py), each message naming file, tensor and remedy.
    """
    directory = Path(directory)
    config = read_target_config(directory, dtype=dtype, boundaries=boundaries)
    checkpoint = open_checkpoint(directory)
    shapes = parameter_shapes(config)
    tensor_name = family_named(config.family).tensor_name
    names = {path: tensor_name(path) for path in shapes}
    checkpoint.check_names(names.values(), allowed=_redundant(config, checkpoint))
    leaves: dict[tuple[str, ...], jax.Array] = {}
    for path, shape in shapes.items():
        leaves[path] = _read_leaf(checkpoint, names[path], path, shape, config)
        if progress is not None:
            progress(len(leaves), len(shapes))
    return config, unflatten(leaves)


def _read_leaf(
    checkpoint: Checkpoint,
    name: str,
    path: tuple[str, ...],
    shape: tuple[int, ...],
    config: TargetConfig,
) -> jax.Array:
    """One parameter; a kernel is stored [out, in] in files and kept [in, out] here."""
    is_kernel = path[-1] == "kernel"
    stored = checkpoint.read(name, shape[::-1] if is_kernel else shape)
    host = stored.astype(config.dtype, copy=False)
    if is_kernel:
        host = np.ascontiguousarray(host.T)
    return jnp.asarray(host).block_until_ready()


def _redundant(config: TargetConfig, checkpoint: Checkpoint) -> list[str]:
    """Tensors some exporters write that carry nothing: RoPE tables, a tied model's lm_head."""
    tables = [name for name in checkpoint.names if name.endswith("rotary_emb.inv_freq")]
    return [*tables, "lm_head.weight"] if config.tied_embeddings else tables
