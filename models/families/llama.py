"""Llama (2, 3.x, SmolLM2, and what else calls itself LlamaForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import TargetConfig
from models.families.decoder import read_decoder
from models.families.decoder import tensor_name as tensor_name

ARCHITECTURES: tuple[str, ...] = ("LlamaForCausalLM",)


def read_config(raw: Mapping[str, Any], where: Path) -> TargetConfig:
    """One switch biases all four projections of attention, another the MLP."""
    bias = bool(raw.get("attention_bias", False))
    return read_decoder(
        raw,
        where,
        "llama",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )
