"""The router's middle: admits generations, joins their sessions to the links, follows the peers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from canopy.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2
from common.log import get_logger
from common.types import TreeShape
from router import actions as act
from router import codec
from router.config import RouterConfig
from router.handshake import check_pair, check_verify
from router.links import DraftLink, PeerState, VerifyLink
from router.machine import GenerationMachine, Patience
from router.metrics import RouterMetrics
from router.requests import ErrorKind, Limits, RequestError, parse
from router.session import Session
from router.textstream import TextStream
from router.tokenizer import ModelTokenizer

_logger = get_logger("router")


class RouterCore:
    """Everything between the public servicer and the two links; lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer,
        metrics: RouterMetrics,
        on_ready: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._tokenizer, self._metrics = config, tokenizer, metrics
        self._on_ready, self._clock = on_ready, clock
        self._sessions: dict[bytes, Session] = {}
        self._by_request: dict[str, Session] = {}
        self._lost_timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.all_met = asyncio.Event()
        """Set once every configured peer was connected."""
        size = config.max_message_bytes
        self.verify = VerifyLink(
            config.verify,
            size,
            self._on_verify_event,
            self._on_verify_up,
            self._on_verify_down,
            check=lambda info: check_verify(info, tokenizer),
            on_features=self._on_features,
        )
        self.draft = (
            DraftLink(
                config.draft,
                size,
                self._on_draft_event,
                self._on_draft_up,
                self._on_draft_down,
                check=self._check_draft,
                on_features_sent=self.verify.return_credit,
            )
            if config.draft
            else None
        )

    def start(self) -> None:
        self.verify.start()
        if self.draft is not None:
            self.draft.start()

    async def drain(self) -> None:
        """Refuses new generations and waits for the running ones."""
        self._draining = True
        await self._idle.wait()
        await self.verify.flush()

    async def stop(self) -> None:
        for session in list(self._sessions.values()):
            session.fail(
                RequestError("", "the router is stopping; send it again", ErrorKind.UNAVAILABLE)
            )
        await self.verify.flush()
        await self.verify.stop()
        if self.draft is not None:
            await self.draft.stop()

    # -- for the servicer ----------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._sessions)

    @property
    def peers(self) -> list[PeerState]:
        return [self.verify.peer, *([self.draft.peer] if self.draft else [])]

    def limits(self) -> Limits:
        """Raises RequestError (UNAVAILABLE) while verify was never reached."""
        info = self.verify.info
        if info is None:
            raise RequestError(
                "", f"verify is not ready: {self.verify.peer.reason}", ErrorKind.UNAVAILABLE
            )
        context = min(info.max_context_len, self._tokenizer.context_len)
        most = TreeShape(max_depth=1, top_k=1, max_nodes=info.max_tree_nodes)
        if self.draft is not None and self.draft.info is not None:
            head = self.draft.info
            context = min(context, head.max_context_len or context)
            most = TreeShape(
                max_depth=head.max_tree.max_depth,
                top_k=head.max_tree.top_k,
                max_nodes=min(info.max_tree_nodes, head.max_tree.max_nodes),
            )
        elif (
            self.draft is not None
        ):  # not met yet: the request's wishes are bounded by our defaults
            most = self._config.default_tree
        return Limits(
            model_name=self._config.served_name,
            context_len=min(context, self._config.max_total_tokens or context),
            vocab_size=info.target.vocab_size,
            default_max_tokens=self._config.default_max_tokens,
            max_tree=most,
            default_tree=self._config.default_tree,
            can_speculate=self.draft is not None,
        )

    def open(self, request: generation_pb2.GenerateRequest) -> Session:
        """Starts a generation. Raises RequestError; then nothing was started."""
        try:
            if self._draining:
                raise RequestError("", "the router is draining", ErrorKind.UNAVAILABLE)
            if not self.verify.peer.ready:
                reason = f"verify is not ready: {self.verify.peer.reason}"
                raise RequestError("", reason, ErrorKind.UNAVAILABLE)
            if len(self._sessions) >= self._config.max_running:
                limit = self._config.max_running
                raise RequestError("", f"{limit} generations run already", ErrorKind.OVERLOADED)
            generation = parse(request, self._tokenizer, self.limits())
            if generation.request_id in self._by_request:
                raise RequestError(
                    "request_id", "is in use; choose another", ErrorKind.ALREADY_EXISTS
                )
        except RequestError as error:
            self._metrics.rejected.labels(error.kind.value).inc()
            raise
        machine = GenerationMachine(
            generation,
            TextStream(self._tokenizer.decode, generation.stop_strings),
            Patience(tree_seconds=self._config.tree_seconds),
            has_draft=self.draft is not None and self.draft.peer.ready,
        )
        sequence_id = secrets.token_bytes(16)
        session = Session(
            sequence_id,
            machine,
            self._tokenizer,
            self,
            self._clock,
            self._config.max_buffered_chunks,
        )
        self._sessions[sequence_id] = session
        self._by_request[generation.request_id] = session
        self._idle.clear()
        self._metrics.running.set(len(self._sessions))
        session.start()
        return session

    def abort(self, request_id: str) -> bool:
        session = self._by_request.get(request_id)
        if session is None:
            return False
        session.cancel()
        return True

    # -- Wire ----------------------------------------------------------------------------------

    def to_verify(self, session: Session, command: act.VerifyCommand) -> None:
        generation = session.machine.generation
        self.verify.send(codec.encode_verify(session.sequence_id, command, generation))

    def to_draft(self, session: Session, command: act.DraftCommand) -> None:
        if self.draft is not None:
            generation = session.machine.generation
            self.draft.send(codec.encode_draft(session.sequence_id, command, generation))

    def features_to_draft(self, block: types_pb2.FeatureBlock) -> None:
        if self.draft is None:
            self.features_dropped(len(block.data))
        else:
            self._metrics.feature_bytes.inc(len(block.data))
            self.draft.send_features(block)

    def features_dropped(self, num_bytes: int) -> None:
        if num_bytes:
            self.verify.return_credit(num_bytes)

    def ended(self, session: Session, action: act.Finish | act.Fail) -> None:
        self._sessions.pop(session.sequence_id, None)
        self._by_request.pop(session.machine.generation.request_id, None)
        self._metrics.running.set(len(self._sessions))
        if not self._sessions:
            self._idle.set()
        if isinstance(action, act.Finish):
            self._metrics.count_finish(action, self._clock())
        else:
            self._metrics.requests.labels("failed").inc()
            _logger.warning(
                "generation failed",
                request_id=session.machine.generation.request_id,
                kind=action.error.kind.value,
                reason=str(action.error),
            )

    # -- from the links ------------------------------------------------------------------------

    def _on_verify_event(self, message: verify_pb2.VerifyEvent) -> None:
        session = self._sessions.get(message.sequence_id)
        event = codec.decode_verify(message)
        if session is not None and event is not None:
            session.on_verify(event)

    def _on_draft_event(self, message: draft_pb2.DraftEvent) -> None:
        session = self._sessions.get(message.sequence_id)
        if session is None:
            return
        try:
            event = codec.decode_draft(message)
        except ValueError as error:  # the round goes without a tree
            _logger.warning("draft sent a broken tree", reason=str(error))
            return
        if event is not None:
            session.on_draft(event)

    def _on_features(self, block: types_pb2.FeatureBlock) -> None:
        session = self._sessions.get(block.sequence_id)
        if session is None:
            self.features_dropped(len(block.data))
        else:
            session.on_features(block)

    def _check_draft(self, info: draft_pb2.GetDraftInfoResponse) -> str | None:
        if self.verify.info is None or not self.verify.peer.ready:
            return "waiting for verify, to compare the two"
        return check_pair(self.verify.info, info)

    def _on_verify_up(self) -> None:
        self._metrics.peers_ready.labels("verify").set(1)
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None
        for session in list(self._sessions.values()):
            session.on_verify_up()
        self._note_met()
        self._on_ready(True)

    def _on_verify_down(self) -> None:
        self._metrics.peers_ready.labels("verify").set(0)
        self._metrics.peer_losses.labels("verify").inc()
        self._on_ready(False)
        loop = asyncio.get_running_loop()
        self._lost_timer = loop.call_later(self._config.verify_lost_seconds, self._give_up)

    def _give_up(self) -> None:
        reason = (
            f"verify was lost and did not come back within {self._config.verify_lost_seconds} s"
        )
        for session in list(self._sessions.values()):
            session.fail(RequestError("", reason, ErrorKind.UNAVAILABLE))

    def _on_draft_up(self) -> None:
        self._metrics.peers_ready.labels("draft").set(1)
        for session in list(self._sessions.values()):
            session.on_draft_up()
        self._note_met()

    def _note_met(self) -> None:
        if all(peer.ready for peer in self.peers):
            self.all_met.set()

    def _on_draft_down(self) -> None:
        self._metrics.peers_ready.labels("draft").set(0)
        self._metrics.peer_losses.labels("draft").inc()
        for session in list(self._sessions.values()):
            session.on_draft_down()
