"""Run by test_tensor_parallel.py with some forced host devices; prints one line of JSON a model.

Each model is loaded on one device and split over all of them; the same sequences, greedy and
sampled, with trees and without, go through both engines.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from ahead_driver import Ahead, generate_ahead, tree_below
from engine_driver import Allow, Generated, first_difference, guessing
from engine_driver import generate as generate_all
from model_files import load_golden, write_model

from benchmarks.tiny_models import VOCAB_SIZE, write_tiny_target
from common.types import DraftTree, SamplingParams
from models.eagle3 import HeadOverrides, load_fusing_head, open_head
from models.eagle3.init import init_head
from models.sharding import model_mesh
from models.target import load_target
from models.target_tables import read_target_facts
from verify_service.engine import DeviceEngine, EngineConfig

NUM_TOKENS = 16
EIGHT_HEADS = "eight_heads"
"""Features are fused on the way, by a head that is split as well."""
AHEAD = "qwen2"
"""Steps are launched ahead as well."""
BOUNDARIES = (0, 2)
ENGINE = EngineConfig(
    num_pages=32,
    page_size=8,
    max_sequences=4,
    max_context_len=64,
    max_tree_nodes=10,
    max_depth=3,
    row_buckets=(96,),
    max_rows=96,
)


SAMPLINGS = [
    SamplingParams(frequency_penalty=0.6, repetition_penalty=1.3, logprobs=True, top_logprobs=20),
    SamplingParams(temperature=0.8, seed=5, logit_bias=((1, 2.0), (60, 2.0)), logprobs=True),
    SamplingParams(min_tokens=NUM_TOKENS),
    SamplingParams(temperature=1.1, top_p=0.9, top_k=20, min_p=0.02, seed=9, ignore_eos=True),
]
STOPS = (3, 40)


def logprob_difference(alone: Generated, other: Generated) -> float:
    """The largest, of picks and of the likeliest, up to where the tokens part."""
    same = next(
        (i for i, (a, b) in enumerate(zip(alone.response, other.response, strict=False)) if a != b),
        min(len(alone.response), len(other.response)),
    )
    found = np.abs(np.subtract(alone.logprobs[:same], other.logprobs[:same])).tolist()
    for ours, theirs in zip(alone.top_logprobs[:same], other.top_logprobs[:same], strict=True):
        found += np.abs(np.subtract([v for _, v in ours], [v for _, v in theirs])).tolist()
    return max(found, default=0.0)


def write_target(name: str, directory: Path) -> tuple[list[int], int]:
    """A golden model, or one of eight heads; tokens for prompts, and its vocabulary."""
    if name == EIGHT_HEADS:
        write_tiny_target(directory, num_hidden_layers=3, num_attention_heads=8, hidden_size=64)
        return np.random.default_rng(0).integers(0, VOCAB_SIZE, 24).tolist(), VOCAB_SIZE
    raw, weights, golden = load_golden(name)
    write_model(directory, raw, weights, shards=2)
    return golden["tokens"].tolist(), raw["vocab_size"]


def open_new_head(target: Path) -> Any:
    """What fuses features, to be split as well."""
    where = target / "head"
    if not where.exists():
        init_head(target, where, draft_vocab_size=VOCAB_SIZE, boundaries=BOUNDARIES)
    return open_head(where, read_target_facts(target), HeadOverrides(), np.float32)


def follow_each_other(
    split: DeviceEngine, alone: list[Generated], samplings: list[SamplingParams]
) -> dict[str, object]:
    """Rounds launched before the last has ended, along what one device gave and beside it."""
    sequences = [
        Ahead(one.tokens[: one.num_prompt], sampling, (one.num_prompt,), opens=i % 2,
              stop_tokens=() if sampling.ignore_eos else STOPS)
        for i, (one, sampling) in enumerate(zip(alone, samplings, strict=True))
    ]  # fmt: skip

    def candidates(sequence: int, tokens: list[int]) -> DraftTree:
        chain = alone[sequence].tokens[len(tokens) : len(tokens) + 5]
        return tree_below(tokens[-1], [7, *chain], [0, 0, *range(2, len(chain) + 1)])

    record = generate_ahead(split, sequences, NUM_TOKENS, candidates, 4, 3)
    margins = []
    for ours, theirs in zip(sequences, alone, strict=True):
        pairs = zip(ours.response, theirs.response, strict=False)
        margins += [theirs.margins[i] for i, (a, b) in enumerate(pairs) if a != b][:1]
    return {"ahead": margins, "ahead_accepted": record.num_accepted}


def compare(name: str, num_shards: int, directory: Path) -> dict[str, object]:
    tokens, vocab_size = write_target(name, directory)
    mesh = model_mesh(num_shards)
    config = replace(ENGINE, token_masks=name == EIGHT_HEADS)  # elsewhere: the step without masks
    ahead = replace(config, max_ahead_nodes=12 if name == AHEAD else 0)
    fusing = dict.fromkeys((None, mesh))
    if name == EIGHT_HEADS:
        fusing = {where: load_fusing_head(*open_new_head(directory), where) for where in fusing}
    single = DeviceEngine(
        *load_target(directory, boundaries=BOUNDARIES), config, fusing=fusing[None]
    )
    split = DeviceEngine(
        *load_target(directory, boundaries=BOUNDARIES, mesh=mesh), ahead, mesh, fusing=fusing[mesh]
    )
    prompts = [tokens[: 6 + 5 * i] for i in range(4)]

    def two_in_three(tokens: list[int]) -> npt.NDArray[np.bool_]:
        return (np.arange(vocab_size) + len(tokens) + tokens[-1]) % 3 != 0

    allow: list[Allow | None] = [two_in_three if config.token_masks else None] * 4
    generate = functools.partial(generate_all, stop_tokens=STOPS, allow=allow)
    alone = generate(single, prompts, SAMPLINGS, NUM_TOKENS)
    guess = guessing([one.tokens for one in alone], vocab_size, right=0.8)
    result: dict[str, object] = {"name": name}
    for kind, others in (
        ("roots", generate(split, prompts, SAMPLINGS, NUM_TOKENS)),
        ("trees", generate(split, prompts, SAMPLINGS, NUM_TOKENS, guess)),
    ):
        margins = [first_difference(*both, NUM_TOKENS) for both in zip(alone, others, strict=True)]
        result[kind] = [margin for margin in margins if margin is not None]
        result[f"{kind}_accepted"] = sum(one.accepted for one in others)
        nearest = max(
            float(np.abs(a.features[0] - b.features[0][: len(a.features[0])]).max())
            for a, b in zip(alone, others, strict=True)
        )
        result[f"{kind}_features"] = nearest
        result[f"{kind}_logprobs"] = max(map(logprob_difference, alone, others))
    if name == AHEAD:
        result |= follow_each_other(split, alone, SAMPLINGS)
    pages = split._pages.addressable_shards  # type: ignore[attr-defined]
    result["pages"] = [list(shard.data.shape) for shard in pages]
    return result


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    for case in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as where:
            print(json.dumps(compare(case, jax.device_count(), Path(where) / case)), flush=True)
