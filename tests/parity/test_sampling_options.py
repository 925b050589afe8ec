"""Penalties, biases, least lengths and log-probabilities through the real engine, mixed in a batch.

The oracle decodes token by token: a dense forward over the whole sequence, the options applied to
token lists in float64, the pick with noise from Python integers. Trees, neighbours, slots and
recomputation must change nothing, up to near ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_driver import Allow, Generated, Guess, first_difference, generate, guessing, roots_only
from model_files import dense_causal
from test_distribution import TARGET

from common.types import SamplingParams
from kernels.adjust_logits.reference import reference_adjust
from kernels.sample_and_accept.reference import reference_pick
from kernels.token_logprobs.reference import reference_logprobs, reference_top
from models.target import init_target, target_forward, target_logits
from verify_service.engine import DeviceEngine, EngineConfig

NUM_TOKENS, MARGIN = 18, 1e-3
STOPS = (3, 8)
PROMPTS = [[3, 7, 1, 5], [2, 2, 9], [4], [11, 0, 6, 6, 6, 1], [10, 3], [5, 5, 5], [7, 1], [8, 2, 4]]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(presence_penalty=1.5, ignore_eos=True),
    SamplingParams(frequency_penalty=0.8, repetition_penalty=1.4, min_tokens=9),
    SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.6, ignore_eos=True, logprobs=True),
    SamplingParams(logit_bias=((2, 3.5), (7, -100.0)), logprobs=True, top_logprobs=3),
    SamplingParams(temperature=1.2, seed=2**60 + 1, top_k=6, frequency_penalty=-1.0, min_tokens=4),
    SamplingParams(temperature=0.7, seed=9, top_p=0.8, min_tokens=30, logit_bias=((3, 5.0),)),
    SamplingParams(presence_penalty=-0.5, repetition_penalty=0.8, top_logprobs=12, logprobs=True),
]


def two_in_three(tokens: list[int]) -> np.ndarray:
    """Which may follow depends on the path, as with a grammar."""
    return (np.arange(TARGET.vocab_size) + len(tokens) + tokens[-1]) % 3 != 0


ALLOWS: list[Allow | None] = [two_in_three, None, None, *[two_in_three] * 4, None]


@pytest.fixture(scope="module")
def params() -> dict[str, object]:
    return jax.tree.map(lambda leaf: leaf * (8.0 if leaf.ndim > 1 else 1.0), init_target(TARGET, 5))


@pytest.fixture(scope="module")
def engine(params: dict[str, object]) -> DeviceEngine:
    config = EngineConfig(
        num_pages=64,
        page_size=8,
        max_sequences=8,
        max_context_len=64,
        max_tree_nodes=10,
        max_depth=3,
        row_buckets=(128,),
        max_rows=128,
        token_masks=True,
    )
    return DeviceEngine(TARGET, params, config)


@pytest.fixture(scope="module")
def next_logits(params: dict[str, object]) -> Callable[[list[int]], np.ndarray]:
    length = 32

    @jax.jit
    def dense(tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(length, dtype=jnp.int32)
        attend = dense_causal(TARGET.attention_scale, length)
        hidden, _, _ = target_forward(TARGET, params, tokens, positions, attend)
        return target_logits(TARGET, params, hidden)

    def last_row(tokens: list[int]) -> np.ndarray:
        padded = np.array(tokens + [0] * (length - len(tokens)), np.int32)
        return np.asarray(dense(padded))[len(tokens) - 1]

    return last_row


@pytest.fixture(scope="module")
def alone(engine: DeviceEngine) -> list[Generated]:
    return generate(engine, PROMPTS, SAMPLINGS, NUM_TOKENS, stop_tokens=STOPS)


def adjusted(
    logits: np.ndarray, sampling: SamplingParams, one: Generated, place: int
) -> np.ndarray:
    return reference_adjust(
        logits,
        one.tokens[: one.num_prompt],
        one.response[:place],
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        repetition=sampling.repetition_penalty,
        bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        stop_tokens=() if sampling.ignore_eos else STOPS,
    )


def num_changed_of_the_oracles(
    generated: list[Generated],
    allows: Sequence[Allow | None],
    next_logits: Callable[[list[int]], np.ndarray],
) -> int:
    """Picks that options and masks changed. Asserts that all are the oracle's."""
    num_changed = 0
    for sampling, one, allow in zip(SAMPLINGS, generated, allows, strict=True):
        for place, token in enumerate(one.response):
            before = one.tokens[: one.num_prompt + place]
            logits = next_logits(before)
            settings = {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "seed_lo": sampling.seed & 0xFFFFFFFF,
                "seed_hi": sampling.seed >> 32,
                "position": len(before),
            }
            wanted = adjusted(logits, sampling, one, place)
            mask = None if allow is None else allow(before)
            pick = reference_pick(wanted, token_mask=mask, **settings).pick
            assert pick == token or one.margins[place] < MARGIN
            num_changed += pick != reference_pick(logits, **settings).pick
    return num_changed


