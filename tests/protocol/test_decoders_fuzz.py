"""Whatever bytes come from outside, every decoder answers with values, an error entry or a refusal.

Messages are drawn by their descriptors: every field of every kind, at the edges of its type, so
that a new field is tried without being named here. Verify's side is in test_verify_fuzz.py.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
from draft_toy import PAGE_SIZE
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from three_machines import DRAFT_LIMITS, DraftEngine

from canopy.v1 import draft_pb2, generation_pb2, verify_pb2
from common.callers import Callers
from common.tracing import traceparent_of
from common.types import TreeShape
from draft_service import codec as draft_codec
from draft_service.machine import DraftMachine
from router import codec as router_codec
from router.errors import RequestError
from router.generation import Generation, Served
from router.requests import check, complete

SERVED = Served(
    model_name="toy",
    vocab_size=300,
    max_context_len=64,
    stop_token_ids=(297,),
    default_max_tokens=16,
    max_tree=TreeShape(max_depth=8, top_k=8, max_nodes=32),
    default_tree=TreeShape(max_depth=3, top_k=2, max_nodes=8),
    max_choices=8,
)
SEARCH = settings(max_examples=50, deadline=None)
EDGES: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2, 5, 16, 2**31, 2**32 - 1],
    FieldDescriptor.CPPTYPE_INT32: [0, 1, -1, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 2, 2**63, 2**64 - 1],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, 0.5, -1.0, 1e30, float("inf"), float("nan")],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, -1.0, float("inf"), float("nan")],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 3, 99],
}
TEXTS = ["", "toy", "hi", "\n", "\0", "é🌲", "x" * 130]
BLOBS = [b"", b"a" * 16, b"b" * 16, b"x" * 15, struct.pack("<6f", *range(6)), bytes(24)]


def fill(message: Message, draw: Any, depth: int = 0) -> Message:
    """Sets some of the fields."""
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[draw(st.sampled_from([0, 5, 2**32 - 1]))] = draw(
                st.sampled_from(EDGES[FieldDescriptor.CPPTYPE_FLOAT])
            )
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if depth < 4:
                own = getattr(message, field.name)
                if field.is_repeated:
                    for _ in range(draw(st.integers(0, 3))):
                        fill(own.add(), draw, depth + 1)
                else:
                    own.SetInParent()
                    fill(own, draw, depth + 1)
        elif field.is_repeated:
            values = draw(st.lists(scalar(field), max_size=6))
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, draw(scalar(field)))
    return message


def scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return st.sampled_from(BLOBS if is_bytes else TEXTS)
    return st.sampled_from(EDGES[field.cpp_type])


def read_request(request: generation_pb2.GenerateRequest) -> None:
    try:
        checked = check(request, SERVED)
        tokens = checked.prompt.token_ids or (1, 2, 3)
        generation = complete(checked, tokens, SERVED)
    except RequestError:
        return
    assert isinstance(generation, Generation)
    assert len(tokens) < generation.max_total_tokens <= SERVED.max_context_len
    assert 1 <= checked.num_choices <= SERVED.max_choices


def read_draft_frame(request: draft_pb2.DraftRequest) -> None:
    machine, engine = DraftMachine(DRAFT_LIMITS), DraftEngine(DRAFT_LIMITS.num_pages)
    machine.connect(1)
    commands, errors = draft_codec.decode_request(1, request, DRAFT_LIMITS.tree)
    events = [*errors, *machine.handle(1, commands, 0.0)]
    plan = machine.plan(0.0)
    events += [*plan.events, *machine.retire(plan.works, engine.run(plan.works), 0.0)]
    draft_codec.encode_events(events).SerializeToString()
    machine.check_balance()
    assert DRAFT_LIMITS.page_size == PAGE_SIZE


def read_features(request: draft_pb2.SendFeaturesRequest) -> None:
    machine = DraftMachine(DRAFT_LIMITS)
    for block in request.blocks:
        try:
            rows = draft_codec.decode_features(block)
        except ValueError:
            continue
        machine.receive(rows, 0.0)


def read_events(response: verify_pb2.VerifyResponse | draft_pb2.DraftResponse) -> None:
    is_verify = isinstance(response, verify_pb2.VerifyResponse)
    decode: Any = router_codec.decode_verify if is_verify else router_codec.decode_draft
    for event in response.events:
        decode(event)


def read_blocks(response: verify_pb2.ReceiveFeaturesResponse) -> None:
    for block in response.blocks:
        assert router_codec.num_data_bytes(block) >= 0


READERS: dict[type[Message], Any] = {
    generation_pb2.GenerateRequest: read_request,
    draft_pb2.DraftRequest: read_draft_frame,
    draft_pb2.SendFeaturesRequest: read_features,
    verify_pb2.VerifyResponse: read_events,
    draft_pb2.DraftResponse: read_events,
    verify_pb2.ReceiveFeaturesResponse: read_blocks,
}
KINDS = pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)


@KINDS
@given(data=st.data())
@SEARCH
def test_any_message_is_answered(kind: type[Message], data: st.DataObject) -> None:
    message = fill(kind(), data.draw)
    READERS[kind](kind.FromString(message.SerializeToString()))


@KINDS
@given(raw=st.binary(max_size=200))
@SEARCH
def test_any_bytes_that_are_a_message_are_answered(kind: type[Message], raw: bytes) -> None:
    try:
        message = kind.FromString(raw)
    except DecodeError:
        return  # gRPC refuses it
    READERS[kind](message)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["authorization", "traceparent", "x-tenant", "other"]),
            st.text(max_size=60) | st.binary(max_size=60),
        )
    )
)
@SEARCH
def test_any_metadata_is_a_caller_and_perhaps_a_trace(sent: list[tuple[str, str | bytes]]) -> None:
    caller = Callers(None, "x-tenant").of(sent)
    assert isinstance(caller.key, str)
    assert len(traceparent_of(sent)) in (0, 55)
