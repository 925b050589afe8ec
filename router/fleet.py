"""The links to all replicas of verify and draft: who is there, who fits, who takes the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from canopy.v1 import draft_pb2, types_pb2, verify_pb2
from router.config import RouterConfig
from router.draft_link import DraftLink
from router.handshake import check_pair, check_same_target, check_verify
from router.links import LinkListener, NotYet, PeerState
from router.names import Name, Names, Resolve, parse_name, resolve
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
    """`verifies`, `drafts`: one link for each configured address, in that order, then one for each
    address of the configured names, which come and go.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer,
        listener: FleetListener,
        resolve: Resolve = resolve,
    ) -> None:
        """Raises StartupError for certificates or tokens that cannot be used."""
        self._tokenizer, self._listener = tokenizer, listener
        self._max_message_bytes = config.max_message_bytes
        self._security = config.peer_security
        self._security.check("peer_")
        self._silence_seconds = config.silence_seconds
        self._resolve_seconds = config.resolve_seconds
        self._verify_names = list(filter(None, map(parse_name, config.verify)))
        self._draft_names = list(filter(None, map(parse_name, config.draft)))
        self._names = Names([*self._verify_names, *self._draft_names], resolve)
        self._of_name: dict[VerifyLink | DraftLink, Name] = {}
        self._resolve_now = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self.verifies = [self._verify_link(a) for a in config.verify if parse_name(a) is None]
        self.drafts = [self._draft_link(a) for a in config.draft if parse_name(a) is None]

    def _verify_link(self, address: str, server_name: str = "") -> VerifyLink:
        told = self._listener
        link: VerifyLink
        listener: LinkListener[verify_pb2.VerifyEvent] = LinkListener(
            on_events=lambda messages: told.on_verify_events(link, messages),
            on_up=lambda: self._on_verify_up(link),
            on_down=lambda: self._on_down(told.on_verify_down, link),
            on_change=told.on_change,
            asked_at=told.when_asked,
            on_sent=told.note_turnaround,
        )
        security = replace(self._security, server_name=server_name)
        link = VerifyLink(
            *(address, self._max_message_bytes, listener, security, self._silence_seconds),
            self._check_verify,
            lambda block, returned: told.on_features(link, block, returned),
        )
        return link

    def _draft_link(self, address: str, server_name: str = "") -> DraftLink:
        told = self._listener
        link: DraftLink
        listener: LinkListener[draft_pb2.DraftEvent] = LinkListener(
            on_events=lambda messages: told.on_draft_events(link, messages),
            on_up=lambda: told.on_draft_up(link),
            on_down=lambda: self._on_down(told.on_draft_down, link),
            on_change=told.on_change,
            asked_at=told.when_asked,
            on_sent=told.note_turnaround,
        )
        security = replace(self._security, server_name=server_name)
        link = DraftLink(
            *(address, self._max_message_bytes, listener, security, self._silence_seconds),
            self._check_draft,
        )
        return link

    def _on_verify_up(self, link: VerifyLink) -> None:
        """Drafts that fitted the verifies met before may not fit this one, or what it is now."""
        for draft in self.drafts:
            if draft.peer.linked and draft.info is not None and self._misfit(draft.info):
                draft.meet_again()
        self._listener.on_verify_up(link)

    def _on_down(self, tell: Callable[[Any], None], link: VerifyLink | DraftLink) -> None:
        self._resolve_now.set()  # its name may have an heir
        tell(link)

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
        if not self.verify_infos:
            raise NotYet("waits for verify, to compare the two")
        return self._misfit(info)

    def _misfit(self, info: draft_pb2.GetDraftInfoResponse) -> str | None:
        """Why the draft does not fit one of the verifies, in words; None: it fits them all."""
        return next(filter(None, (check_pair(v, info) for v in self.verify_infos)), None)

    # -- life

    def start(self) -> None:
        for link in self.links:
            link.start()
        if len(self._names):
            self._follower = asyncio.create_task(self._follow_names(), name="follow-names")

    async def flush(self) -> None:
        for link in self.links:
            await link.flush()

    async def stop(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with suppress(asyncio.CancelledError):
                await self._follower
        for link in self.links:
            await link.stop()

    # -- names

    async def _follow_names(self) -> None:
        """Asks what the names stand for: again and again, and when a link was lost."""
        while True:
            self._resolve_now.clear()
            await self._names.refresh()
            for name in self._verify_names:
                await self._match(self.verifies, name, self._verify_link)
            for name in self._draft_names:
                await self._match(self.drafts, name, self._draft_link)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._resolve_seconds):
                    await self._resolve_now.wait()

    async def _match(
        self, links: list[AnyLink], name: Name, make: Callable[[str, str], AnyLink]
    ) -> None:
        """Links what the name has come to stand for, and lets go of what it no longer does.

        One that is linked stays as long as it is: a pod that drains is taken from the name at once,
        and has sequences to finish.
        """
        addresses = self._names.addresses(name)
        for link in [link for link in links if self._of_name.get(link) == name]:
            if link.peer.address not in addresses and not link.peer.linked:
                links.remove(link)
                del self._of_name[link]
                await link.stop()
                self._listener.on_change()
        known = {link.peer.address for link in links}
        for address in addresses:
            if address not in known:
                link = make(address, name.host)
                self._of_name[link] = name
                links.append(link)
                link.start()


def choose(
    links: Sequence[AnyLink], rank: Callable[[AnyLink], Any], but: Collection[AnyLink] = ()
) -> AnyLink | None:
    """The link of the lowest rank that is ready and not among `but`; of equal ones the first.

    None: there is none.
    """
    ready = [link for link in links if link.peer.ready and link not in but]
    return min(ready, key=rank, default=None)
