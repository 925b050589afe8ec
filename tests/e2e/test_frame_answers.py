"""Answers of the real three processes: the target's own tokens, however they were drafted."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.lossless import MARGIN, compare, first_difference
from benchmarks.prompts import GOLDENS, Conversation, read_conversations
from canopy.client import Client
from canopy.results import Chunk, FinishReason, Generation, Message, Options

pytestmark = pytest.mark.e2e

FAST, REST = slice(0, 4), slice(4, None)
QUESTION = [Message("user", "Why does bread rise?")]


def goldens() -> list[Conversation]:
    return read_conversations(GOLDENS)


def assert_golden(client: Client, golden: Conversation, speculation: bool) -> None:
    options = Options(
        max_tokens=len(golden.golden), speculation=speculation, token_ids=True, pick_margins=True
    )
    answer = client.generate(golden.messages, options)
    found = compare(0, "golden", answer, golden.golden, golden.golden_margins)
    assert found is None or found.margin < MARGIN, found
    if not speculation:
        assert answer.completion.speculation.num_drafted == 0


@pytest.mark.parametrize("speculation", [True, False], ids=["speculative", "root_only"])
def test_greedy_answers_equal_transformers(client: Client, speculation: bool) -> None:
    """One alone, the others side by side."""
    first, *others = goldens()[FAST]
    assert_golden(client, first, speculation)
    with ThreadPoolExecutor(len(others)) as pool:
        list(pool.map(lambda golden: assert_golden(client, golden, speculation), others))


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [True, False], ids=["speculative", "root_only"])
@pytest.mark.parametrize("golden", goldens()[REST])
def test_every_other_greedy_answer_equals_transformers(
    client: Client, golden: Conversation, speculation: bool
) -> None:
    assert_golden(client, golden, speculation)


FILTERS = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 50}]
SHAPES = [
    {"speculation": False},
    {"speculation": True},
    {"speculation": True, "max_tree_nodes": 5, "max_depth": 2},
]


def test_seeded_sampling_gives_one_text_with_any_tree(client: Client) -> None:
    base = Options(max_tokens=32, temperature=0.8, seed=2026, token_ids=True, pick_margins=True)

    def answer(filters: Any, shape: Any) -> Generation:
        return client.generate(QUESTION, dataclasses.replace(base, **filters, **shape))

    with ThreadPoolExecutor(len(FILTERS) * len(SHAPES)) as pool:
        asked = [[pool.submit(answer, filters, shape) for shape in SHAPES] for filters in FILTERS]
        for of_filter in asked:
            plain, *others = [one.result() for one in of_filter]
            assert plain.completion.seed == 2026
            for other in others:
                found = compare(0, "root_only", other, plain.token_ids, plain.pick_margins)
                assert found is None or found.margin < MARGIN, found


def test_other_seed_gives_other_text(client: Client) -> None:
    texts = {
        client.generate(QUESTION, Options(max_tokens=16, temperature=1.0, seed=seed)).text
        for seed in range(2)
    }
    assert len(texts) == 2


def test_unset_seed_is_returned_and_repeats_the_text(client: Client) -> None:
    first = client.generate(QUESTION, Options(max_tokens=16, temperature=1.0))
    again = client.generate(
        QUESTION, Options(max_tokens=16, temperature=1.0, seed=first.completion.seed)
    )
    assert again.text == first.text


def test_speculation_emits_more_than_one_token_per_round(client: Client) -> None:
    answer = client.generate(QUESTION, Options(max_tokens=48, ignore_eos=True, token_ids=True))
    stats = answer.completion.speculation
    assert stats.num_accepted > 0
    assert stats.acceptance_length > 1
    assert stats.num_emitted >= len(answer.token_ids) == 48
    assert stats.num_rounds < 48
    assert answer.completion.finish_reason is FinishReason.LENGTH


def test_three_kinds_of_prompt_say_the_same(client: Client) -> None:
    golden = goldens()[0]
    chat = client.generate(golden.messages, Options(max_tokens=12))
    ids = client.generate(read_prompt_ids(), Options(max_tokens=12))
    assert chat.text == ids.text
    text = client.generate("The capital of France is", Options(max_tokens=8))
    assert "Paris" in text.text


def read_prompt_ids() -> list[int]:
    import json

    line = GOLDENS.read_text(encoding="utf-8").splitlines()[0]
    ids: list[int] = json.loads(line)["prompt_ids"]
    return ids


def test_stop_string_ends_the_text_before_it(client: Client) -> None:
    whole = client.generate(QUESTION, Options(max_tokens=40)).text
    stop = whole[len(whole) // 2 :][:7]
    answer = client.generate(QUESTION, Options(max_tokens=40, stop=(stop,)))
    assert answer.text == whole[: whole.index(stop)]
    assert answer.completion.finish_reason is FinishReason.STOP
    assert answer.completion.matched_stop == stop


def test_stop_token_ends_the_answer(client: Client) -> None:
    whole = client.generate(QUESTION, Options(max_tokens=24, token_ids=True))
    stop = whole.token_ids[12]
    answer = client.generate(
        QUESTION, Options(max_tokens=24, token_ids=True, stop_token_ids=(stop,))
    )
    end = whole.token_ids.index(stop)
    assert answer.token_ids[:end] == whole.token_ids[:end]
    assert len(answer.token_ids) <= end + 1
    assert answer.completion.matched_stop == stop


def test_chunks_never_split_a_character(client: Client) -> None:
    prompt = [Message("user", "Repeat exactly: 🧲 naïve café — 東京 🌲🌲")]
    chunks = [
        event.text
        for event in client.stream(prompt, Options(max_tokens=40, ignore_eos=True))
        if isinstance(event, Chunk)
    ]
    whole = "".join(chunks)
    settled = whole.rstrip("\N{REPLACEMENT CHARACTER}")  # the length limit may cut the last one
    assert "\N{REPLACEMENT CHARACTER}" not in settled


def test_traced_trees_explain_every_token(client: Client) -> None:
    answer = client.generate(
        QUESTION, Options(max_tokens=32, ignore_eos=True, token_ids=True, trace=True)
    )
    emitted: list[int] = []
    for played in answer.rounds:
        assert all(parent < node for node, parent in enumerate(played.parents))
        assert list(played.scores) == sorted(played.scores, reverse=True)
        path = (0, *played.accepted_nodes)
        assert all(played.parents[b] == a for a, b in itertools.pairwise(path))
        emitted += [played.tokens[node] for node in played.accepted_nodes]
        emitted.append(played.bonus_token)
        assert len(played.texts) == len(played.tokens)
    assert first_difference(tuple(emitted[:32]), answer.token_ids) is None


MIXED_OPTIONS = [
    Options(repetition_penalty=1.3, presence_penalty=0.4),
    Options(temperature=0.8, seed=11, frequency_penalty=0.7, top_p=0.95),
    Options(logit_bias={198: -100.0, 260: 2.0}, logprobs=True, top_logprobs=5),
    Options(min_tokens=20, temperature=1.0, seed=3, top_k=50),
    Options(),
]


def test_options_mixed_in_a_batch_give_the_same_tokens_with_trees_and_without(
    client: Client,
) -> None:
    def answer(options: Options, speculation: bool) -> Generation:
        return client.generate(
            QUESTION,
            dataclasses.replace(
                options,
                max_tokens=32,
                token_ids=True,
                pick_margins=True,
                speculation=speculation,
            ),
        )

    with ThreadPoolExecutor(2 * len(MIXED_OPTIONS)) as pool:
        trees = [pool.submit(answer, options, True) for options in MIXED_OPTIONS]
        roots = [pool.submit(answer, options, False) for options in MIXED_OPTIONS]
        pairs = [(a.result(), b.result()) for a, b in zip(trees, roots, strict=True)]
    for options, (ours, theirs) in zip(MIXED_OPTIONS, pairs, strict=True):
        found = compare(0, "root_only", ours, theirs.token_ids, theirs.pick_margins)
        assert found is None or found.margin < MARGIN, found
        assert len(ours.logprobs) == (len(ours.token_ids) if options.logprobs else 0)
        assert len(ours.token_ids) >= (options.min_tokens or 0)
    biased, plain = pairs[2][0], pairs[4][0]
    assert 198 not in biased.token_ids
    assert biased.token_ids != plain.token_ids
    for token, logprob, top in zip(
        biased.token_ids, biased.logprobs, biased.top_logprobs, strict=True
    ):
        assert len(top) == 5
        assert logprob <= top[0][1] <= 0.0
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
