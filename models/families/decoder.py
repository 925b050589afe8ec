"""What the families share: the usual fields of config.json, and the usual names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import TargetConfig, positive_int
from models.errors import ModelError, UnsupportedModelError
from models.rope import read_rope

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


def read_decoder(raw: Mapping[str, Any], where: Path, family: str, **fields: Any) -> TargetConfig:
    """A config from the fields that all families spell alike; `fields` come on top, or instead.

    Raises ModelError for a field missing or out of range, UnsupportedModelError by name.
    """
    _refuse_unknown_features(raw, where)
    num_layers = positive_int(raw, "num_hidden_layers", where)
    hidden_size = positive_int(raw, "hidden_size", where)
    num_heads = positive_int(raw, "num_attention_heads", where)
    num_kv_heads = positive_int(raw, "num_key_value_heads", where, num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is no multiple of num_key_value_heads"
            f" {num_kv_heads}"
        )
    common: dict[str, Any] = {
        "vocab_size": positive_int(raw, "vocab_size", where),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": positive_int(raw, "head_dim", where, hidden_size // num_heads),
        "mlp_size": positive_int(raw, "intermediate_size", where),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(raw, str(where)),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "max_positions": positive_int(raw, "max_position_embeddings", where, 2048),
        "windows": (None,) * num_layers,
    }
    return TargetConfig(family=family, **{**common, **fields})


def read_layer_windows(
    raw: Mapping[str, Any], where: Path, window: int | None, first_layer: int
) -> tuple[int | None, ...]:
    """The windows of layers: as `layer_types` says, else `window` from `first_layer` on.

    Raises UnsupportedModelError for other kinds of layers, ModelError for a list that does not fit.
    """
    num_layers = positive_int(raw, "num_hidden_layers", where)
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first_layer else None for layer in range(num_layers))
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"{where}: layers of type {unknown[0]!r} are not supported")
    if len(kinds) != num_layers:
        raise ModelError(f"{where}: layer_types names {len(kinds)} of {num_layers} layers")
    if window is None and "sliding_attention" in kinds:
        raise ModelError(f"{where}: layer_types asks for a sliding_window, which is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _refuse_unknown_features(raw: Mapping[str, Any], where: Path) -> None:
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
