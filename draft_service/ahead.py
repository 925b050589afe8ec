"""Trees ahead that were sent for one sequence, as far as its tokens have not left them.

What verify made of them says how long they are on the way (draft_service/levels.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.types import DraftTree

MOST_SENT = 8
SURE = math.log(0.5)
"""A node of at least this score is verified if its tree is there: the budget has no cheaper one."""


@dataclass(slots=True)
class _Sent:
    root: int  # position
    tree: DraftTree
    at: float  # seconds, machine's clock
    node: int = 0  # where the tokens since then have led

    def follow(self, tokens: Sequence[int]) -> bool:
        """Whether they stay in the tree."""
        for token in tokens:
            below = (self.tree.parents == self.node) & (self.tree.tokens == token)
            self.node = int(below.argmax())
            if not below[self.node]:
                return False
        return True

    @property
    def is_sure(self) -> bool:
        """Whether the best child of the node is likely enough to be verified."""
        children = self.tree.parents == self.node
        best = int(children.argmax())
        return bool(children[best] and self.tree.scores[best] - self.tree.scores[self.node] >= SURE)


@dataclass(slots=True)
class SentAhead:
    _trees: deque[_Sent] = field(default_factory=lambda: deque(maxlen=MOST_SENT))

    def note(self, tree: DraftTree, root: int, since: Sequence[int], at: float) -> None:
        """It was sent at `at`; `since`: committed tokens behind its root."""
        sent = _Sent(root, tree, at)
        if sent.follow(since):
            self._trees.append(sent)

    def follow(self, tokens: Sequence[int]) -> None:
        """Newly committed."""
        kept = [sent for sent in self._trees if sent.follow(tokens)]
        self._trees = deque(kept, maxlen=MOST_SENT)

    def way(self, began_at: float, verified: int | None) -> tuple[float | None, list[float]]:
        """Of the round that began at the last token, at `began_at`, with the tree rooted at
        `verified`, if any: see `LevelRule.note_way`.
        """
        used, passed_over = None, list[float]()
        for sent in self._trees:
            seconds = began_at - sent.at
            if sent.root == verified:
                used = seconds
            elif seconds >= 0 and (verified is None or sent.root > verified) and sent.is_sure:
                passed_over.append(seconds)
        return used, passed_over

    def forget(self) -> None:
        self._trees.clear()
