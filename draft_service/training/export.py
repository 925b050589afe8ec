"""A trained head in the layout that SpecForge writes and SGLang and vLLM read.

    config.json         LlamaForCausalLMEagle3, sizes, draft_vocab_size, RoPE
    model.safetensors   fc, midlayer.* (one layer) or layers.<i>.* (more), norm, lm_head, d2t, t2d

The embedding is the target's and not in the file. Tensors are [out, in]; d2t is an int64 offset per draft
id (target id = d + d2t[d]); t2d is a bool mask over the target's vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from draft_service.training.dataset import DraftVocabulary
from draft_service.training.loss import Frozen
from draft_service.training.network import HeadShape, Params
from models.config import TargetConfig, default_boundaries

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}

_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def export_head(
    directory: Path,
    shape: HeadShape,
    params: Params,
    frozen: Frozen,
    vocabulary: DraftVocabulary,
    target: TargetConfig,
    dtype: str = "float16",
) -> None:
    """Writes both files. Raises ValueError where a weight does not fit `dtype`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: _cast(name, tensor, dtype)
        for name, tensor in published_tensors(shape, params, frozen).items()
    }
    tensors["d2t"] = (
        vocabulary.target_ids.astype(np.int64) - np.arange(vocabulary.size, dtype=np.int64)
    )
    mask = np.zeros(vocabulary.target_vocab_size, np.bool_)
    mask[vocabulary.target_ids] = True
    tensors["t2d"] = mask
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = published_config(shape, vocabulary, target, dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def published_tensors(
    shape: HeadShape, params: Params, frozen: Frozen
) -> dict[str, npt.NDArray[np.float32]]:
    """Name → float32 tensor, [out, in]; the scale of features is folded into fc."""
    scale = np.asarray(frozen.feature_scale)
    tensors = {
        "fc.weight": np.asarray(params["fc"]).T * scale,
        "norm.weight": np.asarray(params["norm"]),
        "lm_head.weight": np.asarray(frozen.lm_head).T,
    }
    for index, layer in enumerate(params["layers"]):
        prefix = "midlayer." if shape.num_layers == 1 else f"layers.{index}."
        for name, tensor in layer.items():
            own = _published_name(name, shape.takes_embedding(index))
            tensors[f"{prefix}{own}.weight"] = np.asarray(tensor).T
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def _published_name(name: str, takes_embedding: bool) -> str:
    if name in _ATTENTION:
        return f"self_attn.{name}"
    if name in _MLP:
        return f"mlp.{name}"
    if name == "hidden_norm" and not takes_embedding:
        return "input_layernorm"  # what public loaders call a plain decoder layer's first norm
    return name


def published_config(
    shape: HeadShape, vocabulary: DraftVocabulary, target: TargetConfig, dtype: str
) -> dict[str, Any]:
    """The fields of config.json that public loaders look at."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": target.max_positions,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": vocabulary.size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    if target.eos_token_ids:
        config["eos_token_id"] = target.eos_token_ids[0]
    if target.boundaries != default_boundaries(target.num_layers):
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(target.boundaries),
            "use_aux_hidden_state": True,
        }
    return config


def _cast(name: str, tensor: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    cast = tensor.astype(DTYPES[dtype])
    if not np.isfinite(cast.astype(np.float32)).all():
        raise ValueError(
            f"{name}: largest value {np.abs(tensor).max()} does not fit {dtype}; export as bfloat16"
        )
    return cast
