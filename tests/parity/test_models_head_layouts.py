"""Every published head layout against `speculators` (goldens/) and a float64 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_numpy import Reference
from model_files import GOLDENS, load_golden, run_head_steps, write_model, write_target

from models.eagle3 import HeadOverrides, load_head

pytestmark = pytest.mark.heads

Array = Any
SPECULATORS = sorted(path.stem for path in GOLDENS.glob("head_*.npz"))
H, V, K, INTERMEDIATE, ROWS, EPS = 24, 61, 37, 40, 14, 1e-5
_ROLES = {"ln_mlp": "post_attention_layernorm", "qn": "self_attn.q_norm", "kn": "self_attn.k_norm"}


def later_tokens(tokens: Array, steps: int) -> list[Array]:
    """Step s reads tokens s further on, 0 where there are none."""
    padded = np.concatenate([tokens, np.zeros(steps, tokens.dtype)])
    return [padded[s : s + tokens.size] for s in range(steps)]


@pytest.mark.parametrize("name", SPECULATORS)
def test_head_equals_speculators(name: str, tmp_path: Path) -> None:
    raw, weights, golden = load_golden(name)
    write_target(tmp_path / "target", num_layers=12)
    write_model(tmp_path / "head", raw, weights)
    config, params = load_head(tmp_path / "head", tmp_path / "target")
    tokens = later_tokens(golden["tokens"], golden["logits"].shape[0])
    logits = run_head_steps(config, params, golden["features"], tokens, first=1)
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-3, atol=1e-3)
    offsets = weights.get("d2t", np.zeros(V, np.int64))
    expected = np.arange(config.draft_vocab_size) + offsets
    np.testing.assert_array_equal(np.asarray(params["draft_to_target"]), expected)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a random head is made of."""

    hidden: int = H
    target_hidden: int = H
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    num_states: int = 3
    kinds: tuple[bool, ...] = (True,)  # per layer: fed the embedding
    biases: bool = False
    qk_norm: bool = False
    draft_vocab: int = K

    def build(self, seed: int) -> dict[str, Any]:
        """A head as eagle3_numpy.Reference takes it, float16 values; tables are added later."""
        random = np.random.default_rng(seed)

        def draw(*shape: int, mean: float = 0.0) -> Array:
            values = mean + random.normal(0.0, 0.3, shape)
            return values.astype(np.float16).astype(np.float64)

        def layer(embed: bool) -> dict[str, Array]:
            width = self.hidden * (2 if embed else 1)
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            part = {
                "q": draw(q, width),
                "k": draw(kv, width),
                "v": draw(kv, width),
                "o": draw(self.hidden, q),
                "gate": draw(INTERMEDIATE, self.hidden),
                "up": draw(INTERMEDIATE, self.hidden),
                "down": draw(self.hidden, INTERMEDIATE),
                "ln_hidden": draw(self.hidden, mean=1.0),
                "ln_mlp": draw(self.hidden, mean=1.0),
            }
            if embed:
                part["ln_embed"] = draw(self.hidden, mean=1.0)
            if self.biases:
                for name in ("q", "k", "v", "o", "gate", "up", "down"):
                    part[name + "b"] = draw(part[name].shape[0])
            if self.qk_norm:
                part |= {
                    "qn": draw(self.head_dim, mean=1.0),
                    "kn": draw(self.head_dim, mean=1.0),
                }
            return part

        return {
            "fc": draw(self.hidden, self.num_states * self.target_hidden),
            "norm": draw(self.hidden, mean=1.0),
            "layers": [layer(kind) for kind in self.kinds],
        }


def layer_tensors(part: dict[str, Array], prefix: str, hidden_norm: str) -> dict[str, Array]:
    """One layer under published names; `hidden_norm`: the name of its norm of the state."""
    tensors = {}
    for role, value in part.items():
        if role == "ln_hidden":
            name = f"{hidden_norm}.weight"
        elif role == "ln_embed":
            name = "input_layernorm.weight"
        elif role in _ROLES:
            name = f"{_ROLES[role]}.weight"
        else:
            stem, leaf = (role[:-1], "bias") if role.endswith("b") else (role, "weight")
            block = "self_attn" if stem in ("q", "k", "v", "o") else "mlp"
            name = f"{block}.{stem}_proj.{leaf}"
        tensors[prefix + name] = value
    return tensors


def midlayer(head: dict[str, Any]) -> dict[str, Array]:
    return layer_tensors(head["layers"][0], "midlayer.", "hidden_norm")


