"""Generations through a real engine without services: prefill, then rounds with trees or roots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from common.types import SamplingParams
from verify_service.engine import DeviceEngine
from verify_service.step import SequenceWork, TokenHistory
from verify_service.token_masks import pack_mask

Tree = tuple[list[int], list[int]]
"""Tokens and parents of the nodes below the root; parent 0 is the root, i the i-th of these."""

Guess = Callable[[int, list[int]], Tree]
"""(sequence, its tokens so far) -> a tree."""

Allow = Callable[[list[int]], npt.NDArray[np.bool_]]
"""Tokens so far -> bool [V], those that may follow."""


@dataclass
class Generated:
    """What one sequence got beyond its prompt."""

    tokens: list[int]
    num_prompt: int
    margins: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: int = 0
    kv_len: int = 0
    features: list[Any] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    history: TokenHistory | None = None

    @property
    def response(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def cut(self, length: int) -> None:
        """Back to so many tokens, the last of them the next root."""
        if len(self.tokens) <= length:
            return
        del self.tokens[length:]
        for values in (self.margins, self.logprobs, self.top_logprobs):
            del values[length - self.num_prompt :]
        self.kv_len = min(self.kv_len, length - 1)
        self.history = TokenHistory(self.tokens, self.num_prompt)


def roots_only(sequence: int, tokens: list[int]) -> Tree:
    return [], []


def guessing(truth: Sequence[list[int]], vocab_size: int, right: float, depth: int = 3) -> Guess:
    """Trees of a chain along `truth`, each token right with that probability, with two siblings."""
    random = np.random.default_rng(3)

    def guess(sequence: int, tokens: list[int]) -> Tree:
        ahead = truth[sequence][len(tokens) : len(tokens) + depth]
        nodes: list[int] = []
        parents: list[int] = []
        parent = 0
        for token in ahead:
            likely = token if random.random() < right else int(random.integers(vocab_size))
            others = [int(t) for t in random.integers(vocab_size, size=2)]
            first = len(nodes) + 1
            nodes += [others[0], likely, others[1]]
            parents += [parent] * 3
            parent = first + 1
        return nodes, parents

    return guess


def generate(
    engine: DeviceEngine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    num_tokens: int,
    guess: Guess = roots_only,
    stop_tokens: tuple[int, ...] = (),
    resume: list[Generated] | None = None,
    with_history: bool = True,
    allow: Sequence[Allow | None] | None = None,
) -> list[Generated]:
    """`num_tokens` tokens or more of every sequence, all of them in one batch.

    `resume`: goes on from these. Stop tokens count for those that do not ignore them. `allow`: of
    each sequence; None: any token.
    """
    pages = engine.config.shape.pages_per_sequence
    done = resume or [Generated(list(prompt), len(prompt)) for prompt in prompts]
    for one in done:
        one.history = one.history or TokenHistory(one.tokens, one.num_prompt)
    stops = [() if sampling.ignore_eos else stop_tokens for sampling in samplings]
    while open_ := [i for i, g in enumerate(done) if _goes_on(g, num_tokens, stops[i])]:
        works = []
        for i in open_:
            one = done[i]
            causal = one.tokens[one.kv_len :]
            nodes, parents = guess(i, one.tokens)
            allowed = None if allow is None else allow[i]
            works.append(
                SequenceWork(
                    slot=i,
                    tokens=np.array([*causal, *nodes], np.int32),
                    parents=np.array(
                        [*range(-1, len(causal) - 1), *(p + len(causal) - 1 for p in parents)],
                        np.int32,
                    ),
                    num_causal=len(causal),
                    samples=True,
                    kv_len=one.kv_len,
                    page_ids=np.arange(i * pages, (i + 1) * pages, dtype=np.int32),
                    sampling=samplings[i],
                    stop_tokens=stops[i],
                    wants_features=True,
                    history=one.history if with_history else None,
                    token_mask=allowed and _mask(allowed, one.tokens, nodes, parents),
                )
            )
        for i, outcome in zip(open_, engine.run(works), strict=True):
            one = done[i]
            one.tokens += outcome.tokens.tolist()
            one.margins += outcome.margins.tolist()
            one.logprobs += outcome.logprobs.tolist()
            one.accepted += outcome.num_accepted
            one.kv_len += outcome.num_committed
            one.features.append(outcome.features)
            one.top_logprobs += outcome.top_logprobs
    return done


def _mask(allow: Allow, tokens: list[int], nodes: list[int], parents: list[int]) -> Any:
    """Of the root and of each node, whose path counts as decoded."""
    paths = [tokens]
    for token, parent in zip(nodes, parents, strict=True):
        paths.append([*paths[parent], token])
    return pack_mask(np.stack([allow(path) for path in paths]))


def _goes_on(one: Generated, num_tokens: int, stop_tokens: tuple[int, ...]) -> bool:
    response = one.response
    return len(response) < num_tokens and not (response and response[-1] in stop_tokens)


def first_difference(ours: Generated, theirs: Generated, num_tokens: int) -> float | None:
    """The margin of the first pick that differs; None: none does."""
    pairs = zip(ours.response[:num_tokens], theirs.response[:num_tokens], strict=True)
    for place, (one, other) in enumerate(pairs):
        if one != other:
            return min(ours.margins[place], theirs.margins[place])
    return None
