"""The target families. One is one small file: how config.json is read, how tensors are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from models.config import TargetConfig
from models.errors import UnsupportedModelError
from models.families import llama, mistral, qwen2, qwen3, qwen3_moe


class Family(Protocol):
    """What a family module provides."""

    ARCHITECTURES: tuple[str, ...]

    def read_config(self, raw: Mapping[str, Any], where: Path) -> TargetConfig: ...

    def tensor_name(self, path: tuple[str, ...]) -> str:
        """`{expert}` in it stands for a number: one tensor for each expert, stacked here."""
        ...


FAMILIES: dict[str, Family] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
"""By `TargetConfig.family`."""

_BY_ARCHITECTURE = {name: f for f in FAMILIES.values() for name in f.ARCHITECTURES}


def family_of(raw: Mapping[str, Any], where: Path) -> Family:
    """The family that `architectures` in config.json names. Raises UnsupportedModelError."""
    architectures = raw.get("architectures") or []
    for name in architectures:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    named = ", ".join(map(str, architectures)) or "none"
    raise UnsupportedModelError(
        f"{where}: architecture {named} is not supported; supported are"
        f" {', '.join(sorted(_BY_ARCHITECTURE))}: choose a model of one of them"
    )


def family_named(name: str) -> Family:
    """The family of a `TargetConfig.family`."""
    return FAMILIES[name]