def numbered(prefix: str, plain_norm: str = "input_layernorm") -> Callable[[Any], dict[str, Array]]:
    """Layers under `prefix`; the norm of those without embedding is called `plain_norm`."""

    def names(head: dict[str, Any]) -> dict[str, Array]:
        tensors: dict[str, Array] = {}
        for i, part in enumerate(head["layers"]):
            norm = "hidden_norm" if "ln_embed" in part else plain_norm
            tensors |= layer_tensors(part, f"{prefix}{i}.", norm)
        return tensors

    return names


def fused_and_additional(head: dict[str, Any]) -> dict[str, Array]:
    tensors = layer_tensors(head["layers"][0], "fuse_layer.", "hidden_norm")
    for i, part in enumerate(head["layers"][1:]):
        tensors |= layer_tensors(part, f"additional_layers.{i}.", "input_layernorm")
    return tensors


def mixed_modelopt(head: dict[str, Any]) -> dict[str, Array]:
    """Projections as midlayer.<i>, norms as layers.<i>."""
    tensors = numbered("midlayer.")(head)
    return {
        k.replace("midlayer.", "layers.") if "norm" in k.split(".")[2] else k: v
        for k, v in tensors.items()
    }


def with_prefix(names: Callable[[Any], dict[str, Array]]) -> Callable[[Any], dict[str, Array]]:
    return lambda head: {f"model.{name}": value for name, value in names(head).items()}


