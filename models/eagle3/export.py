"""Writes a head in a published layout that other EAGLE-3 loaders read too.

One layer: `midlayer.*`. More layers: `midlayers.<i>.*` when each is fed [embedding, hidden]
(convention A), `layers.<i>.*` when only the first is (B). The captured boundaries go in as
`canopy.boundaries`, which leaves nothing to guess here; where they are not EAGLE-3's default, also
as layer ids for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from models.checkpoint import HostArray
from models.config import MIN_LAYERS_FOR_DEFAULT_BOUNDARIES, default_boundaries
from models.eagle3.description import FeatureKind, FuseNorm, HeadConfig, TableSource
from models.eagle3.loader import checkpoint_name
from models.eagle3.vocabulary import offsets_and_mask
from models.layers import Params
from models.rope import rope_fields
from models.target import flatten
from models.writing import LazyTensor, write_json, write_safetensors


def save_head(
    directory: str | Path,
    config: HeadConfig,
    params: Params,
    *,
    target_num_layers: int,
    dtype: DTypeLike = np.float32,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and model.safetensors into `directory`, made if need be.

    `params` as `load_head` gives them; `draft_to_target` must ascend. A table that is the target's
    own is not written. `extra` goes into config.json (max_position_embeddings, how the head was
    trained).

    Raises ValueError when draft_to_target does not ascend; OSError.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = np.dtype(dtype)
    tensors: dict[str, LazyTensor] = {}
    tables = ("embedding", "lm_head", "draft_to_target")
    for path, leaf in flatten({k: v for k, v in params.items() if k not in tables}):
        name = _published(checkpoint_name(path, config, {}), config)
        tensors[name] = _lazy(leaf, stored, transposed=path[-1] == "kernel")
    if config.embedding_source is TableSource.HEAD:
        tensors["embed_tokens.weight"] = _lazy(params["embedding"], stored)
    if config.lm_head_source is TableSource.HEAD:
        tensors["lm_head.weight"] = _lazy(params["lm_head"], stored)
        draft_to_target = np.asarray(params["draft_to_target"])
        if (np.diff(draft_to_target) <= 0).any():
            raise ValueError("draft_to_target must ascend: t2d knows no order")
        d2t, t2d = offsets_and_mask(draft_to_target, config.target_vocab_size)
        tensors |= {"d2t": LazyTensor.of(d2t), "t2d": LazyTensor.of(t2d)}
    write_safetensors(directory / "model.safetensors", tensors)
    fields = (
        config_fields(config, target_num_layers) | {"torch_dtype": str(stored)} | dict(extra or {})
    )
    write_json(directory / "config.json", fields)


def config_fields(config: HeadConfig, target_num_layers: int) -> dict[str, Any]:
    """config.json of a head."""
    spec = config.attention
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": config.mlp_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": spec.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "norm_before_fc": config.fuse_norm is FuseNorm.JOINT,
        "fc_norm": config.fuse_norm is FuseNorm.PER_STATE,
        **rope_fields(config.rope),
    }
    if any(config.windows):
        fields["sliding_window"] = max(window or 0 for window in config.windows)
        fields["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in config.windows
        ]
    if config.feature_kind is FeatureKind.LAST:
        fields["use_aux_hidden_state"] = False
        return fields
    fields["canopy"] = {"boundaries": list(config.boundaries)}
    if not _is_default(config.boundaries, target_num_layers):
        # one family of loaders reads the first as boundaries, another the second as layer outputs
        fields["eagle_aux_hidden_state_layer_ids"] = list(config.boundaries)
        outputs = [boundary - 1 for boundary in config.boundaries]
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs}
    return fields


def _is_default(boundaries: tuple[int, ...], num_layers: int) -> bool:
    deep = num_layers >= MIN_LAYERS_FOR_DEFAULT_BOUNDARIES
    return deep and boundaries == default_boundaries(num_layers)


def _published(name: str, config: HeadConfig) -> str:
    if not name.startswith("layers."):
        return name
    if config.num_layers == 1:
        return name.replace("layers.0.", "midlayer.", 1)
    if all(config.embedding_layers):
        return name.replace("layers.", "midlayers.", 1)
    _, layer, *rest = name.split(".")
    if not config.embedding_layers[int(layer)] and rest[0] == "hidden_norm":
        rest[0] = "input_layernorm"  # the more usual name where there is no embedding
    return ".".join(["layers", layer, *rest])


def _lazy(leaf: Any, dtype: np.dtype[Any], transposed: bool = False) -> LazyTensor:
    shape = tuple(leaf.shape)

    def make() -> HostArray:
        host: HostArray = np.asarray(leaf).astype(dtype)
        return host.T if transposed else host

    return LazyTensor(dtype, shape[::-1] if transposed else shape, make)
