"""On-policy sequences, the draft vocabulary chosen from them, and batches of like lengths."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.types import Int32Array
from draft_service.training.recipe import DataRecipe

PROMPT_BUCKET = 64
RESPONSE_BUCKET = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and the target's own response to it; token ids of the target's vocabulary."""

    prompt: Int32Array
    response: Int32Array
    temperature: float
    source: str

    @property
    def num_tokens(self) -> int:
        return int(self.prompt.size + self.response.size)

    @property
    def tokens(self) -> Int32Array:
        return np.concatenate([self.prompt, self.response])


def read_samples(path: Path, limit: int | None = None) -> list[Sample]:
    """Rows of a JSON-lines file with `prompt_ids`, `response_ids` and, if known, `temperature`,
    `source`.

    Raises ValueError naming file, line and field.
    """
    if not path.is_file():
        raise ValueError(f"data.responses: no file {path}; `canopy head generate-data` writes one")
    samples: list[Sample] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(samples) == limit:
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from None
            for field in ("prompt_ids", "response_ids"):
                if not row.get(field):
                    raise ValueError(
                        f"{path}:{number}: {field} is missing or empty;"
                        " `canopy head generate-data` writes both"
                    )
            samples.append(
                Sample(
                    np.asarray(row["prompt_ids"], np.int32),
                    np.asarray(row["response_ids"], np.int32),
                    float(row.get("temperature", 0.0)),
                    str(row.get("source", "")),
                )
            )
    if not samples:
        raise ValueError(f"{path}: no rows")
    return samples


def check_vocabulary(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raises ValueError for a token that the target does not have."""
    for number, sample in enumerate(samples, 1):
        tokens = sample.tokens
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(
                f"data.responses: sequence {number} has token {int(tokens.max())}, outside the"
                f" target's vocabulary of {vocab_size}; it was written by another model"
            )


def split_validation(
    count: int, num_validation: int, seed: int = 0
) -> tuple[Int32Array, Int32Array]:
    """Sample indices (training, validation), both sorted, chosen by `seed` alone."""
    if num_validation >= count:
        raise ValueError(
            f"data.num_validation: {num_validation} leaves nothing of {count} sequences to train on"
        )
    order = np.random.default_rng(seed).permutation(count).astype(np.int32)
    return np.sort(order[num_validation:]), np.sort(order[:num_validation])


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The target tokens a head can propose. `target_ids` int32 [draft_vocab], ascending."""

    target_ids: Int32Array
    target_vocab_size: int
    coverage: float  # share of the training responses' tokens that are in it

    @property
    def size(self) -> int:
        return int(self.target_ids.size)

    def draft_ids(self) -> Int32Array:
        """int32 [target_vocab]: draft id of each target token, -1 where it has none."""
        table = np.full(self.target_vocab_size, -1, np.int32)
        table[self.target_ids] = np.arange(self.size, dtype=np.int32)
        return table

    def share_of(self, responses: Iterable[Int32Array]) -> float:
        """The share of the tokens of `responses` that are in the vocabulary."""
        table = self.draft_ids()
        hits = [table[response] >= 0 for response in responses]
        return float(np.concatenate(hits).mean())


def choose_vocabulary(
    responses: Sequence[Int32Array], size: int, target_vocab_size: int
) -> DraftVocabulary:
    """The `size` most frequent response tokens; ties and unseen tokens go by lowest id."""
    if size > target_vocab_size:
        raise ValueError(
            f"head.draft_vocab_size: {size} exceeds the target's vocabulary ({target_vocab_size})"
        )
    counts = np.bincount(np.concatenate(responses), minlength=target_vocab_size)
    order = np.argsort(-counts, kind="stable")[:size]
    coverage = float(counts[order].sum() / counts.sum())
    return DraftVocabulary(np.sort(order).astype(np.int32), target_vocab_size, coverage)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sequences of one batch. Every prompt ends at column `prompt_columns` (padding is on its
    left)."""

    indices: tuple[int, ...]
    num_rows: int  # of the padded batch; >= len(indices)
    prompt_columns: int
    response_columns: int


def plan_batches(
    samples: Sequence[Sample],
    indices: Int32Array,
    recipe: DataRecipe,
    seed: int,
    rows_multiple: int = 1,
) -> list[BatchPlan]:
    """All of `indices` once, in batches of one (prompt, response) bucket, in random order by
    `seed`.

    Batches of a bucket have the same padded shape, so the number of compiled programs is the
    number of buckets. `rows_multiple`: padded rows divide evenly over that many devices.
    """
    rng = np.random.default_rng(seed)
    buckets: dict[tuple[int, int], list[int]] = {}
    for index in rng.permutation(indices):
        sample = samples[int(index)]
        buckets.setdefault(_bucket(sample, recipe), []).append(int(index))
    plans = []
    for (prompt, response), members in sorted(buckets.items()):
        rows = _round_up(max(1, recipe.batch_tokens // response), rows_multiple)
        plans += [
            BatchPlan(tuple(members[start : start + rows]), rows, prompt, response)
            for start in range(0, len(members), rows)
        ]
    return [plans[i] for i in rng.permutation(len(plans))]


def _bucket(sample: Sample, recipe: DataRecipe) -> tuple[int, int]:
    """Padded (prompt, response) columns: multiples of 64, long prompts all in one bucket."""
    prompt = _round_up(min(sample.prompt.size, recipe.max_prompt_tokens), PROMPT_BUCKET)
    response = _round_up(min(sample.response.size, recipe.max_response_tokens), RESPONSE_BUCKET)
    if prompt > 2 * PROMPT_BUCKET:  # few sequences: one shape for them all saves compiling
        prompt = _round_up(recipe.max_prompt_tokens, PROMPT_BUCKET)
    return prompt, response


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
