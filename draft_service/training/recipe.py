"""A training recipe: one frozen, validated object per run, read from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class RecipeError(ValueError):
    """A recipe file cannot be used; the message names field, value, limit and remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadRecipe(_Section):
    """The head's shape. Heads, head size, RoPE and norm epsilon are the target's."""

    num_layers: int = Field(default=1, ge=1, le=8)
    fusion: Literal["every", "first"] = "every"
    """Layers fed [embedding, hidden]: every one (convention A) or the first alone (B)."""
    draft_vocab_size: int = Field(default=8192, ge=16)
    intermediate_size: int | None = Field(default=None, ge=16, description="None: the target's")
    boundaries: tuple[int, ...] | None = Field(default=None, description="None: {2, n//2, n-3}")
    warm_start: bool = True
    """Start layers from the target's last one; otherwise from scaled normal noise."""
    init_from: Path | None = None
    """Start from the head in this directory instead; its draft vocabulary is taken over."""


class DataRecipe(_Section):
    """Which sequences are used, and how they are batched."""

    responses: Path
    cache: Path
    max_prompt_tokens: int = Field(default=320, ge=2)  # the tail of longer prompts is used
    max_response_tokens: int = Field(default=192, ge=2)
    num_validation: int = Field(default=200, ge=1)
    limit: int | None = Field(
        default=None, ge=2, description="use only the first sequences of the file"
    )
    batch_tokens: int = Field(
        default=1536, ge=64, description="response positions in a batch, padded"
    )


class OptimiserRecipe(_Section):
    """AdamW (0.9, 0.95), global clip, linear warm-up and cosine decay to a floor."""

    learning_rate: float = Field(default=5e-4, gt=0)
    final_fraction: float = Field(default=0.02, ge=0, le=1)
    warmup_steps: int = Field(default=40, ge=0)
    total_steps: int = Field(default=1000, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)
    """Ends the schedule early: progress is the larger of steps done and training time spent."""
    clip: float = Field(default=0.5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    num_test_steps: int = Field(default=3, ge=1, le=8)
    step_decay: float = Field(default=0.8, gt=0, le=1)
    matmul_dtype: Literal["float32", "bfloat16"] = "float32"
    """Operands of matrix products; sums, weights and optimiser state are float32 always."""
    seed: int = 0


class Recipe(_Section):
    """Everything `canopy head train` needs; paths are relative to the working directory."""

    target: Path
    output: Path
    head: HeadRecipe = HeadRecipe()
    data: DataRecipe
    optimiser: OptimiserRecipe = OptimiserRecipe()
    validate_every_steps: int = Field(default=100, ge=1)
    checkpoint_every_steps: int = Field(default=50, ge=1)
    log_every_steps: int = Field(default=10, ge=1)
    validation_steps: int = Field(default=6, ge=1, le=12)
    """Depth of the simulated greedy chain."""

    @model_validator(mode="after")
    def _schedules_fit(self) -> Self:
        if self.optimiser.warmup_steps >= self.optimiser.total_steps:
            raise ValueError(
                f"optimiser.warmup_steps: {self.optimiser.warmup_steps} must be below"
                f" optimiser.total_steps ({self.optimiser.total_steps})"
            )
        return self


def load_recipe(path: Path, overrides: dict[str, object] | None = None) -> Recipe:
    """The recipe in `path`; `overrides` maps dotted fields to values. Raises RecipeError."""
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RecipeError(f"recipe: cannot read {path} ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe: {path} is not YAML ({error})") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"recipe: {path} must hold a mapping, not {type(raw).__name__}")
    for name, value in (overrides or {}).items():
        section = raw
        *parents, leaf = name.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise RecipeError(f"{path}: {name}: {parent} is {section!r} and has no fields")
        section[leaf] = value
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise RecipeError(
            f"{path}: {field}: {first['msg']} (value {first.get('input')!r});"
            " see docs/training.md for the fields"
        ) from error
