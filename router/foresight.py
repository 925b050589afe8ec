"""Trees that the draft grew for outcomes of the present round: verify may go on with them at once.

They are sent to verify as they come and kept here, keyed by what the round would emit. Verify says
with the round's result whether it has begun the next with one; if they came too late there, the
router sends the fitting one itself. Because a tree is good whoever verifies it, nothing here has to
be undone when links break or sequences move: what does not fit is never looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.types import TreeShape
from router.messages import TreesForeseen
from router.trees import Tree


@dataclass(frozen=True, slots=True)
class KnownTree:
    tree: Tree
    depths: Sequence[int]


class Foresight:
    def __init__(self) -> None:
        self._round = -1
        self._known: dict[tuple[int, ...], KnownTree] = {}

    def keep(self, event: TreesForeseen, most: TreeShape) -> Mapping[tuple[int, ...], Tree]:
        """Keeps the event's trees, cut to `most`; those for verify. Malformed ones are left out."""
        self._round, self._known = event.round, {}
        for tokens, tree in event.outcomes:
            depths = tree.depths()
            if depths is None or not tokens or tree.tokens[0] != tokens[-1]:
                continue
            capped = tree.capped(depths, most.max_nodes, most.max_depth)
            if capped is not tree:
                depths = capped.depths()
                assert depths is not None
            self._known[tuple(tokens)] = KnownTree(capped, depths)
        return {tokens: known.tree for tokens, known in self._known.items()}

    def find(self, round_: int, tokens: Sequence[int]) -> KnownTree | None:
        """The tree of `round_`, where the one before it emitted `tokens`."""
        return self._known.get(tuple(tokens)) if round_ == self._round else None

    def forget(self) -> None:
        self._round, self._known = -1, {}
