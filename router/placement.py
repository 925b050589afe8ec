"""Which replicas take a sequence: by what they have seen of its prompt, their load and their pages.

A verify that computed a prompt's leading blocks lately has likely kept their pages. What a router
knows of that is its own memory of where it sent them; it may be wrong, which costs a prefill and
nothing else.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

from router.draft_link import DraftLink
from router.fleet import Fleet, choose
from router.session import Session
from router.verify_link import VerifyLink

BLOCK_TOKENS = 32
"""Prompts are compared in such steps; a shared beginning that is shorter is not worth a detour."""

MAX_BLOCKS = 1 << 16
"""Blocks remembered, the least recently seen go first: some 10 MiB, two million tokens."""


class PrefixTable:
    """Which replica saw a beginning of a prompt last."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._seen_by: OrderedDict[bytes, VerifyLink] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen_by)

    def note(self, tokens: Sequence[int], link: VerifyLink) -> None:
        """The replica now has, or is about to compute, the rows of these tokens."""
        for key in block_keys(tokens):
            self._seen_by[key] = link
            self._seen_by.move_to_end(key)
        while len(self._seen_by) > self._max_blocks:
            self._seen_by.popitem(last=False)

    def num_seen(self, tokens: Sequence[int]) -> dict[VerifyLink, int]:
        """Leading tokens, whole blocks, that each replica has seen. Whoever saw a block saw all
        before it, even if another has seen those since.
        """
        seen: dict[VerifyLink, int] = {}
        for index, key in enumerate(block_keys(tokens), 1):
            link = self._seen_by.get(key)
            if link is None:
                break
            seen[link] = index * BLOCK_TOKENS
        return seen

    def forget(self, link: VerifyLink) -> None:
        """The replica has lost all it knew."""
        for key in [key for key, of in self._seen_by.items() if of is link]:
            del self._seen_by[key]


class Placement:
    """Chooses among the ready replicas of a fleet.

    `affinity_weight`: tokens of load that a replica may have more than the least loaded, for each
    token of the prompt that it has seen.
    """

    def __init__(
        self, fleet: Fleet, sessions: Mapping[bytes, Session], affinity_weight: float
    ) -> None:
        self._fleet, self._sessions = fleet, sessions
        self._affinity_weight = affinity_weight
        self._prefixes = PrefixTable()

    def verify(
        self, tokens: Sequence[int], max_total_tokens: int, but: Collection[VerifyLink] = ()
    ) -> VerifyLink | None:
        """For a sequence with these tokens that may grow to `max_total_tokens`. None: none ready.

        First those whose pages hold it beside all they have; of these the one with the least load,
        what it has seen of the tokens taken off; of equal ones the first.
        """
        links = self._fleet.verifies
        weight = self._affinity_weight if len(links) > 1 else 0.0
        seen = self._prefixes.num_seen(tokens) if weight else {}
        loads = self._verify_loads()

        def rank(link: VerifyLink) -> tuple[bool, float]:
            load = loads.get(link, 0)
            is_full = load + max_total_tokens > _capacity_tokens(link)
            return is_full, load - weight * seen.get(link, 0)

        return choose(links, rank, but)

    def draft(self) -> DraftLink | None:
        """The ready draft with the fewest sequences; it keeps nothing of those that ended."""
        return choose(self._fleet.drafts, self._num_drafting)

    def note(self, tokens: Sequence[int], link: VerifyLink) -> None:
        """A sequence with these tokens was opened there, or ended there."""
        if self._affinity_weight and len(self._fleet.verifies) > 1:
            self._prefixes.note(tokens, link)

    def forget(self, link: VerifyLink) -> None:
        self._prefixes.forget(link)

    def _verify_loads(self) -> dict[VerifyLink, int]:
        """Tokens that each one's sequences may come to hold: what pages and step time go by."""
        loads: dict[VerifyLink, int] = {}
        for session in self._sessions.values():
            link = session.seat.verify
            tokens = session.machine.generation.max_total_tokens
            loads[link] = loads.get(link, 0) + tokens
        return loads

    def _num_drafting(self, link: DraftLink) -> int:
        return sum(session.seat.draft is link for session in self._sessions.values())


def block_keys(tokens: Sequence[int]) -> Iterator[bytes]:
    """A digest for each whole block of the tokens, of it and of all before it."""
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(array("I", tokens[start : start + BLOCK_TOKENS]).tobytes())
        yield digest.digest()


def _capacity_tokens(link: VerifyLink) -> float:
    """KV rows of a replica; no limit where it does not say."""
    info = link.info
    pages = info.num_pages * info.page_size_tokens if info is not None else 0
    return pages or float("inf")
