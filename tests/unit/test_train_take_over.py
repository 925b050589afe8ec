"""Training that starts from a head on disk: its very first step computes what that head serves."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tiny_models import VOCAB_SIZE, write_tiny_target
from draft_service.training.export import served_params
from draft_service.training.loss import batch_loss
from draft_service.training.network import HeadShape
from draft_service.training.recipe import Recipe, load_recipe
from draft_service.training.run import Run, capture_missing, prepare
from models.eagle3 import load_head
from models.target import flatten

pytestmark = pytest.mark.heads


def write_responses(path: Path, count: int = 12) -> Path:
    rng = np.random.default_rng(2)
    rows = []
    for _ in range(count):
        tokens = rng.integers(0, 200, 30).tolist()
        rows.append({"prompt_ids": tokens[:8], "response_ids": tokens[8:], "temperature": 0.8})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def make_recipe(directory: Path, output: str, **head: Any) -> Recipe:
    settings: dict[str, Any] = {
        "target": str(directory / "target"),
        "output": str(directory / output),
        "head": {"draft_vocab_size": 128, **head},
        "data": {
            "responses": str(directory / "responses.jsonl"),
            "cache": str(directory / "cache"),
            "num_validation": 2,
            "batch_tokens": 256,
        },
        "optimiser": {"learning_rate": 0.01, "warmup_steps": 1, "total_steps": 4},
        "validation_steps": 2,
        "log_every_steps": 2,
    }
    path = directory / f"{output}.json"  # JSON is YAML
    path.write_text(json.dumps(settings))
    return load_recipe(path)


def silent(entry: dict[str, Any]) -> None:
    """No report is wanted."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, responses, and runs as if trained: `one`, and `two` layers."""
    directory = tmp_path_factory.mktemp("take_over")
    write_tiny_target(directory / "target")
    write_responses(directory / "responses.jsonl")
    capture_missing(make_recipe(directory, "one"), silent)
    for name, shape in (("one", {}), ("two", {"num_layers": 2, "fusion": "first"})):
        run = prepare(make_recipe(directory, name, **shape), silent)
        state, rng = run.trainer.state, np.random.default_rng(1)
        state.params = jax.tree.map(
            lambda p, r=rng: p + jnp.asarray(r.normal(0, 0.1, p.shape), p.dtype), state.params
        )
        run.trainer.save()
        run.export(directory / name / "head")
    return directory


@cache
def compiled_loss(shape: HeadShape) -> Any:
    return jax.jit(partial(batch_loss, shape, num_steps=3, step_decay=0.8))


def first_loss(run: Run) -> Any:
    """Loss per step of the first batch, before any update."""
    trainer = run.trainer
    plan = next(trainer._plans(0))
    batch = trainer.cache.batch(plan, 3)
    return compiled_loss(trainer.shape)(trainer.state.params, trainer.frozen, batch)[1].loss


@pytest.mark.parametrize(
    ("name", "shape"), [("one", {}), ("two", {"num_layers": 2, "fusion": "first"})]
)
def test_the_first_step_is_the_exported_head(
    trained: Path, name: str, shape: dict[str, Any]
) -> None:
    """Parameters as served are the file's own, float16 rounding included; so is every logit."""
    head = trained / name / "head"
    run = prepare(make_recipe(trained, f"{name}_on", init_from=str(head), **shape), silent)
    _, wanted = load_head(head, trained / "target")
    trainer = run.trainer
    served = served_params(trainer.shape, trainer.state.params, trainer.frozen, run.vocabulary)
    expected = dict(flatten(wanted))
    found = dict(flatten(served))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-6, atol=1e-30, err_msg=str(path))


def test_training_goes_on_from_where_the_head_stood(trained: Path) -> None:
    """The loss that the run which exported it had reached, up to float16; a new start differs."""
    reached = prepare(make_recipe(trained, "one"), silent)
    assert reached.trainer.resume()
    taken = prepare(make_recipe(trained, "on", init_from=str(trained / "one" / "head")), silent)
    fresh = prepare(make_recipe(trained, "fresh"), silent)
    np.testing.assert_allclose(first_loss(taken), first_loss(reached), rtol=2e-3)
    assert np.max(np.abs(first_loss(fresh) / first_loss(reached) - 1)) > 0.02
    assert taken.vocabulary.target_ids.tolist() == reached.vocabulary.target_ids.tolist()
    assert taken.trainer.state.step == 0


