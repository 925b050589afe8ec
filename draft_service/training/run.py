"""`canopy head train`: a recipe from data to a head in a published layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from draft_service.training.dataset import choose_vocabulary, read_samples, split_validation
from draft_service.training.features import CacheMeta, FeatureCache, digest_of
from draft_service.training.loop import Trainer, write_log
from draft_service.training.recipe import Recipe
from draft_service.training.warm_start import (
    Target,
    frozen_tables,
    head_shape,
    initial_params,
)

RMS_SEQUENCES = 64


def build_trainer(recipe: Recipe) -> Trainer:
    """Everything up to the first step; sequences without cached states are left out."""
    target = Target.open(recipe.target, recipe.head.boundaries)
    samples = read_samples(recipe.data.responses, recipe.data.limit)
    cache = open_cache(recipe, target, samples)
    training, validation = split_validation(len(samples), recipe.data.num_validation)
    done = cache.done()
    training, validation = np.intersect1d(training, done), np.intersect1d(validation, done)
    if not training.size or not validation.size:
        raise ValueError(
            f"data.cache: {cache.directory} holds states of {done.size} sequences only; capture first"
        )
    vocabulary = choose_vocabulary(
        [samples[i].response for i in training],
        recipe.head.draft_vocab_size,
        target.config.vocab_size,
    )
    shape = head_shape(target.config, recipe.head, recipe.optimiser.matmul_dtype)
    frozen = frozen_tables(target, vocabulary, feature_rms(cache, training))
    params = initial_params(shape, target, frozen, recipe.head, recipe.optimiser.seed)
    report = write_log(recipe.output / "log.jsonl")
    report(
        {
            "training_sequences": int(training.size),
            "validation_sequences": int(validation.size),
            "draft_vocab_size": vocabulary.size,
            "coverage_training": round(vocabulary.coverage, 4),
            "coverage_validation": round(
                vocabulary.share_of(samples[i].response for i in validation), 4
            ),
        }
    )
    trainer = Trainer(recipe, shape, frozen, params, samples, cache, training, validation)
    trainer.vocabulary, trainer.target, trainer.report = vocabulary, target, report
    return trainer


def open_cache(recipe: Recipe, target: Target, samples: list) -> FeatureCache:
    """The cache that the recipe names, checked against target and data."""
    meta = CacheMeta(
        target_sha256="",
        data_sha256=digest_of(samples),
        boundaries=target.config.boundaries,
        feature_size=target.config.feature_size,
        hidden_size=target.config.hidden_size,
        total_tokens=sum(sample.num_tokens for sample in samples),
    )
    return FeatureCache(recipe.data.cache, samples, meta)


def feature_rms(
    cache: FeatureCache, indices: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """float32 [F]: root mean square of each feature over response tokens of some sequences."""
    chosen = np.random.default_rng(0).permutation(indices)[:RMS_SEQUENCES]
    rows = [
        cache.rows(int(i))[0][cache.samples[int(i)].prompt.size :].astype(np.float32)
        for i in chosen
    ]
    mean_square = np.mean(np.square(np.concatenate(rows)), axis=0)
    return np.asarray(np.sqrt(mean_square + 1e-6), np.float32)


if __name__ == "__main__":
    import os
    import sys

    import jax

    from draft_service.training.recipe import load_recipe

    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    overrides = dict(a.split("=", 1) for a in sys.argv[2:])
    trainer = build_trainer(load_recipe(Path(sys.argv[1]), overrides))
    trainer.resume()
    trainer.run(trainer.report)
