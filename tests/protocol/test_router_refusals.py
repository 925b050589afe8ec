"""Bad input: a status that names field and remedy, over real gRPC, and a router unharmed by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from canopy.v1 import generation_pb2 as pb
from canopy.v1 import types_pb2
from common.errors import StartupError
from tests.protocol.router_simulators import Host
from tests.protocol.router_world import World, router_world, simulated_peers, until
from tests.unit.router_tiny import write_model

CODE = grpc.StatusCode
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("router") / "toy")


@pytest.fixture
async def world(model: Path) -> AsyncIterator[World]:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft) as running:
        yield running


async def refusal(world: World, **fields: Any) -> tuple[grpc.aio.AioRpcError, status_pb2.Status]:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await world.generate(**fields)
    error = failure.value
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    return error, status


def sampling(**fields: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling": types_pb2.SamplingParams(**fields)}


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return {"chat": pb.ChatMessages(messages=turns)}


def speculation(**fields: Any) -> dict[str, Any]:
    return {"text": "hi", "speculation": pb.SpeculationParams(**fields)}


def ids(*token_ids: int) -> dict[str, Any]:
    return {"token_ids": pb.TokenIds(ids=token_ids)}


INVALID = [
    # what is sent, the field named, words of the message
    ({}, "prompt", ["not set", "exactly one of text, chat or token_ids"]),
    ({"text": "hi", **ids(1)}, "prompt", ["text and token_ids are set", "exactly one"]),
    ({**chat(("user", "x")), **ids(1)}, "prompt", ["chat and token_ids are set"]),
    ({"text": ""}, "text", ["empty", "at least one character"]),
    (chat(), "chat.messages", ["empty", "at least one message"]),
    (chat(("", "x")), "chat.messages[0].role", ["empty", "system, user or assistant"]),
    (chat(("wizard", "x")), "chat", ["refuses", "no role wizard"]),
    (ids(), "token_ids", ["empty", "at least one token id"]),
    (ids(1, 300, 2), "token_ids.ids[1]", ["300", "[0, 300)", "tokenizer"]),
    (ids(2**32 - 1), "token_ids.ids[0]", ["4294967295", "[0, 300)"]),
    ({**ids(*[1] * 512)}, "prompt", ["512 tokens", "context of 512", "at most 511"]),
    ({**ids(*[1] * 500), "max_tokens": 13}, "max_tokens", ["13", "500", "512", "at most 12"]),
    ({"text": "x" * 20_000}, "prompt", ["20000 characters", "context of 512", "send less"]),
    ({"text": "hi", "max_tokens": 0}, "max_tokens", ["at least 1"]),
    (sampling(temperature=-0.1), "sampling.temperature", ["-0.1", "[0, 100]"]),
    (sampling(temperature=NAN), "sampling.temperature", ["nan", "[0, 100]"]),
    (sampling(temperature=INF), "sampling.temperature", ["inf", "[0, 100]"]),
    (sampling(top_p=0.0), "sampling.top_p", ["0.0", "(0, 1]"]),
    (sampling(top_p=1.5), "sampling.top_p", ["1.5", "(0, 1]"]),
    (sampling(top_p=NAN), "sampling.top_p", ["nan", "(0, 1]"]),
    (sampling(min_p=-1.0), "sampling.min_p", ["-1.0", "[0, 1]"]),
    (sampling(min_p=NAN), "sampling.min_p", ["nan", "[0, 1]"]),
    (sampling(presence_penalty=NAN), "sampling.presence_penalty", ["nan"]),
    (speculation(max_depth=0), "speculation.max_depth", ["0", "[1, 8]", "enabled = false"]),
    (speculation(max_depth=10**6), "speculation.max_depth", ["1000000", "[1, 8]"]),
    (speculation(top_k=2**31), "speculation.top_k", ["2147483648", "[1, 8]"]),
    (speculation(max_tree_nodes=33), "speculation.max_tree_nodes", ["33", "[1, 32]"]),
    (speculation(max_tree_nodes=0), "speculation.max_tree_nodes", ["0", "[1, 32]"]),
    ({"text": "hi", "stop": [""]}, "stop[0]", ["0 characters", "1 to 1024"]),
    ({"text": "hi", "stop": ["x" * 1025]}, "stop[0]", ["1025 characters", "1 to 1024"]),
    ({"text": "hi", "stop": ["x"] * 17}, "stop", ["17 strings", "at most 16"]),
    ({"text": "hi", "stop_token_ids": [5, 300]}, "stop_token_ids[1]", ["300", "[0, 300)"]),
    ({"text": "hi", "stop_token_ids": [5] * 65}, "stop_token_ids", ["65 ids", "at most 64"]),
    ({"text": "hi", "request_id": "x" * 129}, "request_id", ["129 characters", "at most 128"]),
    ({"text": "hi", "request_id": "a\nb"}, "request_id", ["printable"]),
    ({"text": "hi", "n": 9}, "n", ["9 choices", "send 1 to 8"]),
    ({"text": "hi", "n": 0}, "n", ["0 choices", "send 1 to 8"]),
    (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty", ["-2.5", "[-2, 2]"]),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", ["0.0", "[0.01, 10]"]),
    (sampling(repetition_penalty=1e-38), "sampling.repetition_penalty", ["[0.01, 10]"]),
    (sampling(logit_bias={300: 1.0}), "sampling.logit_bias", ["token 300", "[0, 300)"]),
    (sampling(logit_bias={3: 101.0}), "sampling.logit_bias[3]", ["101.0", "[-100, 100]"]),
    (sampling(min_tokens=4) | {"max_tokens": 3}, "sampling.min_tokens", ["4 is above", "3"]),
    ({"text": "hi", "logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "[0, 20]"]),
    ({"text": "hi", "top_logprobs": 2}, "top_logprobs", ["without logprobs"]),
]


@pytest.mark.parametrize(("fields", "field", "words"), INVALID)
async def test_invalid_argument_names_field_value_limit_and_remedy(
    world: World, fields: dict[str, Any], field: str, words: list[str]
) -> None:
    error, status = await refusal(world, **fields)
    assert error.code() is CODE.INVALID_ARGUMENT
    assert error.details().startswith(f"{field}: ")
    for word in words:
        assert word in error.details()
    details = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(details)
    assert [violation.field for violation in details.field_violations] == [field]
    assert not world.verify_simulator.frames  # nothing was started
    answer = await world.generate(text="hi", max_tokens=2)  # and all is well
    assert answer.completion.usage.num_completion_tokens == 2


async def test_neutral_values_of_what_is_not_built_are_honoured(world: World) -> None:
    neutral = types_pb2.SamplingParams(
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, min_tokens=0
    )
    answer = await world.generate(
        text="hi", max_tokens=2, n=1, logprobs=False, top_logprobs=0, sampling=neutral
    )
    assert answer.completion.usage.num_completion_tokens == 2


async def test_an_unknown_model_is_not_found(world: World) -> None:
    error, _ = await refusal(world, text="hi", model="gpt-9")
    assert error.code() is CODE.NOT_FOUND
    assert error.details() == ("model: 'gpt-9' is not served here; send 'toy', or leave it empty")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await world.stub.GetModelInfo(pb.GetModelInfoRequest(model="gpt-9"))
    assert failure.value.code() is CODE.NOT_FOUND
    info = await world.stub.GetModelInfo(pb.GetModelInfoRequest(model="toy"))
    assert (info.target.model_name, info.max_context_len, info.has_chat_template) == (
        *("toy", 512, True),
    )
    assert list(info.stop_token_ids) == [297, 299]
    assert info.head_name == "toy-head"


async def test_an_oversized_message_is_refused_and_nothing_else(model: Path) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft, max_message_bytes=65536) as world:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await world.generate(text="x" * 70_000)
        assert failure.value.code() is CODE.RESOURCE_EXHAUSTED
        assert "65536" in failure.value.details()
        assert (await world.generate(text="hi", max_tokens=1)).completion.request_id


async def test_a_long_prompt_is_counted_not_cut(world: World) -> None:
    error, _ = await refusal(world, text="word " * 800)
    assert error.code() is CODE.INVALID_ARGUMENT
    assert "leave no room in the context of 512" in error.details()


async def test_a_request_id_in_use_already_exists(world: World) -> None:
    world.verify_simulator.trouble.delay_seconds = 0.05
    call = world.stub.Generate(pb.GenerateRequest(text="hi", request_id="a", max_tokens=200))
    await call.read()
    error, _ = await refusal(world, text="hi", request_id="a")
    assert error.code() is CODE.ALREADY_EXISTS
    call.cancel()


async def test_abort_needs_an_id(world: World) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await world.stub.Abort(pb.AbortRequest())
    assert failure.value.code() is CODE.INVALID_ARGUMENT
    assert "request_id" in failure.value.details()


# -- what verify refuses


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        (types_pb2.SEQUENCE_ERROR_CODE_OVERLOADED, CODE.RESOURCE_EXHAUSTED, True),
        (types_pb2.SEQUENCE_ERROR_CODE_NOT_SERVING, CODE.UNAVAILABLE, True),
        (types_pb2.SEQUENCE_ERROR_CODE_NEVER_FITS, CODE.INVALID_ARGUMENT, False),
        (types_pb2.SEQUENCE_ERROR_CODE_UNIMPLEMENTED, CODE.UNIMPLEMENTED, False),
        (types_pb2.SEQUENCE_ERROR_CODE_INVALID, CODE.INTERNAL, False),
        (types_pb2.SEQUENCE_ERROR_CODE_INTERNAL, CODE.INTERNAL, False),
    ],
)
async def test_verifys_refusals_have_their_status(
    world: World, code: int, status: grpc.StatusCode, retry: bool
) -> None:
    world.verify_simulator.trouble.refuse = code
    error, details = await refusal(world, text="hi")
    assert error.code() is status
    assert "the toy refuses" in error.details()
    advice = error_details_pb2.RetryInfo()
    found = [detail for detail in details.details if detail.Unpack(advice)]
    assert bool(found) is retry
    if retry:
        assert advice.retry_delay.ToMilliseconds() == 1000


async def test_more_than_max_running_is_resource_exhausted(model: Path) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft, max_running=2) as world:
        world.verify_simulator.trouble.delay_seconds = 0.05
        calls = [world.stub.Generate(pb.GenerateRequest(text="hi", max_tokens=300)) for _ in "ab"]
        for call in calls:
            await call.read()
        error, details = await refusal(world, text="hi")
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert "2 generations run already" in error.details()
        advice = error_details_pb2.RetryInfo()
        assert details.details[0].Unpack(advice)
        load = await world.stub.GetLoad(pb.GetLoadRequest())
        assert (load.num_running, load.max_running) == (2, 2)
        for call in calls:
            call.cancel()
        await until(lambda: world.service.core.num_running == 0)
        await world.generate(text="hi", max_tokens=1)


# -- pairs that do not fit

MISFITS = [
    # where, field, value, words of the message
    ("draft", "protocol_version", 1, ["protocol version", "2", "draft 1", "same release"]),
    ("verify", "protocol_version", 7, ["protocol version", "verify 7"]),
    ("verify", "target.tokenizer_hash", "ff", ["tokenizer_hash", "ff", "same model directory"]),
    ("draft", "target.vocab_size", 299, ["vocab_size", "300", "299", "same target"]),
    ("draft", "target.padded_vocab_size", 320, ["padded_vocab_size", "300", "320"]),
    ("draft", "target.tokenizer_hash", "ee", ["tokenizer_hash", "ee"]),
    ("draft", "target.hidden_size", 16, ["hidden_size", "8", "16"]),
    ("draft", "target.weights_hash", "other", ["weights_hash", "'w'", "'other'"]),
    ("draft", "features.kind", types_pb2.FEATURE_KIND_LAST, ["feature kind", "AUX", "LAST"]),
    ("draft", "features.boundaries", [1, 2], ["boundaries", "[1, 2, 3]", "[1, 2]"]),
    ("draft", "features.dtype", types_pb2.FEATURE_DTYPE_BFLOAT16, ["dtype", "FLOAT32", "BFLOAT16"]),
    ("draft", "features.row_width", 12, ["width", "4", "12"]),
    ("draft", "features.fused_by", "beef", ["captured ones", "beef", "verify with --features"]),
]


def set_field(host: Host, path: str, value: Any) -> None:
    message: Any = host.simulator.info
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    message.ClearField(name)
    if isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


@pytest.mark.parametrize(("where", "field", "value", "words"), MISFITS)
async def test_a_pair_that_does_not_fit_is_refused_at_start(
    model: Path, where: str, field: str, value: Any, words: list[str]
) -> None:
    verify, draft = simulated_peers(model)
    set_field(verify if where == "verify" else draft, field, value)
    with pytest.raises(StartupError) as failure:
        async with router_world(model, verify, draft):
            pytest.fail("the router started")
    assert str(failure.value).startswith(f"{where}: 127.0.0.1:")
    for word in words:
        assert word in str(failure.value)


async def test_a_head_without_features_fits_any_boundaries(model: Path) -> None:
    verify, draft = simulated_peers(model)
    draft.simulator.info.features.Clear()
    draft.simulator.info.features.kind = types_pb2.FEATURE_KIND_NONE
    async with router_world(model, verify, draft) as world:
        assert (await world.generate(text="hi", max_tokens=4)).completion.request_id
        assert world.verify_simulator.num_feature_bytes == 0


async def test_a_verify_that_comes_back_with_another_model_is_left_out(world: World) -> None:
    await world.verify.stop()
    set_field(world.verify, "target.weights_hash", "new")
    await world.verify.start()
    await until(lambda: world.service.core.fleet.peers[0].misfit)
    assert not world.health.serving
    error, _ = await refusal(world, text="hi")
    assert error.code() is CODE.UNAVAILABLE
    assert "weights_hash: verify came back with 'new', it had 'w'" in error.details()
    info = await world.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert "weights_hash" in info.peers[0].reason


async def test_a_draft_that_comes_back_with_another_head_is_left_out(world: World) -> None:
    await world.draft.stop()
    set_field(world.draft, "features.boundaries", [7])
    await world.draft.start()
    await until(lambda: world.service.core.fleet.peers[1].misfit)
    assert world.health.serving
    answer = await world.generate(text="hi", max_tokens=8)
    assert answer.completion.speculation.num_accepted == 0
    info = await world.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert "captured boundaries" in info.peers[1].reason


async def test_a_verify_that_comes_back_fusing_by_another_head_loses_the_draft(
    world: World,
) -> None:
    """Rows of the same width would pass unseen, and every tree be worthless."""
    await world.verify.stop()
    set_field(world.verify, "features.fused_by", "beef")
    await world.verify.start()
    await until(lambda: world.service.core.fleet.peers[1].misfit)
    await until(lambda: world.health.serving)
    answer = await world.generate(text="hi", max_tokens=8)
    assert answer.completion.speculation.num_accepted == 0
    info = await world.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert "fused by head beef, the draft takes captured ones" in info.peers[1].reason
    set_field(world.draft, "features.fused_by", "beef")
    await until(lambda: world.service.core.fleet.peers[1].ready)
    assert (await world.generate(text="hi", max_tokens=8)).completion.speculation.num_accepted > 0


# -- readiness


async def test_readiness_follows_a_verify_that_drains(world: World) -> None:
    assert world.health.serving
    await world.verify.say_serving(False)
    await until(lambda: not world.health.serving)
    error, _ = await refusal(world, text="hi")
    assert error.code() is CODE.UNAVAILABLE
    assert "draining" in error.details()
    await world.verify.say_serving(True)
    await until(lambda: world.health.serving)
    assert (await world.generate(text="hi", max_tokens=1)).completion.request_id


async def test_a_draining_router_finishes_what_runs_and_takes_nothing_new(world: World) -> None:
    world.verify_simulator.trouble.delay_seconds = 0.02
    call = world.stub.Generate(pb.GenerateRequest(text="hi", max_tokens=60))
    await call.read()
    draining = asyncio.create_task(world.service.drain(5.0))
    await asyncio.sleep(0.05)
    error, _ = await refusal(world, text="hi")
    assert error.code() is CODE.UNAVAILABLE
    assert "drains" in error.details()
    last = None
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    assert last is not None
    assert last.HasField("completion")
    await draining
    await until(lambda: not world.verify_simulator.toy.sequences)
