"""Every bad request gets a status that names the field, and harms nothing."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from canopy.client import Client
from canopy.convert import to_error
from canopy.results import Options
from canopy.v1 import generation_pb2 as pb
from canopy.v1 import generation_pb2_grpc
from canopy.v1.types_pb2 import SamplingParams

pytestmark = pytest.mark.e2e

TEXT = "The capital of France is"
NAN = float("nan")


def sampling(**fields: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=TEXT, sampling=SamplingParams(**fields))  # type: ignore[arg-type]


def speculation(**fields: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=TEXT, speculation=pb.SpeculationParams(**fields))  # type: ignore[arg-type]


INVALID, NOT_FOUND = "INVALID_ARGUMENT", "NOT_FOUND"

CASES: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "unknown_model": (pb.GenerateRequest(text=TEXT, model="gpt-9"), NOT_FOUND, "model"),
    "no_prompt": (pb.GenerateRequest(), INVALID, "prompt"),
    "two_prompts": (
        pb.GenerateRequest(text=TEXT, token_ids=pb.TokenIds(ids=[1])),
        INVALID,
        "prompt",
    ),
    "empty_text": (pb.GenerateRequest(text=""), INVALID, "text"),
    "empty_chat": (pb.GenerateRequest(chat=pb.ChatMessages()), INVALID, "chat.messages"),
    "empty_ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), INVALID, "token_ids"),
    "id_beyond_vocabulary": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 49152])),
        INVALID,
        "token_ids.ids[1]",
    ),
    "prompt_beyond_context": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 8192)),
        INVALID,
        "prompt",
    ),
    "max_tokens_beyond_context": (
        pb.GenerateRequest(text=TEXT, max_tokens=8192),
        INVALID,
        "max_tokens",
    ),
    "max_tokens_zero": (pb.GenerateRequest(text=TEXT, max_tokens=0), INVALID, "max_tokens"),
    "temperature_nan": (sampling(temperature=NAN), INVALID, "sampling.temperature"),
    "temperature_negative": (sampling(temperature=-1), INVALID, "sampling.temperature"),
    "temperature_infinite": (sampling(temperature=float("inf")), INVALID, "sampling.temperature"),
    "top_p_zero": (sampling(top_p=0), INVALID, "sampling.top_p"),
    "top_p_nan": (sampling(top_p=NAN), INVALID, "sampling.top_p"),
    "top_p_above_one": (sampling(top_p=1.5), INVALID, "sampling.top_p"),
    "min_p_negative": (sampling(min_p=-0.1), INVALID, "sampling.min_p"),
    "tree_of_no_node": (speculation(max_tree_nodes=0), INVALID, "speculation.max_tree_nodes"),
    "tree_absurdly_wide": (
        speculation(max_tree_nodes=10**6),
        INVALID,
        "speculation.max_tree_nodes",
    ),
    "tree_absurdly_deep": (speculation(max_depth=10**6), INVALID, "speculation.max_depth"),
    "tree_top_k_absurd": (speculation(top_k=10**6), INVALID, "speculation.top_k"),
    "stop_string_empty": (pb.GenerateRequest(text=TEXT, stop=[""]), INVALID, "stop"),
    "stop_id_beyond_vocabulary": (
        pb.GenerateRequest(text=TEXT, stop_token_ids=[10**6]),
        INVALID,
        "stop_token_ids",
    ),
    "too_many_choices": (pb.GenerateRequest(text=TEXT, n=300), INVALID, "n"),
    "top_logprobs_too_many": (
        pb.GenerateRequest(text=TEXT, logprobs=True, top_logprobs=21),
        INVALID,
        "top_logprobs",
    ),
    "penalty_too_large": (sampling(presence_penalty=3), INVALID, "sampling.presence_penalty"),
    "bias_beyond_vocabulary": (sampling(logit_bias={10**6: 1}), INVALID, "sampling.logit_bias"),
    "min_tokens_above_max": (
        pb.GenerateRequest(text=TEXT, max_tokens=3, sampling=SamplingParams(min_tokens=4)),
        INVALID,
        "sampling.min_tokens",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_request_names_its_field(
    stub: generation_pb2_grpc.GenerationServiceStub, case: str
) -> None:
    request, code, field = CASES[case]
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=30))
    error = to_error(caught.value)
    assert error.code == code, error
    assert error.message.startswith(field), error
    if code == INVALID:
        assert error.field.startswith(field), error
    assert len(error.message) > len(field) + 10  # says more than the name


def test_oversized_message_is_refused(
    stub: generation_pb2_grpc.GenerationServiceStub,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text="x" * (17 << 20)), timeout=30))
    assert to_error(caught.value).code == "RESOURCE_EXHAUSTED"


def test_garbage_is_no_request(client: Client, stack: object) -> None:
    with (
        grpc.insecure_channel(stack.address) as channel,  # type: ignore[attr-defined]
        pytest.raises(grpc.RpcError) as caught,
    ):
        list(
            channel.unary_stream("/canopy.v1.GenerationService/Generate")(b"\xff" * 64, timeout=30)
        )
    assert caught.value.code() is not grpc.StatusCode.OK


def test_service_is_unharmed_by_all_of_it(
    client: Client,
    stub: generation_pb2_grpc.GenerationServiceStub,
    pages_settle: Callable[[], bool],
) -> None:
    for request, _, _ in CASES.values():
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(request, timeout=30))
    assert "Paris" in client.generate(TEXT, Options(max_tokens=8)).text
    assert pages_settle()
