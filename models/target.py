"""The target model: loaded from a Hugging Face-style directory, run on flattened rows.

The model knows nothing of caches: attention goes through the engine's `attend` callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.checkpoint import Checkpoint, open_checkpoint
from models.config import TargetConfig, read_target_config
from models.decoder import DecoderLayer
from models.families import family_named
from models.layers import Attend, Params, RMSNorm, project_to_vocabulary
from models.rope import rope_angles

Progress = Callable[[int, int], None]
"""(tensors read, tensors in all), called after each tensor."""


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
    stream = embed_rows(params, tokens)
    out = run_layers(config, layer_params(config, params), stream, positions, attend)
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


def embed_rows(params: Params, tokens: jax.Array) -> jax.Array:
    """The residual stream [T, Ht] entering the first layer."""
    return jnp.take(params["embedding"], tokens, axis=0, mode="clip")


def run_layers(
    config: TargetConfig,
    layers: Sequence[Params],
    stream: jax.Array,
    positions: jax.Array,
    attend: Attend,
) -> LayersOutput:
    """Some consecutive layers over T rows; unrolled, which XLA's CPU backend runs faster than a
    scan over stacked weights. `attend` is called with the layer's place in `layers`.
    """
    angles = rope_angles(config.rope, config.head_dim, positions)
    blocks: list[jax.Array] = []
    entering: list[jax.Array] = []
    for place, params in enumerate(layers):
        entering.append(stream)
        result: Any = DecoderLayer(config, place).apply({"params": params}, stream, angles, attend)
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

    row = jnp.zeros((1, config.hidden_size), config.dtype)
    angles = rope_angles(config.rope, config.head_dim, jnp.zeros(1, jnp.int32))
    variables: Any = jax.eval_shape(
        lambda key: DecoderLayer(config, 0).init(key, row, angles, keep_q), jax.random.key(0)
    )
    layer = {path: tuple(leaf.shape) for path, leaf in flatten(variables["params"])}
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {("embedding",): table}
    for number in range(config.num_layers):
        shapes |= {(f"layer_{number}", *path): shape for path, shape in layer.items()}
    shapes[("final_norm", "scale")] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes[("lm_head",)] = table
    return shapes


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
