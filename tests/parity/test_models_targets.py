"""Targets against transformers, on tiny random models (goldens/, made by make_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint import HostArray
from models.config import TargetConfig
from models.layers import Attend
from models.target import load_target, target_forward, target_logits
from models.writing import LazyTensor, write_json, write_safetensors

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(path.stem for path in GOLDENS.glob("llama_*.npz"))


def dense_causal(scale: float) -> Attend:
    """Attention among the block's own rows, each seeing itself and those before."""

    def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        k, v = jnp.split(block_kv, 2, axis=-1)
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
        scores = jnp.einsum("thd,shd->hts", q, k) * jnp.asarray(scale, q.dtype)
        mask = jnp.tril(jnp.ones((q.shape[0], q.shape[0]), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hts,shd->thd", weights, v)

    return attend


def write_model(
    directory: Path, config: dict[str, object], weights: dict[str, HostArray], shards: int = 1
) -> None:
    """A Hugging Face-style directory; with more than one shard, an index beside them."""
    write_json(directory / "config.json", config)
    names = sorted(weights)
    if shards == 1:
        tensors = {name: LazyTensor.of(weights[name]) for name in names}
        write_safetensors(directory / "model.safetensors", tensors)
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        write_safetensors(directory / file, {n: LazyTensor.of(weights[n]) for n in mine})
        weight_map |= dict.fromkeys(mine, file)
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})


def load_golden(name: str) -> tuple[dict[str, object], dict[str, HostArray], dict[str, HostArray]]:
    with np.load(GOLDENS / f"{name}.npz") as golden:
        config = json.loads(str(golden["config"]))
        weights = {key[2:]: golden[key] for key in golden.files if key.startswith("w/")}
        arrays = {key: golden[key] for key in ("tokens", "logits", "boundaries")}
    return config, weights, arrays


def run(config: TargetConfig, params: dict[str, object], tokens: HostArray) -> list[HostArray]:
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    attend = dense_causal(config.attention_scale)
    hidden, _, features = target_forward(config, params, jnp.asarray(tokens), positions, attend)
    return [np.asarray(target_logits(config, params, hidden)), np.asarray(features)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shards", [1, 3])
def test_target_equals_transformers(name: str, shards: int, tmp_path: Path) -> None:
    raw, weights, golden = load_golden(name)
    write_model(tmp_path, raw, weights, shards)
    layers = int(raw["num_hidden_layers"])  # type: ignore[call-overload]
    config, params = load_target(tmp_path, boundaries=range(layers + 1))
    logits, features = run(config, params, golden["tokens"])
    np.testing.assert_allclose(logits, golden["logits"], rtol=2e-4, atol=2e-4)
    expected = np.concatenate(list(golden["boundaries"]), axis=-1)
    np.testing.assert_allclose(features, expected, rtol=2e-4, atol=2e-4)


def test_captured_boundaries_are_side_by_side_in_order(tmp_path: Path) -> None:
    raw, weights, golden = load_golden("llama_untied")
    write_model(tmp_path, raw, weights)
    config, params = load_target(tmp_path, boundaries=[0, 3])
    _, features = run(config, params, golden["tokens"])
    expected = np.concatenate([golden["boundaries"][0], golden["boundaries"][3]], axis=-1)
    np.testing.assert_allclose(features, expected, rtol=2e-4, atol=2e-4)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    raw, weights, golden = load_golden("llama_tied")
    write_model(tmp_path, raw, weights)
    config, params = load_target(tmp_path, dtype=jnp.bfloat16, boundaries=[1])
    logits, features = run(config, params, golden["tokens"])
    assert features.dtype == jnp.bfloat16
    assert logits.dtype == np.float32
    spread = np.abs(golden["logits"]).max()
    assert np.abs(logits - golden["logits"]).max() < 0.05 * spread
