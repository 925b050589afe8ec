"""The verify half of one generation, sans-IO: under which epoch it is open, and since when not.

Verify is the authority: what it has forgotten is opened again with all tokens so far. Every Open,
Attach and Rollback carries a new epoch; what comes under another is of an earlier life.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.types import TreeShape
from router.generation import Generation
from router.messages import (
    Close,
    Rollback,
    VerifyAcknowledge,
    VerifyAttach,
    VerifyOpen,
    VerifyTree,
    VerifyTreeAhead,
)
from router.trees import Tree

_MAX_STOP_TOKENS_SENT = 80
"""Verify takes so many: what a request may name (64), and the model's own. All must reach it, for
`min_tokens` keeps it from picking them.
"""


class VerifySide:
    """`epoch`: of the router–verify link, for this sequence; 0: never opened. `lost_at`: since when
    it waits for a replica that is gone, full or draining. `acked`: the last round with a result.
    `rides_on_open`: the present round was begun by Open, not by VerifyTree.
    """

    def __init__(
        self,
        sequence_id: bytes,
        generation: Generation,
        *,
        wants_features: bool,
        max_recoveries: int,
        draft_ahead: bool = False,
        fork_of: bytes | None = None,
    ) -> None:
        self.epoch = 0
        self.link_up = True
        self.lost_at: float | None = None
        self.acked: int | None = None
        self.rides_on_open = True
        self._sequence_id = sequence_id
        self._generation = generation
        self._wants_features = wants_features
        self._max_recoveries = max_recoveries
        self._draft_ahead = draft_ahead
        self._fork_of = fork_of
        self._recoveries = 0

    # -- what is said to it

    def open(self, tokens: Sequence[int], round_: int) -> VerifyOpen | None:
        """With all tokens so far; the round rides on the prefill. None while the link is down."""
        self.epoch += 1
        self.rides_on_open = True
        if not self.link_up:
            return None
        return VerifyOpen(
            *(self._sequence_id, self.epoch, self.acked),
            tokens=tuple(tokens),
            num_prompt_tokens=len(self._generation.prompt_tokens),
            sampling=self._generation.sampling,
            stop_token_ids=self._generation.stop_token_ids[:_MAX_STOP_TOKENS_SENT],
            max_total_tokens=self._generation.max_total_tokens,
            round=round_,
            wants_features=self._wants_features,
            cache_salt=self._generation.cache_salt,
            prompt_logprobs=self._prompt_logprobs(round_),
            choice_index=self._generation.choice_index,
            fork_of=self._fork_of,
            trace=self._generation.trace,
            draft_ahead=self._draft_ahead,
        )

    def _prompt_logprobs(self, round_: int) -> int | None:
        """Once, with the first round, and of the first choice: all have the same prompt."""
        first = round_ == 0 and self._generation.choice_index == 0
        return self._generation.sampling.prompt_logprobs if first else None

    def attach(self, features_from: int | None) -> VerifyAttach | None:
        """Takes the sequence over on a new stream. None while the link is down."""
        self.epoch += 1
        if not self.link_up:
            return None
        return VerifyAttach(self._sequence_id, self.epoch, self.acked, features_from)

    def verify_tree(self, round_: int, num_tokens: int, tree: Tree) -> VerifyTree:
        return VerifyTree(
            *(self._sequence_id, self.epoch, self.acked), *(round_, num_tokens - 1, tree)
        )

    def tree_ahead(self, round_: int, kv_len: int, tree: Tree, most: TreeShape) -> VerifyTreeAhead:
        return VerifyTreeAhead(
            *(self._sequence_id, self.epoch, self.acked),
            round=round_,
            kv_len=kv_len,
            tree=tree,
            most=most,
        )

    def acknowledge(self) -> VerifyAcknowledge:
        return VerifyAcknowledge(self._sequence_id, self.epoch, self.acked)

    def roll_back(self, num_tokens: int, round_: int) -> Rollback:
        self.epoch += 1
        self.rides_on_open = False
        return Rollback(*(self._sequence_id, self.epoch, None), num_tokens, round_)

    def close(self) -> Close | None:
        """None: nothing is there, or its lease ends it."""
        if not self.link_up or not self.epoch:
            return None
        return Close(self._sequence_id, self.epoch, self.acked)

    # -- what becomes of it

    def on_result(self, round_: int) -> None:
        self._recoveries, self.acked, self.lost_at = 0, round_, None

    def on_link_down(self, now: float) -> None:
        self.link_up = False
        self.on_refusal(now)

    def on_refusal(self, now: float) -> None:
        """It takes no more sequences: the wait begins, unless it has begun."""
        if self.lost_at is None:
            self.lost_at = now

    def may_recover(self) -> bool:
        """Counts an attempt to bring it in step; not for ever without a result between."""
        self._recoveries += 1
        return self._recoveries <= self._max_recoveries
