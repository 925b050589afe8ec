"""A small router for tests of a real verify service: plain rounds, or trees that guess."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from canopy.v1 import types_pb2, verify_pb2, verify_pb2_grpc
from common.types import FeatureRows


@dataclass
class Generation:
    """What a service said of one sequence. `response`: emitted tokens."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    accepted: int = 0
    rounds: int = 0
    step_seconds: list[float] = field(default_factory=list)
    errors: list[types_pb2.SequenceError] = field(default_factory=list)
    preempted: int = 0


class VerifyClient:
    """One Verify stream, and a ReceiveFeatures stream beside it if asked for."""

    def __init__(self, channel: grpc.aio.Channel, link_id: str | None = None) -> None:
        self.stub = verify_pb2_grpc.VerifyServiceStub(channel)
        self._metadata = (("canopy-link-id", link_id or secrets.token_hex(8)),)
        self._outbox: asyncio.Queue[verify_pb2.VerifyRequest | None] = asyncio.Queue()
        self._inboxes: dict[bytes, asyncio.Queue[verify_pb2.VerifyEvent]] = {}
        self.features: dict[bytes, list[FeatureRows]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._call = self.stub.Verify(self._requests(), metadata=self._metadata)

    async def __aenter__(self) -> VerifyClient:
        self._tasks.append(asyncio.create_task(self._read()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._outbox.put_nowait(None)
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self._tasks[0]
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def receive_features(self, credit_bytes: int) -> None:
        self._tasks.append(asyncio.create_task(self._read_features(credit_bytes)))

    def cancel(self) -> None:
        """Drops the stream in mid-air."""
        self._call.cancel()

    def send(self, *commands: verify_pb2.VerifyCommand) -> None:
        self._outbox.put_nowait(verify_pb2.VerifyRequest(commands=commands))

    async def event(self, sequence_id: bytes) -> verify_pb2.VerifyEvent:
        inbox = self._inboxes.setdefault(sequence_id, asyncio.Queue())
        return await asyncio.wait_for(inbox.get(), 120)

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        sampling: types_pb2.SamplingParams | None = None,
        stop: Sequence[int] = (),
        guess: Guess | None = None,
        wants_features: bool = False,
    ) -> Generation:
        """Runs rounds until max_tokens or a stop token; trees come from `guess`."""
        sequence_id = secrets.token_bytes(16)
        generation = Generation(list(prompt))
        self.send(
            verify_pb2.VerifyCommand(
                sequence_id=sequence_id,
                epoch=1,
                open=verify_pb2.VerifyOpen(
                    tokens=prompt,
                    num_prompt_tokens=len(prompt),
                    sampling=sampling,
                    stop_token_ids=stop,
                    max_total_tokens=len(prompt) + max_tokens,
                    wants_features=wants_features,
                ),
            )
        )
        while True:
            event = await self.event(sequence_id)
            match event.WhichOneof("event"):
                case "error":
                    generation.errors.append(event.error)
                    return generation
                case "preempted":
                    generation.preempted += 1
                case "result":
                    _note(generation, event.result)
                    done = len(generation.response) >= max_tokens
                    if done or generation.response[-1] in stop:
                        self.send(_close(sequence_id))
                        return generation
                    self.send(_next_round(sequence_id, event.result, generation, guess))

    async def _requests(self) -> AsyncIterator[verify_pb2.VerifyRequest]:
        while (request := await self._outbox.get()) is not None:
            yield request

    async def _read(self) -> None:
        async for response in self._call:
            for event in response.events:
                inbox = self._inboxes.setdefault(event.sequence_id, asyncio.Queue())
                inbox.put_nowait(event)

    async def _read_features(self, credit_bytes: int) -> None:
        credit: asyncio.Queue[int] = asyncio.Queue()
        credit.put_nowait(credit_bytes)

        async def grants() -> AsyncIterator[verify_pb2.ReceiveFeaturesRequest]:
            while True:
                yield verify_pb2.ReceiveFeaturesRequest(credit_bytes=await credit.get())

        async for response in self.stub.ReceiveFeatures(grants(), metadata=self._metadata):
            total = 0
            for block in response.blocks:
                assert len(block.data) <= 1 << 20
                total += len(block.data)
                rows = np.frombuffer(block.data, np.float32).reshape(block.num_rows, -1)
                assert rows.shape[1] == block.row_width
                self.features.setdefault(block.sequence_id, []).append(
                    FeatureRows(block.sequence_id, block.epoch, block.position, rows)
                )
            assert total <= credit_bytes
            credit.put_nowait(total)


class Guess:
    """Random trees; a share `right` of their nodes continues `truth`, the known response."""

    def __init__(self, truth: Sequence[int], vocab_size: int, seed: int, right: float) -> None:
        self._truth, self._vocab_size, self._right = list(truth), vocab_size, right
        self._random = random.Random(seed)

    def tree(self, response: Sequence[int]) -> types_pb2.DraftTree:
        tokens, parents, on_path = [response[-1]], [0], {0: len(response)}
        for node in range(1, self._random.randint(1, 12)):
            parent = self._random.randrange(node)
            token = self._random.randrange(self._vocab_size)
            place = on_path.get(parent, len(self._truth))
            if place < len(self._truth) and self._random.random() < self._right:
                token, on_path[node] = self._truth[place], place + 1
            tokens.append(token)
            parents.append(parent)
        scores = [-0.1 * node for node in range(len(tokens))]
        return types_pb2.DraftTree(tokens=tokens, parents=parents, scores=scores)


def _note(generation: Generation, result: verify_pb2.VerifyResult) -> None:
    assert result.round == generation.rounds
    assert result.kv_len == len(generation.prompt) + len(generation.response) - 1
    assert len(result.pick_margins) == len(result.tokens) == len(result.accepted_nodes) + 1
    generation.response += result.tokens
    generation.margins += result.pick_margins
    generation.accepted += len(result.accepted_nodes)
    generation.rounds += 1
    generation.step_seconds.append(result.step_seconds)


def _next_round(
    sequence_id: bytes,
    last: verify_pb2.VerifyResult,
    generation: Generation,
    guess: Guess | None,
) -> verify_pb2.VerifyCommand:
    root = types_pb2.DraftTree(tokens=generation.response[-1:], parents=[0], scores=[0.0])
    return verify_pb2.VerifyCommand(
        sequence_id=sequence_id,
        epoch=1,
        acked_round=last.round,
        verify_tree=verify_pb2.VerifyTree(
            round=last.round + 1,
            kv_len=len(generation.prompt) + len(generation.response) - 1,
            tree=guess.tree(generation.response) if guess else root,
        ),
    )


def _close(sequence_id: bytes) -> verify_pb2.VerifyCommand:
    return verify_pb2.VerifyCommand(
        sequence_id=sequence_id, epoch=1, close=verify_pb2.VerifyClose()
    )
