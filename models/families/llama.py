"""Llama (2, 3.x, SmolLM2, and what else calls itself LlamaForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import TargetConfig, positive_int
from models.errors import ModelError, UnsupportedModelError
from models.rope import read_rope

ARCHITECTURES: tuple[str, ...] = ("LlamaForCausalLM",)

_MODULES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "final_norm": "model.norm",
    "attention": "self_attn",
    "mlp": "mlp",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
_TABLES = {"embedding": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


def tensor_name(path: tuple[str, ...]) -> str:
    """The checkpoint's name of a parameter: ("layer_3", "mlp", "up", "kernel") and the like."""
    if len(path) == 1:
        return _TABLES[path[0]]
    *modules, leaf = path
    parts = [
        f"model.layers.{module.removeprefix('layer_')}"
        if module.startswith("layer_")
        else _MODULES[module]
        for module in modules
    ]
    return ".".join([*parts, _LEAVES[leaf]])


def read_config(raw: Mapping[str, Any], where: Path) -> TargetConfig:
    """Raises ModelError for a field missing or out of range, UnsupportedModelError by name."""
    refuse_unknown_features(raw, where)
    num_layers = positive_int(raw, "num_hidden_layers", where)
    hidden_size = positive_int(raw, "hidden_size", where)
    num_heads = positive_int(raw, "num_attention_heads", where)
    num_kv_heads = positive_int(raw, "num_key_value_heads", where, num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is no multiple of num_key_value_heads"
            f" {num_kv_heads}"
        )
    bias = bool(raw.get("attention_bias", False))
    return TargetConfig(
        family="llama",
        vocab_size=positive_int(raw, "vocab_size", where),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=positive_int(raw, "head_dim", where, hidden_size // num_heads),
        mlp_size=positive_int(raw, "intermediate_size", where),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=read_rope(raw, str(where)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_positions=positive_int(raw, "max_position_embeddings", where, 2048),
        windows=(None,) * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def refuse_unknown_features(raw: Mapping[str, Any], where: Path) -> None:
    """What no family of this shape computes: other activations, quantised weights."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(
            f"{where}: hidden_act {activation!r} is not supported, only 'silu'"
        )
    quantisation = raw.get("quantization_config")
    if quantisation:
        method = dict(quantisation).get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{where}: quantised weights ({method}) are not supported; use the unquantised model"
        )
