"""The router's middle: admits generations, joins their sessions to the links, follows the peers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from canopy.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2
from common.log import get_logger
from router import codec
from router.actions import Failed, Finished
from router.chat import ChatTemplateError
from router.config import RouterConfig
from router.draft_link import DraftLink
from router.drafting import DraftSettings
from router.errors import ErrorKind, Failure, GenerationError, RequestError
from router.generation import Generation, Served
from router.handshake import check_pair, check_same_target, check_verify, served
from router.links import LinkListener, NotYet, PeerState
from router.machine import GenerationMachine, MachineSettings
from router.messages import DraftCommand, DraftOpen, VerifyCommand, VerifyOpen
from router.metrics import RouterMetrics
from router.output_text import OutputText
from router.requests import CheckedRequest, Prompt, check, complete
from router.session import Session
from router.stops import StopStrings
from router.tokenizer import ModelTokenizer
from router.verify_link import VerifyLink

_ENCODE_ON_THREAD_CHARACTERS = 4096
"""Longer prompts are encoded off the event loop: a megabyte takes a third of a second."""

_logger = get_logger("router")


class RouterCore:
    """Everything between the public servicer and the two links; lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer,
        metrics: RouterMetrics,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change`: called whenever a peer came, went or was found not to fit."""
        self._config, self._tokenizer, self._metrics = config, tokenizer, metrics
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}
        self._by_request: dict[str, Session] = {}
        self._num_opening = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._asked_at = clock()
        size = config.max_message_bytes
        verify_listener = LinkListener(
            self._on_verify_events,
            *(self._on_verify_up, self._on_verify_down, on_change),
            *(self._when_asked, self._note_turnaround),
        )
        self.verify = VerifyLink(
            config.verify, size, verify_listener, self._check_verify, self._on_features
        )
        self.draft: DraftLink | None = None
        if config.draft:
            draft_listener = LinkListener(
                self._on_draft_events,
                *(self._on_draft_up, self._on_draft_down, on_change),
                *(self._when_asked, self._note_turnaround),
            )
            self.draft = DraftLink(
                config.draft, size, draft_listener, self._check_draft, self.verify.return_credit
            )
        metrics.follow(self)

    def start(self) -> None:
        self.verify.start()
        if self.draft is not None:
            self.draft.start()

    async def drain(self) -> None:
        """Refuses new generations and waits for the running ones."""
        self._draining = True
        await self._idle.wait()
        await self._flush()

    async def stop(self) -> None:
        """Ends what still runs, and tells both services so."""
        for session in list(self._sessions.values()):
            session.fail(_unavailable("the router is stopping; send the request again"))
        await self._flush()
        await self.verify.stop()
        if self.draft is not None:
            await self.draft.stop()

    async def _flush(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self.verify.flush()
                if self.draft is not None:
                    await self.draft.flush()

    # -- for the servicer

    @property
    def num_running(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        """Running generations without a token yet."""
        return sum(s.machine.num_emitted == 0 for s in self._sessions.values())

    @property
    def peers(self) -> list[PeerState]:
        return [self.verify.peer, *([self.draft.peer] if self.draft is not None else [])]

    def served(self) -> Served:
        """Raises GenerationError (UNAVAILABLE) while verify was never reached."""
        if self.verify.info is None:
            raise GenerationError(_unavailable(f"verify service: {self.verify.peer.reason}"))
        draft = self.draft.info if self.draft is not None else None
        return served(self._config, self._tokenizer, self.verify.info, draft)

    async def open(self, request: generation_pb2.GenerateRequest) -> Session:
        """Starts a generation. Raises RequestError or GenerationError; then nothing was started."""
        self._asked_at = arrived = self._clock()
        limits = self.served()
        checked = check(request, limits)
        self._admit(checked)
        self._num_opening += 1
        try:
            tokens = await self._encode(checked)
        finally:
            self._num_opening -= 1
        self._admit(checked)  # time has passed
        return self._begin(complete(checked, tokens, limits), arrived)

    def _admit(self, checked: CheckedRequest) -> None:
        if self._draining:
            raise GenerationError(_unavailable("the router drains; send the request again"))
        peer = self.verify.peer
        if not peer.ready:
            raise GenerationError(_unavailable(f"verify service: {peer.reason or 'not ready'}"))
        limit = self._config.max_running
        if len(self._sessions) + self._num_opening >= limit:
            message = f"{limit} generations run already, the most at one time; try again later"
            raise GenerationError(Failure(ErrorKind.RESOURCE_EXHAUSTED, message, 1.0))
        if checked.request_id in self._by_request:
            message = f"{checked.request_id!r} is running; choose another, or none"
            raise RequestError("request_id", message, ErrorKind.ALREADY_EXISTS)

    async def _encode(self, checked: CheckedRequest) -> Sequence[int]:
        prompt = checked.prompt
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.num_characters > _ENCODE_ON_THREAD_CHARACTERS:
            return await asyncio.to_thread(self._encode_now, prompt)
        return self._encode_now(prompt)

    def _encode_now(self, prompt: Prompt) -> list[int]:
        if prompt.messages is None:
            return self._tokenizer.encode(prompt.text or "")
        try:
            return self._tokenizer.encode_chat(prompt.messages)
        except ChatTemplateError as error:
            raise RequestError("chat", str(error)) from None

    def _begin(self, generation: Generation, arrived: float) -> Session:
        text = OutputText(self._tokenizer.detokenizer(), StopStrings(generation.stop_strings))
        machine = GenerationMachine(
            generation, secrets.token_bytes(16), text, self._machine_settings(), arrived
        )
        machine.clock.observer = machine.statistics.observer = self._metrics.rounds
        session = Session(
            machine, self._tokenizer, self, self._clock, self._config.max_unread_tokens
        )
        self._sessions[session.sequence_id] = session
        self._by_request[session.request_id] = session
        self._idle.clear()
        session.start(draft_up=self.draft is not None and self.draft.peer.linked)
        return session

    def _machine_settings(self) -> MachineSettings:
        assert self.verify.info is not None
        draft = None
        if self.draft is not None:
            info = self.draft.info
            draft = DraftSettings(
                needs_features=info is None or info.features.kind != types_pb2.FEATURE_KIND_NONE,
                max_context_len=(info.max_context_len if info is not None else 0) or 1 << 31,
                deadline_seconds=self._config.tree_seconds,
                catch_up_tokens=self._config.catch_up_tokens,
            )
        return MachineSettings(
            draft=draft,
            max_tree_nodes=self.verify.info.max_tree_nodes,
            verify_lost_seconds=self._config.verify_lost_seconds,
        )

    def abort(self, request_id: str) -> bool:
        session = self._by_request.get(request_id)
        if session is None:
            return False
        session.abort()
        return True

    # -- Wire

    def to_verify(self, command: VerifyCommand) -> None:
        num_tokens = len(command.tokens) if isinstance(command, VerifyOpen) else 0
        self.verify.send(codec.encode_verify(command), num_tokens)

    def to_draft(self, command: DraftCommand) -> None:
        if self.draft is not None:
            num_tokens = len(command.tokens) if isinstance(command, DraftOpen) else 0
            self.draft.send(codec.encode_draft(command), num_tokens)

    def features_to_draft(self, block: types_pb2.FeatureBlock) -> None:
        if self.draft is None:
            self.features_dropped(codec.num_data_bytes(block))
        else:
            self.draft.send_features(block)

    def features_dropped(self, num_bytes: int) -> None:
        self.verify.return_credit(num_bytes)

    def ended(self, session: Session, ending: Finished | Failed | None) -> None:
        self._sessions.pop(session.sequence_id, None)
        self._by_request.pop(session.request_id, None)
        if not self._sessions:
            self._idle.set()
        self._metrics.count_generation(session.machine, ending, self._clock())
        if isinstance(ending, Failed):
            _logger.warning(
                "generation failed",
                request_id=session.request_id,
                kind=ending.failure.kind.value,
                reason=ending.failure.message,
            )

    # -- from the links

    def _on_verify_events(self, messages: Iterable[verify_pb2.VerifyEvent]) -> None:
        self._asked_at = now = self._clock()
        sessions = self._sessions
        for message in messages:
            session = sessions.get(message.sequence_id)
            if session is not None and (event := codec.decode_verify(message)) is not None:
                session.on_verify(event, now)

    def _on_draft_events(self, messages: Iterable[draft_pb2.DraftEvent]) -> None:
        self._asked_at = now = self._clock()
        sessions = self._sessions
        for message in messages:
            session = sessions.get(message.sequence_id)
            if session is not None and (event := codec.decode_draft(message)) is not None:
                session.on_draft(event, now)

    def _on_features(self, block: types_pb2.FeatureBlock) -> None:
        session = self._sessions.get(block.sequence_id)
        if session is None:
            self.features_dropped(codec.num_data_bytes(block))
        else:
            session.on_features(block)

    def _when_asked(self) -> float:
        return self._asked_at

    def _note_turnaround(self, role: str, asked_at: float) -> None:
        self._metrics.turnaround.labels(role).observe(self._clock() - asked_at)

    def _on_verify_up(self) -> None:
        for session in list(self._sessions.values()):
            session.on_verify_up()

    def _on_verify_down(self) -> None:
        for session in list(self._sessions.values()):
            session.on_verify_down()

    def _on_draft_up(self) -> None:
        for session in list(self._sessions.values()):
            session.on_draft_up()

    def _on_draft_down(self) -> None:
        for session in list(self._sessions.values()):
            session.on_draft_down()

    def _check_verify(self, info: verify_pb2.GetVerifyInfoResponse) -> str | None:
        mismatch = check_verify(info, self._tokenizer)
        if mismatch is None and self.verify.info is not None:
            mismatch = check_same_target(self.verify.info, info)
        return mismatch

    def _check_draft(self, info: draft_pb2.GetDraftInfoResponse) -> str | None:
        """Raises NotYet while there is no verify to compare with."""
        if self.verify.info is None:
            raise NotYet("waits for verify, to compare the two")
        return check_pair(self.verify.info, info)


def _unavailable(message: str) -> Failure:
    return Failure(ErrorKind.UNAVAILABLE, message, retry_seconds=1.0)
