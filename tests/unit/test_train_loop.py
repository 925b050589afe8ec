"""Training on tiny synthetic states: it learns, and a run that was cut off goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_service.training.dataset import (
    Sample,
    choose_vocabulary,
    plan_batches,
    split_validation,
)
from draft_service.training.features import CacheMeta, FeatureCache, capture, digest_of
from draft_service.training.loop import Trainer, learning_rate, summarise_chains
from draft_service.training.loss import Frozen
from draft_service.training.network import HeadShape, layer_shapes
from draft_service.training.recipe import (
    DataRecipe,
    HeadRecipe,
    OptimiserRecipe,
    Recipe,
    RecipeError,
    load_recipe,
)

VOCAB, WIDTH, FEATURES = 12, 8, 24
SHAPE = HeadShape(WIDTH, FEATURES, 2, 1, 4, 16, 1, "every", 1000.0, 1e-5)


def make_samples(count: int) -> list[Sample]:
    """Responses that count upward from the prompt's last token: a pattern to learn."""
    rng = np.random.default_rng(3)
    samples = []
    for _ in range(count):
        start, prompt, response = rng.integers(0, VOCAB), rng.integers(2, 9), rng.integers(6, 20)
        tokens = ((start + np.arange(prompt + response)) % VOCAB).astype(np.int32)
        samples.append(Sample(tokens[:prompt], tokens[prompt:], 0.0, "counting"))
    return samples


def table() -> Any:
    return np.random.default_rng(5).normal(size=(VOCAB, WIDTH)).astype(np.float32)


def oracle_states(tokens: Any) -> tuple[Any, Any]:
    """A target that counts: features tell the token, the last hidden state the next one."""
    features = np.concatenate([table()[tokens]] * 3, axis=-1)
    return features, 3.0 * table()[(tokens + 1) % VOCAB]


def make_recipe(directory: Path, **optimiser: Any) -> Recipe:
    return Recipe(
        target=directory,
        output=directory / "run",
        head=HeadRecipe(draft_vocab_size=16),
        data=DataRecipe(responses=directory, cache=directory / "cache", batch_tokens=256),
        optimiser=OptimiserRecipe(**{"warmup_steps": 2, "num_test_steps": 2, **optimiser}),
        validation_steps=2,
        log_every_steps=4,
    )


def make_cache(directory: Path, samples: list[Sample]) -> FeatureCache:
    total = sum(sample.num_tokens for sample in samples)
    meta = CacheMeta("target", digest_of(samples), (2, 4, 5), FEATURES, WIDTH, total)
    return FeatureCache(directory / "cache", samples, meta)


def make_trainer(directory: Path, **optimiser: Any) -> Trainer:
    samples = make_samples(24)
    cache = make_cache(directory, samples)
    for _ in capture(cache, oracle_states, batch_tokens=128):
        pass
    rng = np.random.default_rng(0)

    def noise(*size: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.3, size), jnp.float32)

    params = {
        "fc": noise(FEATURES, WIDTH),
        "norm": jnp.ones(WIDTH),
        "layers": [{n: noise(*s) for n, s in layer_shapes(SHAPE, 0).items()}],
    }
    frozen = Frozen(
        jnp.asarray(table()),
        jnp.asarray(table().T),
        jnp.arange(VOCAB, dtype=jnp.int32),
        jnp.ones(FEATURES),
    )
    training, validation = split_validation(len(samples), 4)
    recipe = make_recipe(directory, **optimiser)
    return Trainer(recipe, SHAPE, frozen, params, samples, cache, training, validation)