def test_every_token_is_the_oracles(
    alone: list[Generated], next_logits: Callable[[list[int]], np.ndarray]
) -> None:
    num_changed = num_changed_of_the_oracles(alone, [None] * len(alone), next_logits)
    assert num_changed > 30, "the options changed next to nothing: nothing was tested"


def test_least_lengths_hold_and_stops_stop(alone: list[Generated]) -> None:
    for sampling, one in zip(SAMPLINGS, alone, strict=True):
        stops = [p for p, token in enumerate(one.response) if token in STOPS]
        if sampling.ignore_eos:
            assert len(one.response) >= NUM_TOKENS
        else:
            assert all(place >= sampling.min_tokens for place in stops)
            assert all(place == len(one.response) - 1 for place in stops)


def assert_same(ours: list[Generated], theirs: list[Generated]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        length = min(len(one.response), len(other.response), NUM_TOKENS)
        margin = first_difference(one, other, length)
        assert margin is None or margin < MARGIN


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_trees_change_nothing(engine: DeviceEngine, alone: list[Generated], right: float) -> None:
    guess: Guess = guessing([one.tokens for one in alone], TARGET.vocab_size, right)
    with_trees = generate(engine, PROMPTS, SAMPLINGS, NUM_TOKENS, guess, STOPS)
    assert_same(alone, with_trees)
    assert sum(one.accepted for one in with_trees) > (60 if right else 5)
    for sampling, one, other in zip(SAMPLINGS, alone, with_trees, strict=True):
        length = min(len(one.logprobs), len(other.logprobs))
        np.testing.assert_allclose(one.logprobs[:length], other.logprobs[:length], atol=1e-4)
        assert len(other.top_logprobs) == (len(other.response) if sampling.top_logprobs else 0)


def test_neighbours_and_slots_change_nothing(engine: DeviceEngine, alone: list[Generated]) -> None:
    backwards = generate(engine, PROMPTS[::-1], SAMPLINGS[::-1], NUM_TOKENS, stop_tokens=STOPS)
    assert_same(alone, backwards[::-1])
    for number in (2, 3, 4):
        single = generate(
            engine, PROMPTS[number : number + 1], SAMPLINGS[number : number + 1], NUM_TOKENS,
            stop_tokens=STOPS,
        )  # fmt: skip
        assert_same(alone[number : number + 1], single)


def test_recomputing_in_the_middle_changes_nothing(
    engine: DeviceEngine, alone: list[Generated]
) -> None:
    """As after a preemption: KV and what the slot remembers are made again from the tokens."""
    halfway = generate(engine, PROMPTS, SAMPLINGS, 6, stop_tokens=STOPS)
    for one in halfway:
        one.kv_len = 0
    done = generate(engine, PROMPTS, SAMPLINGS, NUM_TOKENS, stop_tokens=STOPS, resume=halfway)
    assert_same(alone, done)


def test_cutting_back_changes_nothing(engine: DeviceEngine, alone: list[Generated]) -> None:
    """As after a rollback: tokens behind the cut were counted and must not be any more."""
    ahead = generate(engine, PROMPTS, SAMPLINGS, 10, stop_tokens=STOPS)
    for one in ahead:
        one.cut(one.num_prompt + 4)
    done = generate(engine, PROMPTS, SAMPLINGS, NUM_TOKENS, roots_only, STOPS, resume=ahead)
    assert_same(alone, done)


def test_logprobs_are_the_models_own(
    alone: list[Generated], next_logits: Callable[[list[int]], np.ndarray]
) -> None:
    for sampling, one in zip(SAMPLINGS, alone, strict=True):
        if not sampling.logprobs:
            assert not any(one.logprobs)
            assert not one.top_logprobs
            continue
        for place, token in enumerate(one.response):
            logits = next_logits(one.tokens[: one.num_prompt + place])
            wanted = reference_logprobs(logits)
            assert one.logprobs[place] == pytest.approx(wanted[token], abs=1e-4)
            if sampling.top_logprobs:
                tokens, values = zip(*one.top_logprobs[place], strict=True)
                top = reference_top(logits, sampling.top_logprobs)
                np.testing.assert_allclose(values, wanted[list(top)], atol=1e-4)
                np.testing.assert_allclose(wanted[list(tokens)], values, atol=1e-4)


def test_options_need_the_sequences_tokens(engine: DeviceEngine) -> None:
    with pytest.raises(ValueError, match="history: None; penalties"):
        generate(engine, [[1]], [SAMPLINGS[1]], 1, with_history=False)


@pytest.fixture(scope="module")
def masked(engine: DeviceEngine) -> list[Generated]:
    return generate(engine, PROMPTS, SAMPLINGS, NUM_TOKENS, stop_tokens=STOPS, allow=ALLOWS)


def test_masked_tokens_are_never_picked_and_all_others_are_the_oracles(
    alone: list[Generated],
    masked: list[Generated],
    next_logits: Callable[[list[int]], np.ndarray],
) -> None:
    for allow, free, one in zip(ALLOWS, alone, masked, strict=True):
        if allow is None:
            assert_same([free], [one])  # a neighbour's mask changes nothing
            continue
        for place, token in enumerate(one.response):
            assert allow(one.tokens[: one.num_prompt + place])[token]
    assert num_changed_of_the_oracles(masked, ALLOWS, next_logits) > 30


@pytest.mark.parametrize("truth", ["masked", "alone"])
def test_trees_change_nothing_of_what_masks_allow(
    engine: DeviceEngine, truth: str, request: pytest.FixtureRequest
) -> None:
    """Along the tokens without masks, trees are full of what must not be accepted."""
    masked: list[Generated] = request.getfixturevalue("masked")
    likely: list[Generated] = request.getfixturevalue(truth)
    guess = guessing([one.tokens for one in likely], TARGET.vocab_size, 1.0)
    with_trees = generate(engine, PROMPTS, SAMPLINGS, NUM_TOKENS, guess, STOPS, allow=ALLOWS)
    assert_same(masked, with_trees)
    for allow, one in zip(ALLOWS, with_trees, strict=True):
        for place in range(one.num_prompt, len(one.tokens)):
            assert allow is None or allow(one.tokens[:place])[one.tokens[place]]
    assert sum(one.accepted for one in with_trees) > (60 if truth == "masked" else 20)


def test_only_steps_with_a_mask_run_programs_with_masks(
    engine: DeviceEngine,
    params: dict[str, object],
    alone: list[Generated],
    masked: list[Generated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = DeviceEngine(TARGET, params, replace(engine.config, token_masks=False))
    with pytest.raises(ValueError, match="token_mask: the engine was made without token_masks"):
        generate(plain, PROMPTS[:1], SAMPLINGS[:1], 1, allow=ALLOWS[:1])
    both = engine._programs
    for allow in (None, two_in_three):
        only = {b: program for b, program in both.items() if bool(b.mask_words) == bool(allow)}
        monkeypatch.setattr(engine, "_programs", only)
        generate(engine, PROMPTS[:1], SAMPLINGS[:1], 3, allow=[allow])
        assert all(bool(b.mask_words) == bool(allow) for b in only), "compiled what it has not"
