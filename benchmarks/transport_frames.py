"""What a frame of each kind costs both ends in CPU time, and how many bytes it has.

The real codecs of both sides and protobuf, without sockets: the sender makes the message from its
own values and serialises it, the receiver parses it and makes its own values of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from canopy.v1 import draft_pb2, verify_pb2
from common.tensors import split_rows
from common.types import DraftTree, FeatureRows, TreeShape
from draft_service import codec as draft_codec
from draft_service.events import GrownTree, TreeReady
from router import codec as router_codec
from router.messages import DraftExtend, VerifyTree
from router.trees import Tree
from verify_service import codec as verify_codec
from verify_service.events import RoundDone, RoundResult

SECONDS_PER_FIGURE = 0.4
NUM_EMITTED = 3
SHAPE = TreeShape(max_depth=5, top_k=4, max_nodes=64)


def measure_frames(num_sequences: int, num_nodes: int, row_width: int) -> list[dict[str, Any]]:
    """For each kind of frame: bytes, and microseconds of CPU that sending and receiving take."""
    ids = [secrets.token_bytes(16) for _ in range(num_sequences)]
    kinds = (
        ("trees to verify", *trees_to_verify(ids, num_nodes)),
        ("results", *results(ids)),
        ("extends", *extends(ids)),
        ("trees from draft", *trees_from_draft(ids, num_nodes)),
        ("features", *features(ids, row_width)),
    )
    figures = []
    for kind, send, receive in kinds:
        data = send()
        figures.append(
            {
                "kind": kind,
                "sequences": num_sequences,
                "bytes": len(data),
                "bytes_per_sequence": round(len(data) / num_sequences, 1),
                "send_us": round(1e6 * cpu_seconds(send), 1),
                "receive_us": round(1e6 * cpu_seconds(partial(receive, data)), 1),
            }
        )
    return figures


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of one call: the best of several runs, for a busy machine only adds."""
    call()
    best, end = float("inf"), time.monotonic() + SECONDS_PER_FIGURE
    while time.monotonic() < end:
        begun = time.process_time()
        for _ in range(5):
            call()
        best = min(best, (time.process_time() - begun) / 5)
    return best


Ends = tuple[Callable[[], bytes], Callable[[bytes], object]]


def trees_to_verify(ids: Sequence[bytes], num_nodes: int) -> Ends:
    parents = tuple(max(0, node // 2) for node in range(num_nodes))
    tree = Tree(tuple(range(40_000, 40_000 + num_nodes)), parents, scores(num_nodes))
    commands = [VerifyTree(id_, 3, 40, 41, 500, tree) for id_ in ids]

    def send() -> bytes:
        messages = [router_codec.encode_verify(command) for command in commands]
        return verify_pb2.VerifyRequest(commands=messages).SerializeToString()

    def receive(data: bytes) -> object:
        return verify_codec.decode_request(1, verify_pb2.VerifyRequest.FromString(data))

    return send, receive


def results(ids: Sequence[bytes]) -> Ends:
    result = RoundResult(
        round=41,
        kv_len=500,
        tokens=(40_001, 40_002, 40_003),
        margins=(1.5, 0.2, 3.0),
        accepted_nodes=(1, 3),
        num_nodes=16,
        step_seconds=0.01,
        queue_seconds=0.001,
    )
    events = [RoundDone(stream=1, sequence_id=id_, epoch=3, result=result) for id_ in ids]

    def receive(data: bytes) -> object:
        events = verify_pb2.VerifyResponse.FromString(data).events
        return [router_codec.decode_verify(event) for event in events]

    return lambda: verify_codec.encode_events(events).SerializeToString(), receive


def extends(ids: Sequence[bytes]) -> Ends:
    tokens = (40_001, 40_002, 40_003)
    commands = [DraftExtend(id_, 2, 40, 41, 498, tokens) for id_ in ids]

    def send() -> bytes:
        messages = [router_codec.encode_draft(command) for command in commands]
        return draft_pb2.DraftRequest(commands=messages).SerializeToString()

    def receive(data: bytes) -> object:
        return draft_codec.decode_request(1, draft_pb2.DraftRequest.FromString(data), SHAPE)

    return send, receive


def trees_from_draft(ids: Sequence[bytes], num_nodes: int) -> Ends:
    parents = np.array([-1, *(node // 2 for node in range(1, num_nodes))], np.int32)
    tokens = np.arange(40_000, 40_000 + num_nodes, dtype=np.int32)
    tree = DraftTree(tokens, parents, np.array(scores(num_nodes), np.float32))
    grown = GrownTree(
        round=41, committed_len=501, tree=tree, step_seconds=0.01, queue_seconds=0.001
    )
    events = [TreeReady(stream=1, sequence_id=id_, epoch=2, grown=grown) for id_ in ids]

    def receive(data: bytes) -> object:
        events = draft_pb2.DraftResponse.FromString(data).events
        return [router_codec.decode_draft(event) for event in events]

    return lambda: draft_codec.encode_events(events).SerializeToString(), receive


def features(ids: Sequence[bytes], row_width: int) -> Ends:
    """From verify into bytes, and from bytes to rows as the draft has them."""
    rows = np.ones((NUM_EMITTED, row_width), np.float32)
    blocks = [FeatureRows(id_, 3, 500, rows) for id_ in ids]

    def send() -> bytes:
        pieces = [piece for block in blocks for piece in split_rows(block)]
        return verify_codec.encode_pieces(pieces).SerializeToString()

    def receive(data: bytes) -> object:
        blocks = verify_pb2.ReceiveFeaturesResponse.FromString(data).blocks
        return [draft_codec.decode_features(block) for block in blocks]

    return send, receive


def scores(num_nodes: int) -> tuple[float, ...]:
    return tuple(-0.1 * node for node in range(num_nodes))