LLAMA = {
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "vocab_size": V,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A published form: config, names, and what they mean."""

    config: dict[str, Any]
    names: Callable[[Any], dict[str, Array]]
    boundaries: tuple[int, ...] = (2, 4, 5)  # of a target of 8 layers
    shape: Shape = Shape()
    extra: tuple[str, ...] = ()  # fc_bias, joint_norm, state_norms, own_embedding, no_d2t, ...
    theta: float = 10000.0
    meaning: dict[str, Any] = dataclasses.field(default_factory=dict)


def of(architecture: str, **changes: Any) -> dict[str, Any]:
    fields = {**LLAMA, "architectures": [architecture], "draft_vocab_size": K, **changes}
    return {name: value for name, value in fields.items() if value is not None}


LAYOUTS = {
    "eagle_authors": Layout(of("LlamaForCausalLM", rope_theta=500000.0), midlayer, theta=5e5),
    "specforge": Layout(of("LlamaForCausalLMEagle3", torch_dtype="bfloat16"), midlayer),
    "angelslim_tied_flag": Layout(of("Eagle3LlamaForCausalLM", tie_word_embeddings=True), midlayer),
    "specforge_ids_as_outputs": Layout(
        of("LlamaForCausalLMEagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        midlayer,
    ),
    "modelopt_nested": Layout(
        of(
            "LlamaForCausalLMEagle3",
            eagle_config={
                "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
                "use_aux_hidden_state": True,
            },
        ),
        numbered("layers."),
        boundaries=(1, 4, 7),
        extra=("no_t2d",),
    ),
    "modelopt_late_2025_mixed": Layout(
        of("LlamaForCausalLMEagle3", eagle_config={}), mixed_modelopt, extra=("no_t2d",)
    ),
    "nemo_model_prefix": Layout(
        of("LlamaForCausalLMEagle3"), with_prefix(numbered("layers.")), extra=("prefixed_fc",)
    ),
    "modelopt_norm_before_fc": Layout(
        of("LlamaForCausalLMEagle3", eagle_config={"norm_before_fc": True}),
        numbered("layers."),
        extra=("joint_norm", "no_t2d"),
    ),
    "eagle31_aux_norm_names": Layout(
        of("LlamaForCausalLMEagle3"), midlayer, extra=("aux_norm_names",)
    ),
    "eagle31_fc_norm_norm_output": Layout(
        of("LlamaForCausalLMEagle3", fc_norm=True, norm_output=True),
        midlayer,
        extra=("state_norms",),
        meaning={"norm_output": True},
    ),
    "return_hidden_post_norm": Layout(
        of("LlamaForCausalLMEagle3", eagle_config={"return_hidden_post_norm": True}),
        numbered("layers."),
        meaning={"norm_output": True},
    ),
    "speculators_flat_ids": Layout(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": K,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
            "transformer_layer_config": {**LLAMA, "model_type": "qwen3", "head_dim": 6},
        },
        numbered("layers."),
        boundaries=(1, 4, 6),
        shape=Shape(qk_norm=True),
        meaning={"norm_before_residual": True},
    ),
    "speculators_residual_unsaid": Layout(
        {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": K,
            "transformer_layer_config": {**LLAMA, "model_type": "llama"},
        },
        numbered("layers."),
        meaning={"norm_before_residual": True},
    ),
    "own_hidden_size": Layout(
        of("LlamaForCausalLM", hidden_size=16, target_hidden_size=H, head_dim=6),
        midlayer,
        shape=Shape(hidden=16),
        extra=("own_embedding",),
    ),
    "biases_own_head_dim": Layout(
        of("LlamaForCausalLMEagle3", attention_bias=True, mlp_bias=True, bias=True),
        midlayer,
        shape=Shape(biases=True, head_dim=10),
        extra=("fc_bias",),
    ),
    "two_states": Layout(
        of("LlamaForCausalLMEagle3", eagle_aux_hidden_state_layer_ids=[2, 7]),
        midlayer,
        boundaries=(3, 8),
        shape=Shape(num_states=2),
    ),
    "borrowed_lm_head": Layout(
        of("LlamaForCausalLMEagle3", draft_vocab_size=V),
        numbered("layers."),
        shape=Shape(draft_vocab=V),
        extra=("borrowed_lm_head", "no_d2t"),
    ),
    "no_draft_vocab_size": Layout(
        of("LlamaForCausalLMEagle3", draft_vocab_size=None),
        midlayer,
        shape=Shape(draft_vocab=V),
        extra=("no_d2t",),
    ),
    "last_state_without_fc": Layout(
        of("LlamaForCausalLMEagle3", eagle_config={"use_aux_hidden_state": False}),
        numbered("layers."),
        boundaries=(),
        shape=Shape(num_states=1),
        extra=("no_fc", "no_t2d"),
    ),
    "sliding_window": Layout(
        of("LlamaForCausalLMEagle3", sliding_window=5, layer_types=["sliding_attention"]),
        midlayer,
        meaning={"window": 5},
    ),
    "convention_a_midlayers": Layout(
        of("LlamaForCausalLMEagle3", num_hidden_layers=3),
        numbered("midlayers."),
        shape=Shape(kinds=(True, True, True)),
    ),
    "convention_b_layers": Layout(
        of("LlamaForCausalLMEagle3", num_hidden_layers=2),
        numbered("layers."),
        shape=Shape(kinds=(True, False)),
    ),
    "convention_b_hidden_norm": Layout(
        of("LlamaForCausalLMEagle3", num_hidden_layers=3, norm_before_residual=True),
        numbered("layers.", plain_norm="hidden_norm"),
        shape=Shape(kinds=(True, False, False)),
        meaning={"norm_before_residual": True},
    ),
    "convention_b_fuse_layer": Layout(
        of("LlamaForCausalLMEagle3", num_hidden_layers=3),
        fused_and_additional,
        shape=Shape(kinds=(True, False, False)),
    ),
}


def make_head(
    layout: Layout, tables: dict[str, Array], seed: int
) -> tuple[dict[str, Any], dict[str, Array]]:
    """(head for the reference, tensors as published)."""
    random = np.random.default_rng(seed + 1)

    def draw(*shape: int, mean: float = 0.0) -> Array:
        values = mean + random.normal(0.0, 0.3, shape)
        return values.astype(np.float16).astype(np.float64)

    shape, extra = layout.shape, layout.extra
    head = shape.build(seed)
    tensors = {**layout.names(head), "norm.weight": head["norm"]}
    if "no_fc" in extra:
        del head["fc"]
    else:
        prefix = "model." if "prefixed_fc" in extra else ""
        tensors[prefix + "fc.weight"] = head["fc"]
    if "fc_bias" in extra:
        head["fc_bias"] = tensors["fc.bias"] = draw(shape.hidden)
    if "joint_norm" in extra:
        head["joint_norm"] = draw(shape.num_states * H, mean=1.0)
        tensors["input_norm.weight"] = head["joint_norm"]
    if {"state_norms", "aux_norm_names"} & set(extra):
        head["state_norms"] = [draw(H, mean=1.0) for _ in range(shape.num_states)]
        for i, norm in enumerate(head["state_norms"]):
            old = ("low", "mid", "high")[i]
            name = f"aux_norm_{old}" if "aux_norm_names" in extra else f"fc_norm.{i}"
            tensors[f"{name}.weight"] = norm
    head["embedding"] = tables["model.embed_tokens.weight"].astype(np.float64)
    if "own_embedding" in extra:
        head["embedding"] = tensors["embed_tokens.weight"] = draw(V, shape.hidden)
    head["lm_head"] = tables["lm_head.weight"].astype(np.float64)
    if "borrowed_lm_head" not in extra:
        head["lm_head"] = tensors["lm_head.weight"] = draw(shape.draft_vocab, shape.hidden)
    published = {name: value.astype(np.float16) for name, value in tensors.items()}
    kept = np.sort(random.permutation(V)[: shape.draft_vocab])
    head["targets"] = kept if "no_d2t" not in extra else np.arange(V)
    if "no_d2t" not in extra:
        published["d2t"] = kept - np.arange(shape.draft_vocab)
        if "no_t2d" not in extra:
            published["t2d"] = np.isin(np.arange(V), kept)
    return head, published


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_means_the_same_as_the_reference(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    tables = write_target(tmp_path / "target")
    head, published = make_head(layout, tables, seed=len(name))
    write_model(tmp_path / "head", layout.config, published, shards=1 + len(name) % 2)
    config, params = load_head(tmp_path / "head", tmp_path / "target")
    assert config.boundaries == layout.boundaries
    assert config.embedding_layers == layout.shape.kinds
    random = np.random.default_rng(5)
    features = random.normal(0, 1, (ROWS, config.feature_size)).astype(np.float32)
    tokens = [random.integers(0, V, ROWS) for _ in range(3)]
    half = np.arange(0, layout.shape.head_dim, 2) / layout.shape.head_dim
    reference = Reference(
        head,
        head_dim=layout.shape.head_dim,
        frequencies=layout.theta**-half,
        eps=EPS,
        **layout.meaning,
    )
    expected = reference.run(features, tokens)
    logits = run_head_steps(config, params, features, tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=2e-3)
    np.testing.assert_array_equal(np.asarray(params["draft_to_target"]), head["targets"])


@pytest.mark.parametrize("name", ["head_llama", "head_qwen3", "head_three_layers", "head_fc_norm"])
def test_reference_equals_speculators(name: str) -> None:
    """The float64 reference is itself held against the published package."""
    raw, weights, golden = load_golden(name)
    weights = {k: v.astype(np.float64) for k, v in weights.items()}
    layers = []
    for i in range(raw["transformer_layer_config"]["num_hidden_layers"]):
        prefix = f"layers.{i}."
        part = {n: weights[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkvo"}
        part |= {n: weights[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")}
        part["ln_mlp"] = weights[prefix + "post_attention_layernorm.weight"]
        if i == 0:
            part["ln_embed"] = weights[prefix + "input_layernorm.weight"]
            part["ln_hidden"] = weights[prefix + "hidden_norm.weight"]
        else:
            part["ln_hidden"] = weights[prefix + "input_layernorm.weight"]
        if prefix + "self_attn.q_norm.weight" in weights:
            part["qn"] = weights[prefix + "self_attn.q_norm.weight"]
            part["kn"] = weights[prefix + "self_attn.k_norm.weight"]
        layers.append(part)
    head = {"layers": layers, "fc": weights["fc.weight"], "norm": weights["norm.weight"]}
    head |= {"lm_head": weights["lm_head.weight"], "embedding": weights["embed_tokens.weight"]}
    if raw["fc_norm"]:
        head["state_norms"] = [weights[f"fc_norm.{i}.weight"] for i in range(3)]
    reference = Reference(
        head,
        head_dim=6,
        frequencies=10000.0 ** -(np.arange(0, 6, 2) / 6),
        norm_before_residual=raw["norm_before_residual"],
    )
    tokens = later_tokens(golden["tokens"], golden["logits"].shape[0])
    logits = reference.run(golden["features"], tokens)
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-3, atol=1e-3)


def test_overrides_go_before_the_files(tmp_path: Path) -> None:
    layout = LAYOUTS["specforge_ids_as_outputs"]
    tables = write_target(tmp_path / "target")
    _, published = make_head(layout, tables, seed=3)
    write_model(tmp_path / "head", layout.config, published)
    overrides = HeadOverrides(boundaries=(0, 4, 8), norm_before_residual=True)
    config, _ = load_head(tmp_path / "head", tmp_path / "target", overrides=overrides)
    assert config.boundaries == (0, 4, 8)
    assert config.norm_before_residual
    sources = {choice.field: choice.source for choice in config.provenance}
    assert sources["boundaries"] == sources["norm_before_residual"] == "override"


def test_bfloat16_head_stays_near_float32(tmp_path: Path) -> None:
    layout = LAYOUTS["specforge"]
    tables = write_target(tmp_path / "target")
    _, published = make_head(layout, tables, seed=4)
    write_model(tmp_path / "head", layout.config, published)
    random = np.random.default_rng(6)
    features = random.normal(0, 1, (ROWS, 3 * H)).astype(np.float32)
    tokens = [random.integers(0, V, ROWS) for _ in range(2)]
    logits = [
        run_head_steps(
            *load_head(tmp_path / "head", tmp_path / "target", dtype=dtype), features, tokens
        )
        for dtype in (jnp.float32, jnp.bfloat16)
    ]
    assert logits[1].dtype == np.float32
    assert np.abs(logits[1] - logits[0]).max() < 0.05 * np.abs(logits[0]).max()
