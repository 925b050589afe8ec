"""Qwen3 (dense): an RMSNorm on every head of q and k, no biases unless asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import TargetConfig, positive_int
from models.families.decoder import read_decoder
from models.families.decoder import tensor_name as tensor_name
from models.families.qwen2 import read_windows

ARCHITECTURES: tuple[str, ...] = ("Qwen3ForCausalLM",)

DEFAULT_HEAD_DIM = 128


def read_config(raw: Mapping[str, Any], where: Path) -> TargetConfig:
    """The head's size is a number of its own: hidden_size / num_attention_heads is not it."""
    bias = bool(raw.get("attention_bias", False))
    return read_decoder(
        raw,
        where,
        "qwen3",
        head_dim=positive_int(raw, "head_dim", where, DEFAULT_HEAD_DIM),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=read_windows(raw, where),
    )
