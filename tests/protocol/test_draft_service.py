"""The draft service over real gRPC, with a tiny head on the real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from canopy.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from common.metrics import Metrics
from common.tensors import FeatureDtype
from draft_service.engine import DeviceEngine
from draft_service.info import DraftInfo
from draft_service.limits import DraftLimits
from draft_service.loop import DraftLoop
from draft_service.machine import DraftMachine
from draft_service.metrics import DraftMetrics
from draft_service.service import DraftServicer
from draft_service.streams import WINDOW_BYTES, StreamHub
from tests.parity.draft_tiny import FEATURES, VOCAB, grow, random_history, tiny_engine, tiny_head

ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture(scope="module")
def engine() -> DeviceEngine:
    head, params = tiny_head(3)
    engine = tiny_engine(head, params, num_pages=64)
    engine.warm_up()
    return engine


@pytest.fixture
async def service(engine: DeviceEngine) -> AsyncIterator[Any]:
    """A served head: `stub` to talk to it, `machine` to look inside."""
    tree = engine.config.tree
    machine = DraftMachine(
        DraftLimits(
            vocab_size=VOCAB,
            feature_size=FEATURES,
            max_context_len=64,
            tree=tree,
            max_sequences=4,
            page_size=4,
            num_pages=64,
            max_step_sequences=2,
            max_draft_rows=4,
            max_extend_rows=16,
        )
    )
    hub = StreamHub(64 << 20)
    servicer = DraftServicer(hub, tree)
    loop = DraftLoop(
        machine, engine, deliver=hub.deliver, on_room=hub.share_credit,
        metrics=DraftMetrics(Metrics("draft"), tree, 16), gather_seconds=0.001,
    )  # fmt: skip
    servicer.loop = loop
    servicer.info = DraftInfo(
        head_name="tiny",
        target={"model_name": "tiny", "vocab_size": VOCAB},
        feature_kind="aux",
        boundaries=(1, 2, 3),
        feature_dtype=FeatureDtype.FLOAT32,
        row_width=FEATURES,
        max_context_len=64,
        max_tree=tree,
        max_sequences=4,
    )
    server = grpc.aio.server()
    servicer.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    task = asyncio.create_task(loop.run())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        yield SimpleNamespace(stub=stub, machine=machine, channel=channel)
    hub.close_all()
    await server.stop(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    loop.stop()
    machine.check_balance()


def opened(sequence_id: bytes, tokens: list[int], **fields: Any) -> draft_pb2.DraftCommand:
    body = draft_pb2.DraftOpen(tokens=tokens, max_total_tokens=40, **fields)
    return draft_pb2.DraftCommand(sequence_id=sequence_id, epoch=1, open=body)


def extended(
    sequence_id: bytes, round_: int, base_len: int, tokens: list[int]
) -> draft_pb2.DraftCommand:
    body = draft_pb2.DraftExtend(round=round_, base_len=base_len, tokens=tokens)
    return draft_pb2.DraftCommand(sequence_id=sequence_id, epoch=1, extend=body)


def block(sequence_id: bytes, features: Any, first: int, until: int) -> types_pb2.FeatureBlock:
    return types_pb2.FeatureBlock(
        sequence_id=sequence_id, epoch=1, position=first, num_rows=until - first,
        row_width=FEATURES, dtype=types_pb2.FEATURE_DTYPE_FLOAT32,
        data=np.ascontiguousarray(features[first:until]).tobytes(),
    )  # fmt: skip


async def write(call: Any, *commands: draft_pb2.DraftCommand) -> None:
    await call.write(draft_pb2.DraftRequest(commands=commands))


async def events(call: Any, count: int) -> list[draft_pb2.DraftEvent]:
    got: list[draft_pb2.DraftEvent] = []
    async with asyncio.timeout(60):
        while len(got) < count:
            got += (await call.read()).events
    return got


async def send(call: Any, *blocks: types_pb2.FeatureBlock) -> None:
    await call.write(draft_pb2.SendFeaturesRequest(blocks=blocks))


@pytest.mark.parametrize("method", ["Draft", "SendFeatures"])
async def test_bytes_that_are_no_request_end_their_own_call(service: Any, method: str) -> None:
    call = service.channel.stream_stream(f"/canopy.v1.DraftService/{method}")(iter([b"\xff" * 64]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:  # credit comes first
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a frame is no message of this stream" in str(caught.value.details())


async def test_trees_of_two_sequences_equal_the_engines_own(service: Any) -> None:
    """The tree over the wire is the one that a fresh engine grows from the same pairs."""
    head, params = tiny_head(3)
    fresh = tiny_engine(head, params, max_sequences=1)
    call, feature_call = service.stub.Draft(), service.stub.SendFeatures()
    info = await service.stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
    assert (info.features.row_width, info.max_tree.max_nodes) == (FEATURES, 12)
    assert info.features.kind == types_pb2.FEATURE_KIND_AUX
    credit = await feature_call.read()
    assert credit.credit_bytes == WINDOW_BYTES
    histories = {ONE: random_history(1, 18), TWO: random_history(2, 9)}
    await write(call, *(opened(i, tokens[:-1]) for i, (tokens, _) in histories.items()))
    states = await events(call, 2)
    assert [e.state.committed_len for e in states] == [17, 8]
    for sequence_id, (tokens, features) in histories.items():
        await write(call, extended(sequence_id, 1, len(tokens) - 1, tokens[-1:]))
        # Out of order, a piece twice, and one row more than the tree needs.
        await send(feature_call, block(sequence_id, features, 5, len(tokens)))
        await send(feature_call, block(sequence_id, features, 0, 7))
    for event in await events(call, 2):
        tokens, features = histories[event.sequence_id]
        expected = grow(fresh, tokens, features, _chunks(len(tokens)), list(range(8)))
        assert event.tree.round == 1
        assert event.tree.committed_len == len(tokens)
        assert list(event.tree.tree.tokens) == expected.tokens.tolist()
        assert list(event.tree.tree.parents)[1:] == expected.parents.tolist()[1:]
        np.testing.assert_allclose(event.tree.tree.scores, expected.scores, atol=2e-4)
    await write(call, extended(ONE, 1, 17, histories[ONE][0][-1:]))  # again: the stored tree
    (again,) = await events(call, 1)
    assert again.tree.round == 1
    await call.done_writing()
    await feature_call.done_writing()


def _chunks(length: int) -> list[int]:
    """Ends of chunks that leave the draft step at most 4 pairs."""
    return [*range(10, length - 4, 10), length - 4]


async def test_a_failure_is_an_entry_of_its_own_sequence(service: Any) -> None:
    call, feature_call = service.stub.Draft(), service.stub.SendFeatures()
    await feature_call.read()
    tokens, features = random_history(3, 4)
    broken = draft_pb2.DraftCommand(sequence_id=b"short", epoch=1)
    await write(call, broken, opened(ONE, tokens), opened(TWO, [VOCAB + 5]))
    got = {bytes(e.sequence_id): e for e in await events(call, 3)}
    assert "sequence_id: 5 bytes; must be 16" in got[b"short"].error.message
    assert got[ONE].state.committed_len == 4
    assert "tokens: one is outside the vocabulary [0, 64)" in got[TWO].error.message
    bad = block(ONE, features, 0, 3)
    bad.row_width = FEATURES + 1
    await send(feature_call, bad)
    (failed,) = await events(call, 1)
    assert failed.error.code == types_pb2.SEQUENCE_ERROR_CODE_INVALID
    for poison in (np.nan, np.inf):
        spoilt = features.copy()
        spoilt[1, 2] = poison
        await send(feature_call, block(ONE, spoilt, 0, 3))
        (failed,) = await events(call, 1)
        assert failed.sequence_id == ONE
        assert failed.error.code == types_pb2.SEQUENCE_ERROR_CODE_INVALID
        assert "rows [0, 3) hold NaN or infinity" in failed.error.message
    # The sequence goes on as if nothing had come.
    await send(feature_call, block(ONE, features, 0, 3))
    await write(call, extended(ONE, 0, 4, []))
    (tree,) = await events(call, 1)
    assert len(tree.tree.tree.tokens) > 1
    await call.done_writing()
    await feature_call.done_writing()


async def test_credit_comes_back_as_rows_are_fed(service: Any) -> None:
    call, feature_call = service.stub.Draft(), service.stub.SendFeatures()
    await feature_call.read()
    tokens, features = random_history(4, 30)
    await write(call, opened(ONE, tokens))
    await events(call, 1)
    row_bytes = FEATURES * 4
    sent = 0
    async with asyncio.timeout(60):
        # Known rows are ignored: they cost credit on the way and give it back at once.
        while sent < WINDOW_BYTES // 2:
            blocks = [block(ONE, features, 0, 29)] * 100
            await send(feature_call, *blocks)
            sent += 29 * row_bytes * len(blocks)
        granted = (await feature_call.read()).credit_bytes
    assert granted > 0
    await call.done_writing()
    await feature_call.done_writing()


async def test_sequences_of_a_lost_stream_wait_for_an_attach(service: Any) -> None:
    call = service.stub.Draft()
    await write(call, opened(ONE, [1, 2, 3]))
    await events(call, 1)
    call.cancel()
    second = service.stub.Draft()
    command = draft_pb2.DraftCommand(
        sequence_id=ONE, epoch=2, attach=draft_pb2.DraftAttach()
    )  # fmt: skip
    await write(second, command)
    (event,) = await events(second, 1)
    assert (event.epoch, event.state.committed_len) == (2, 3)
    await second.done_writing()
