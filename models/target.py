"""The target model: loaded from a Hugging Face-style directory, run on flattened rows.

The model knows nothing of caches: attention goes through the engine's `attend` callback.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.checkpoint import open_checkpoint
from models.config import TargetConfig, read_target_config
from models.decoder import Decoder
from models.layers import Attend, Params, project_to_vocabulary
from models.loading import Progress as Progress
from models.loading import load_parameters
from models.trees import flatten as flatten
from models.trees import unflatten as unflatten


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
    """float32 [N, V] of hidden [N, Ht], which is after the final norm; whole on every chip."""
    logits = project_to_vocabulary(hidden, output_table(config, params))
    if config.axis is None:
        return logits
    whole: jax.Array = lax.all_gather(logits, config.axis, axis=1, tiled=True)
    return whole[:, : config.vocab_size]


def output_table(config: TargetConfig, params: Params) -> jax.Array:
    """[V, Ht], whose rows score the tokens: the lm_head, or the embedding where they are tied."""
    table: jax.Array = params["embedding" if config.tied_embeddings else "lm_head"]
    return table


def parameter_shapes(config: TargetConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path -> shape of every parameter, in the order they are run: what one chip holds of it."""

    def keep_q(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        return q

    row = jnp.zeros(1, jnp.int32)
    variables: Any = jax.eval_shape(
        lambda key: Decoder(config).init(key, row, row, keep_q), jax.random.key(0)
    )
    return {path: tuple(leaf.shape) for path, leaf in flatten(variables["params"])}


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
    mesh: Mesh | None = None,
) -> tuple[TargetConfig, Params]:
    """Configuration and parameters of a model directory, on the default device or split over a
    mesh.

    Tensors are read one at a time into arrays of their own device (models/loading.py). `boundaries`
    None: the default ones (models/config.py); empty: no features.

    Raises:
      ModelError and its kinds (models/errors.py), each message naming file, tensor and remedy.
    """
    directory = Path(directory)
    config = read_target_config(directory, dtype=dtype, boundaries=boundaries)
    if mesh is not None:
        config = config.with_shards(mesh.size)
    checkpoint = open_checkpoint(directory)
    leaves = load_parameters(
        checkpoint,
        config,
        parameter_shapes(config),
        mesh if config.num_shards > 1 else None,
        progress,
    )
    return config, unflatten(leaves)
