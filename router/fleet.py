"""The links to all replicas of verify and draft: who is there, who fits, who takes the next one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from canopy.v1 import draft_pb2, types_pb2, verify_pb2
from router.config import RouterConfig
from router.draft_link import DraftLink
from router.handshake import check_pair, check_same_target, check_verify
from router.links import LinkListener, NotYet, PeerState
from router.tokenizer import ModelTokenizer
from router.verify_link import VerifyLink

AnyLink = TypeVar("AnyLink", VerifyLink, DraftLink)
Returned = Callable[[int], None]
"""Told how many feature bytes have left the router, sent or dropped."""


class FleetListener(Protocol):
    """Who is told what comes in; the router's core."""

    def on_verify_events(
        self, link: VerifyLink, messages: Iterable[verify_pb2.VerifyEvent]
    ) -> None: ...

    def on_draft_events(
        self, link: DraftLink, messages: Iterable[draft_pb2.DraftEvent]
    ) -> None: ...

    def on_features(
        self, link: VerifyLink, block: types_pb2.FeatureBlock, returned: Returned
    ) -> None: ...

    def on_verify_up(self, link: VerifyLink) -> None: ...

    def on_verify_down(self, link: VerifyLink) -> None: ...

    def on_draft_up(self, link: DraftLink) -> None: ...

    def on_draft_down(self, link: DraftLink) -> None: ...

    def on_change(self) -> None: ...

    def when_asked(self) -> float: ...

    def note_turnaround(self, role: str, asked_at: float) -> None: ...


class Fleet:
    """`verifies`, `drafts`: one link for each configured address, in that order."""

    def __init__(
        self, config: RouterConfig, tokenizer: ModelTokenizer, listener: FleetListener
    ) -> None:
        """Raises StartupError for certificates or tokens that cannot be used."""
        self._tokenizer, self._listener = tokenizer, listener
        self._max_message_bytes = config.max_message_bytes
        self._security = config.peer_security
        self._security.check("peer_")
        self.verifies = [self._verify_link(address) for address in config.verify]
        self.drafts = [self._draft_link(address) for address in config.draft]

    def _verify_link(self, address: str) -> VerifyLink:
        told = self._listener
        link: VerifyLink
        listener: LinkListener[verify_pb2.VerifyEvent] = LinkListener(
            on_events=lambda messages: told.on_verify_events(link, messages),
            on_up=lambda: told.on_verify_up(link),
            on_down=lambda: told.on_verify_down(link),
            on_change=told.on_change,
            asked_at=told.when_asked,
            on_sent=told.note_turnaround,
        )
        link = VerifyLink(
            *(address, self._max_message_bytes, listener, self._security, self._check_verify),
            lambda block, returned: told.on_features(link, block, returned),
        )
        return link

    def _draft_link(self, address: str) -> DraftLink:
        told = self._listener
        link: DraftLink
        listener: LinkListener[draft_pb2.DraftEvent] = LinkListener(
            on_events=lambda messages: told.on_draft_events(link, messages),
            on_up=lambda: told.on_draft_up(link),
            on_down=lambda: told.on_draft_down(link),
            on_change=told.on_change,
            asked_at=told.when_asked,
            on_sent=told.note_turnaround,
        )
        link = DraftLink(
            address, self._max_message_bytes, listener, self._security, self._check_draft
        )
        return link

    # -- who is there

    @property
    def links(self) -> list[VerifyLink | DraftLink]:
        return [*self.verifies, *self.drafts]

    @property
    def peers(self) -> list[PeerState]:
        return [link.peer for link in self.links]

    @property
    def verify_ready(self) -> bool:
        return any(link.peer.ready for link in self.verifies)

    @property
    def verify_reason(self) -> str:
        """Why no verify is ready, in words."""
        return "; ".join(f"{link.peer.address} {link.peer.reason}" for link in self.verifies)

    @property
    def draft_ready(self) -> bool:
        return any(link.peer.ready for link in self.drafts)

    @property
    def verify_infos(self) -> list[verify_pb2.GetVerifyInfoResponse]:
        """Of every replica that was met and fitted, even if it is away now."""
        return [link.info for link in self.verifies if link.info is not None]

    @property
    def draft_infos(self) -> list[draft_pb2.GetDraftInfoResponse]:
        return [link.info for link in self.drafts if link.info is not None]

    # -- the checks of each new connection

    def _check_verify(self, info: verify_pb2.GetVerifyInfoResponse) -> str | None:
        mismatch = check_verify(info, self._tokenizer)
        if mismatch is None and self.verify_infos:
            mismatch = check_same_target(self.verify_infos[0], info)
        return mismatch

    def _check_draft(self, info: draft_pb2.GetDraftInfoResponse) -> str | None:
        """Raises NotYet while there is no verify to compare with."""
        infos = self.verify_infos
        if not infos:
            raise NotYet("waits for verify, to compare the two")
        return next(filter(None, (check_pair(verify, info) for verify in infos)), None)

    # -- life

    def start(self) -> None:
        for link in self.links:
            link.start()

    async def flush(self) -> None:
        for link in self.links:
            await link.flush()

    async def stop(self) -> None:
        for link in self.links:
            await link.stop()


def choose(
    links: Sequence[AnyLink], load_of: Callable[[AnyLink], int], but: Collection[AnyLink] = ()
) -> AnyLink | None:
    """The least loaded link that is ready and not among `but`; of equal ones the first. None: none.

    There is nothing to gain from prefix affinity while verify keeps no pages of ended sequences.
    """
    ready = [link for link in links if link.peer.ready and link not in but]
    return min(ready, key=load_of, default=None)
