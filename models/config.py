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
from models.experts import ExpertSpec
from models.layers import AttentionSpec, DType
from models.rope import RopeConfig

MODEL_AXIS = "model"
"""The mesh axis that a target is split over."""

MIN_LAYERS_FOR_DEFAULT_BOUNDARIES = 7  # below, {2, n//2, n-3} are not three different layers


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """A target, normalised. Hashable, so that it may be a static argument of jit.

    `boundaries`: the captured ones, ascending; boundary b is the residual stream *entering* layer
    b, and num_layers the one leaving the last layer, before the final norm. `windows[i]`: how many
    tokens layer i sees back, itself included; None: all. `max_positions`: the context, in tokens.
    `sparse_layers[i]`: layer i has `experts` in the place of one MLP.

    All sizes are the whole model's; with `num_shards` > 1 the properties named `local_` are those
    of one chip, and the modules must run inside a `shard_map` over MODEL_AXIS (models/sharding.py).
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
    experts: ExpertSpec | None = None
    sparse_layers: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    dtype: DType = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    boundaries: tuple[int, ...] = ()
    num_shards: int = 1

    @property
    def axis(self) -> str | None:
        """The mesh axis to sum over, None on a single chip."""
        return MODEL_AXIS if self.num_shards > 1 else None

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.num_shards)

    @property
    def stored_kv_heads(self) -> int:
        """KV heads of all chips' pages together: repeated where chips are more than heads."""
        return self.local_kv_heads * self.num_shards

    @property
    def local_mlp_size(self) -> int:
        return self.mlp_size // self.num_shards

    @property
    def local_experts(self) -> ExpertSpec | None:
        if self.experts is None:
            return None
        return dataclasses.replace(self.experts, size=self.experts.size // self.num_shards)

    @property
    def local_vocab_size(self) -> int:
        """Rows of the embedding on a chip; the last chip's may end in padding."""
        return -(-self.vocab_size // self.num_shards)

    @property
    def stored_vocab_size(self) -> int:
        """Of all chips together, padding included."""
        return self.local_vocab_size * self.num_shards

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts in the place of one MLP."""
        return self.experts is not None and self.sparse_layers[layer]

    def layer_kind(self, layer: int) -> tuple[int | None, bool]:
        """Layers of the same kind differ in their weights alone: (window, is_sparse)."""
        return self.windows[layer], self.is_sparse(layer)

    @property
    def feature_size(self) -> int:
        """F: numbers in one row of captured features."""
        return len(self.boundaries) * self.hidden_size

    @property
    def attention(self) -> AttentionSpec:
        """Of one chip."""
        return AttentionSpec(
            num_heads=self.num_heads // self.num_shards,
            num_kv_heads=self.local_kv_heads,
            head_dim=self.head_dim,
            out_features=self.hidden_size,
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            qk_norm=self.qk_norm,
            eps=self.norm_eps,
            axis=self.axis,
        )

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def kv_bytes_per_token(self) -> int:
        """On all chips together."""
        return self.num_layers * self.stored_kv_heads * 2 * self.head_dim * self.dtype.itemsize

    def with_dtype(self, dtype: DTypeLike) -> TargetConfig:
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def with_shards(self, num_shards: int) -> TargetConfig:
        """For so many chips. Raises ModelError unless each gets an equal share."""
        parts = {"attention heads": self.num_heads, "MLP width": self.mlp_size}
        if self.experts is not None:
            parts["expert width"] = self.experts.size
        check_shares(num_shards, "target", parts, self.num_kv_heads)
        return dataclasses.replace(self, num_shards=num_shards)

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


def check_shares(num_shards: int, whose: str, parts: Mapping[str, int], num_kv_heads: int) -> None:
    """Raises ModelError unless so many chips get equal shares of all parts, and whole KV heads."""
    if num_kv_heads > num_shards:
        parts = {**parts, "KV heads": num_kv_heads}
    for name, size in parts.items():
        if num_shards < 1 or size % num_shards:
            raise ModelError(
                f"tensor_parallel: {num_shards} chips cannot share this {whose}'s {name} ({size})"
                f" equally; choose a divisor of {size}"
            )
    if num_kv_heads < num_shards and num_shards % num_kv_heads:
        raise ModelError(
            f"tensor_parallel: {num_shards} chips is no multiple of this {whose}'s {num_kv_heads}"
            " KV heads; choose one"
        )


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
