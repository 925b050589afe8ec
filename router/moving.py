"""Which sequences go to another replica, and when: one is lost, full or draining, or comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from common.types import ErrorCode
from router.draft_link import DraftLink
from router.fleet import Fleet
from router.messages import RoundResult, SequenceFailed, VerifyEvent
from router.placement import Placement
from router.session import Session
from router.verify_link import VerifyLink

_SHORTEST_WAIT_SECONDS = 0.01

_FULL = (ErrorCode.OVERLOADED, ErrorCode.NOT_SERVING)
"""Why a replica would not take a sequence that another may."""


class Moving:
    """`patience_seconds`: how long the sequences of a verify that is gone wait for it."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Mapping[bytes, Session],
        placement: Placement,
        patience_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._sessions, self._placement = fleet, sessions, placement
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._lost_at: dict[VerifyLink, float] = {}  # verify links that are down
        self._timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # -- verify

    def on_verify_up(self, link: VerifyLink) -> None:
        self._lost_at.pop(link, None)
        for session in list(self._sessions.values()):
            if session.seat.verify is link:
                session.on_verify_up()
        self._fail_over()

    def on_verify_down(self, link: VerifyLink) -> None:
        """It may be back at once, with all it knew; if not, others take its sequences over."""
        self._lost_at[link] = self._clock()
        for session in list(self._sessions.values()):
            if session.seat.verify is link:
                session.on_verify_down()
        self._fail_over_in(self._patience_seconds)

    def goes_elsewhere(self, session: Session, event: VerifyEvent) -> bool:
        """Whether another replica was asked to take what this one would not."""
        refused_by = session.seat.refused_by
        if isinstance(event, RoundResult):
            refused_by.clear()
        refuses = isinstance(event, SequenceFailed) and event.code in _FULL
        if not refuses or not session.machine.awaits_verify(event.epoch):
            return False
        refused_by.add(session.seat.verify)
        other = self._place_again(session, refused_by)
        if other is None:
            refused_by.clear()
            return False
        session.move_verify(other, lost=False)
        return True

    def _fail_over_in(self, seconds: float) -> None:
        if self._timer is None:  # else it comes first, and is set again
            wait = max(seconds, _SHORTEST_WAIT_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._fail_over()

    def _fail_over(self) -> None:
        """Moves what waits for a replica that has been away for long enough."""
        now, patience = self._clock(), self._patience_seconds
        gone = {link for link, lost_at in self._lost_at.items() if now - lost_at >= patience}
        early = [at + patience - now for link, at in self._lost_at.items() if link not in gone]
        if early:  # lost since then; or the timer of a busy event loop came before its time
            self._fail_over_in(min(early))
        for link in gone:
            self._placement.forget(link)
        for session in list(self._sessions.values()):
            if session.seat.verify not in gone:
                continue
            other = self._place_again(session)
            if other is None:
                self._fail_over_in(patience)  # one may be ready again by then
                return
            session.move_verify(other, lost=True)
        for link in gone.difference(self._fleet.verifies):
            del self._lost_at[link]  # let go of, and nobody's any more

    def _place_again(self, session: Session, but: Collection[VerifyLink] = ()) -> VerifyLink | None:
        tokens = session.machine.tokens
        other = self._placement.verify(tokens, session.machine.generation.max_total_tokens, but)
        if other is not None:
            self._placement.note(tokens, other)
        return other

    # -- draft

    def on_draft_up(self, link: DraftLink) -> None:
        for session in list(self._sessions.values()):
            draft = session.seat.draft
            if draft is link:
                session.on_draft_up()
            elif draft is None or not draft.peer.linked:
                session.move_draft(link)

    def on_draft_down(self, link: DraftLink) -> None:
        """A draft is a cache: another replica begins anew rather than wait for this one."""
        for session in list(self._sessions.values()):
            if session.seat.draft is not link:
                continue
            session.on_draft_down()
            other = self._placement.draft()
            if other is not None:
                session.move_draft(other)
