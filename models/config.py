"""What a target is: sizes, rotary settings, dtype and captured boundaries, from its config.json.

Everything an engine must know of a model before its weights are read is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.checkpoint import read_json
from models.errors import ModelError
from models.layers import AttentionSpec, DType
from models.rope import RopeConfig

MIN_LAYERS_FOR_DEFAULT_BOUNDARIES = 7  # below, {2, n//2, n-3} are not three different layers


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """A target, normalised. Hashable, so that it may be a static argument of jit.

    `boundaries`: the captured ones, ascending; boundary b is the residual stream *entering* layer
    b, and num_layers the one leaving the last layer, before the final norm. `windows[i]`: how many
    tokens layer i sees back, itself included; None: all. `max_positions`: the context, in tokens.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    max_positions: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: DType = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    boundaries: tuple[int, ...] = ()

    @property
    def feature_size(self) -> int:
        """F: numbers in one row of captured features."""
        return len(self.boundaries) * self.hidden_size

    @property
    def attention(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            out_features=self.hidden_size,
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            qk_norm=self.qk_norm,
            eps=self.norm_eps,
        )

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * 2 * self.head_dim * self.dtype.itemsize

    def with_dtype(self, dtype: DTypeLike) -> TargetConfig:
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def with_boundaries(self, boundaries: Sequence[int]) -> TargetConfig:
        """Raises ModelError unless they ascend within [0, num_layers]."""
        chosen = tuple(int(b) for b in boundaries)
        if list(chosen) != sorted(set(chosen)) or any(
            not 0 <= b <= self.num_layers for b in chosen
        ):
            raise ModelError(
                f"boundaries: {list(chosen)} must ascend within [0, {self.num_layers}], the layers"
                " of this target"
            )
        return dataclasses.replace(self, boundaries=chosen)


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """{2, n//2, n-3}: what EAGLE-3 heads are trained on unless they say otherwise.

    Raises ModelError for targets so shallow that two of them coincide.
    """
    if num_layers < MIN_LAYERS_FOR_DEFAULT_BOUNDARIES:
        raise ModelError(
            f"boundaries: a target of {num_layers} layers has no default (two of 2, n//2, n-3 would"
            " coincide); name the captured boundaries"
        )
    return (2, num_layers // 2, num_layers - 3)


def read_target_config(
    directory: Path,
    *,
    dtype: DTypeLike = np.float32,
    boundaries: Sequence[int] | None = None,
) -> TargetConfig:
    """The description in `directory`/config.json, without touching weights.

    `boundaries` None: the default ones; empty: no features are captured.

    Raises:
      UnsupportedModelError: an architecture or feature that is not built, by name.
      ModelError: a field missing or out of range; CheckpointError: the file missing or broken.
    """
    # The families import this module for TargetConfig.
    from models.families import family_of

    raw = read_json(directory / "config.json")
    config = family_of(raw, directory / "config.json").read_config(raw, directory / "config.json")
    if boundaries is None:
        boundaries = default_boundaries(config.num_layers)
    config = config.with_dtype(dtype).with_boundaries(boundaries)
    return dataclasses.replace(config, eos_token_ids=_eos_token_ids(directory, raw))


def _eos_token_ids(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json goes first: chat models stop at more ids than config.json names."""
    value = None
    if (directory / "generation_config.json").exists():
        value = read_json(directory / "generation_config.json").get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def positive_int(raw: Mapping[str, Any], key: str, where: Path, default: int | None = None) -> int:
    """raw[key], or `default` when it is absent or null. Raises ModelError."""
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key} is {value!r}; it must be a positive whole number")
    return value
