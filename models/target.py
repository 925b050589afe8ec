"""The target model: loaded from a Hugging Face-style directory, run on flattened rows.

The model knows nothing of caches: attention goes through the engine's `attend` callback.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kernels.cpu_matmul.api import packed_matmul
from kernels.vocabulary import share_start
from models.checkpoint import open_checkpoint
from models.config import TargetConfig, read_target_config
from models.decoder import DecoderLayer, embedding_rows
from models.layers import (
    PACKED_TABLE,
    Attend,
    Params,
    RMSNorm,
    project_to_vocabulary,
)
from models.loading import Progress as Progress
from models.loading import load_parameters
from models.rope import rope_angles
from models.trees import flatten as flatten
from models.trees import unflatten as unflatten


def target_forward(
    config: TargetConfig, params: Params, tokens: jax.Array, positions: jax.Array, attend: Attend
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All layers over T rows: `embed_rows`, `run_layers` of them all, `finish_rows`.

    Args:
      tokens, positions: int32 [T]. A token outside the vocabulary reads the nearest row.
      attend: (layer as a Python int, q [T, num_heads, head_dim] after RoPE,
        block_kv [T, num_kv_heads, 2*head_dim], K after RoPE) -> [T, num_heads, head_dim].
        It applies `config.attention_scale` and `config.windows[layer]`.

    Returns:
      hidden [T, Ht] after the final norm; block_kv [L, T, num_kv_heads, 2*head_dim];
      features [T, F], the captured boundaries side by side. All in config.dtype.
    """
    stream = embed_rows(config, params, tokens)
    out = run_layers(config, layer_params(config, params), 0, stream, positions, attend)
    hidden, features = finish_rows(config, params, (*out.entering, out.stream))
    return hidden, jnp.stack(out.block_kv), features


class LayersOutput(NamedTuple):
    """What k layers leave. stream [T, Ht]; of each layer, in order: block_kv [T, num_kv_heads,
    2*head_dim], and `entering` [T, Ht], the residual stream that it read.
    """

    stream: jax.Array
    block_kv: tuple[jax.Array, ...]
    entering: tuple[jax.Array, ...]


def layer_params(config: TargetConfig, params: Params) -> list[Params]:
    """The parameters of each layer, first to last."""
    return [params[f"layer_{layer}"] for layer in range(config.num_layers)]


def embed_rows(config: TargetConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """The residual stream [T, Ht] entering the first layer."""
    return embedding_rows(params["embedding"], tokens, config.vocab_size, config.axis)


def run_layers(
    config: TargetConfig,
    layers: Sequence[Params],
    kind: int,
    stream: jax.Array,
    positions: jax.Array,
    attend: Attend,
) -> LayersOutput:
    """Some consecutive layers over T rows; unrolled, which XLA's CPU backend runs faster than a
    scan over stacked weights. They are of the kinds (`config.layer_kind`) that the model has from
    layer `kind` on, and `attend` is called with those layers' numbers.
    """
    angles = rope_angles(config.rope, config.head_dim, positions)
    blocks: list[jax.Array] = []
    entering: list[jax.Array] = []
    for number, params in enumerate(layers, start=kind):
        entering.append(stream)
        result: Any = DecoderLayer(config, number).apply({"params": params}, stream, angles, attend)
        stream, block_kv = result
        blocks.append(block_kv)
    return LayersOutput(stream, tuple(blocks), tuple(entering))


def finish_rows(
    config: TargetConfig, params: Params, boundaries: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """hidden [T, Ht] after the final norm, and features [T, F]: the captured boundaries side by
    side. `boundaries`: the residual stream entering each layer, and behind the last; L + 1 of
    [T, Ht].
    """
    last = boundaries[-1]
    norm = RMSNorm(config.norm_eps, config.dtype)
    hidden: Any = norm.apply({"params": params["final_norm"]}, last)
    captured = [boundaries[b] for b in config.boundaries]
    if not captured:
        return hidden, jnp.zeros((last.shape[0], 0), last.dtype)
    return hidden, jnp.concatenate(captured, axis=-1)


def target_logits(config: TargetConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """float32 [N, V] of hidden [N, Ht], which is after the final norm.

    On several chips V is each chip's own `local_vocab_size`, -inf beyond the vocabulary's end.
    """
    if PACKED_TABLE in params:
        return packed_matmul(hidden, params[PACKED_TABLE], config.vocab_size)
    logits = project_to_vocabulary(hidden, params[scoring_table(config)])
    if config.stored_vocab_size == config.vocab_size:
        return logits
    size = config.local_vocab_size
    tokens = share_start(size, config.axis) + jnp.arange(size, dtype=jnp.int32)
    return jnp.where(tokens < config.vocab_size, logits, -jnp.inf)


def scoring_table(config: TargetConfig) -> str:
    """Of the parameter [V, Ht] whose rows score the tokens."""
    return "embedding" if config.tied_embeddings else "lm_head"


def parameter_shapes(config: TargetConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path -> shape of every parameter, in the order they are run: what one chip holds of it."""

    def keep_q(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        return q

    row = jnp.zeros((1, config.hidden_size), config.dtype)
    angles = rope_angles(config.rope, config.head_dim, jnp.zeros(1, jnp.int32))
    kinds: dict[Any, dict[tuple[str, ...], tuple[int, ...]]] = {}
    table = (config.local_vocab_size, config.hidden_size)
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {("embedding",): table}
    for number in range(config.num_layers):
        kind = config.layer_kind(number)
        if kind not in kinds:
            layer = DecoderLayer(config, number)
            variables: Any = jax.eval_shape(
                lambda key, layer=layer: layer.init(key, row, angles, keep_q), jax.random.key(0)
            )
            kinds[kind] = {p: tuple(leaf.shape) for p, leaf in flatten(variables["params"])}
        shapes |= {(f"layer_{number}", *path): shape for path, shape in kinds[kind].items()}
    shapes[("final_norm", "scale")] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes[("lm_head",)] = table
    return shapes


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