def test_training_learns_and_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    reports: list[dict[str, Any]] = []
    schedule = {"total_steps": 24, "learning_rate": 0.02}
    whole = make_trainer(tmp_path / "whole", **schedule)
    whole.run(reports.append)
    losses = [entry["loss"][0] for entry in reports if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert reports[-1]["finished"] is True
    assert reports[-1]["validation"]["greedy"]["acceptance_length"] > 1.3

    first = make_trainer(tmp_path / "cut", **schedule)
    first.run(reports.append, max_steps=10)
    assert not first.finished()
    second = make_trainer(tmp_path / "cut", **schedule)
    assert second.resume()
    assert second.state.step == 10
    second.run(reports.append)
    for ours, theirs in zip(
        jax.tree.leaves(second.state.params), jax.tree.leaves(whole.state.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_capture_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    samples = make_samples(9)
    cache = make_cache(tmp_path, samples)
    next(iter(capture(cache, oracle_states, batch_tokens=128)))
    some = set(cache.done().tolist())
    assert 0 < len(some) < 9
    seen: list[int] = []

    def counting(tokens: Any) -> tuple[Any, Any]:
        seen.append(int((tokens.sum(axis=1) > 0).sum()))
        return oracle_states(tokens)

    for _ in capture(make_cache(tmp_path, samples), counting, batch_tokens=128):
        pass
    assert sum(seen) == 9 - len(some)
    for index, sample in enumerate(samples):
        features, hidden = cache.rows(index)
        want_features, want_hidden = oracle_states(sample.tokens)
        np.testing.assert_array_equal(features, want_features.astype(np.float16))
        np.testing.assert_array_equal(hidden, want_hidden.astype(np.float16))


def test_a_cache_of_other_data_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path, make_samples(4))
    with pytest.raises(ValueError, match=r"data_sha256 = .* choose another data\.cache"):
        make_cache(tmp_path, make_samples(5))


def test_capture_refuses_states_that_float16_cannot_hold(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, make_samples(2))
    with pytest.raises(ValueError, match=r"features of sequence \d reach .*; float16 holds 65504"):
        list(capture(cache, lambda t: tuple(1e6 * x for x in oracle_states(t))))  # type: ignore[arg-type,return-value]


def test_batches_use_every_sequence_once_and_divide_over_devices() -> None:
    samples = make_samples(50)
    recipe = DataRecipe(responses=Path(), cache=Path(), batch_tokens=300)
    indices = np.arange(5, 50, dtype=np.int32)
    plans = plan_batches(samples, indices, recipe, seed=1, rows_multiple=4)
    assert sorted(i for plan in plans for i in plan.indices) == indices.tolist()
    assert {(p.num_rows, p.prompt_columns, p.response_columns) for p in plans} == {(4, 64, 64)}
    assert [p.indices for p in plans] != [
        p.indices for p in plan_batches(samples, indices, recipe, seed=2, rows_multiple=4)
    ]


def test_vocabulary_is_the_most_frequent_tokens_and_says_its_coverage() -> None:
    responses = [np.array([7, 7, 7, 3, 3, 9], np.int32), np.array([3, 1], np.int32)]
    vocabulary = choose_vocabulary(responses, 3, 12)
    assert vocabulary.target_ids.tolist() == [1, 3, 7]  # 1 and 9 tie: the lower id
    assert vocabulary.coverage == 7 / 8
    assert vocabulary.draft_ids()[[1, 3, 7, 9]].tolist() == [0, 1, 2, -1]
    with pytest.raises(ValueError, match=r"draft_vocab_size: 13 exceeds .* \(12\)"):
        choose_vocabulary(responses, 13, 12)


def test_chains_are_counted_as_verification_would() -> None:
    """Hits per anchor row; row 0 is the prompt's. Rounds: 1 (2 hits), 4 (miss), 5 (cut off)."""
    hits = np.array([[1, 1], [1, 1], [0, 0], [0, 0], [0, 1], [1, 0]], bool)
    present = np.array([[1, 1], [1, 1], [1, 1], [1, 1], [1, 1], [1, 0]], bool)
    summary = summarise_chains([(hits, present)])
    assert summary["rounds"] == 2
    assert summary["acceptance_length"] == (3 + 1) / 2
    assert summary["conditional"] == [0.6667, 1.0]


def test_learning_rate_warms_up_and_ends_by_steps_or_by_time() -> None:
    recipe = OptimiserRecipe(
        learning_rate=1.0, warmup_steps=10, total_steps=100, final_fraction=0.1, max_minutes=1.0
    )
    assert learning_rate(recipe, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(recipe, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(recipe, 55, 0.0) == pytest.approx(0.55)
    assert learning_rate(recipe, 20, 60.0) == pytest.approx(0.1)
    assert learning_rate(recipe, 100, 0.0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target: a\noutput: b\ndata: {responses: r}", r"data\.cache: Field required"),
        (
            "target: a\noutput: b\ndata: {responses: r, cache: c}\nhead: {num_layers: 0}",
            r"head\.num_layers: .*greater than or equal to 1 \(value 0\)",
        ),
        ("target: a\noutput: b\ndata: {responses: r, cache: c, cash: 1}", r"data\.cash: Extra"),
        ("- 1", "must hold a mapping, not list"),
    ],
)
def test_a_bad_recipe_names_field_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


def test_an_override_below_a_plain_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("target: a\noutput: b\ndata: {responses: r, cache: c}")
    with pytest.raises(RecipeError, match=r"target\.size: target is 'a' and has no fields"):
        load_recipe(path, {"target.size": 3})


def test_shipped_recipes_are_valid_and_overrides_reach_them() -> None:
    recipes = Path(__file__).parents[2] / "draft_service" / "training" / "recipes"
    found = sorted(recipes.glob("*.yaml"))
    assert found
    for path in found:
        recipe = load_recipe(path, {"optimiser.learning_rate": 0.25})
        assert recipe.optimiser.learning_rate == 0.25
