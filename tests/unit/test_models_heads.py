"""Heads: every refusal by its message; making, writing, bundling and describing them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from model_files import load_golden, run_head_steps, write_model, write_target

from models.checkpoint import open_checkpoint, read_json
from models.eagle3 import AuxReading, HeadOverrides, TableSource, load_head
from models.eagle3.bundle import write_bundle
from models.eagle3.export import save_head
from models.eagle3.init import init_head
from models.eagle3.inspect import inspect_head
from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.identity import target_identity
from models.target import load_target
from models.writing import write_json

pytestmark = pytest.mark.heads

Array = Any
H, V, K = 24, 61, 37
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "draft_vocab_size": K,
    "hidden_act": "silu",
}


def plain_tensors() -> dict[str, Array]:
    """A right head of one layer, as SpecForge names it."""
    _, weights, _ = load_golden("head_llama")
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    del renamed["embed_tokens.weight"]
    return renamed


def load_changed(
    tmp_path: Path,
    config: dict[str, Any],
    change: Callable[[dict[str, Array]], None] = lambda tensors: None,
    overrides: HeadOverrides | None = None,
    **target: Any,
) -> Any:
    tensors = plain_tensors()
    change(tensors)
    write_target(tmp_path / "target", **target)
    write_model(tmp_path / "head", {**CONFIG, **config}, tensors)
    return load_head(tmp_path / "head", tmp_path / "target", overrides=overrides)


def put(name: str, *shape: int, dtype: Any = np.float16) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.update({name: np.ones(shape, dtype)})


def drop(name: str) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.pop(name)


UNSUPPORTED = [
    ({}, put("mask_hidden", 1, H), r"P-EAGLE .*mask_hidden"),
    ({"mask_token_id": 4}, None, r"P-EAGLE .*mask_token_id"),
    ({"ptd_token_id": 4}, None, r"P-EAGLE .*ptd_token_id"),
    ({"speculators_model_type": "dflash"}, None, r"a drafter of kind 'dflash'"),
    ({"kv_lora_rank": 512}, None, r"multi-head latent attention .*kv_lora_rank in config\.json"),
    ({}, put("midlayer.self_attn.kv_b_proj.weight", 2, 2), r"multi-head latent attention"),
    ({}, put("eh_proj.weight", H, 2 * H), r"a head with eh_proj"),
    ({}, put("midlayer.mlp.experts.0.up_proj.weight", 2, 2), r"a mixture of experts"),
    ({}, put("midlayer.mlp.up_proj.weight_scale", 40), r"quantised weights .*weight_scale"),
    ({"quantization_config": {"quant_method": "fp8"}}, None, r"quantised weights"),
    ({"hidden_act": "gelu"}, None, r"activation 'gelu'"),
    (
        {"transformer_layer_config": {**CONFIG, "model_type": "gemma3"}},
        None,
        r"a layer of family 'gemma3'",
    ),
]


@pytest.mark.parametrize(("config", "change", "message"), UNSUPPORTED)
def test_unsupported_heads_are_refused_by_feature_with_a_remedy(
    tmp_path: Path, config: dict[str, Any], change: Any, message: str
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=message + r".* is not supported|" + message
    ) as caught:
        load_changed(tmp_path, config, change or (lambda tensors: None))
    assert "is not supported" in str(caught.value)
    assert "use another head for this target, or train one" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"sliding_window": 4, "layer_types": ["chunked"]}, "layer type 'chunked'"),
    ],
)
def test_unsupported_kinds_within_a_layer_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_changed(tmp_path, config)


def test_first_layer_without_embedding_is_no_eagle3_head(tmp_path: Path) -> None:
    def narrow(tensors: dict[str, Array]) -> None:
        for name in "qkv":
            key = f"midlayer.self_attn.{name}_proj.weight"
            tensors[key] = tensors[key][:, :H]

    with pytest.raises(UnsupportedModelError, match=r"not fed the embedding .* no EAGLE-3 head"):
        load_changed(tmp_path, {}, narrow)


def replaced(name: str, make: Callable[[Array], Array]) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


BROKEN = [
    ({}, drop("fc.weight"), "tensor fc.weight is missing"),
    ({}, drop("norm.weight"), "tensor norm.weight is missing"),
    ({}, drop("midlayer.hidden_norm.weight"), "tensor layers.0.hidden_norm.weight is missing"),
    ({}, drop("lm_head.weight"), "tensor lm_head.weight is missing"),
    ({}, drop("d2t"), "tensor d2t is missing"),
    ({}, put("midlayer.extra.weight", 3), "tensor midlayer.extra.weight is not part of the head"),
    ({}, put("fc_norm.3.weight", H), r"tensor fc_norm\.0\.weight is missing"),
    ({"norm_before_fc": True}, None, r"tensor input_norm\.weight is missing"),
    ({}, put("input_norm.weight", H), r"input_norm\.weight has shape \[24\], wanted is \[72\]"),
    ({"norm_before_fc": False}, put("input_norm.weight", 72), "input_norm.weight is not part"),
    ({"norm_before_fc": True, "fc_norm": True}, None, "exclude each other"),
    ({}, put("layers.0.hidden_norm.weight", H), r"are both layers\.0\.hidden_norm\.weight"),
    ({}, put("midlayer.mlp.down_proj.weight", 3, 40), r"down_proj\.weight has shape \[3, 40\]"),
    ({}, put("midlayer.self_attn.q_proj.weight", 24, 30), r"shape \[24, 30\], wanted is \[_, 48\]"),
    ({}, put("layers.2.input_layernorm.weight", H), r"numbered \[0, 2\]; they must run from 0"),
    ({}, put("midlayer.mlp.up_proj.weight", 40, H, dtype=np.int8), "quantised heads are not"),
    ({}, put("lm_head.weight", K, 20), r"lm_head\.weight has shape \[37, 20\]"),
    ({"hidden_size": 32}, None, "hidden_size in config.json is 32, but the tensors have .* 24"),
    ({"num_hidden_layers": 2}, None, "num_hidden_layers in config.json is 2, but .* 1"),
    ({"num_attention_heads": 3, "head_dim": 6}, None, "num_attention_heads .* is 3, but .* 4"),
    ({"num_key_value_heads": 4}, None, "num_key_value_heads in config.json is 4, but .* 2"),
    ({"num_attention_heads": None}, None, "num_attention_heads is missing"),
    ({"num_attention_heads": 8}, None, "rows in heads of 3"),
    ({"intermediate_size": 44}, None, "intermediate_size in config.json is 44, but"),
    ({"draft_vocab_size": 36}, None, "draft_vocab_size in config.json is 36, but"),
    ({"vocab_size": 64}, None, "vocab_size in config.json is 64, but the target .* 61; .* another"),
    ({"target_hidden_size": 32}, None, "target_hidden_size .* is 32, but the target .* 24"),
    ({"num_capture_layers": 4}, None, "num_capture_layers .* is 4, but the tensors have .* 3"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, None, "2 aux layer ids .* fc takes 3 states"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, None, r"\[2, 2, 3\] must ascend"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 20]}, None, r"must ascend within \[0, 8\]"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, None, "is false, but fc takes 3 states"),
    ({}, put("fc.weight", H, 50), "fc takes 50 numbers, which is no multiple of .* 24"),
    ({}, put("fc.weight", H, 4 * H), "takes 4 states and names no aux layer ids; name"),
    ({"sliding_window": 4, "layer_types": ["full_attention"] * 2}, None, "layer_types names 2"),
    ({}, put("embed_tokens.weight", 50, H), r"embed_tokens\.weight has shape \[50, 24\].*another"),
    ({}, replaced("d2t", lambda d: d[:-1]), r"d2t has shape \[36\], wanted is \[37\]"),
    ({}, replaced("d2t", lambda d: d.astype(np.float16)), "d2t is stored as float16"),
    ({}, replaced("d2t", lambda d: d + np.arange(K)), "seems to hold target ids instead of off"),
    ({}, replaced("d2t", lambda d: d - 40), "maps draft id 0 to -.*made for another target"),
    ({}, replaced("d2t", lambda d: -np.arange(K)), "d2t maps two draft ids to target id 0"),
    ({}, replaced("t2d", lambda t: ~t), "tensors d2t and t2d name different tokens"),
    ({}, replaced("t2d", lambda t: t[:-1]), r"t2d has shape \[60\], wanted is \[61\]"),
]


@pytest.mark.parametrize(("config", "change", "message"), BROKEN)
def test_broken_and_foreign_heads_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], change: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_changed(tmp_path, config, change or (lambda tensors: None))


def test_head_for_another_hidden_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no multiple of the target's hidden size 32; .* another"):
        load_changed(tmp_path, {}, hidden_size=32)


def test_head_of_own_size_needs_its_own_embedding(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"24 is not the target's 12, so it needs an embedding"):
        load_changed(
            tmp_path,
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5, 6]},
            hidden_size=12,
        )


def test_head_without_lm_head_or_fc_needs_the_targets_size(tmp_path: Path) -> None:
    def without_head(tensors: dict[str, Array]) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]
        tensors["embed_tokens.weight"] = np.ones((V, H), np.float16)

    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5, 6]}
    with pytest.raises(ModelError, match="no lm_head, and the target's is 12 wide, not 24"):
        load_changed(tmp_path, {**ids, "draft_vocab_size": None}, without_head, hidden_size=12)
    with pytest.raises(ModelError, match="no fc, yet its hidden size 24 is not the target's 12"):
        load_changed(
            tmp_path,
            {"eagle_config": {"use_aux_hidden_state": False}},
            drop("fc.weight"),
            hidden_size=12,
        )


def test_shallow_target_needs_named_boundaries(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="6 layers has no default"):
        load_changed(tmp_path, {}, num_layers=6)
    overrides = HeadOverrides(boundaries=(1, 2, 3))
    config, _ = load_changed(tmp_path, {}, overrides=overrides, num_layers=6)
    assert config.boundaries == (1, 2, 3)
    with pytest.raises(ModelError, match=r"boundaries \[1, 2\] are not 3"):
        load_changed(tmp_path, {}, overrides=HeadOverrides(boundaries=(1, 2)))


@pytest.mark.parametrize(
    ("ids", "reading", "boundaries", "assumed"),
    [
        ([1, 3, 4], None, (2, 4, 5), False),  # the defaults of 8 layers, as outputs
        ([2, 4, 5], None, (2, 4, 5), False),  # and as boundaries
        ([1, 4, 8], None, (1, 4, 8), False),  # no layer 8 to have an output
        ([0, 3, 6], None, (1, 4, 7), True),  # the habit of this layout
        ([6, 0, 3], None, (1, 4, 7), True),  # everybody concatenates in layer order
        ([0, 3, 6], AuxReading.BOUNDARIES, (0, 3, 6), False),
    ],
)
def test_layer_ids_are_read_with_provenance(
    tmp_path: Path,
    ids: list[int],
    reading: AuxReading | None,
    boundaries: tuple[int, ...],
    assumed: bool,
) -> None:
    config, _ = load_changed(
        tmp_path,
        {"eagle_aux_hidden_state_layer_ids": ids},
        overrides=HeadOverrides(aux_reading=reading),
    )
    assert config.boundaries == boundaries
    choice = next(c for c in config.provenance if c.field == "boundaries")
    assert choice.assumed == assumed


def test_borrowed_lm_head_of_a_tied_target_is_held_once(tmp_path: Path) -> None:
    def without_head(tensors: dict[str, Array]) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]

    config, params = load_changed(tmp_path, {"draft_vocab_size": V}, without_head, tied=True)
    assert config.lm_head_source is TableSource.TARGET
    assert params["lm_head"] is params["embedding"]


def test_pickled_head_loads_like_safetensors(tmp_path: Path) -> None:
    """`torch.save` of a head, read without torch; the head itself is then refused by its shapes."""
    write_target(tmp_path / "target")
    (tmp_path / "head").mkdir()
    write_json(tmp_path / "head" / "config.json", CONFIG)
    shutil.copyfile(
        Path(__file__).parent.parent / "parity" / "goldens" / "midlayer.bin",
        tmp_path / "head" / "pytorch_model.bin",
    )
    _, pickled = load_head(tmp_path / "head", tmp_path / "target")
    write_model(tmp_path / "other", CONFIG, plain_tensors())
    _, plain = load_head(tmp_path / "other", tmp_path / "target")
    np.testing.assert_array_equal(pickled["fuse"]["fc"]["kernel"], plain["fuse"]["fc"]["kernel"])
    np.testing.assert_array_equal(pickled["draft_to_target"], plain["draft_to_target"])


# making heads


def tiny_target(directory: Path, num_layers: int = 3) -> Path:
    """The golden's target, with a tokenizer of two special tokens."""
    raw, weights, _ = load_golden("llama_tied")
    write_model(directory, raw, weights)
    added = [{"id": i, "content": f"<{i}>", "special": True} for i in (0, 60)]
    vocabulary = {str(i): i for i in range(61)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": added}
    write_json(directory / "tokenizer.json", tokenizer)
    return directory


def test_warm_head_is_the_targets_last_layer(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    made = init_head(target, tmp_path / "head", draft_vocab_size=10, boundaries=(0, 1, 2))
    config, params = load_head(tmp_path / "head", target)
    assert config == made
    _, of_target = load_target(target, boundaries=())
    last = of_target["layer_2"]
    q = np.asarray(params["layer_0"]["attention"]["q"]["kernel"])
    np.testing.assert_array_equal(q[: config.hidden_size], 0.0)
    np.testing.assert_array_equal(q[config.hidden_size :], last["attention"]["q"]["kernel"])
    np.testing.assert_array_equal(
        params["layer_0"]["mlp"]["down"]["kernel"], last["mlp"]["down"]["kernel"]
    )
    np.testing.assert_array_equal(
        params["layer_0"]["hidden_norm"]["scale"], last["attention_norm"]["scale"]
    )
    ids = np.asarray(params["draft_to_target"])
    np.testing.assert_array_equal(ids, [0, 1, 2, 3, 4, 5, 6, 7, 8, 60])
    np.testing.assert_array_equal(params["lm_head"], of_target["embedding"][ids])


def test_warm_head_of_all_last_layers_is_the_target_itself(tmp_path: Path) -> None:
    """Fed the stream entering layer 1, two warm layers give the target's own logits."""
    _, _, golden = load_golden("llama_tied")
    target = tiny_target(tmp_path / "target")
    for every in (False, True):
        init_head(
            target,
            tmp_path / f"head{every}",
            draft_vocab_size=61,
            num_layers=2,
            embedding_in_every_layer=every,
            boundaries=(1,),
        )
        config, params = load_head(tmp_path / f"head{every}", target)
        assert config.embedding_layers == (True, every)
        logits = run_head_steps(config, params, golden["boundaries"][1], [golden["tokens"]])
        np.testing.assert_allclose(logits[0], golden["logits"], rtol=1e-3, atol=1e-3)


def test_draft_vocabulary_is_the_most_frequent_tokens(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    counts = np.zeros(61, np.int64)
    counts[[7, 30, 31]] = [5, 9, 5]
    init_head(
        target, tmp_path / "head", draft_vocab_size=4, token_counts=counts, boundaries=(0, 1, 2)
    )
    _, params = load_head(tmp_path / "head", target)
    np.testing.assert_array_equal(params["draft_to_target"], [0, 7, 30, 60])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_vocab_size": 2}, r"draft_vocab_size: 2 is outside \(2, 61\]"),
        ({"draft_vocab_size": 62}, r"draft_vocab_size: 62 is outside"),
        ({"draft_vocab_size": 9, "num_layers": 4}, r"num_layers: 4 is outside \[1, 3\]"),
        ({"draft_vocab_size": 9, "token_counts": np.ones(5, np.int64)}, "token_counts: .* has 61"),
    ],
)
def test_impossible_warm_heads_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    target = tiny_target(tmp_path / "target")
    with pytest.raises(ModelError, match=message):
        init_head(target, tmp_path / "head", boundaries=(0, 1, 2), **arguments)


@pytest.mark.parametrize(
    "name",
    ["head_llama", "head_fc_norm", "head_norm_before_fc", "head_three_layers", "head_norm_output",
     "head_biases_own_head_dim", "head_rope_llama3", "head_qwen3", "head_four_states"],
)  # fmt: skip
def test_saved_head_loads_as_the_same(tmp_path: Path, name: str) -> None:
    raw, weights, _ = load_golden(name)
    write_target(tmp_path / "target", num_layers=12)
    write_model(tmp_path / "head", raw, weights)
    config, params = load_head(tmp_path / "head", tmp_path / "target")
    save_head(tmp_path / "saved", config, params, target_num_layers=12, dtype=np.float16)
    again, params_again = load_head(tmp_path / "saved", tmp_path / "target")
    assert dataclasses.replace(again, layout=config.layout) == config
    for path in (("fuse", "fc", "kernel"), ("layer_0", "attention", "q", "kernel"), ("lm_head",)):
        before, after = params, params_again
        for key in path:
            before, after = before[key], after[key]
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def test_saved_names_and_fields_are_the_published_ones(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    init_head(target, tmp_path / "head", draft_vocab_size=10, boundaries=(0, 1, 2))
    names = open_checkpoint(tmp_path / "head").names
    assert "midlayer.self_attn.q_proj.weight" in names
    assert "midlayer.hidden_norm.weight" in names
    entries = open_checkpoint(tmp_path / "head").entries
    assert entries["d2t"].dtype == np.int64
    assert entries["t2d"].shape == (61,)
    fields = read_json(tmp_path / "head" / "config.json")
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["draft_vocab_size"] == 10
    # not the default boundaries: both readings are served
    assert fields["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1]


def test_unordered_map_cannot_be_saved(tmp_path: Path) -> None:
    config, params = load_changed(tmp_path, {})
    params["draft_to_target"] = params["draft_to_target"][::-1]
    with pytest.raises(ValueError, match="must ascend"):
        save_head(tmp_path / "saved", config, params, target_num_layers=8)


# bundles, identity, inspection


@pytest.mark.parametrize("borrowed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_bundle_serves_as_head_and_target(tmp_path: Path, borrowed: bool, tied: bool) -> None:
    tensors = plain_tensors()
    if borrowed:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]
    write_target(tmp_path / "target", tied=tied)
    config = {**CONFIG, "draft_vocab_size": V if borrowed else K}
    write_model(tmp_path / "head", config, tensors, shards=2)
    write_bundle(tmp_path / "head", tmp_path / "target", tmp_path / "bundle")
    expected, before = load_head(tmp_path / "head", tmp_path / "target")
    identity = target_identity(tmp_path / "target")
    shutil.rmtree(tmp_path / "target")
    loaded, after = load_head(tmp_path / "bundle", tmp_path / "bundle")
    assert loaded == expected
    for table in ("embedding", "lm_head", "draft_to_target"):
        np.testing.assert_array_equal(np.asarray(before[table]), np.asarray(after[table]))
    assert target_identity(tmp_path / "bundle") == identity
    held = open_checkpoint(tmp_path / "bundle" / "target").names
    assert ("lm_head.weight" in held) == (borrowed and not tied)


def test_bundle_is_not_made_over_other_files(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_model(tmp_path / "head", CONFIG, plain_tensors())
    with pytest.raises(ModelError, match="is not empty; name a new directory"):
        write_bundle(tmp_path / "head", tmp_path / "target", tmp_path / "head")


def test_bundle_without_the_borrowed_table_says_so(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_model(tmp_path / "head", CONFIG, plain_tensors())
    write_bundle(tmp_path / "head", tmp_path / "target", tmp_path / "bundle")
    tensors = plain_tensors()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    write_model(tmp_path / "borrower", {**CONFIG, "draft_vocab_size": V}, tensors)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight; point to the target's"):
        load_head(tmp_path / "borrower", tmp_path / "bundle")


def test_identity_tells_targets_apart_but_not_their_files(tmp_path: Path) -> None:
    tables = write_target(tmp_path / "a")
    identity = target_identity(tmp_path / "a")
    assert (identity.vocab_size, identity.padded_vocab_size, identity.hidden_size) == (61, 61, 24)
    config = read_json(tmp_path / "a" / "config.json")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    write_model(tmp_path / "b", config, tables, shards=2)
    assert target_identity(tmp_path / "b").weights_hash == identity.weights_hash
    tables["lm_head.weight"][0, 0] += 1.0
    write_model(tmp_path / "b", config, tables, shards=2)
    assert target_identity(tmp_path / "b").weights_hash != identity.weights_hash
    write_json(tmp_path / "b" / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    assert target_identity(tmp_path / "b").tokenizer_hash != identity.tokenizer_hash


@pytest.mark.parametrize("text", ["", "[]", '{"model": {}}'])
def test_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    write_target(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        target_identity(tmp_path)


def test_inspection_tells_what_was_assumed_and_whether_it_fits(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_target(tmp_path / "wider", hidden_size=32)
    write_model(tmp_path / "head", CONFIG, plain_tensors())
    report = inspect_head(tmp_path / "head", tmp_path / "target")
    described = json.loads(json.dumps(report.as_dict()))
    assert described["fits"] is True
    assert described["description"]["boundaries"] == [2, 4, 5]
    assumed = {c["field"] for c in described["provenance"] if c["assumed"]}
    assert assumed == {"boundaries", "norm_before_residual", "norm_output"}
    assert "assumed: default of EAGLE-3" in report.as_text()

    wrong = inspect_head(tmp_path / "head", tmp_path / "wider")
    assert wrong.as_dict()["fits"] is False
    assert "does not fit: " in wrong.as_text()
    assert "made for another target" in (wrong.misfit or "")

    alone = inspect_head(tmp_path / "head")
    assert alone.as_dict()["fits"] is None
    assert alone.config.boundaries == ()


def test_features_of_another_dtype_are_taken(tmp_path: Path) -> None:
    config, params = load_changed(tmp_path, {})
    features = np.ones((3, config.feature_size), np.float32)
    tokens = [np.array([1, 2, 3])]
    exact = run_head_steps(config, params, features, tokens)
    narrow = run_head_steps(config, params, jnp.asarray(features, jnp.bfloat16), tokens)
    np.testing.assert_array_equal(exact, narrow)
