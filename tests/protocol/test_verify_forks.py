"""Choices of one request in verify: they share the prompt's rows and part where their tokens do.

The toy target keeps tokens in its pages, so that a row that one choice wrote into another's page
shows as a wrong token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_verify_machine import A, B, Bench, C, tree, verify
from test_verify_prefix_cache import LONG, features, rows_run
from verify_toy import continuation

from common.types import SamplingParams
from verify_service import commands as c
from verify_service import events as e

PROMPT = LONG  # 13 tokens: three full pages of four; a fork shares rows 0 to 11
SHORT = LONG[:11]  # rows 0 to 9: the third page is shared in part


@pytest.fixture(params=[True, False], ids=["cache", "no_cache"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Forks need no prefix cache."""
    return Bench(prefix_cache=request.param)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed)


def open_all(bench: Bench, tokens: tuple[int, ...] = SHORT, **more: Any) -> None:
    for index, sequence_id in enumerate((A, B, C)):
        fork_of = A if index else b""
        bench.open(sequence_id, tokens, sampling=sampled(index), fork_of=fork_of, **more)


def go_on(bench: Bench, num_rounds: int, tokens: tuple[int, ...] = SHORT) -> dict[bytes, list[int]]:
    """Root-only rounds of all three; their tokens, prompt included."""
    texts = {sequence_id: list(tokens) for sequence_id in (A, B, C)}
    for round_ in range(num_rounds):
        for event in bench.steps():
            if isinstance(event, e.RoundDone):
                texts[event.sequence_id] += event.result.tokens
        for sequence_id, text in texts.items():
            command = verify(round_ + 1, len(text) - 1, tree(text[-1]), acked=round_)
            bench.do(replace(command, sequence_id=sequence_id))
    return texts


def reference(num_tokens: int, tokens: tuple[int, ...] = SHORT) -> dict[bytes, list[int]]:
    return {
        sequence_id: [*tokens, *continuation(tokens, num_tokens, seed)]
        for seed, sequence_id in enumerate((A, B, C))
    }


@pytest.mark.parametrize("tokens", [SHORT, PROMPT, SHORT[:2], SHORT[:1]])
def test_prompt_is_computed_once_and_texts_part(bench: Bench, tokens: tuple[int, ...]) -> None:
    open_all(bench, tokens)
    assert rows_run(bench) == len(tokens) + 2  # and each other choice's root
    bench = Bench()
    open_all(bench, tokens)
    assert go_on(bench, 9, tokens) == reference(9, tokens)


def test_full_pages_are_held_by_all_and_the_last_is_each_ones_own(bench: Bench) -> None:
    open_all(bench)
    bench.steps()
    assert bench.machine.page_counts.live == 2 + 3
    for sequence_id in (A, B):
        bench.do(c.Close(sequence_id=sequence_id, epoch=1))
    assert bench.machine.page_counts.live == 3
    bench.do(c.Close(sequence_id=C, epoch=1))
    assert bench.machine.page_counts.live == 0


def test_others_wait_for_a_prefill_in_several_chunks() -> None:
    bench = Bench(max_step_tokens=8, max_prefill_tokens=4, prefix_cache=False)
    open_all(bench)
    assert rows_run(bench) == len(SHORT) + 2


def test_a_younger_one_does_not_wait_with_them() -> None:
    bench = Bench(max_step_tokens=16, max_prefill_tokens=4)
    bench.open(A, LONG)
    bench.open(B, LONG, fork_of=A)
    bench.open(C, (6, 6))
    plan = bench.launch()
    slots = {work.slot for work in plan.works}
    assert len(slots) == 2
    bench.land(plan)
    bench.steps()


def test_features_of_the_prompt_come_for_each_choice(bench: Bench) -> None:
    open_all(bench, PROMPT, wants_features=True)
    bench.steps()
    sent = features(bench)
    for sequence_id in (A, B, C):
        assert sent[sequence_id] == list(enumerate(PROMPT))


