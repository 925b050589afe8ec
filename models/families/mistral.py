"""Mistral: a sliding window in every layer, where the file names one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import TargetConfig, positive_int
from models.families.decoder import read_decoder
from models.families.decoder import tensor_name as tensor_name

ARCHITECTURES: tuple[str, ...] = ("MistralForCausalLM",)

DEFAULT_WINDOW = 4096
"""Of files that do not mention `sliding_window`, as transformers has it; null means none."""


def read_config(raw: Mapping[str, Any], where: Path) -> TargetConfig:
    """Raises ModelError for a window that is no positive whole number."""
    window = None
    if raw.get("sliding_window", DEFAULT_WINDOW) is not None:
        window = positive_int(raw, "sliding_window", where, DEFAULT_WINDOW)
    num_layers = positive_int(raw, "num_hidden_layers", where)
    return read_decoder(raw, where, "mistral", windows=(window,) * num_layers)
