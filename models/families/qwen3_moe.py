"""Qwen3-MoE: Qwen3's attention; most layers pick a few of many small MLPs for each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import TargetConfig, positive_int
from models.errors import ModelError
from models.experts import ExpertSpec
from models.families import decoder, qwen3

ARCHITECTURES: tuple[str, ...] = ("Qwen3MoeForCausalLM",)

_EXPERTS = {
    "router": "gate.weight",
    "gate": "experts.{expert}.gate_proj.weight",
    "up": "experts.{expert}.up_proj.weight",
    "down": "experts.{expert}.down_proj.weight",
}


def tensor_name(path: tuple[str, ...]) -> str:
    """As in the other families; `{expert}` in a name stands for the number of each expert."""
    if len(path) > 1 and path[1] == "experts":
        layer = path[0].removeprefix("layer_")
        return f"model.layers.{layer}.mlp.{_EXPERTS[path[2]]}"
    return decoder.tensor_name(path)


def read_config(raw: Mapping[str, Any], where: Path) -> TargetConfig:
    """Raises ModelError for numbers of experts that do not fit together."""
    config = dataclasses.replace(qwen3.read_config(raw, where), family="qwen3_moe")
    num_experts = positive_int(raw, "num_experts", where, 128)
    per_token = positive_int(raw, "num_experts_per_tok", where, 8)
    if per_token > num_experts:
        raise ModelError(
            f"{where}: num_experts_per_tok {per_token} is above num_experts {num_experts}"
        )
    step = positive_int(raw, "decoder_sparse_step", where, 1)
    dense = {int(layer) for layer in raw.get("mlp_only_layers") or ()}
    sparse = tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_layers)
    )
    spec = ExpertSpec(
        num_experts=num_experts,
        num_per_token=per_token,
        size=positive_int(raw, "moe_intermediate_size", where, 768),
        normalise=bool(raw.get("norm_topk_prob", False)),
    )
    return dataclasses.replace(config, experts=spec, sparse_layers=sparse)
