"""What each family reads from its config.json that others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_files import load_golden

from models.config import TargetConfig
from models.errors import ModelError, UnsupportedModelError
from models.families import family_of

HERE = Path("config.json")


def read(golden: str, **changes: Any) -> TargetConfig:
    raw, _, _ = load_golden(golden)
    raw = {k: v for k, v in {**raw, **changes}.items() if v is not ...}
    return family_of(raw, HERE).read_config(raw, HERE)


@pytest.mark.parametrize(
    ("golden", "changes", "windows"),
    [
        ("mistral_window", {}, (12, 12, 12)),
        ("mistral_window", {"sliding_window": None}, (None, None, None)),
        ("mistral_window", {"sliding_window": ...}, (4096, 4096, 4096)),
        ("qwen2", {"sliding_window": 5}, (None, None, None)),  # not switched on
        ("qwen2_window", {}, (None, 9, 9)),
        ("qwen2_window", {"max_window_layers": ...}, (None, None, None)),
        ("qwen2_window", {"sliding_window": None}, (None, None, None)),
        ("qwen3_biases_windows", {}, (7, None, 7)),
    ],
)
def test_windows(golden: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(golden, **changes).windows == windows


def test_head_size_of_qwen3_is_its_own() -> None:
    assert read("qwen3", head_dim=...).head_dim == 128
    assert read("qwen2", head_dim=...).head_dim == 6


def test_biases() -> None:
    assert read("qwen2").qkv_bias
    assert not read("qwen2").output_bias
    assert read("qwen3_biases_windows").output_bias
    assert not read("qwen3").qkv_bias


def test_layers_with_experts() -> None:
    assert read("qwen3_moe").sparse_layers == (True, True, True)
    assert read("qwen3_moe_some_dense").sparse_layers == (False, True, False, False)


@pytest.mark.parametrize(
    ("golden", "changes", "kind", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, ModelError, "num_experts_per_tok 7 is above"),
        ("qwen2_window", {"layer_types": ["full_attention"]}, ModelError, "1 of 3 layers"),
        ("qwen2", {"layer_types": ["x"] * 3}, UnsupportedModelError, "layers of type 'x'"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ModelError, "sliding_window"),
        ("mistral_window", {"sliding_window": 0}, ModelError, "sliding_window is 0"),
        ("qwen3", {"architectures": ["Qwen3NextForCausalLM"]}, UnsupportedModelError, "Qwen3Next"),
    ],
)
def test_faults_are_named(
    golden: str, changes: dict[str, Any], kind: type[ModelError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read(golden, **changes)
