"""The client against a small real server: retries, errors, deadlines; and the tree view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from rich.console import Console

from benchmarks.lossless import first_difference, margin_at
from canopy.client import AsyncClient, Client, Retry
from canopy.convert import to_request
from canopy.results import CanopyError, Chunk, Completion, FinishReason, Message, Options, Round
from canopy.trees import draw_round
from canopy.v1 import generation_pb2 as pb
from canopy.v1 import generation_pb2_grpc

QUICK = Retry(max_attempts=3, first_pause_seconds=0.01)


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Fails `failures` times, before or after the first chunk, then answers "ab"."""

    def __init__(self, failures: int, after_first_chunk: bool = False) -> None:
        self.failures = failures
        self.after_first_chunk = after_first_chunk
        self.num_calls = 0
        self.cancelled = False

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.num_calls += 1
        context.add_callback(lambda: setattr(self, "cancelled", not context.is_active()))
        fails = self.num_calls <= self.failures
        if fails and not self.after_first_chunk:
            context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(text="a", token_ids=[1]))
        if fails:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if request.text == "slow":
            time.sleep(1)
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(text="b", token_ids=[2]))
        completion = pb.GenerateCompletion(
            finish_reason=pb.FINISH_REASON_STOP, stop_string="x", seed=7
        )
        yield pb.GenerateResponse(completion=completion)


class Refusing(generation_pb2_grpc.GenerationServiceServicer):
    """Refuses with a field and a pause."""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> None:
        status = status_pb2.Status(code=3, message="top_p: 2 is outside (0, 1]")
        violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p")
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        status.details.append(detail)
        context.abort_with_status(rpc_status.to_status(status))


@contextmanager
def serving(servicer: generation_pb2_grpc.GenerationServiceServicer) -> Iterator[str]:
    with futures.ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def test_call_is_tried_again_before_the_first_chunk() -> None:
    servicer = Scripted(failures=2)
    with serving(servicer) as address, Client(address, QUICK) as client:
        answer = client.generate("x")
    assert servicer.num_calls == 3
    assert (answer.text, answer.token_ids) == ("ab", (1, 2))
    assert answer.completion.finish_reason is FinishReason.STOP
    assert answer.completion.matched_stop == "x"
    assert answer.completion.seed == 7


class TwoChoices(generation_pb2_grpc.GenerationServiceServicer):
    """Two choices in turn; the second ends first. `loses`: the first never ends."""

    def __init__(self, loses: bool = False) -> None:
        self.loses = loses

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        assert request.n == 2
        for text, index in (("a", 0), ("x", 1), ("b", 0)):
            yield pb.GenerateResponse(chunk=pb.GenerateChunk(text=text, choice_index=index))
        for index in (1,) if self.loses else (1, 0):
            done = pb.GenerateCompletion(
                choice_index=index, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=index
            )
            yield pb.GenerateResponse(completion=done)


def test_choices_come_apart_and_in_order() -> None:
    with serving(TwoChoices()) as address, Client(address, QUICK) as client:
        choices = client.generate_choices("x", Options(n=2))
        with pytest.raises(CanopyError, match="generate_choices"):
            client.generate("x", Options(n=2))
    assert [choice.text for choice in choices] == ["ab", "x"]
    assert [choice.completion.choice_index for choice in choices] == [0, 1]
    with (
        serving(TwoChoices(loses=True)) as address,
        Client(address, QUICK) as client,
        pytest.raises(CanopyError, match="without a completion"),
    ):
        client.generate_choices("x", Options(n=2))


def test_call_is_never_tried_again_after_the_first_chunk() -> None:
    servicer = Scripted(failures=1, after_first_chunk=True)
    with serving(servicer) as address, Client(address, QUICK) as client:
        stream = client.stream("x")
        assert next(stream) == Chunk(text="a", token_ids=(1,))
        with pytest.raises(CanopyError) as caught:
            next(stream)
    assert caught.value.code == "UNAVAILABLE"
    assert servicer.num_calls == 1


def test_attempts_have_an_end() -> None:
    servicer = Scripted(failures=9)
    with (
        serving(servicer) as address,
        Client(address, QUICK) as client,
        pytest.raises(CanopyError, match="draining"),
    ):
        client.generate("x")
    assert servicer.num_calls == QUICK.max_attempts


def test_refusal_names_its_field_and_is_not_tried_again() -> None:
    with serving(Refusing()) as address, Client(address, QUICK) as client:
        with pytest.raises(CanopyError) as caught:
            client.generate("x")
        assert caught.value.code == "INVALID_ARGUMENT"
        assert caught.value.field == "sampling.top_p"


def test_deadline_covers_the_whole_stream() -> None:
    with serving(Scripted(failures=0)) as address, Client(address) as client:
        with pytest.raises(CanopyError) as caught:
            client.generate("slow", timeout_seconds=0.3)
        assert caught.value.code == "DEADLINE_EXCEEDED"


async def test_async_client_does_the_same() -> None:
    servicer = Scripted(failures=2)
    with serving(servicer) as address:
        async with AsyncClient(address, QUICK) as client:
            answer = await client.generate("x")
            events = [event async for event in client.stream("x")]
    assert answer.text == "ab"
    assert isinstance(events[-1], Completion)
    await asyncio.sleep(0)


def test_only_what_is_set_goes_over() -> None:
    request = to_request("hi", Options(temperature=0.0, max_tree_nodes=4))
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("seed")
    assert not request.HasField("max_tokens")
    assert request.speculation.max_tree_nodes == 4
    chat = to_request([Message("user", "hi")], Options())
    assert chat.chat.messages[0].role == "user"
    assert to_request([], Options()).HasField("token_ids")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", Options(max_tokens=-1), "max_tokens"),
        ("x", Options(seed=2**64), "seed"),
        ([1, -2], Options(), "token_ids"),
        ("x", Options(stop_token_ids=(-1,)), "stop_token_ids"),
    ],
)
def test_value_that_no_field_holds_is_named(
    prompt: str | list[int], options: Options, field: str
) -> None:
    with pytest.raises(CanopyError) as caught:
        to_request(prompt, options)
    assert caught.value.field == field


def test_drawn_round_marks_accepted_path_and_bonus() -> None:
    played = Round(
        number=3,
        tokens=(5, 6, 7, 8),
        parents=(-1, 0, 1, 0),
        scores=(0.0, -0.1, -0.3, -2.0),
        texts=(" the", " sky", " is", " sea"),
        accepted_nodes=(1, 2),
        bonus_token=9,
        bonus_text=" blue",
        draft_seconds=0.001,
        verify_seconds=0.002,
    )
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(draw_round(played))
    lines = capture.get().splitlines()
    assert "round 3" in lines[0]
    assert "2 of 3 accepted" in lines[0]
    assert [line.split("── ")[-1].split("  ")[0].strip() for line in lines[1:]] == [
        "' the'",
        "✓ ' sky'",
        "✓ ' is'",
        "+ ' blue'",
        "' sea'",
    ]
    assert "90 %" in lines[2]


def test_first_difference_counts_ends() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert margin_at(1, [0.5, 0.2], [0.4, 0.1]) == 0.1
    assert margin_at(5, [0.5], [0.4]) == float("inf")
