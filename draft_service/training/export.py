"""A trained head in the form that serving and public loaders read (`models.eagle3.export`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from draft_service.training.dataset import DraftVocabulary
from draft_service.training.loss import Frozen
from draft_service.training.network import HeadShape
from draft_service.training.network import Params as TrainedParams
from models.config import TargetConfig
from models.eagle3.description import FeatureKind, FuseNorm, HeadConfig, TableSource
from models.eagle3.export import save_head
from models.layers import AttentionSpec, Params

DTYPES = ("float16", "float32")

ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""Names in serving → names in training."""


def export_head(
    directory: Path,
    shape: HeadShape,
    params: TrainedParams,
    frozen: Frozen,
    vocabulary: DraftVocabulary,
    target: TargetConfig,
    dtype: str = "float16",
) -> None:
    """Writes config.json and model.safetensors. Raises ValueError where a weight overflows
    `dtype`."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype} is not one of {', '.join(DTYPES)}")
    limit = float(np.finfo(dtype).max)
    served = served_params(shape, params, frozen, vocabulary)
    largest = float(np.abs(np.asarray(served["fuse"]["fc"]["kernel"])).max())
    if not largest <= limit:
        raise ValueError(f"fc: its largest value, {largest}, does not fit {dtype}; use float32")
    save_head(
        directory,
        served_config(shape, vocabulary, target),
        served,
        target_num_layers=target.num_layers,
        dtype=np.dtype(dtype),
        extra={"max_position_embeddings": target.max_positions, **_special_ids(target)},
    )


def served_config(
    shape: HeadShape, vocabulary: DraftVocabulary, target: TargetConfig
) -> HeadConfig:
    """The description that `models.eagle3` runs the head by."""
    return HeadConfig(
        layout="midlayer" if shape.num_layers == 1 else "layers",
        hidden_size=shape.hidden_size,
        target_hidden_size=target.hidden_size,
        num_states=len(target.boundaries),
        feature_kind=FeatureKind.AUX,
        boundaries=target.boundaries,
        has_fc=True,
        fc_bias=False,
        fuse_norm=FuseNorm.NONE,
        embedding_layers=tuple(shape.takes_embedding(i) for i in range(shape.num_layers)),
        windows=(None,) * shape.num_layers,
        attention=AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            out_features=shape.hidden_size,
            eps=shape.norm_eps,
        ),
        mlp_size=shape.intermediate_size,
        mlp_bias=False,
        norm_eps=shape.norm_eps,
        norm_before_residual=False,
        norm_output=False,
        rope=target.rope,
        draft_vocab_size=vocabulary.size,
        target_vocab_size=target.vocab_size,
        embedding_source=TableSource.TARGET,
        lm_head_source=TableSource.HEAD,
    )


def served_params(
    shape: HeadShape, params: TrainedParams, frozen: Frozen, vocabulary: DraftVocabulary
) -> Params:
    """The parameters as `models.eagle3.loader` gives them; the scale of features is folded into
    fc."""
    served: Params = {
        "fuse": {"fc": {"kernel": params["fc"] * frozen.feature_scale[:, None]}},
        "final_norm": {"scale": params["norm"]},
        "embedding": frozen.embedding,
        "lm_head": frozen.lm_head.T,
        "draft_to_target": vocabulary.target_ids,
    }
    for index, layer in enumerate(params["layers"]):
        served[f"layer_{index}"] = _served_layer(layer)
    return served


def layer_norms(takes_embedding: bool) -> dict[str, str]:
    """Norms of a layer: name in serving → name in training."""
    norms = {"hidden_norm": "hidden_norm", "mlp_norm": "post_attention_layernorm"}
    return {**norms, "embed_norm": "input_layernorm"} if takes_embedding else norms


def _served_layer(layer: TrainedParams) -> Params:
    norms = layer_norms("input_layernorm" in layer)
    return {
        **{ours: {"scale": layer[name]} for ours, name in norms.items()},
        "attention": {ours: {"kernel": layer[name]} for ours, name in ATTENTION.items()},
        "mlp": {ours: {"kernel": layer[name]} for ours, name in MLP.items()},
    }


def _special_ids(target: TargetConfig) -> dict[str, Any]:
    return {"eos_token_id": target.eos_token_ids[0]} if target.eos_token_ids else {}
