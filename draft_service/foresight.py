"""Which outcomes of a round are likely, so that trees can be grown for them before it ends.

An outcome is what verify may emit: the tokens of a path that is accepted, and the bonus behind it,
which is no child of the path's end in the tree that verify has; else it would have been accepted.
The engine grows more nodes than are sent: those that are left over and hang on the sent tree are
the outcomes, best first by the head's own scores, over all of the tree at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import DraftTree, TreeShape

Outcome = tuple[int, ...]
"""Tokens emitted by a round, the bonus last."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """A wish for trees of `round`, one for each outcome of the round before it; best first.

    `shape`: the most that may be sent of each. `since`: seconds, machine's clock.
    """

    round: int
    outcomes: tuple[Outcome, ...]
    shape: TreeShape
    since: float


@dataclass(frozen=True, slots=True)
class ForeseenTrees:
    """Trees of `round` as they were grown, more than is sent of them, by outcome."""

    round: int
    trees: dict[Outcome, DraftTree]


def likeliest_outcomes(grown: DraftTree, sent: DraftTree, count: int) -> tuple[Outcome, ...]:
    """Up to `count` outcomes of a round that verifies `sent`, which was cut from `grown`."""
    kept = set(_paths(sent))
    outcomes: list[Outcome] = []
    for path in _paths(grown)[1:]:
        if len(outcomes) == count:
            break
        if path not in kept and path[:-1] in kept:
            outcomes.append(path)
    return tuple(outcomes)


def _paths(tree: DraftTree) -> list[Outcome]:
    """Tokens from below the root down to each node; () at the root."""
    paths: list[Outcome] = [()]
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