@pytest.mark.parametrize("fusion", ["first", "every"])
def test_layers_on_top_of_a_head_change_nothing_at_first(trained: Path, fusion: str) -> None:
    """A trained layer, and two that start as the identity: the same loss at every step."""
    head = str(trained / "one" / "head")
    plain = prepare(make_recipe(trained, "plain", init_from=head), silent)
    grown = make_recipe(trained, f"grown_{fusion}", init_from=head, num_layers=3, fusion=fusion)
    run = prepare(grown, silent)
    assert len(run.trainer.state.params["layers"]) == 3
    np.testing.assert_allclose(first_loss(run), first_loss(plain), rtol=1e-6)


def test_a_checkpoint_keeps_the_scale_that_its_fc_was_trained_on(trained: Path) -> None:
    """More captured sequences give another scale; the head must compute as it did before."""
    run = prepare(make_recipe(trained, "one"), silent)
    run.trainer.frozen = run.trainer.frozen._replace(feature_scale=jnp.ones(96))
    before = first_loss(run)
    assert run.trainer.resume()
    served = served_params(
        run.trainer.shape, run.trainer.state.params, run.trainer.frozen, run.vocabulary
    )
    _, wanted = load_head(trained / "one" / "head", trained / "target")
    kernel = np.asarray(wanted["fuse"]["fc"]["kernel"])
    np.testing.assert_allclose(served["fuse"]["fc"]["kernel"], kernel, rtol=2e-3, atol=1e-5)
    assert not np.allclose(before, first_loss(run))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            {"num_layers": 1, "init_from": "two"},
            r"embedding_layers = \(True, False\), this recipe trains \(True,\);"
            r" set head\.num_layers and head\.fusion",
        ),
        (
            {"num_layers": 2, "init_from": "two"},
            r"embedding_layers = \(True, False\), this recipe trains \(True, True\)",
        ),
        (
            {"draft_vocab_size": 64, "init_from": "one"},
            r"draft_vocab_size = 128, this recipe trains 64; set head\.draft_vocab_size",
        ),
        (
            {"intermediate_size": 64, "init_from": "one"},
            r"mlp_size = 48, this recipe trains 64; set head\.intermediate_size",
        ),
        (
            {"boundaries": [1, 2, 3], "init_from": "one"},
            r"boundaries = \(2, 4, 5\), this recipe trains \(1, 2, 3\); set head\.boundaries",
        ),
        ({"init_from": "nowhere"}, r"head\.init_from: .*nowhere/head holds no head"),
    ],
)
def test_a_head_that_is_not_the_recipes_is_refused_by_field(
    trained: Path, tmp_path: Path, head: dict[str, Any], message: str
) -> None:
    head = {**head, "init_from": str(trained / head["init_from"] / "head")}
    recipe = make_recipe(trained, "refused", **head)
    if "boundaries" in head:  # another feature cache
        recipe = recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"cache": tmp_path / "cache"})}
        )
        capture_missing(recipe, silent)
    with pytest.raises(ValueError, match=message):
        prepare(recipe, silent)


def test_a_head_with_parts_that_cannot_be_trained_is_refused(trained: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(trained / "one" / "head", head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "norm_output": True}))
    with pytest.raises(
        ValueError, match=re.escape("norm_output = True, this recipe trains False; heads of that")
    ):
        prepare(make_recipe(trained, "refused", init_from=str(head)), silent)
    assert config["vocab_size"] == VOCAB_SIZE


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"prompt_ids": [1], "response_ids": [2, 260]}\n', r"sequence 1 has token 260, outside"),
        ('{"prompt_ids": [1]}\n', r"rows\.jsonl:1: response_ids is missing or empty"),
        ('{"prompt_ids": [1], "response_ids": [2]}\noops\n', r"rows\.jsonl:2: not JSON"),
        ("", r"rows\.jsonl: no rows"),
    ],
)
def test_bad_data_is_refused_before_anything_is_computed(
    trained: Path, tmp_path: Path, rows: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    recipe = make_recipe(trained, "bad")
    data = recipe.data.model_copy(
        update={"responses": tmp_path / "rows.jsonl", "cache": tmp_path / "cache"}
    )
    with pytest.raises(ValueError, match=message):
        capture_missing(recipe.model_copy(update={"data": data}), silent)
    assert not (tmp_path / "cache").exists()
