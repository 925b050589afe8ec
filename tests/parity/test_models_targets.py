"""Targets against transformers, on tiny random models (goldens/, made by make_goldens.py)."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_files import GOLDENS, load_golden, masked_attention, write_model

from models.checkpoint import HostArray
from models.config import TargetConfig
from models.families import FAMILIES
from models.layers import Attend
from models.target import load_target, target_forward, target_logits

FAMILY_PREFIXES = ("llama", "mistral", "qwen")
CASES = sorted(p.stem for p in GOLDENS.glob("*.npz") if p.stem.startswith(FAMILY_PREFIXES))


def run(config: TargetConfig, params: dict[str, object], tokens: HostArray) -> list[HostArray]:
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    attend = windowed_causal(config, tokens.size)
    hidden, _, features = target_forward(config, params, jnp.asarray(tokens), positions, attend)
    return [np.asarray(target_logits(config, params, hidden)), np.asarray(features)]


def windowed_causal(config: TargetConfig, num_rows: int) -> Attend:
    """Each row sees itself and those before, as far back as its layer's window."""
    behind = np.arange(num_rows)[:, None] - np.arange(num_rows)
    masks = [(behind >= 0) & (behind < (window or num_rows)) for window in config.windows]
    return masked_attention(config.attention_scale, None, np.stack(masks))


def test_every_family_has_goldens() -> None:
    families = {load_golden(name)[0]["model_type"] for name in CASES}
    assert families == set(FAMILIES)


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


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_some_dense"])
def test_neighbours_change_nothing_that_experts_give(name: str, tmp_path: Path) -> None:
    """Rows sent to one expert in crowds, and alone: the same, to the last bits of a sum."""
    raw, weights, golden = load_golden(name)
    write_model(tmp_path, raw, weights)
    config, params = load_target(tmp_path, boundaries=[])
    alone, _ = run(config, params, golden["tokens"][:8])
    crowd = np.concatenate([golden["tokens"][:8], np.full(120, golden["tokens"][0])])
    beside, _ = run(config, params, crowd)
    np.testing.assert_allclose(beside[:8], alone, rtol=2e-6, atol=2e-6)
