"""A verify service of two hosts, as two processes whose devices jax joins over gloo: one device's
tokens, drained together, and over together when either is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from engine_driver import Generated, generate
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hosts import Pair, note_states
from verify_client import Generation, Guess, VerifyClient

from benchmarks.tiny_models import VOCAB_SIZE, write_tiny_target
from canopy.v1 import types_pb2, verify_pb2
from common.types import SamplingParams
from models.target import load_target
from tests.e2e.metrics import read_metric
from verify_service.engine import DeviceEngine, EngineConfig

pytestmark = pytest.mark.timeout(900)
"""Two processes compile: minutes, where others compile beside them."""

NUM_TOKENS, MAX_MARGIN = 20, 1e-3
ENGINE = EngineConfig(
    num_pages=64,
    page_size=16,
    max_sequences=4,
    max_context_len=128,
    max_tree_nodes=12,
    max_depth=4,
    row_buckets=(32,),
    max_rows=32,
)
FLAGS = [
    *("--boundaries", "0,1", "--row-buckets", "32", "--max-step-tokens", "32"),
    *("--max-sequences", "4", "--max-prefill-tokens", "16", "--max-context-tokens", "128"),
    *("--kv-pool-tokens", "1024", "--max-tree-nodes", "12", "--max-tree-depth", "4"),
]
PROMPTS = [[5, 17, 99, 3], [200] * 7, list(range(40, 55)), [8]]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(presence_penalty=0.7, repetition_penalty=1.3),  # sets slots on both hosts
    SamplingParams(temperature=1.1, top_p=0.9, frequency_penalty=0.5, seed=9),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("hosts") / "target", num_hidden_layers=2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of compiled programs: the second pair starts faster."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def pair(target: Path, cache: Path, tmp_path: Path) -> Iterator[Pair]:
    flags = ["--model", str(target), "--compile-cache", str(cache), *FLAGS]
    with Pair("verify", flags, tmp_path / "pair") as running:
        yield running


@contextlib.asynccontextmanager
async def client_of(pair: Pair) -> AsyncIterator[VerifyClient]:
    async with grpc.aio.insecure_channel(pair.address) as channel, VerifyClient(channel) as client:
        yield client


def as_message(sampling: SamplingParams) -> types_pb2.SamplingParams:
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    fields = {name: getattr(sampling, name) for name in (*names, "seed")}
    return types_pb2.SamplingParams(**fields)


def assert_near(alone: Generated, other: Generation) -> None:
    assert not other.errors
    wanted = alone.response[: len(other.response)]
    for want, got, margin in zip(wanted, other.response, other.margins, strict=False):
        if want != got:
            assert margin < MAX_MARGIN
            return


async def test_two_hosts_give_the_tokens_of_one_and_drain_together(
    pair: Pair, target: Path, cache: Path
) -> None:
    single = DeviceEngine(*load_target(target, boundaries=[0, 1]), ENGINE)
    alone = generate(single, PROMPTS, SAMPLINGS, NUM_TOKENS)
    assert read_metric(pair.metrics_address, "canopy_verify_hosts_missing") == 0
    assert list(os.scandir(cache)), "compiled programs are kept"
    async with client_of(pair) as client:
        info = await client.stub.GetVerifyInfo(verify_pb2.GetVerifyInfoRequest())
        assert {point.num_tokens for point in info.step_times} == {32}, "the measured curve"
        assert all(point.seconds > 0 for point in info.step_times)
        for right in (None, 0.8):
            others = await asyncio.gather(
                *(
                    client.generate(
                        prompt,
                        NUM_TOKENS,
                        sampling=as_message(sampling),
                        guess=None if right is None else Guess(one.response, VOCAB_SIZE, 1, right),
                        wants_features=True,
                    )
                    for prompt, sampling, one in zip(PROMPTS, SAMPLINGS, alone, strict=True)
                )
            )
            for one, other in zip(alone, others, strict=True):
                assert_near(one, other)
        assert sum(other.accepted for other in others) > 10
        late = asyncio.create_task(client.generate(PROMPTS[0], 60))
        await asyncio.sleep(0.2)
        pair.follower.end(signal.SIGTERM)
        assert len((await late).response) >= 60
    assert await asyncio.to_thread(pair.leader.exit_code) == 0
    assert await asyncio.to_thread(pair.follower.exit_code) == 0


async def test_a_lost_follower_ends_the_leader_visibly(pair: Pair) -> None:
    async with grpc.aio.insecure_channel(pair.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        states: list[int] = []
        running = asyncio.create_task(note_states(watch, states))
        async with VerifyClient(channel) as client:
            generating = asyncio.create_task(client.generate(PROMPTS[0], 100))
            await asyncio.sleep(0.2)
            pair.follower.end(signal.SIGKILL)
            assert await asyncio.to_thread(pair.leader.exit_code) == 1
            generating.cancel()
        await running
    status = health_pb2.HealthCheckResponse.ServingStatus
    assert states == [status.SERVING, status.NOT_SERVING]
    (line,) = pair.leader.last_words
    assert "host 1 of the slice is gone" in line


@pytest.mark.slow
def test_a_lost_leader_ends_the_follower(pair: Pair) -> None:
    pair.leader.end(signal.SIGKILL)
    assert pair.follower.exit_code() != 0
