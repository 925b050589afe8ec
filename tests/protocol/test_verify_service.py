"""The verify service over real gRPC with the real engine, on a tiny random Llama."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import jax
import numpy as np
import pytest
from verify_client import Generation, Guess, VerifyClient

from canopy.v1 import types_pb2, verify_pb2, verify_pb2_grpc
from common.metrics import Metrics
from common.outbox import MAX_EVENTS, Outbox
from models.config import TargetConfig
from models.rope import RopeConfig
from models.target import init_target
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.limits import VerifyLimits
from verify_service.loop import DeviceLost, VerifyLoop
from verify_service.machine import VerifyMachine
from verify_service.metrics import VerifyMetrics
from verify_service.service import VerifyServicer
from verify_service.streams import StreamHub

VOCAB, HIDDEN = 32, 16
TARGET = TargetConfig(
    family="llama", vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=4, mlp_size=24, norm_eps=1e-5, rope=RopeConfig(theta=10_000.0),
    tied_embeddings=False, max_positions=128, windows=(None, None), boundaries=(0, 1, 2),
)  # fmt: skip
ENGINE = EngineConfig(
    num_pages=24, page_size=4, max_sequences=4, max_context_len=64, max_tree_nodes=12,
    row_buckets=(), max_rows=32, min_rows=8, max_stop_tokens=4,
)  # fmt: skip
LIMITS = VerifyLimits(
    vocab_size=VOCAB, max_context_len=64, max_tree_nodes=12, max_tree_depth=16, max_sequences=4,
    max_waiting_sequences=16, page_size=4, num_pages=24, max_step_tokens=32, max_prefill_tokens=12,
    max_stop_tokens=4, grace_seconds=20.0,
)  # fmt: skip
PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(3 + 5 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def engine() -> DeviceEngine:
    # Larger weights than a fresh model's, so that its choices differ from place to place.
    params = jax.tree.map(lambda x: x * (8.0 if x.ndim > 1 else 1.0), init_target(TARGET, 5))
    engine = DeviceEngine(TARGET, params, ENGINE)
    engine.warm_up()
    return engine


@dataclass
class Served:
    machine: VerifyMachine
    loop: VerifyLoop
    task: asyncio.Task[None]
    channel: grpc.aio.Channel
    metrics: Metrics

    def scraped(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"canopy_verify_{name}") or 0.0


@asynccontextmanager
async def served(engine: Any) -> AsyncIterator[Served]:
    machine, hub, metrics = VerifyMachine(LIMITS), StreamHub(), Metrics("verify")
    loop = VerifyLoop(
        machine, engine, deliver=hub.deliver, on_features=hub.wake_receivers,
        metrics=VerifyMetrics(metrics, 16, 32), gather_seconds=0.001,
    )  # fmt: skip
    servicer = VerifyServicer(hub)
    servicer.loop, servicer.info = loop, verify_pb2.GetVerifyInfoResponse()
    server = grpc.aio.server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    task = asyncio.create_task(loop.run())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(machine, loop, task, channel, metrics)
    finally:
        hub.close_all()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loop.stop()
        await server.stop(1)


async def settled(machine: VerifyMachine) -> None:
    """Waits until every sequence is closed; then nothing may be held."""
    async with asyncio.timeout(10):
        while machine.num_sequences or machine.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    machine.check_balance()
    assert machine.page_counts.available == LIMITS.num_pages


def assert_same_up_to_near_ties(one: Generation, other: Generation) -> None:
    for place, (a, b) in enumerate(zip(one.response, other.response, strict=True)):
        if a != b:
            assert min(one.margins[place], other.margins[place]) < 1e-3
            return


@pytest.mark.parametrize("method", ["Verify", "ReceiveFeatures"])
async def test_bytes_that_are_no_request_end_their_own_call(
    engine: DeviceEngine, method: str
) -> None:
    async with served(engine) as s:
        call = s.channel.stream_stream(f"/canopy.v1.VerifyService/{method}")(
            iter([b"\xff" * 64]), metadata=(("canopy-link", "raw"),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "a frame is no message of this stream" in str(caught.value.details())
        assert not s.task.done()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_any_tree_gives_the_tokens_of_root_only_decoding(
    engine: DeviceEngine, temperature: float
) -> None:
    """Six sequences on four slots, prompts in chunks, pages for a part of them."""
    sampling = types_pb2.SamplingParams(temperature=temperature, seed=11)
    async with served(engine) as s, VerifyClient(s.channel) as client:
        alone = [await client.generate(p, 24, sampling=sampling) for p in PROMPTS]
        assert s.scraped("gather_seconds_count") == 0.0  # nobody to wait for
        guesses = [Guess(g.response, VOCAB, i, 0.7) for i, g in enumerate(alone)]
        together = await asyncio.gather(
            *(
                client.generate(p, 24, sampling=sampling, guess=guess)
                for p, guess in zip(PROMPTS, guesses, strict=True)
            )
        )
        assert s.scraped("gather_seconds_count") > 0.0
        for one, other in zip(alone, together, strict=True):
            assert not one.errors
            assert not other.errors
            assert_same_up_to_near_ties(one, other)
        assert sum(g.accepted for g in together) > 20
        await settled(s.machine)


async def test_features_of_every_row_arrive_within_the_credit(engine: DeviceEngine) -> None:
    async with served(engine) as s, VerifyClient(s.channel) as client:
        row_bytes = 3 * HIDDEN * 4
        client.receive_features(credit_bytes=5 * row_bytes)
        generation = await client.generate(PROMPTS[3], 12, wants_features=True)
        guess = Guess(generation.response, VOCAB, 1, 1.0)
        await client.generate(PROMPTS[3], 12, wants_features=True, guess=guess)
        await asyncio.sleep(0.2)
        root_only, with_trees = client.features.values()
        # A closed sequence has no more to send: its last rows may be missing.
        for blocks in (root_only, with_trees):
            position = 0
            for block in blocks:
                assert block.position == position
                assert block.rows.nbytes <= 5 * row_bytes
                position += len(block.rows)
            assert position >= len(PROMPTS[3])
        a, b = (np.concatenate([x.rows for x in blocks]) for blocks in (root_only, with_trees))
        rows = min(len(a), len(b))
        np.testing.assert_allclose(a[:rows], b[:rows], atol=1e-4)


async def test_no_feature_is_sent_before_the_first_credit(engine: DeviceEngine) -> None:
    async with served(engine) as s, VerifyClient(s.channel) as client:
        client.receive_features(credit_bytes=0)
        await client.generate(PROMPTS[0], 2, wants_features=True)
        await asyncio.sleep(0.1)
        assert client.features == {}


def open_command(sequence_id: bytes, **fields: Any) -> verify_pb2.VerifyCommand:
    body: dict[str, Any] = {
        "tokens": PROMPTS[0],
        "num_prompt_tokens": len(PROMPTS[0]),
        "max_total_tokens": 40,
    }
    return verify_pb2.VerifyCommand(
        sequence_id=sequence_id, epoch=1, open=verify_pb2.VerifyOpen(**(body | fields))
    )


async def test_malformed_commands_are_errors_of_their_own_and_the_stream_lives(
    engine: DeviceEngine,
) -> None:
    def tree(**fields: Any) -> verify_pb2.VerifyTree:
        return verify_pb2.VerifyTree(round=1, kv_len=3, tree=types_pb2.DraftTree(**fields))

    good, ids = secrets.token_bytes(16), [secrets.token_bytes(16) for _ in range(8)]
    penalty = types_pb2.SamplingParams(presence_penalty=2.5)
    unseeded = types_pb2.SamplingParams(temperature=0.7)
    bad = [
        (open_command(b"abc"), "INVALID", "sequence_id: 3 bytes; must be 16"),
        (verify_pb2.VerifyCommand(sequence_id=ids[1], epoch=1), "INVALID", "command: none"),
        (open_command(ids[2], sampling=penalty), "INVALID", "presence_penalty: 2.5"),
        (open_command(ids[3], sampling=unseeded), "INVALID", "sampling.seed: unset"),
        (open_command(ids[5], tokens=[VOCAB]), "INVALID", "tokens: one is outside"),
    ]
    trees = [
        (tree(tokens=[1, 2], parents=[0], scores=[0, -1]), "2 tokens, 1 parents and 2 scores"),
        (tree(tokens=[1, 2**31], parents=[0, 0], scores=[0, -1]), r"2**31 or more"),
        (tree(), "tree has 0 nodes"),
    ]
    async with served(engine) as s, VerifyClient(s.channel) as client:
        client.send(*(command for command, _, _ in bad), open_command(good))
        for command, code, message in bad:
            error = (await client.event(command.sequence_id)).error
            assert error.code == getattr(types_pb2, f"SEQUENCE_ERROR_CODE_{code}")
            assert message in error.message
        assert (await client.event(good)).state.committed_len == 3
        assert len((await client.event(good)).result.tokens) == 1
        for body, message in trees:
            client.send(
                verify_pb2.VerifyCommand(sequence_id=good, epoch=1, acked_round=0, verify_tree=body)
            )
            error = (await client.event(good)).error
            assert (error.code, error.round) == (types_pb2.SEQUENCE_ERROR_CODE_INVALID, 1)
            assert message in error.message
            assert error.state.next_round == 1


async def test_result_lost_with_its_stream_is_sent_again_after_attach(engine: DeviceEngine) -> None:
    sequence_id = secrets.token_bytes(16)
    async with served(engine) as s:
        async with VerifyClient(s.channel, "router-1") as client:
            client.send(open_command(sequence_id))
            assert (await client.event(sequence_id)).HasField("state")
            first = (await client.event(sequence_id)).result
        async with VerifyClient(s.channel, "router-1") as client:
            attach = verify_pb2.VerifyAttach()
            client.send(verify_pb2.VerifyCommand(sequence_id=sequence_id, epoch=2, attach=attach))
            state = (await client.event(sequence_id)).state
            assert (state.epoch, state.next_round) == (2, 1)
            again = await client.event(sequence_id)
            assert (again.epoch, again.result) == (2, first)
            close = verify_pb2.VerifyClose()
            client.send(verify_pb2.VerifyCommand(sequence_id=sequence_id, epoch=2, close=close))
            assert (await client.event(sequence_id)).HasField("closed")
            await settled(s.machine)


async def test_cancelled_streams_leave_nothing_behind(engine: DeviceEngine) -> None:
    async with served(engine) as s:
        for _ in range(5):
            async with VerifyClient(s.channel) as client:
                ids = [secrets.token_bytes(16) for _ in range(6)]
                client.send(*(open_command(i) for i in ids))
                await client.event(ids[0])
                client.cancel()
        s.machine.check_balance()
        async with VerifyClient(s.channel) as client:  # orphans give way to the living
            generation = await client.generate(PROMPTS[1], 8)
        assert len(generation.response) == 8


class BrokenEngine:
    def run(self, works: Any) -> Any:
        raise RuntimeError("the device is gone")


async def test_failed_steps_are_told_and_the_third_in_a_row_ends_the_loop() -> None:
    async with served(BrokenEngine()) as s, VerifyClient(s.channel) as client:
        for _ in range(3):
            generation = await client.generate(PROMPTS[0], 4)
            (error,) = generation.errors
            assert error.code == types_pb2.SEQUENCE_ERROR_CODE_INTERNAL
        with pytest.raises(DeviceLost, match="3 verify steps in a row failed"):
            await s.task


async def test_outbox_that_nobody_reads_overflows_instead_of_growing() -> None:
    outbox = Outbox()
    for i in range(MAX_EVENTS + 10):
        outbox.put(i)  # type: ignore[arg-type]
    assert outbox.overflowed
    total = 0
    while events := await outbox.take():
        total += len(events)
    assert total == MAX_EVENTS
