"""`canopy head train`: a recipe from data to a head in a published layout."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.types import Int32Array
from draft_service.training.dataset import (
    DraftVocabulary,
    Sample,
    check_vocabulary,
    choose_vocabulary,
    read_samples,
    split_validation,
)
from draft_service.training.export import export_head
from draft_service.training.features import CacheMeta, FeatureCache, capture, digest_of
from draft_service.training.loop import Report, Trainer, write_log
from draft_service.training.loss import Frozen
from draft_service.training.network import HeadShape, Params
from draft_service.training.recipe import Recipe
from draft_service.training.take_over import GivenHead
from draft_service.training.target_states import make_target_states
from draft_service.training.warm_start import (
    FINAL_NORM,
    Target,
    frozen_tables,
    head_shape,
    initial_params,
)
from models.target import load_target

RMS_SEQUENCES = 64
CAPTURE_REPORT_SECONDS = 20.0


@dataclass(frozen=True)
class Run:
    """A recipe made ready: its trainer and what export needs beside it."""

    recipe: Recipe
    target: Target
    vocabulary: DraftVocabulary
    trainer: Trainer

    def export(self, directory: Path, dtype: str = "float16") -> None:
        """Writes the head as it now is."""
        trainer = self.trainer
        export_head(
            directory, trainer.shape, trainer.state.params, trainer.frozen,
            self.vocabulary, self.target.config, dtype,
        )  # fmt: skip


def train(recipe: Recipe, max_steps: int | None = None) -> Path:
    """Captures what is missing, trains (on from a checkpoint if there is one), exports.

    Returns the exported directory, OUTPUT/head. Raises ValueError and ModelError with the field
    at fault.
    """
    report = write_log(recipe.output / "log.jsonl")
    capture_missing(recipe, report)
    run = prepare(recipe, report)
    run.trainer.resume()
    run.trainer.run(report, max_steps)
    run.export(recipe.output / "head")
    return recipe.output / "head"


def capture_missing(recipe: Recipe, report: Report) -> None:
    """Fills the recipe's cache. The target is loaded only if there is something to do."""
    target = Target.open(recipe.target, recipe.head.boundaries)
    samples = read_samples(recipe.data.responses, recipe.data.limit)
    cache = open_cache(recipe, target, samples)
    if cache.done().size == len(samples):
        return
    config, params = load_target(recipe.target, boundaries=target.config.boundaries)
    started = reported = time.monotonic()
    for num_tokens in capture(cache, make_target_states(config, params)):
        now = time.monotonic()
        if now - reported >= CAPTURE_REPORT_SECONDS:
            reported = now
            report(
                {
                    "captured_sequences": int(cache.done().size),
                    "of": len(samples),
                    "tokens_per_second": round(num_tokens / (now - started)),
                }
            )


def prepare(recipe: Recipe, report: Report) -> Run:
    """Everything up to the first step; sequences without cached states are left out."""
    target = Target.open(recipe.target, recipe.head.boundaries)
    samples = read_samples(recipe.data.responses, recipe.data.limit)
    cache = open_cache(recipe, target, samples)
    training, validation = split_validation(len(samples), recipe.data.num_validation)
    # of all, captured or not: a vocabulary must not change while capture goes on
    responses = [samples[i].response for i in training]
    done = cache.done()
    training, validation = np.intersect1d(training, done), np.intersect1d(validation, done)
    if not training.size or not validation.size:
        raise ValueError(
            f"data.cache: {cache.directory} holds states of {done.size} sequences only; capture"
            " must come first"
        )
    shape = head_shape(target.config, recipe.head, recipe.optimiser.matmul_dtype)
    rms = feature_rms(cache, training)
    vocabulary, frozen, params = _start(recipe, target, shape, responses, rms)
    held_out = vocabulary.share_of(samples[i].response for i in validation)
    report(
        {
            "training_sequences": int(training.size),
            "validation_sequences": int(validation.size),
            "draft_vocab_size": vocabulary.size,
            "coverage_training": round(vocabulary.coverage, 4),
            "coverage_validation": round(held_out, 4),
        }
    )
    trainer = Trainer(recipe, shape, frozen, params, samples, cache, training, validation)
    return Run(recipe, target, vocabulary, trainer)


def _start(
    recipe: Recipe,
    target: Target,
    shape: HeadShape,
    responses: list[Int32Array],
    rms: npt.NDArray[np.float32],
) -> tuple[DraftVocabulary, Frozen, Params]:
    """The head before its first step: from the target, or from `head.init_from`."""
    seed = recipe.optimiser.seed
    if recipe.head.init_from is None:
        vocabulary = choose_vocabulary(
            responses, recipe.head.draft_vocab_size, target.config.vocab_size
        )
        frozen = frozen_tables(target, vocabulary, rms)
        return vocabulary, frozen, initial_params(shape, target, frozen, recipe.head, seed)
    given = GivenHead.load(recipe.head.init_from, recipe.target, target.config.boundaries)
    given.check(shape, target.config, recipe.head.draft_vocab_size)
    vocabulary = given.vocabulary(responses)
    frozen = given.frozen(frozen_tables(target, vocabulary, rms))
    fresh = initial_params(shape, target, frozen, recipe.head, seed)
    return vocabulary, frozen, given.initial_params(fresh, shape, frozen)


def open_cache(recipe: Recipe, target: Target, samples: list[Sample]) -> FeatureCache:
    """The cache that the recipe names, checked against target and data."""
    check_vocabulary(samples, target.config.vocab_size)
    meta = CacheMeta(
        target_sha256=hashlib.sha256(target.tensor(FINAL_NORM).tobytes()).hexdigest(),
        data_sha256=digest_of(samples),
        boundaries=target.config.boundaries,
        feature_size=target.config.feature_size,
        hidden_size=target.config.hidden_size,
        total_tokens=sum(sample.num_tokens for sample in samples),
    )
    return FeatureCache(recipe.data.cache, samples, meta)


def feature_rms(cache: FeatureCache, indices: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 [F]: root mean square of each feature over response tokens of some sequences."""
    chosen = np.random.default_rng(0).permutation(indices)[:RMS_SEQUENCES]
    rows = [
        cache.rows(int(i))[0][cache.samples[int(i)].prompt.size :].astype(np.float32)
        for i in chosen
    ]
    mean_square = np.mean(np.square(np.concatenate(rows)), axis=0)
    return np.asarray(np.sqrt(mean_square + 1e-6), np.float32)
