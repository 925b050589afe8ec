"""`canopy head inspect`: what a head is, what was assumed about it, whether it fits a target."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint import TensorEntry
from models.eagle3.description import HeadConfig, HeadOverrides
from models.eagle3.loader import check_tensors, checkpoint_name, open_head
from models.eagle3.module import head_shapes
from models.eagle3.vocabulary import read_draft_to_target
from models.errors import ModelError
from models.target import flatten
from models.target_tables import read_target_facts


@dataclass(frozen=True, slots=True)
class HeadReport:
    """A head's description; `misfit` says why it does not fit the target, None when it does or no
    target was given."""

    directory: Path
    target_directory: Path | None
    config: HeadConfig
    num_parameters: int
    misfit: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        description = {
            field.name: _plain(getattr(self.config, field.name))
            for field in dataclasses.fields(self.config)
            if field.name not in ("provenance", "dtype")
        }
        return {
            "head": str(self.directory),
            "target": str(self.target_directory) if self.target_directory else None,
            "fits": None if self.target_directory is None else self.misfit is None,
            "misfit": self.misfit,
            "num_parameters": self.num_parameters,
            "description": description,
            "provenance": [dataclasses.asdict(choice) for choice in self.config.provenance],
        }

    def as_text(self) -> str:
        """Lines to read: the choices with their sources, assumed ones marked, then the fit."""
        lines = [f"head {self.directory}: {self.num_parameters / 1e6:.1f} M parameters of its own"]
        width = max(len(choice.field) for choice in self.config.provenance)
        for choice in self.config.provenance:
            mark = "assumed: " if choice.assumed else ""
            lines.append(f"  {choice.field:<{width}}  {choice.value}  ({mark}{choice.source})")
        if self.target_directory is not None:
            fit = f"does not fit: {self.misfit}" if self.misfit else "fits"
            lines.append(f"target {self.target_directory}: {fit}")
        return "\n".join(lines)


def inspect_head(
    directory: str | Path,
    target_directory: str | Path | None = None,
    overrides: HeadOverrides | None = None,
) -> HeadReport:
    """Describes a head without reading its weights, but for the vocabulary map.

    Raises ModelError when the head itself cannot be understood. That it does not fit the target is
    part of the report.
    """
    directory, overrides = Path(directory), overrides or HeadOverrides()
    target = Path(target_directory) if target_directory is not None else None
    misfit = None
    if target is not None:
        try:
            config, tensors = open_head(directory, read_target_facts(target), overrides, np.float32)
        except ModelError as error:
            misfit = str(error)
    if target is None or misfit is not None:
        config, tensors = open_head(directory, None, overrides, np.float32)
    paths = [path for path, _ in flatten(head_shapes(config))]
    names = {checkpoint_name(path, config, tensors) for path in paths}
    check_tensors(directory, config, tensors, names)
    if misfit is None:
        misfit = _map_misfit(config, tensors, target)
    num_parameters = sum(
        math.prod(entry.shape) for name, entry in tensors.items() if name not in ("d2t", "t2d")
    )
    return HeadReport(directory, target, config, num_parameters, misfit)


def _map_misfit(
    config: HeadConfig, tensors: Mapping[str, TensorEntry], target: Path | None
) -> str | None:
    """The map's fault; raised, instead of reported, when no target is at issue."""
    try:
        read_draft_to_target(
            tensors.get("d2t"),
            tensors.get("t2d"),
            config.draft_vocab_size,
            config.target_vocab_size,
        )
    except ModelError as error:
        if target is None:
            raise
        return str(error)
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value
