"""The published layouts of EAGLE-3 heads: where config fields lie, how tensors are called.

Everything that differs by publisher is met here, and nothing else: canonical names come out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.checkpoint import Checkpoint, TensorEntry
from models.errors import CheckpointError, UnsupportedModelError

SPECULATORS = "speculators"
MODELOPT = "modelopt"
MIDLAYER = "midlayer"
PLAIN = "layers"

_ALIASES = {
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}

# Written by trainers, of no use to a drafter.
_TRAINING_ONLY = re.compile(r"(verifier_norm\.weight|verifier_lm_head\.weight|.*rotary_emb\..*)$")

_LAYER_PREFIXES: tuple[tuple[re.Pattern[str], int | None], ...] = (
    # (pattern, offset): the group, if any, is the layer's number, counted from offset
    (re.compile(r"(?:midlayers?|layers)\.(\d+)\.(?=\D)"), 0),
    (re.compile(r"additional_layers\.(\d+)\.(?=\D)"), 1),
    (re.compile(r"(?:midlayer|fuse_layer)\.(?=\D)"), None),
)

_UNSUPPORTED_TENSORS: tuple[tuple[str, str], ...] = (
    (r"mask_hidden", "P-EAGLE (parallel drafting with mask_hidden)"),
    (r"(^|\.)eh_proj\.", "a head with eh_proj (MTP or EAGLE-1/2 style)"),
    (r"\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.", "multi-head latent attention (MLA)"),
    (r"\.(experts|block_sparse_moe)\.", "a mixture of experts in the head"),
    (r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale(_inv)?|weight_zero_point|input_scale)$",
     "quantised weights"),
)  # fmt: skip

_UNSUPPORTED_FIELDS: tuple[tuple[str, str], ...] = (
    ("mask_token_id", "P-EAGLE (parallel drafting with mask_token_id)"),
    ("ptd_token_id", "P-EAGLE (parallel drafting with ptd_token_id)"),
    ("kv_lora_rank", "multi-head latent attention (MLA)"),
    ("q_lora_rank", "multi-head latent attention (MLA)"),
)

_LAYER_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_REMEDY = "use another head for this target, or train one with `canopy head train`"


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A head's config.json, whatever it nests: `get` looks in each part in turn.

    Flags may stand at the top or in `eagle_config`; sizes also in `transformer_layer_config`.
    """

    raw: Mapping[str, Any]
    where: Path

    def find(self, *names: str) -> tuple[Any, str]:
        """(value, "name in part") of the first that is there and not null; else (None, "")."""
        parts = (
            ("config.json", self.raw),
            ("eagle_config", self.raw.get("eagle_config") or {}),
            ("transformer_layer_config", self.raw.get("transformer_layer_config") or {}),
        )
        for name in names:
            for part, values in parts:
                if values.get(name) is not None:
                    return values[name], f"{name} in {part}"
        return None, ""

    def get(self, *names: str) -> Any:
        return self.find(*names)[0]

    @property
    def layer(self) -> Mapping[str, Any]:
        """Where the sizes and rotary settings of the layers are."""
        return self.raw.get("transformer_layer_config") or self.raw

    def layout(self, canonical_from: Iterable[str]) -> str:
        """Whose form this is, by its marks in config.json and in the tensors' published names."""
        if self.raw.get("transformer_layer_config") or self.raw.get("speculators_model_type"):
            return SPECULATORS
        if self.raw.get("eagle_config") and "canopy" not in self.raw:  # ours has both marks
            return MODELOPT
        if any(re.match(r"(model\.)?midlayers?\.", name) for name in canonical_from):
            return MIDLAYER
        return PLAIN


def canonical_name(name: str) -> str | None:
    """The one name we know a tensor by; None for what only training needs."""
    name = name.removeprefix("model.")
    if _TRAINING_ONLY.match(name):
        return None
    if name in _ALIASES:
        return _ALIASES[name]
    for pattern, offset in _LAYER_PREFIXES:
        match = pattern.match(name)
        if match:
            layer = 0 if offset is None else int(match[1]) + offset
            return f"layers.{layer}.{name[match.end() :]}"
    return name


def canonical_tensors(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Canonical name -> where the tensor lies. Raises CheckpointError when two names meet."""
    found: dict[str, TensorEntry] = {}
    for published in checkpoint.names:
        name = canonical_name(published)
        if name is None:
            continue
        if name in found:
            raise CheckpointError(
                f"{checkpoint.where}: tensors {found[name].name} and {published} are both {name};"
                " the file mixes two layouts: export the head again"
            )
        found[name] = checkpoint.entries[published]
    return found


def refuse_unsupported(fields: Fields, names: Iterable[str]) -> None:
    """Raises UnsupportedModelError naming the first feature of the head that is not built."""

    def refuse(feature: str, sign: str) -> None:
        raise UnsupportedModelError(
            f"{fields.where.parent}: {feature} is not supported ({sign}); {_REMEDY}"
        )

    for key, feature in _UNSUPPORTED_FIELDS:
        value, source = fields.find(key)
        if value is not None:
            refuse(feature, source)
    kind = fields.raw.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        refuse(f"a drafter of kind {kind!r}", "speculators_model_type; supported is 'eagle3'")
    for name in names:
        for pattern, feature in _UNSUPPORTED_TENSORS:
            if re.search(pattern, name):
                refuse(feature, f"tensor {name}")
    quantisation, source = fields.find("quantization_config")
    if quantisation:
        refuse("quantised weights", source)
    activation, source = fields.find("hidden_act")
    if activation not in (None, "silu"):
        refuse(f"activation {activation!r}", f"{source}; supported is 'silu'")
    family = fields.layer.get("model_type")
    if fields.raw.get("transformer_layer_config") and family not in (None, *_LAYER_FAMILIES):
        refuse(f"a layer of family {family!r}", f"supported are {', '.join(_LAYER_FAMILIES)}")
