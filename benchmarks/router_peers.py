"""Verify and draft services that answer at once, for measuring the router alone.

    python -m benchmarks.router_peers --tokenizer-hash HEX

A round accepts the first two nodes of every tree and adds a bonus; tokens count upwards, so that no
model is needed. Verify answers in lockstep: when all open sequences have sent their round, one
frame answers them all, as one device step would. Prints its address as one JSON line; at the end,
on SIGTERM, another with what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from canopy.v1 import draft_pb2, draft_pb2_grpc, types_pb2, verify_pb2, verify_pb2_grpc
from common.process import event_loop_factory, tune_malloc
from common.server import server_options
from router.handshake import PROTOCOL_VERSION

VOCAB_SIZE = 256
NUM_EMITTED = 3
CREDIT_BYTES = 64 << 20


def next_token(token: int) -> int:
    """Letters only: every token is a character."""
    return 97 + (token - 96) % 26


class Lockstep:
    """How long each lockstep round took outside of these services: the router and the wires."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.answered_at: float | None = None

    def all_here(self) -> None:
        if self.answered_at is not None:
            self.seconds.append(time.perf_counter() - self.answered_at)

    def answered(self) -> None:
        self.answered_at = time.perf_counter()


class InstantVerify(verify_pb2_grpc.VerifyServiceServicer):
    def __init__(self, arguments: argparse.Namespace, lockstep: Lockstep) -> None:
        self._arguments, self._lockstep = arguments, lockstep
        self._open: dict[bytes, int] = {}  # last token
        self._waiting: list[verify_pb2.VerifyEvent] = []
        self._out: asyncio.Queue[list[verify_pb2.VerifyEvent]] = asyncio.Queue()
        self._blocks: asyncio.Queue[types_pb2.FeatureBlock] = asyncio.Queue()
        self._row = bytes(arguments.feature_row_bytes)

    async def GetVerifyInfo(self, request: Any, context: Any) -> verify_pb2.GetVerifyInfoResponse:
        return verify_pb2.GetVerifyInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            target=identity(self._arguments),
            features=features(self._arguments),
            max_context_len=1 << 20,
            max_tree_nodes=64,
            max_sequences=4096,
        )

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verify_pb2.VerifyResponse]:
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                events = await self._out.get()
                self._lockstep.answered()
                yield verify_pb2.VerifyResponse(events=events)
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            for command in request.commands:
                answer = self.answer(command)
                if answer is not None:
                    self._waiting.append(answer[0])
                    self._blocks.put_nowait(answer[1])
            if self._waiting and len(self._waiting) >= len(self._open):
                self._lockstep.all_here()
                waiting, self._waiting = self._waiting, []
                self._out.put_nowait(waiting)

    def answer(
        self, command: verify_pb2.VerifyCommand
    ) -> tuple[verify_pb2.VerifyEvent, types_pb2.FeatureBlock] | None:
        """The round's result, and the features of its rows."""
        match command.WhichOneof("command"):
            case "open":
                last = command.open.tokens[-1]
                kv_len, round_ = len(command.open.tokens) - 1, command.open.round
                num_emitted = 1
            case "verify_tree":
                last = self._open[command.sequence_id]
                kv_len, round_ = command.verify_tree.kv_len, command.verify_tree.round
                num_emitted = min(NUM_EMITTED, len(command.verify_tree.tree.tokens))
            case _:
                self._open.pop(command.sequence_id, None)
                return None
        tokens = []
        for _ in range(num_emitted):
            last = next_token(last)
            tokens.append(last)
        self._open[command.sequence_id] = last
        event = verify_pb2.VerifyEvent(
            sequence_id=command.sequence_id,
            epoch=command.epoch,
            result=verify_pb2.VerifyResult(
                round=round_,
                kv_len=kv_len,
                tokens=tokens,
                pick_margins=[1.0] * num_emitted,
                num_nodes=1 if num_emitted == 1 else self._arguments.nodes,
                accepted_nodes=range(1, num_emitted),
            ),
        )
        block = types_pb2.FeatureBlock(
            sequence_id=command.sequence_id,
            epoch=command.epoch,
            position=0 if round_ == 0 else kv_len,
            num_rows=kv_len + 1 if round_ == 0 else num_emitted,
            row_width=len(self._row) // 4,
            dtype=types_pb2.FEATURE_DTYPE_FLOAT32,
            data=self._row * num_emitted,
        )
        return event, block

    async def ReceiveFeatures(
        self, requests: Any, context: Any
    ) -> AsyncIterator[verify_pb2.ReceiveFeaturesResponse]:
        reader = asyncio.create_task(exhaust(requests))
        try:
            while True:
                blocks = [await self._blocks.get()]
                while not self._blocks.empty() and len(blocks) < 64:
                    blocks.append(self._blocks.get_nowait())
                yield verify_pb2.ReceiveFeaturesResponse(blocks=blocks)
        finally:
            reader.cancel()


