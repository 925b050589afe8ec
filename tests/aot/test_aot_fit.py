"""The verify step split over a slice, by the real compiler: what it holds and what it sends."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="the compiler for TPU; pip install '.[tpu]'")

from benchmarks import aot
from benchmarks.fit import Load, compile_step, first_layers, weights_bytes
from benchmarks.model_configs import CONFIGS, named_config
from kernels.chips import CHIPS
from models.config import MODEL_AXIS

pytestmark = pytest.mark.aot

LOAD = Load(context=4096, batch=4, nodes=8, rows=32, page_size=128)
NUM_LAYERS, VOCAB = 2, 4096


def test_split_step_sends_two_sums_a_layer_no_logits_and_copies_no_pages() -> None:
    target = dataclasses.replace(
        named_config("llama-3.1-8b", jnp.bfloat16, boundaries=[1]),
        num_layers=NUM_LAYERS,
        windows=(None,) * NUM_LAYERS,
        hidden_size=1024,
        num_heads=8,
        num_kv_heads=2,  # fewer than chips: each lies on two
        mlp_size=2048,
        vocab_size=VOCAB,
    ).with_shards(4)
    mesh = aot.mesh_of("v5e:2x2", MODEL_AXIS)
    step = compile_step(target, CHIPS["v5e"], mesh, LOAD, num_pages=512)
    sent = step.program.collectives()
    assert set(sent) == {"all-reduce", "all-gather"}
    activations = (2 * NUM_LAYERS + 1) * 32 * 1024 * 2
    # Beside these a few numbers a row, and the likeliest of each chip for log-probabilities.
    sampling = sum(kind["bytes"] for kind in sent.values()) - activations
    assert 0 < sampling < 32 * VOCAB * 4 / 4, "logits are sent"
    assert sum(kind["count"] for kind in sent.values()) <= 2 * NUM_LAYERS + 1 + 14
    assert step.program.alias_bytes >= step.pages
    assert step.program.temp_bytes < step.pages / 4, "pages or weights are copied"
    assert step.peak < 1.1 * (step.weights + step.pages)


PUBLISHED = {
    "llama-3.1-8b": 8.03,
    "llama-3.3-70b": 70.6,
    "mistral-7b-v0.1": 7.24,
    "qwen2.5-7b": 7.62,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
}
"""Billions of parameters, as the models' publishers state them."""


@pytest.mark.parametrize("model", CONFIGS)
def test_listed_sizes_add_up_to_the_published_number_of_parameters(model: str) -> None:
    target = named_config(model, jnp.bfloat16)
    assert weights_bytes(target) / 2e9 == pytest.approx(PUBLISHED[model], rel=2e-3)
    halves = first_layers(target.with_shards(2))
    assert weights_bytes(halves) < weights_bytes(first_layers(target)) * 0.51


def test_unknown_slices_are_refused() -> None:
    with pytest.raises(ValueError, match="chip: 'v5e:7x9' is no slice"):
        aot.mesh_of("v5e:7x9", MODEL_AXIS)
