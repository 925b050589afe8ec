"""The real verify process on SmolLM2, driven directly: tokens as transformers gives them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from verify_client import Guess, VerifyClient

from canopy.stack import Stack
from canopy.v1 import types_pb2, verify_pb2

pytestmark = pytest.mark.e2e

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens" / "smollm2_greedy.jsonl"
NUM_PROMPTS, MAX_TOKENS, MIN_MARGIN = 4, 40, 1e-3


@asynccontextmanager
async def verify_client(stack: Stack) -> AsyncIterator[VerifyClient]:
    address = stack.children["verify"].address
    async with grpc.aio.insecure_channel(address) as channel, VerifyClient(channel) as client:
        yield client


def goldens() -> list[dict[str, list[int]]]:
    return [json.loads(line) for line in GOLDENS.read_text().splitlines()[:NUM_PROMPTS]]


@pytest.mark.parametrize("right", [None, 0.0, 0.6], ids=["roots", "wrong trees", "good trees"])
async def test_greedy_tokens_are_those_of_transformers_whatever_the_trees(
    stack: Stack, right: float | None
) -> None:
    async with verify_client(stack) as client:
        info = await client.stub.GetVerifyInfo(verify_pb2.GetVerifyInfoRequest())

        def guess(i: int, truth: list[int]) -> Guess | None:
            vocab_size = info.target.vocab_size
            return None if right is None else Guess(truth, vocab_size, i, right)

        generations = await asyncio.gather(
            *(
                client.generate(
                    golden["prompt_ids"],
                    min(MAX_TOKENS, len(golden["response_ids"])),
                    guess=guess(i, golden["response_ids"]),
                )
                for i, golden in enumerate(goldens())
            )
        )
    for golden, generation in zip(goldens(), generations, strict=True):
        assert not generation.errors
        wanted = golden["response_ids"][: len(generation.response)]
        for got, want, margin in zip(generation.response, wanted, generation.margins, strict=True):
            if got != want:
                assert margin < MIN_MARGIN
                break
    accepted = sum(generation.accepted for generation in generations)
    assert accepted > 30 if right else accepted < 10


async def test_seeded_sampling_gives_the_same_tokens_with_trees_and_without(stack: Stack) -> None:
    sampling = types_pb2.SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    (golden, *_) = goldens()
    async with verify_client(stack) as client:
        alone = await client.generate(golden["prompt_ids"], 32, sampling=sampling)
        guess = Guess(alone.response, 49152, 3, 0.7)
        again = await client.generate(golden["prompt_ids"], 32, sampling=sampling, guess=guess)
    assert again.accepted > 5
    for got, want, margin in zip(again.response, alone.response, again.margins, strict=True):
        if got != want:
            assert margin < MIN_MARGIN
            break