def test_window_of_the_first_bounds_what_features_the_others_get() -> None:
    bench = Bench(feature_window_tokens=4, prefix_cache=False, max_prefill_tokens=4)
    bench.open(A, PROMPT, wants_features=True)
    bench.steps()
    bench.open(B, PROMPT, wants_features=True, fork_of=A)
    assert rows_run(bench) == 1
    rows = features(bench)[B]
    assert rows == list(enumerate(PROMPT))[-len(rows) :]
    assert 4 <= len(rows) < 13


@pytest.mark.parametrize("reason", ["closed", "unknown", "itself", "of another stream", "salt"])
def test_without_its_source_a_choice_is_computed(reason: str) -> None:
    bench = Bench(prefix_cache=False)
    bench.open(A, SHORT, cache_salt=b"x" if reason == "salt" else b"")
    bench.steps()
    if reason == "closed":
        bench.do(c.Close(sequence_id=A, epoch=1))
    stream = 2 if reason == "of another stream" else 1
    fork_of = {"unknown": C, "itself": B}.get(reason, A)
    bench.open(B, SHORT, fork_of=fork_of, stream=stream)
    assert rows_run(bench) == len(SHORT)


def test_opened_again_it_shares_the_prompt_and_keeps_its_own(bench: Bench) -> None:
    """After a fail-over: the first has other tokens by now."""
    texts = reference(6)
    for sequence_id in (A, B, C):
        seed = (A, B, C).index(sequence_id)
        bench.open(
            sequence_id,
            tuple(texts[sequence_id]),
            sampling=sampled(seed),
            num_prompt_tokens=len(SHORT),
            fork_of=A if seed else b"",
            round=6,
        )
    plan_rows = rows_run(bench)
    assert plan_rows <= 17 + 2 * (17 - len(SHORT) + 1)
    for sequence_id, wanted in reference(7).items():
        sequence = bench.machine._registry.need(sequence_id)
        assert sequence.tokens == wanted


def test_rollback_into_the_prompt_leaves_the_others_alone(bench: Bench) -> None:
    open_all(bench)
    bench.steps()
    cut = SHORT[:6]
    bench.do(c.Rollback(sequence_id=B, epoch=2, committed_len=6, round=5))
    bench.do(replace(verify(5, 5, tree(cut[-1]), epoch=2), sequence_id=B))
    bench.steps()
    assert bench.machine._registry.need(B).tokens == [*cut, *continuation(cut, 1, 1)]
    for sequence_id in (A, C):
        text = bench.machine._registry.need(sequence_id).tokens
        command = verify(1, len(text) - 1, tree(text[-1]), acked=0)
        bench.do(replace(command, sequence_id=sequence_id))
    bench.steps()
    for sequence_id in (A, C):
        assert bench.machine._registry.need(sequence_id).tokens == reference(2)[sequence_id]


def test_few_pages_put_choices_out_and_their_texts_stay() -> None:
    """Of three that need fifteen pages, in eight: the youngest wait until an older one ends."""
    bench = Bench(num_pages=8, max_sequences=3)
    open_all(bench, max_total_tokens=32)
    texts = {sequence_id: list(SHORT) for sequence_id in (A, B, C)}
    num_put_out, events = 0, bench.steps()
    while events:
        num_put_out += sum(isinstance(event, e.Preempted) for event in events)
        for event in events:
            if not isinstance(event, e.RoundDone):
                continue
            text, round_ = texts[event.sequence_id], event.result.round
            text += event.result.tokens
            ended = len(text) == len(SHORT) + 12
            bench.do(
                c.Close(sequence_id=event.sequence_id, epoch=1)
                if ended
                else replace(
                    verify(round_ + 1, len(text) - 1, tree(text[-1]), acked=round_),
                    sequence_id=event.sequence_id,
                )
            )
        events = bench.steps()
    assert texts == reference(12)
    assert num_put_out > 0
    assert bench.machine.page_counts.live == 0
