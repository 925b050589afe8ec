"""The router's middle: admits generations, joins their sessions to replicas, moves them on."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from canopy.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2
from common.callers import ANYBODY, Caller
from common.log import get_logger
from common.tracing import Trace, Tracing
from router import codec
from router.actions import Failed, Finished
from router.choices import Choices
from router.config import RouterConfig
from router.draft_link import DraftLink
from router.errors import ErrorKind, Failure, GenerationError, RequestError
from router.fleet import Fleet, Returned
from router.generation import Generation, Served
from router.handshake import machine_settings, served
from router.machine import GenerationMachine
from router.messages import (
    DraftCommand,
    DraftOpen,
    RoundResult,
    VerifyCommand,
    VerifyOpen,
)
from router.metrics import RouterMetrics
from router.moving import Moving
from router.names import Resolve, resolve
from router.output_text import OutputText
from router.placement import Placement
from router.prompts import encode
from router.requests import CheckedRequest, check, complete
from router.session import Seat, Session
from router.spans import RequestSpans
from router.stops import StopStrings
from router.tenants import Tenants
from router.tokenizer import ModelTokenizer
from router.verify_link import VerifyLink

_logger = get_logger("router")


class RouterCore:
    """Everything between the public servicer and the links; lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer,
        metrics: RouterMetrics,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        resolve: Resolve = resolve,
        tracing: Tracing | None = None,
    ) -> None:
        """`on_change`: called whenever a peer came, went or was found not to fit."""
        self._config, self._tokenizer, self._metrics = config, tokenizer, metrics
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}
        self._by_request: dict[tuple[str, str], Choices] = {}  # caller's key, request id
        self.tenants = Tenants(config.tenant_limits, self._note_tenant_refusal)
        self._num_opening = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._asked_at = clock()
        self._on_change = on_change
        self._spans = RequestSpans(tracing)
        self.fleet = Fleet(config, tokenizer, self, resolve)
        self._placement = Placement(self.fleet, self._sessions, config.affinity_weight)
        patience_seconds = config.fail_over_seconds
        self._moving = Moving(self.fleet, self._sessions, self._placement, patience_seconds, clock)
        metrics.follow(self)

    def start(self) -> None:
        self.fleet.start()

    async def drain(self) -> None:
        """Refuses new generations and waits for the running ones."""
        self._draining = True
        await self._idle.wait()
        await self._flush()

    async def stop(self) -> None:
        """Ends what still runs, and tells both services so."""
        self._moving.stop()
        for session in list(self._sessions.values()):
            session.fail(_unavailable("the router is stopping; send the request again"))
        await self._flush()
        await self.fleet.stop()

    async def _flush(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self.fleet.flush()

    # -- for the servicer

    @property
    def num_running(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        """Running generations without a token yet."""
        return sum(s.machine.num_emitted == 0 for s in self._sessions.values())

    def served(self) -> Served:
        """Raises GenerationError (UNAVAILABLE) while no verify was ever reached."""
        fleet = self.fleet
        if not fleet.verify_infos:
            raise GenerationError(_unavailable(f"verify service: {fleet.verify_reason}"))
        return served(self._config, self._tokenizer, fleet.verify_infos, fleet.draft_infos)

    async def open(
        self,
        request: generation_pb2.GenerateRequest,
        caller: Caller = ANYBODY,
        traceparent: str = "",
    ) -> Choices:
        """Starts a generation. Raises RequestError or GenerationError; then nothing was started.

        `caller`: who may abort it; request ids are their own. `traceparent`: the caller's span.
        """
        self._asked_at = arrived = self._clock()
        limits = self.served()
        checked = check(request, limits)
        count = checked.num_choices
        self._admit(checked, caller)
        self.tenants.enter(caller, count, self._num_waiting_of)
        try:
            self._num_opening += count
            try:
                tokens = await encode(checked.prompt, self._tokenizer, limits.max_context_len)
            finally:
                self._num_opening -= count
            self._admit(checked, caller)  # time has passed
            generation = complete(checked, tokens, limits)
        except BaseException:
            self.tenants.leave(caller, count)
            raise
        trace = Trace(generation.request_id, traceparent)
        return self._begin(replace(generation, trace=trace), count, caller, arrived)

    def _admit(self, checked: CheckedRequest, caller: Caller) -> None:
        if self._draining:
            raise GenerationError(_unavailable("the router drains; send the request again"))
        if not self.fleet.verify_ready:
            raise GenerationError(_unavailable(f"verify service: {self.fleet.verify_reason}"))
        limit, running = self._config.max_running, len(self._sessions) + self._num_opening
        if running + checked.num_choices > limit:
            message = (
                f"{running} generations run already and {limit} are the most at one time; try again"
                " later"
            )
            raise GenerationError(Failure(ErrorKind.RESOURCE_EXHAUSTED, message, 1.0))
        if (caller.key, checked.request_id) in self._by_request:
            message = f"{checked.request_id!r} is running; choose another, or none"
            raise RequestError("request_id", message, ErrorKind.ALREADY_EXISTS)

    def _note_tenant_refusal(self, caller: Caller, limit: str) -> None:
        """Who it was goes to the log alone: metrics must not grow with the number of callers."""
        self._metrics.tenant_refusals.labels(limit).inc()
        _logger.info("caller is at its limit", caller=caller.name or "unnamed", limit=limit)

    def _num_waiting_of(self, caller: Caller) -> int:
        sessions = self._sessions.values()
        return sum(s.caller == caller and s.machine.num_emitted == 0 for s in sessions)

    def _begin(self, generation: Generation, count: int, caller: Caller, arrived: float) -> Choices:
        """All choices go to the same replicas: they share the prompt's pages."""
        room = generation.max_total_tokens * count
        verify = self._placement.verify(generation.prompt_tokens, room)
        assert verify is not None  # admitted a moment ago
        self._placement.note(generation.prompt_tokens, verify)
        draft = self._placement.draft()
        if draft is None:  # it will be moved to the first that comes
            draft = next(iter(self.fleet.drafts), None)
        readable, sessions = asyncio.Event(), list[Session]()
        for index in range(count):
            part, span = self._spans.begin(replace(generation, choice_index=index))
            machine = self._machine(
                part,
                sessions[0].sequence_id if sessions else None,
                arrived,
            )
            session = Session(
                *(machine, Seat(verify, draft), self._tokenizer, self, self._clock),
                *(self._config.max_unread_tokens, readable, caller),
            )
            session.span = span
            self._sessions[session.sequence_id] = session
            sessions.append(session)
        choices = Choices(sessions, readable)
        self._by_request[caller.key, choices.request_id] = choices
        self._idle.clear()
        for session in sessions:
            session.start(draft_up=draft is not None and draft.peer.linked)
        return choices

    def _machine(
        self, generation: Generation, fork_of: bytes | None, arrived: float
    ) -> GenerationMachine:
        text = OutputText(self._tokenizer.detokenizer(), StopStrings(generation.stop_strings))
        fleet = self.fleet
        settings = machine_settings(self._config, fleet.verify_infos, fleet.draft_infos)
        machine = GenerationMachine(
            *(generation, secrets.token_bytes(16), text, settings, arrived),
            fork_of=fork_of,
        )
        machine.clock.observer = machine.statistics.observer = self._metrics.rounds
        return machine

    def abort(self, request_id: str, caller: Caller = ANYBODY) -> bool:
        choices = self._by_request.get((caller.key, request_id))
        if choices is None:
            return False
        choices.abort()
        return True

    # -- Wire

    def to_verify(self, session: Session, command: VerifyCommand) -> None:
        num_tokens = len(command.tokens) if isinstance(command, VerifyOpen) else 0
        session.seat.verify.send(codec.encode_verify(command), num_tokens)

    def to_draft(self, session: Session, command: DraftCommand) -> None:
        if session.seat.draft is not None:
            num_tokens = len(command.tokens) if isinstance(command, DraftOpen) else 0
            session.seat.draft.send(codec.encode_draft(command), num_tokens)

    def features_to_draft(
        self, session: Session, block: types_pb2.FeatureBlock, returned: Returned
    ) -> None:
        if session.seat.draft is None:
            returned(codec.num_data_bytes(block))
        else:
            session.seat.draft.send_features(block, returned)

    def ended(self, session: Session, ending: Finished | Failed | None) -> None:
        self._sessions.pop(session.sequence_id, None)
        self.tenants.leave(session.caller, 1)
        key = (session.caller.key, session.request_id)
        if all(other.machine.ended for other in self._by_request[key].sessions):
            del self._by_request[key]
        self._placement.note(session.machine.tokens, session.seat.verify)
        if not self._sessions:
            self._idle.set()
        self._metrics.count_generation(session.machine, ending, self._clock())
        self._spans.end(session.span, session.machine, ending)
        if isinstance(ending, Failed):
            _logger.warning(
                "generation failed",
                request_id=session.request_id,
                kind=ending.failure.kind.value,
                reason=ending.failure.message,
            )

    # -- from the links; what a replica says of a sequence that has moved on is dropped

    def on_verify_events(
        self, link: VerifyLink, messages: Iterable[verify_pb2.VerifyEvent]
    ) -> None:
        self._asked_at = now = self._clock()
        sessions = self._sessions
        for message in messages:
            session = sessions.get(message.sequence_id)
            if session is None or session.seat.verify is not link:
                continue
            event = codec.decode_verify(message)
            if event is not None and not self._moving.goes_elsewhere(session, event):
                if self._spans.on and isinstance(event, RoundResult):
                    self._spans.note_round(session.machine, event, now)
                session.on_verify(event, now)

    def on_draft_events(self, link: DraftLink, messages: Iterable[draft_pb2.DraftEvent]) -> None:
        self._asked_at = now = self._clock()
        sessions = self._sessions
        for message in messages:
            session = sessions.get(message.sequence_id)
            if session is None or session.seat.draft is not link:
                continue
            if (event := codec.decode_draft(message)) is not None:
                session.on_draft(event, now)

    def on_features(
        self, link: VerifyLink, block: types_pb2.FeatureBlock, returned: Returned
    ) -> None:
        session = self._sessions.get(block.sequence_id)
        if session is None or session.seat.verify is not link:
            returned(codec.num_data_bytes(block))
        else:
            session.on_features(block, returned)

    def on_change(self) -> None:
        self._on_change()

    def when_asked(self) -> float:
        return self._asked_at

    def note_turnaround(self, role: str, asked_at: float) -> None:
        self._metrics.turnaround.labels(role).observe(self._clock() - asked_at)

    def on_verify_up(self, link: VerifyLink) -> None:
        self._moving.on_verify_up(link)

    def on_verify_down(self, link: VerifyLink) -> None:
        self._moving.on_verify_down(link)

    def on_draft_up(self, link: DraftLink) -> None:
        self._moving.on_draft_up(link)

    def on_draft_down(self, link: DraftLink) -> None:
        self._moving.on_draft_down(link)


def _unavailable(message: str) -> Failure:
    return Failure(ErrorKind.UNAVAILABLE, message, retry_seconds=1.0)
