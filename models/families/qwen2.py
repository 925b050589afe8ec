"""Qwen2 and Qwen2.5: biased q, k and v; a window in the upper layers, if switched on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import TargetConfig, positive_int
from models.families.decoder import read_decoder, read_layer_windows
from models.families.decoder import tensor_name as tensor_name

ARCHITECTURES: tuple[str, ...] = ("Qwen2ForCausalLM",)

DEFAULT_WINDOW = 4096
DEFAULT_FIRST_WINDOWED_LAYER = 28
"""transformers' defaults for files that switch the window on and say no more."""


def read_config(raw: Mapping[str, Any], where: Path) -> TargetConfig:
    return read_decoder(raw, where, "qwen2", qkv_bias=True, windows=read_windows(raw, where))


def read_windows(raw: Mapping[str, Any], where: Path) -> tuple[int | None, ...]:
    """`sliding_window` counts only with `use_sliding_window`, from layer `max_window_layers` on."""
    window = None
    if raw.get("use_sliding_window", False) and raw.get("sliding_window", 1) is not None:
        window = positive_int(raw, "sliding_window", where, DEFAULT_WINDOW)
    first = raw.get("max_window_layers", DEFAULT_FIRST_WINDOWED_LAYER)
    return read_layer_windows(raw, where, window, int(first))
