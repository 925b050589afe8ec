"""A draft service of two hosts, as two processes whose devices jax joins over gloo: one device's
trees, drained together, and over together when either is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hosts import Pair, note_states

from benchmarks.tiny_models import VOCAB_SIZE, write_tiny_target
from canopy.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from common.types import DraftTree, TreeShape
from draft_service.engine import DeviceEngine, EngineConfig
from models.eagle3 import load_head
from models.eagle3.init import init_head
from tests.e2e.metrics import read_metric
from tests.parity.draft_tiny import grow
from tests.protocol.test_draft_service import block, events, extended, opened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
"""Two processes compile: minutes, where others compile beside them. What a follower does with each
operation is also tested within one process (test_following_engines.py)."""

TREE = TreeShape(max_depth=3, top_k=3, max_nodes=12)
ENGINE = EngineConfig(
    num_pages=64, page_size=16, max_context_len=128, tree=TREE, max_sequences=2, max_draft_rows=4,
    max_extend_rows=32,
)  # fmt: skip
FLAGS = [
    *("--max-depth", "3", "--top-k", "3", "--max-nodes", "12", "--levels", "all"),
    *("--max-sequences", "4", "--max-step-sequences", "2", "--max-draft-tokens", "4"),
    *("--max-extend-tokens", "32", "--max-context-tokens", "128", "--kv-pool-tokens", "1024"),
]
LENGTHS = (70, 33, 9)
"""Tokens of the sequences before their first round: three chunks, two, none."""

COMMITS = (1, 3, 2, 1)
"""Tokens that the rounds commit."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a target and a head whose vocabulary two chips cannot share evenly."""
    where = tmp_path_factory.mktemp("hosts")
    target = write_tiny_target(where / "target")
    init_head(target, where / "head", draft_vocab_size=39)
    return where / "head", target


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of compiled programs: the second pair starts faster."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def pair(models: tuple[Path, Path], cache: Path, tmp_path: Path) -> Iterator[Pair]:
    head, target = models
    flags = ["--head", str(head), "--target", str(target), "--compile-cache", str(cache), *FLAGS]
    with Pair("draft", flags, tmp_path / "pair") as running:
        yield running


class Drafting:
    """One sequence, its history made up: tokens, and a row of features for each."""

    def __init__(self, number: int, width: int) -> None:
        self.sequence_id = bytes([number]) * 16
        random = np.random.default_rng(number)
        length = LENGTHS[number] + sum(COMMITS)
        self.tokens: list[int] = random.integers(0, VOCAB_SIZE, length).tolist()
        self.features = random.normal(0.0, 1.0, (length, width)).astype(np.float32)
        self.num_committed = LENGTHS[number]
        self.num_sent = 0

    def open(self) -> draft_pb2.DraftCommand:
        tokens = self.tokens[: self.num_committed]
        command = opened(self.sequence_id, tokens)
        command.open.max_total_tokens = ENGINE.max_context_len
        return command

    def extend(self, round_: int, count: int) -> draft_pb2.DraftCommand:
        before, self.num_committed = self.num_committed, self.num_committed + count
        tokens = self.tokens[before : self.num_committed]
        return extended(self.sequence_id, round_, before, tokens)

    def new_features(self) -> types_pb2.FeatureBlock:
        first, self.num_sent = self.num_sent, self.num_committed - 1
        message = block(self.sequence_id, self.features, first, self.num_sent)
        message.row_width = self.features.shape[1]
        return message

    def tree_of(self, engine: DeviceEngine) -> DraftTree:
        """What one device grows here."""
        tokens = self.tokens[: self.num_committed]
        ends = [*range(32, len(tokens) - 4, 32), len(tokens) - 4]
        return grow(engine, tokens, self.features, ends, list(range(8)))


@contextlib.asynccontextmanager
async def calls_of(pair: Pair) -> AsyncIterator[tuple[Any, Any]]:
    """A Draft and a SendFeatures call."""
    async with grpc.aio.insecure_channel(pair.address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        call, features = stub.Draft(), stub.SendFeatures()
        await features.read()  # credit
        yield call, features


async def write(call: Any, *commands: draft_pb2.DraftCommand) -> None:
    await call.write(draft_pb2.DraftRequest(commands=commands))


async def test_two_hosts_grow_the_trees_of_one_and_drain_together(
    pair: Pair, models: tuple[Path, Path]
) -> None:
    head, params = load_head(*models)
    single = DeviceEngine(head, params, ENGINE)
    assert read_metric(pair.metrics_address, "canopy_draft_hosts_missing") == 0
    all_ = [Drafting(number, head.feature_size) for number in range(len(LENGTHS))]
    async with calls_of(pair) as (call, features):
        await write(call, *(one.open() for one in all_))
        await events(call, len(all_))
        for round_, count in enumerate(COMMITS, 1):
            if round_ == len(COMMITS):
                pair.follower.end(signal.SIGTERM)  # what is open goes on to its end
                await asyncio.sleep(0.5)
            await write(call, *(one.extend(round_, count) for one in all_))
            blocks = [one.new_features() for one in all_]
            await features.write(draft_pb2.SendFeaturesRequest(blocks=blocks))
            trees = {event.sequence_id: event.tree for event in await events(call, len(all_))}
            for one in all_:
                assert_same_tree(trees[one.sequence_id], one.tree_of(single))
        closes = [
            draft_pb2.DraftCommand(
                sequence_id=one.sequence_id, epoch=1, close=draft_pb2.DraftClose()
            )
            for one in all_
        ]
        await write(call, *closes)
        await call.done_writing()
        await features.done_writing()
        assert await asyncio.to_thread(pair.leader.exit_code) == 0
    assert await asyncio.to_thread(pair.follower.exit_code) == 0


def assert_same_tree(got: draft_pb2.DraftTreeReady, wanted: DraftTree) -> None:
    assert list(got.tree.tokens) == wanted.tokens.tolist()
    assert list(got.tree.parents)[1:] == wanted.parents.tolist()[1:]
    np.testing.assert_allclose(got.tree.scores, wanted.scores, atol=2e-4)
    assert len(got.tree.tokens) == TREE.max_nodes


async def test_a_lost_follower_ends_the_leader_visibly(pair: Pair) -> None:
    states: list[int] = []
    async with grpc.aio.insecure_channel(pair.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        noting = asyncio.create_task(note_states(watch, states))
        async with calls_of(pair) as (call, _):
            await write(call, opened(b"1" * 16, [1, 2, 3]))
            await events(call, 1)
            pair.follower.end(signal.SIGKILL)
            assert await asyncio.to_thread(pair.leader.exit_code) == 1
        await noting
    status = health_pb2.HealthCheckResponse.ServingStatus
    assert states == [status.SERVING, status.NOT_SERVING]
    (line,) = pair.leader.last_words
    assert "host 1 of the slice is gone" in line


def test_a_lost_leader_ends_the_follower(pair: Pair) -> None:
    pair.leader.end(signal.SIGKILL)
    assert pair.follower.exit_code() != 0
