"""What a head takes over from its target: frozen tables, and layers that start as its last one.

Layers start from the target's last decoder layer: attention reads [0 | hidden], so that the
embedding half begins silent; the fusion starts as [0, 0, I], which passes the latest captured
boundary on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from draft_service.training.dataset import DraftVocabulary
from draft_service.training.loss import Frozen
from draft_service.training.network import HeadShape, Params, layer_shapes
from draft_service.training.recipe import HeadRecipe
from models.checkpoint import Checkpoint, open_checkpoint
from models.config import TargetConfig, read_target_config

Float32 = npt.NDArray[np.float32]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

TARGET_NAMES = {
    "hidden_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "post_attention_layernorm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
"""Head tensor → tensor of a target's decoder layer (Llama-style names)."""


@dataclass(frozen=True)
class Target:
    """The parts of a target that training reads. float32, [out, in] as stored."""

    config: TargetConfig
    checkpoint: Checkpoint

    @staticmethod
    def open(directory: Path, boundaries: tuple[int, ...] | None) -> Target:
        """Raises ModelError; ValueError for a target whose layers a Llama-style head cannot
        copy."""
        config = read_target_config(directory, boundaries=boundaries)
        for feature in ("qkv_bias", "output_bias", "mlp_bias", "qk_norm"):
            if getattr(config, feature):
                raise ValueError(
                    f"target: {directory} has {feature}; heads are trained for Llama-style targets"
                    " without it"
                )
        return Target(config, open_checkpoint(directory))

    def tensor(self, name: str) -> Float32:
        return np.asarray(self.checkpoint.read(name), np.float32)

    def last_layer(self, name: str) -> Float32:
        """[in, out] for matrices, [H] for norms."""
        prefix = f"model.layers.{self.config.num_layers - 1}."
        tensor = self.tensor(f"{prefix}{TARGET_NAMES[name]}.weight")
        return np.ascontiguousarray(tensor.T) if tensor.ndim == 2 else tensor

    @property
    def output_table_name(self) -> str:
        return EMBEDDING if self.config.tied_embeddings else LM_HEAD


def head_shape(config: TargetConfig, recipe: HeadRecipe, matmul_dtype: str) -> HeadShape:
    """A head as wide as the target."""
    inner = recipe.intermediate_size or config.mlp_size
    if recipe.warm_start and recipe.init_from is None and inner != config.mlp_size:
        raise ValueError(
            f"head.intermediate_size: {inner} differs from the target's {config.mlp_size}; a warm"
            " start needs them equal (set head.warm_start: false)"
        )
    return HeadShape(
        hidden_size=config.hidden_size,
        feature_size=config.feature_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=inner,
        num_layers=recipe.num_layers,
        fusion=recipe.fusion,
        rope_theta=config.rope.theta,
        norm_eps=config.norm_eps,
        matmul_dtype=matmul_dtype,
    )


def frozen_tables(target: Target, vocabulary: DraftVocabulary, feature_rms: Float32) -> Frozen:
    """Embedding, lm_head rows of the draft vocabulary, and the scale of features.

    Features are trained on as `features * feature_scale`: each divided by its own rms, times the
    typical rms of the last boundary, at which the target's layers work. Raw features differ by
    three orders of magnitude, which Adam's equal steps cannot serve; export folds the scale into
    fc.
    """
    embedding = target.tensor(EMBEDDING)
    table = embedding if target.config.tied_embeddings else target.tensor(LM_HEAD)
    typical = float(np.median(feature_rms[-target.config.hidden_size :]))
    return Frozen(
        embedding=jnp.asarray(embedding),
        lm_head=jnp.asarray(table[vocabulary.target_ids].T),
        draft_ids=jnp.asarray(vocabulary.draft_ids()),
        feature_scale=jnp.asarray(typical / feature_rms),
    )


def initial_params(
    shape: HeadShape, target: Target, frozen: Frozen, recipe: HeadRecipe, seed: int
) -> Params:
    """The head before its first step. float32."""
    rng = np.random.default_rng(seed)
    copies = recipe.warm_start and shape.intermediate_size == target.config.mlp_size
    layers = []
    for layer in range(shape.num_layers):
        tensors = {}
        for name, size in layer_shapes(shape, layer).items():
            if copies and name in TARGET_NAMES:
                tensors[name] = _widened(target.last_layer(name), size)
            elif len(size) == 1:
                tensors[name] = np.ones(size, np.float32)
            else:
                tensors[name] = rng.normal(0.0, size[0] ** -0.5, size).astype(np.float32)
        if layer > 0:  # a deeper layer starts as the identity: it must not undo the first one
            tensors["o_proj"] = np.zeros_like(tensors["o_proj"])
            tensors["down_proj"] = np.zeros_like(tensors["down_proj"])
        layers.append(tensors)
    fc = np.zeros((shape.feature_size, shape.hidden_size), np.float32)
    scale = np.asarray(frozen.feature_scale)[-shape.hidden_size :]
    fc[-shape.hidden_size :] = np.diag(1.0 / scale)
    tree: dict[str, Any] = {"fc": fc, "norm": target.tensor(FINAL_NORM), "layers": layers}
    on_device: Params = _to_device(tree)
    return on_device


def _widened(tensor: Float32, size: tuple[int, ...]) -> Float32:
    """[0 | tensor] along the input axis, where the head's input is twice as wide."""
    if tensor.shape == size:
        return tensor
    padding = np.zeros((size[0] - tensor.shape[0], *size[1:]), np.float32)
    return np.concatenate([padding, tensor])


def _to_device(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _to_device(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_to_device(value) for value in tree]
    return jnp.asarray(tree)
