"""What of a head's trees would have been accepted while the target wrote answers that are known.

Emitted tokens do not depend on the drafter, so a known answer can be replayed: the target runs over
it once for its true features, then round after round the real draft engine grows a tree from them
and the path that the answer takes is accepted, just as verify would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from common.types import DraftTree, Int32Array, TreeShape
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.step import FeatureArray, NoiseKey, SequenceWork
from models.eagle3 import HeadConfig
from models.layers import Params

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a prompt, template included, and of what the target wrote after it."""

    prompt: list[int]
    response: list[int]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.response]


def make_engine(
    head: HeadConfig, params: Params, tree: TreeShape, max_context_len: int
) -> DeviceEngine:
    """A draft engine for one sequence at a time. Raises ValueError for a tree it cannot grow."""
    config = EngineConfig(
        num_pages=-(-max_context_len // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_context_len=max_context_len,
        tree=tree,
        max_sequences=1,
        max_draft_rows=tree.max_depth + 2,
        max_extend_rows=512,
    )
    return DeviceEngine(head, params, config)


def pairs_work(
    tokens: Sequence[int],
    features: FeatureArray,
    first: int,
    until: int,
    page_ids: Int32Array,
    *,
    drafts: bool,
    ahead: bool = False,
    noise: NoiseKey | None = None,
) -> SequenceWork:
    """Pairs [first, until) of a text whose `features` [positions, F] begin at its first token; the
    root is token `until`.
    """
    return SequenceWork(
        sequence_id=b"",
        tokens=np.array(tokens[first + 1 : until + 1], np.int32),
        features=features[first:until],
        kv_len=first,
        page_ids=page_ids,
        drafts=drafts,
        ahead=ahead,
        noise=noise,
    )


def replay(engine: DeviceEngine, answer: Answer, features: FeatureArray) -> Iterator[int]:
    """num_emitted of each round after the root-only one that comes with the prefill.

    `features` [tokens, F]: the target's, at every token of the answer.
    """
    tokens = answer.tokens
    pages = np.arange(engine.config.pages_per_sequence, dtype=np.int32)
    fed = 0

    def work(until: int, drafts: bool) -> SequenceWork:
        return pairs_work(tokens, features, fed, until, pages, drafts=drafts)

    length = len(answer.prompt) + 1
    while length < len(tokens):
        pairs = length - 1
        while pairs - fed > engine.config.max_draft_rows:
            until = min(fed + engine.config.max_extend_rows, pairs - 1)
            engine.run([work(until, False)])
            fed = until
        tree = engine.run([work(pairs, True)])[0].tree
        assert tree is not None
        fed = pairs
        num_emitted = num_accepted(tree, tokens[length:]) + 1
        yield min(num_emitted, len(tokens) - length)
        length += num_emitted


def num_accepted(tree: DraftTree, truth: list[int]) -> int:
    """Nodes below the root that match what the target wrote."""
    node = depth = 0
    while depth < len(truth):
        children = np.flatnonzero((tree.parents == node) & (tree.tokens == truth[depth]))
        if not children.size:
            break
        node, depth = int(children[0]), depth + 1
    return depth


def acceptance_length(emitted: list[int]) -> float | None:
    """Mean num_emitted; None of no rounds."""
    return round(float(np.mean(emitted)), 4) if emitted else None


def per_depth(emitted: list[int], max_depth: int) -> list[float]:
    """Share of the rounds that came to depth d + 1 which found their token there; as deep as any
    came."""
    accepted = np.asarray(emitted) - 1
    reached = [int((accepted >= depth).sum()) for depth in range(max_depth + 1)]
    return [round(after / before, 4) for before, after in pairwise(reached) if before]


def padded(tokens: list[int], multiple: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [1, C], zeros on the right up to a multiple: few shapes, few compilations."""
    columns = -(-len(tokens) // multiple) * multiple
    row = np.zeros((1, columns), np.int32)
    row[0, : len(tokens)] = tokens
    return row
