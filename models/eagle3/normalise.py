"""From a published head, whatever its layout, to the normalised description.

Tensors are believed before flags; where neither says, the choice is noted as assumed; where two
contradict each other, the head is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jax.typing import DTypeLike
from numpy import dtype as np_dtype

from models.checkpoint import TensorEntry
from models.eagle3.aux_states import read_aux_states
from models.eagle3.description import HeadConfig, HeadOverrides, TableSource
from models.eagle3.layouts import SPECULATORS, Fields, refuse_unsupported
from models.eagle3.notes import Notes
from models.errors import UnsupportedModelError
from models.layers import AttentionSpec
from models.rope import read_rope
from models.target_tables import TargetFacts

_LAYER = re.compile(r"layers\.(\d+)\.")


def normalise(
    fields: Fields,
    tensors: Mapping[str, TensorEntry],
    facts: TargetFacts | None,
    overrides: HeadOverrides,
    dtype: DTypeLike,
) -> HeadConfig:
    """The description of the head with these config fields and tensors (by canonical name).

    `facts` None: the target is not known; what depends on it stays as the head's files have it.

    Raises:
      UnsupportedModelError: a feature that is not built, by name.
      ModelError, CheckpointError: contradictions, tensors missing or misshapen, another target.
    """
    refuse_unsupported(fields, tensors)
    notes = Notes(fields, tensors)
    layout = fields.layout(entry.name for entry in tensors.values())
    notes.note("layout", layout, "marks in config.json and names of tensors")
    (hidden_size,) = notes.shape("norm.weight", 1)
    notes.agree("hidden size", ("hidden_size",), hidden_size)
    aux = read_aux_states(notes, hidden_size, layout, facts, overrides)
    eps = float(fields.layer.get("rms_norm_eps") or 1e-6)
    embedding_layers = _embedding_layers(notes, hidden_size)
    attention = _attention(notes, hidden_size, eps)
    mlp_size = notes.shape("layers.0.mlp.gate_proj.weight")[0]
    notes.agree("MLP size", ("intermediate_size",), mlp_size)
    draft_vocab_size, target_vocab_size, lm_head_source = _vocabulary(notes, hidden_size, facts)
    habit = layout == SPECULATORS
    rope = read_rope(fields.layer, str(fields.where))
    notes.note("rope", f"{rope.kind}, theta {rope.theta:g}", "the head's own config.json")
    return HeadConfig(
        layout=layout,
        hidden_size=hidden_size,
        target_hidden_size=aux.target_hidden_size,
        num_states=aux.num_states,
        feature_kind=aux.feature_kind,
        boundaries=aux.boundaries,
        has_fc=aux.has_fc,
        fc_bias=aux.fc_bias,
        fuse_norm=aux.fuse_norm,
        embedding_layers=embedding_layers,
        windows=_windows(notes, len(embedding_layers)),
        attention=attention,
        mlp_size=mlp_size,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
        norm_eps=eps,
        norm_before_residual=notes.flag(
            "norm_before_residual",
            overrides.norm_before_residual,
            habit,
            "the habit of this layout",
            "norm_before_residual",
        ),
        norm_output=notes.flag(
            "norm_output",
            overrides.norm_output,
            False,
            "the habit of every layout",
            "norm_output",
            "return_hidden_post_norm",
        ),
        rope=rope,
        draft_vocab_size=draft_vocab_size,
        target_vocab_size=target_vocab_size,
        embedding_source=_embedding_source(notes, hidden_size, aux.target_hidden_size),
        lm_head_source=lm_head_source,
        dtype=np_dtype(dtype),
        provenance=tuple(notes.choices),
    )


def _embedding_layers(notes: Notes, hidden_size: int) -> tuple[bool, ...]:
    """Which layers take [embedding, hidden]: told by q_proj, as the names do not decide."""
    numbers = {int(match[1]) for name in notes.tensors if (match := _LAYER.match(name))}
    num_layers = len(numbers)
    if numbers != set(range(num_layers)) or not numbers:
        notes.refuse(f"the head's layers are numbered {sorted(numbers)}; they must run from 0")
    notes.agree("num_hidden_layers", ("num_hidden_layers",), num_layers)
    kinds = []
    for layer in range(num_layers):
        name = f"layers.{layer}.self_attn.q_proj.weight"
        in_size = notes.shape(name)[1]
        if in_size not in (hidden_size, 2 * hidden_size):
            notes.misshapen(name, f"[_, {2 * hidden_size}] or [_, {hidden_size}]")
        kinds.append(in_size == 2 * hidden_size)
    if not kinds[0]:
        raise UnsupportedModelError(
            f"{notes.fields.where.parent}: a first layer that is not fed the embedding is not"
            " supported (q_proj takes H, not 2H): this is no EAGLE-3 head"
        )
    words = ["[embedding, hidden]" if kind else "hidden" for kind in kinds]
    notes.note("layers", ", ".join(words), "shapes of q_proj")
    return tuple(kinds)


def _attention(notes: Notes, hidden_size: int, eps: float) -> AttentionSpec:
    q_size = notes.shape("layers.0.self_attn.q_proj.weight")[0]
    kv_size = notes.shape("layers.0.self_attn.k_proj.weight")[0]
    num_heads, head_dim = (notes.fields.get(f) for f in ("num_attention_heads", "head_dim"))
    if num_heads is None and head_dim is None:
        notes.refuse("num_attention_heads is missing; it cannot be told from the tensors")
    if head_dim is None:
        head_dim = q_size // int(num_heads)
        notes.note("head_dim", head_dim, f"shape of q_proj: {q_size} / {num_heads} heads")
    head_dim = int(head_dim)
    if head_dim < 2 or head_dim % 2 or q_size % head_dim or kv_size % head_dim:
        notes.misshapen("layers.0.self_attn.q_proj.weight", f"rows in heads of {head_dim}")
    notes.agree("num_attention_heads", ("num_attention_heads",), q_size // head_dim)
    notes.agree("num_key_value_heads", ("num_key_value_heads",), kv_size // head_dim)
    names = notes.tensors
    spec = AttentionSpec(
        num_heads=q_size // head_dim,
        num_kv_heads=kv_size // head_dim,
        head_dim=head_dim,
        out_features=hidden_size,
        qkv_bias="layers.0.self_attn.q_proj.bias" in names,
        output_bias="layers.0.self_attn.o_proj.bias" in names,
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        eps=eps,
    )
    if spec.num_heads % spec.num_kv_heads:
        notes.refuse(
            f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads"
        )
    return spec


def _vocabulary(
    notes: Notes, hidden_size: int, facts: TargetFacts | None
) -> tuple[int, int, TableSource]:
    """(K, V, whose lm_head); the map itself is checked when it is read."""
    given, source = notes.fields.find("vocab_size")
    if facts is not None and given is not None and int(given) != facts.vocab_size:
        notes.refuse(
            f"{source} is {given}, but the target {facts.directory} has a vocabulary of"
            f" {facts.vocab_size}; this head was made for another target"
        )
    if facts is None and given is None:
        notes.refuse("vocab_size is missing; name the target")
    target_vocab_size = facts.vocab_size if facts else int(given)
    draft = notes.fields.get("draft_vocab_size")
    if "lm_head.weight" in notes.tensors:
        draft_vocab_size, width = notes.shape("lm_head.weight")
        if width != hidden_size:
            notes.misshapen("lm_head.weight", f"[_, {hidden_size}]")
        notes.agree("draft_vocab_size", ("draft_vocab_size",), draft_vocab_size)
        notes.note("lm_head", "the head's own", "tensor lm_head.weight")
        lm_head_source = TableSource.HEAD
    else:
        if draft is not None and int(draft) != target_vocab_size:
            notes.shape("lm_head.weight")  # raises: missing
        if facts is not None and facts.hidden_size != hidden_size:
            notes.refuse(
                f"the head has no lm_head, and the target's is {facts.hidden_size} wide, not"
                f" {hidden_size}; this head was made for another target"
            )
        draft_vocab_size, lm_head_source = target_vocab_size, TableSource.TARGET
        notes.note("lm_head", "the target's", "no tensor lm_head.weight, full vocabulary")
    if draft_vocab_size > target_vocab_size:
        notes.refuse(
            f"the head's vocabulary of {draft_vocab_size} is larger than the target's of"
            f" {target_vocab_size}; this head was made for another target"
        )
    if "d2t" not in notes.tensors and draft_vocab_size != target_vocab_size:
        notes.shape("d2t", 1)  # raises: missing
    notes.note(
        "draft vocabulary",
        f"{draft_vocab_size} of {target_vocab_size}",
        "tensor d2t (offsets)" if "d2t" in notes.tensors else "no d2t: the same ids",
    )
    return draft_vocab_size, target_vocab_size, lm_head_source


def _embedding_source(notes: Notes, hidden_size: int, target_hidden_size: int) -> TableSource:
    if "embed_tokens.weight" in notes.tensors:
        notes.note("embedding", "the head's own", "tensor embed_tokens.weight")
        return TableSource.HEAD
    if hidden_size != target_hidden_size:
        notes.refuse(
            f"the head's hidden size {hidden_size} is not the target's {target_hidden_size}, so it"
            " needs an embedding of its own, and tensor embed_tokens.weight is missing"
        )
    notes.note("embedding", "the target's", "no tensor embed_tokens.weight")
    return TableSource.TARGET


def _windows(notes: Notes, num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows, only where `layer_types` names the layers that have one."""
    kinds = notes.fields.layer.get("layer_types")
    window = notes.fields.layer.get("sliding_window")
    if not kinds or not window:
        return (None,) * num_layers
    if len(kinds) != num_layers:
        notes.refuse(f"layer_types names {len(kinds)} layers, but the head has {num_layers}")
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"{notes.fields.where}: layer type {unknown[0]!r} is not supported"
        )
    windows = tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    notes.note("windows", list(windows), "layer_types and sliding_window")
    return windows