class InstantDraft(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._parents = [0, 0, 1, *[0] * (arguments.nodes - 3)]
        self._scores = [-0.1 * node for node in range(arguments.nodes)]

    async def GetDraftInfo(self, request: Any, context: Any) -> draft_pb2.GetDraftInfoResponse:
        return draft_pb2.GetDraftInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            head_name="instant",
            target=identity(self._arguments),
            features=features(self._arguments),
            max_context_len=1 << 20,
            max_tree=types_pb2.TreeShape(max_depth=8, top_k=8, max_nodes=64),
        )

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[draft_pb2.DraftResponse]:
        async for request in requests:
            events = [event for command in request.commands for event in self.answer(command)]
            if events:
                yield draft_pb2.DraftResponse(events=events)

    def answer(self, command: draft_pb2.DraftCommand) -> list[draft_pb2.DraftEvent]:
        event = draft_pb2.DraftEvent(sequence_id=command.sequence_id, epoch=command.epoch)
        match command.WhichOneof("command"):
            case "open":
                event.state.committed_len = len(command.open.tokens)
            case "extend":
                root = command.extend.tokens[-1]
                first = next_token(root)
                ready = event.tree
                ready.round = command.extend.round
                ready.committed_len = command.extend.base_len + len(command.extend.tokens)
                others = [65] * (self._arguments.nodes - 3)
                ready.tree.tokens.extend([root, first, next_token(first), *others])
                ready.tree.parents.extend(self._parents)
                ready.tree.scores.extend(self._scores)
            case _:
                return []
        return [event]

    async def SendFeatures(
        self, requests: Any, context: Any
    ) -> AsyncIterator[draft_pb2.SendFeaturesResponse]:
        yield draft_pb2.SendFeaturesResponse(credit_bytes=CREDIT_BYTES)
        async for request in requests:
            taken = sum(len(block.data) for block in request.blocks)
            yield draft_pb2.SendFeaturesResponse(credit_bytes=taken)


async def exhaust(requests: Any) -> None:
    async for _ in requests:
        pass


def identity(arguments: argparse.Namespace) -> types_pb2.TargetIdentity:
    return types_pb2.TargetIdentity(
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=VOCAB_SIZE,
        tokenizer_hash=arguments.tokenizer_hash,
        hidden_size=1,
        weights_hash="none",
    )


def features(arguments: argparse.Namespace) -> types_pb2.FeatureSpec:
    return types_pb2.FeatureSpec(
        kind=types_pb2.FEATURE_KIND_AUX,
        boundaries=[1],
        dtype=types_pb2.FEATURE_DTYPE_FLOAT32,
        row_width=arguments.feature_row_bytes // 4,
    )


async def serve(arguments: argparse.Namespace) -> None:
    lockstep = Lockstep()
    server = grpc.aio.server(options=server_options(16 << 20))
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(InstantVerify(arguments, lockstep), server)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(InstantDraft(arguments), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(json.dumps({"address": address}), flush=True)
    asked_to_stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    await asked_to_stop.wait()
    await server.stop(None)
    # The first rounds still open sequences, the last close them.
    print(json.dumps({"round_seconds": lockstep.seconds[5:-5]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer-hash", required=True)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--feature-row-bytes", type=int, default=6912)
    arguments = parser.parse_args()
    tune_malloc()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(serve(arguments))


if __name__ == "__main__":
    main()
