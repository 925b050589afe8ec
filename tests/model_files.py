"""Model directories written for tests, and attention simple enough to be trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.eagle3 import HeadConfig, head_embed, head_forward, head_fuse, head_logits
from models.layers import Attend, Params
from models.writing import LazyTensor, write_json, write_safetensors

Array = Any
GOLDENS = Path(__file__).parent / "parity" / "goldens"


def write_model(
    directory: Path, config: Mapping[str, Any], weights: Mapping[str, Array], shards: int = 1
) -> Path:
    """A Hugging Face-style directory; with more than one shard, an index beside them."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    names = sorted(weights)
    if shards == 1:
        tensors = {name: LazyTensor.of(weights[name]) for name in names}
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        write_safetensors(directory / file, {n: LazyTensor.of(weights[n]) for n in mine})
        weight_map |= dict.fromkeys(mine, file)
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return directory


def load_golden(name: str) -> tuple[dict[str, Any], dict[str, Array], dict[str, Array]]:
    """(config, weights by name, the other arrays) of one npz file."""
    with np.load(GOLDENS / f"{name}.npz") as golden:
        config = json.loads(str(golden["config"]))
        weights = {key[2:]: golden[key] for key in golden.files if key.startswith("w/")}
        others = {k: golden[k] for k in golden.files if not k.startswith("w/") and k != "config"}
    return config, weights, others


def write_target(
    directory: Path,
    *,
    hidden_size: int = 24,
    num_layers: int = 8,
    vocab_size: int = 61,
    tied: bool = False,
    seed: int = 0,
) -> dict[str, Array]:
    """Config and tables of a target, no layers: all that a head looks at. Returns the tables."""
    random = np.random.default_rng(seed)
    tables = {"model.embed_tokens.weight": random.normal(0, 0.5, (vocab_size, hidden_size))}
    if not tied:
        tables["lm_head.weight"] = random.normal(0, 0.5, (vocab_size, hidden_size))
    tables = {name: table.astype(np.float16).astype(np.float32) for name, table in tables.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
    }
    write_model(directory, config, tables)
    write_json(directory / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": vocab_size - 1}}})
    return tables


def masked_attention(scale: float, past: Array | None, mask: Array) -> Attend:
    """Rows see what mask [layers or 1, T, P + T] says of past [L, P, kv, 2D] and their block."""

    def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        rows = block_kv if past is None else jnp.concatenate([past[layer], block_kv])
        k, v = jnp.split(rows, 2, axis=-1)
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
        scores = jnp.einsum("thd,shd->hts", q, k) * jnp.asarray(scale, q.dtype)
        weights = jax.nn.softmax(jnp.where(mask[layer % len(mask)], scores, -jnp.inf), axis=-1)
        return jnp.einsum("hts,shd->thd", weights, v)

    return attend


def dense_causal(scale: float, num_rows: int) -> Attend:
    """Each row sees itself and those before."""
    return masked_attention(scale, None, np.tril(np.ones((1, num_rows, num_rows), bool)))


def run_head_steps(
    config: HeadConfig, params: Params, features: Array, tokens: list[Array], first: int = 0
) -> Array:
    """logits [steps, T, K]: prefill, then one drafted chain per row, as in make_head_goldens.py."""
    rows = features.shape[0]
    state = head_fuse(config, params, jnp.asarray(features))
    past, mask = None, np.tril(np.ones((rows, rows), bool))
    key_positions, logits = np.arange(rows), []
    for step, ids in enumerate(tokens):
        if step:
            mask = np.concatenate([mask, np.eye(rows, dtype=bool)], axis=1)
            key_positions = np.concatenate([key_positions, np.arange(rows) + step])
        positions = jnp.arange(rows, dtype=jnp.int32) + jnp.int32(first + step)
        embed = head_embed(config, params, jnp.asarray(ids, jnp.int32))
        behind = (np.arange(rows) + step)[:, None] - key_positions
        within = [mask & (behind < (window or behind.max() + 1)) for window in config.windows]
        attend = masked_attention(config.attention_scale, past, np.stack(within))
        state, block = head_forward(config, params, embed, state, positions, attend)
        past = block if past is None else jnp.concatenate([past, block], axis=1)
        logits.append(np.asarray(head_logits(config, params, state)))
    return np.stack(logits)
