"""Rotary position embedding: which frequencies a config asks for, and the rotation itself.

The layout is Hugging Face's: the first half of a head's channels is rotated against the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from models.errors import ModelError, UnsupportedModelError

DEFAULT_THETA = 10000.0
KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary settings, normalised from `rope_theta`, `rope_scaling` and `rope_parameters`.

    `original_positions` is the context the model was first trained for (llama3, yarn). The names of
    the other fields are those of config.json. Unused ones keep their defaults.
    """

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # scales cos and sin; yarn only
    truncate: bool = True

    def inverse_frequencies(self, head_dim: int) -> npt.NDArray[np.float32]:
        """float32 [head_dim/2], radians a position; computed in float64."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        plain = 1.0 / self.theta**exponents
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        elif self.kind == "yarn":
            plain = self._yarn(plain, head_dim)
        return plain.astype(np.float32)

    def _llama3(self, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Long wavelengths are stretched by `factor`, short ones kept, a smooth band between."""
        turns = self.original_positions * plain / (2 * math.pi)  # in the first training's context
        band = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(band, 0.0, 1.0)
        return keep * plain + (1.0 - keep) * plain / self.factor

    def _yarn(self, plain: npt.NDArray[np.float64], head_dim: int) -> npt.NDArray[np.float64]:
        """As llama3, with the band linear in the channel (arXiv 2309.00071, section 3.2)."""

        def channel(turns: float) -> float:  # the channel that turns this often in the context
            ratio = self.original_positions / (turns * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = max(high - low, 0.001)  # equal edges: a step, not a division by zero
        stretch = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
        return stretch * plain / self.factor + (1.0 - stretch) * plain


def read_rope(config: Mapping[str, Any], where: str) -> RopeConfig:
    """The rotary settings of a config.json, in any of the spellings in use.

    `rope_parameters` (newer files) holds theta and scaling; older files have `rope_theta` beside
    `rope_scaling`, whose kind is `rope_type` or `type`. No theta at all means 10000.

    Raises:
      UnsupportedModelError: a kind that is not built, by name.
      ModelError: a kind without the numbers it needs.
    """
    fields: dict[str, Any] = dict(config.get("rope_scaling") or {})
    fields.update(config.get("rope_parameters") or {})
    theta = float(fields.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    if (
        float(config.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0)
        != 1.0
    ):
        raise UnsupportedModelError(f"{where}: partial_rotary_factor is not supported")
    kind = str(fields.get("rope_type") or fields.get("type") or "default")
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{where}: rope scaling {kind!r} is not supported; supported are {', '.join(KINDS)}"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _number(fields, "factor", kind, where)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    original = fields.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    if original is None and kind == "yarn":  # transformers' rule for files without it
        original = config.get("max_position_embeddings")
    fields["original_max_position_embeddings"] = original
    original_positions = int(_number(fields, "original_max_position_embeddings", kind, where))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_positions=original_positions,
            low_freq_factor=_number(fields, "low_freq_factor", kind, where),
            high_freq_factor=_number(fields, "high_freq_factor", kind, where),
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_positions=original_positions,
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(fields, factor),
        truncate=bool(fields.get("truncate", True)),
    )


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config.json that `read_rope` reads back to `rope`."""
    scaling: dict[str, Any] | None = None
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
    if scaling is not None and rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_positions
    if scaling is not None and rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if scaling is not None and rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        scaling |= {"attention_factor": rope.attention_factor, "truncate": rope.truncate}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _yarn_attention_factor(fields: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin: given, or 0.1·m·ln(factor) + 1 (their ratio, with two m)."""

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return scale(float(fields["mscale"])) / scale(float(fields["mscale_all_dim"]))
    return scale(1.0)


def _number(fields: Mapping[str, Any], key: str, kind: str, where: str) -> float:
    value = fields.get(key)
    if value is None:
        raise ModelError(f"{where}: rope scaling {kind!r} needs {key}, which is missing")
    return float(value)


def rope_angles(
    rope: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [T, 1, head_dim/2], of int32 positions [T]; shared by all layers."""
    frequencies = jnp.asarray(rope.inverse_frequencies(head_dim))
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    factor = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [T, heads, head_dim] turned by the angles of its rows; float32 inside, x.dtype out."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
