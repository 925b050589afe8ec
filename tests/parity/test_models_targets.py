"""Targets against transformers, on tiny random models (goldens/, made by make_goldens.py)."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_files import GOLDENS, dense_causal, load_golden, write_model

from models.checkpoint import HostArray
from models.config import TargetConfig
from models.target import load_target, target_forward, target_logits

CASES = sorted(path.stem for path in GOLDENS.glob("llama_*.npz"))


def run(config: TargetConfig, params: dict[str, object], tokens: HostArray) -> list[HostArray]:
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    attend = dense_causal(config.attention_scale, tokens.size)
    hidden, _, features = target_forward(config, params, jnp.asarray(tokens), positions, attend)
    return [np.asarray(target_logits(config, params, hidden)), np.asarray(features)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shards", [1, 3])
def test_target_equals_transformers(name: str, shards: int, tmp_path: Path) -> None:
    raw, weights, golden = load_golden(name)
    write_model(tmp_path, raw, weights, shards)
    layers = int(raw["num_hidden_layers"])
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
