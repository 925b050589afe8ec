"""config.json of targets: what is understood, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import load_golden, write_model

from models.config import read_target_config
from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.hub import resolve_model
from models.rope import RopeConfig, read_rope, rope_fields
from models.target import init_target, load_target, parameter_shapes, target_forward

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def write_config(directory: Path, **changes: Any) -> Path:
    fields = {k: v for k, v in {**LLAMA, **changes}.items() if v is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_sizes_are_read_and_derived(tmp_path: Path) -> None:
    config = read_target_config(write_config(tmp_path), dtype=jnp.bfloat16)
    assert (config.head_dim, config.num_kv_heads, config.num_layers) == (6, 2, 8)
    assert config.boundaries == (2, 4, 5)
    assert config.feature_size == 72
    assert config.kv_bytes_per_token == 8 * 2 * 12 * 2
    assert config.windows == (None,) * 8
    assert not config.tied_embeddings
    assert hash(config) == hash(dataclasses.replace(config))


def test_generation_config_names_the_stop_tokens(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=5)
    assert read_target_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read_target_config(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported.*LlamaFor"),
        ({"architectures": ...}, "architecture none is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights .awq."),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_unsupported_features_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: .*{message}"):
        read_target_config(write_config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is None; it must be a positive whole number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers is '8'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of .* 3"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' needs factor"),
        (
            {"max_position_embeddings": ..., "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "'yarn' needs original_max_position_embeddings",
        ),
    ],
)
def test_wrong_numbers_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_target_config(write_config(tmp_path, **changes))


@pytest.mark.parametrize("boundaries", [(3, 2), (2, 2), (-1, 2), (2, 9)])
def test_boundaries_must_ascend_within_the_layers(
    tmp_path: Path, boundaries: tuple[int, ...]
) -> None:
    with pytest.raises(ModelError, match=r"boundaries: .* within \[0, 8\]"):
        read_target_config(write_config(tmp_path), boundaries=boundaries)


def test_shallow_target_needs_named_boundaries(tmp_path: Path) -> None:
    write_config(tmp_path, num_hidden_layers=6)
    with pytest.raises(ModelError, match=r"6 layers has no default.*name the captured"):
        read_target_config(tmp_path)
    assert read_target_config(tmp_path, boundaries=()).feature_size == 0


def test_missing_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        read_target_config(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=5e5),
        RopeConfig(kind="linear", factor=4.0),
        RopeConfig(kind="llama3", factor=8.0, original_positions=64, low_freq_factor=1.0),
        RopeConfig(kind="yarn", factor=4.0, original_positions=64, attention_factor=1.1),
        RopeConfig(kind="yarn", factor=4.0, original_positions=64, truncate=False),
    ],
)
def test_rope_survives_a_config_file(rope: RopeConfig) -> None:
    assert read_rope(json.loads(json.dumps(rope_fields(rope))), "config.json") == rope


def test_rope_without_theta_means_10000() -> None:
    assert read_rope({}, "config.json") == RopeConfig(theta=10000.0)
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": None}
    assert read_rope(newer, "config.json") == RopeConfig(theta=7.0)


def test_loading_reports_each_tensor_and_names_faults(tmp_path: Path) -> None:
    raw, weights, _ = load_golden("llama_tied")
    seen: list[tuple[int, int]] = []
    write_model(tmp_path, raw, weights)
    load_target(tmp_path, boundaries=(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(weights)) for i in range(len(weights))]

    dropped = {k: v for k, v in weights.items() if not k.endswith("layers.1.mlp.up_proj.weight")}
    write_model(tmp_path, raw, dropped)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is"):
        load_target(tmp_path, boundaries=())

    write_model(
        tmp_path,
        raw,
        {**weights, "model.layers.3.mlp.up_proj.weight": weights["model.norm.weight"]},
    )
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp.* not part of the model"):
        load_target(tmp_path, boundaries=())

    write_model(tmp_path, {**raw, "intermediate_size": 41}, weights)
    with pytest.raises(CheckpointError, match=r"has shape \[\d+, \d+\].*config\.json asks"):
        load_target(tmp_path, boundaries=())


def test_redundant_tensors_of_exporters_are_left_out(tmp_path: Path) -> None:
    raw, weights, _ = load_golden("llama_tied")
    extra = {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32),
    }
    write_model(tmp_path, raw, {**weights, **extra})
    _, params = load_target(tmp_path, boundaries=())
    assert "lm_head" not in params


def test_random_parameters_have_the_shapes_of_the_module(tmp_path: Path) -> None:
    config = read_target_config(write_config(tmp_path, tie_word_embeddings=True))
    params = init_target(config, seed=1)
    assert params["layer_0"]["mlp"]["up"]["kernel"].shape == (24, 40)
    assert ("lm_head",) not in parameter_shapes(config)
    tokens = jnp.zeros(5, jnp.int32)

    def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        assert q.shape == (5, 4, 6)
        assert block_kv.shape == (5, 2, 12)
        return q

    hidden, block_kv, features = target_forward(config, params, tokens, tokens, attend)
    assert hidden.shape == (5, 24)
    assert block_kv.shape == (8, 5, 2, 12)
    assert features.shape == (5, 72)


def test_a_hugging_face_id_names_the_snapshot_in_the_hubs_cache(tmp_path: Path) -> None:
    """Offline, as the library's own rules have it: what is cached is found, and nothing else."""
    kept = tmp_path / "models--owner--tiny-llama"
    (kept / "snapshots" / "abc123").mkdir(parents=True)
    write_config(kept / "snapshots" / "abc123")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc123")
    code = (
        "from models.hub import resolve_model; from models.identity import _model_name;"
        "found = resolve_model('owner/tiny-llama'); print(found, _model_name(found));"
        "resolve_model('owner/other')"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == f"{kept / 'snapshots' / 'abc123'} tiny-llama\n", done.stderr
    assert "FetchError: owner/other: could not be downloaded" in done.stderr


def test_only_directories_and_ids_name_models(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(ModelError, match="neither a directory nor a Hugging Face id"):
        resolve_model(tmp_path / "nowhere")
