"""What one verify step takes and gives: plain values between the state machine and the device.

The machine plans a list of `SequenceWork`, an engine turns it into as many `SequenceOutcome`s, in
the same order. Nothing here knows jax or protobuf. Axes: n rows of one sequence's block, F
features.

A block is `num_causal` rows in a causal chain (prefill rows; if the sequence samples, the last of
them is the root), then the tree's other nodes, each below an earlier row of the block.

A block may also *follow* the one that the same slot had in the step launched directly before, while
that step still runs: then the device itself finds out its root, its length and its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from common.types import Float32Array, Int32Array, SamplingParams, TopLogprobs
from verify_service.follow_up import Chosen, FollowUp
from verify_service.token_masks import MaskWords, check_mask

_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class TokenHistory:
    """A sequence's committed tokens for as long as they only grow; compared by identity.

    `tokens` is the sequence's own list. Cutting it back ends this history: a new one is made.
    """

    tokens: list[int]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceWork:
    """One sequence's block in a step.

    `tokens` int32 [n]; `parents` int32 [n], block-relative: -1 for the first row, the row before
    for causal rows, and for a tree node a row in [num_causal - 1, its own). `kv_len` is the number
    of tokens whose K/V are in pages, which is the first row's position. `page_ids` int32 [pages]:
    page i holds positions [i·page_size, (i+1)·page_size); reserved for prefix + num_causal +
    deepest path. `page_copy`: a page of others and one of `page_ids`, into which the first is
    copied, all layers, before anything else happens. `scored` int32 [m]: the prompt's tokens that
    follow the first m causal rows; their log-probabilities are wanted. `token_mask` uint32
    [num_nodes, words] (verify_service/token_masks.py): bits of the tokens that may follow each
    node, the root first; None: any. If penalties, biases or min_tokens bar all that it allows, the
    node has no pick.

    `follows`: the block is a root and a tree that are not known here; see `followed_by`. `tokens`
    and `parents` are empty then, `num_causal` is 1, and `kv_len` is the position of the root of the
    round before, where the candidates' root stands. The round's own root is the last token emitted
    there and stands as many positions behind. Pages must have room for the deepest path of both
    rounds. If the round before emits nothing, or ends the sequence, this one does no harm. It
    cannot have prompt rows, `scored`, `page_copy` or `token_mask`.
    """

    slot: int  # 0..max_sequences-1; no two works of a step share one
    tokens: Int32Array
    parents: Int32Array
    num_causal: int
    samples: bool  # False: a prefill chunk that is not the last; it has causal rows only
    kv_len: int
    page_ids: Int32Array
    page_copy: tuple[int, int] | None = None
    sampling: SamplingParams
    stop_tokens: tuple[int, ...] = ()
    wants_features: bool = True
    history: TokenHistory | None = None  # needed for penalties, logit_bias and min_tokens
    scored: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    token_mask: MaskWords | None = None
    follows: FollowUp | None = None

    def followed_by(
        self, follows: FollowUp, root_position: int, page_ids: Int32Array
    ) -> SequenceWork:
        """The work of the round behind this one, which need not have ended. `root_position`: of
        this one's root.
        """
        return replace(
            self,
            tokens=_NO_TOKENS,
            parents=_NO_TOKENS,
            num_causal=1,
            kv_len=root_position,
            page_ids=page_ids,
            page_copy=None,
            scored=_NO_TOKENS,
            token_mask=None,
            follows=follows,
        )

    @property
    def needs_slot(self) -> bool:
        """Whether the device must remember tokens or biases of the sequence."""
        return self.sampling.is_penalised or bool(self.sampling.logit_bias)

    @property
    def num_rows(self) -> int:
        return int(self.tokens.shape[0]) if self.follows is None else self.follows.num_rows

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, root included; 0 where nothing is sampled."""
        return self.num_rows - self.num_causal + 1 if self.samples else 0

    @property
    def num_scored(self) -> int:
        return int(self.scored.shape[0])

    @property
    def max_depth(self) -> int:
        """Depth of the deepest tree node below the root: rows that may be committed beyond it."""
        if self.follows is not None:
            return self.follows.most_depth
        return max(self.tree_depths(), default=0)

    def tree_depths(self) -> list[int]:
        """Of the rows behind the causal ones: 1 below the root."""
        first = self.num_causal
        if self.num_rows == first:
            return []
        depths: list[int] = []
        for parent in self.parents[first:].tolist():  # Python's own numbers: numpy's are slow
            depths.append(depths[parent - first] + 1 if parent >= first else 1)
        return depths

    def validate(self, vocab_size: int, page_size: int) -> None:
        """Raises ValueError naming the first rule that the work breaks, with value and limit.

        What follows is held against the step before by the engine.
        """
        if self.follows is not None:
            self._validate_follows(vocab_size)
        else:
            self._validate_block(vocab_size, page_size)
        if self.history is None and (self.needs_slot or self.sampling.min_tokens):
            raise ValueError(
                "history: None; penalties, logit_bias and min_tokens need the sequence's tokens"
            )
        if self.kv_len < 0:
            raise ValueError(f"kv_len: {self.kv_len} is negative")

    def _validate_follows(self, vocab_size: int) -> None:
        assert self.follows is not None
        self.follows.validate(vocab_size)
        if self.tokens.size or self.parents.size or self.num_causal != 1 or not self.samples:
            raise ValueError(
                f"follows: set beside {self.tokens.size} tokens, num_causal {self.num_causal},"
                f" samples {self.samples}; a block that follows has its root alone, not known yet"
            )
        for name in ("scored", "page_copy", "token_mask"):
            if getattr(self, name) is not None and np.size(getattr(self, name)):
                raise ValueError(
                    f"{name}: set beside follows; run this round when the one before has ended"
                )

    def _validate_block(self, vocab_size: int, page_size: int) -> None:
        n = self.num_rows
        if not 1 <= self.num_causal <= n:
            raise ValueError(f"num_causal: {self.num_causal} is outside [1, {n}], the block's rows")
        if self.parents.shape != (n,):
            raise ValueError(f"parents: {self.parents.size} of them for {n} tokens")
        if not self.samples and self.num_causal != n:
            raise ValueError(
                f"num_causal: {self.num_causal} of {n} rows, but a block that does not sample"
                " has causal rows only"
            )
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            raise ValueError(f"tokens: one is outside [0, {vocab_size})")
        if (self.parents[: self.num_causal] != np.arange(-1, self.num_causal - 1)).any():
            raise ValueError("parents: a causal row's parent must be the row before it")
        below = self.parents[self.num_causal :]
        if (below < self.num_causal - 1).any() or (below >= np.arange(self.num_causal, n)).any():
            raise ValueError(
                f"parents: a tree node's parent must be in [{self.num_causal - 1}, its own row)"
            )
        if self.num_scored > self.num_causal - self.samples:
            raise ValueError(
                f"scored: {self.num_scored} tokens follow; {self.num_causal - self.samples} causal"
                " rows stand below the root"
            )
        if self.token_mask is not None:
            check_mask(self.token_mask, self.num_nodes, vocab_size)
        if self.page_copy is not None and self.page_copy[1] not in self.page_ids:
            raise ValueError(f"page_copy: to page {self.page_copy[1]}, which is none of page_ids")
        needed = self.kv_len + self.num_causal + self.max_depth
        room = int(self.page_ids.shape[0]) * page_size
        if room < needed:
            raise ValueError(
                f"page_ids: {self.page_ids.size} pages of {page_size} tokens hold {room} tokens;"
                f" prefix, causal rows and deepest path need {needed}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutcome:
    """What a step gave one sequence, on the host.

    `tokens` int32 [num_emitted]: the accepted path, then the bonus token; empty if the block did
    not sample. The walk stops at a stop token, which then is the last one. `margins` float32
    [num_emitted]. `logprobs` float32 [num_emitted], of the unadjusted logits; 0 unless asked for.
    `top_logprobs`: per token, the likeliest ones and theirs; empty unless asked for. `prompt_…`:
    the same of the work's `scored` tokens.
    `accepted_nodes` int32 [num_accepted], tree-relative: 1 is the first below the root. `features`
    [num_committed, F] for positions from `kv_len`: the causal rows and the accepted nodes; None if
    not wanted. `chosen`: of a work that followed, the tree that it verified, to which `num_nodes`
    and `accepted_nodes` refer; None as well if the round before had emitted nothing: then neither
    did this one, and nothing was committed.
    """

    tokens: Int32Array
    margins: Float32Array
    logprobs: Float32Array
    accepted_nodes: Int32Array
    num_nodes: int  # of the tree, root included; 0 when the block did not sample
    num_committed: int  # K/V rows now in pages from position kv_len: num_causal + num_accepted
    features: npt.NDArray[np.generic] | None = field(default=None, repr=False)
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    chosen: Chosen | None = None

    @property
    def num_emitted(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_accepted(self) -> int:
        return int(self.accepted_nodes.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step that was given to the device; `number` counts the engine's."""

    works: Sequence[SequenceWork]
    number: int


class VerifyEngine(Protocol):
    """Runs steps on a device; called from the engine's thread only.

    A step commits K/V of causal rows and accepted nodes into its works' pages and nothing else.
    """

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        """One step over all `works`; outcomes in the same order. Blocks.

        Raises ValueError, before anything runs, if the works exceed the engine's largest bucket.
        """
        ...


@runtime_checkable
class AheadEngine(VerifyEngine, Protocol):
    """One that need not have ended a step to take the next: `run` is `finish(launch(works))`, with
    nothing else in flight.
    """

    def launch(self, works: Sequence[SequenceWork]) -> Launched:
        """One step over all `works`, given to the device behind what it does already; returns at
        once. At most two steps are in flight.

        A work may stand here though the step in flight has its slot, if it follows that one or if
        all of it is known all the same, as a prompt's next rows are. Raises ValueError, before
        anything runs, if the works are too large or do not fit what is in flight.
        """
        ...

    def finish(self, launched: Launched) -> list[SequenceOutcome]:
        """What the older of the steps in flight gave, in the order of its works; blocks.

        If it raises, state on the device is lost, for steps launched behind it too: these are
        forgotten, and nothing is in flight.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepPoint:
    """`seconds` of a step over `num_tokens` rows of `num_sequences` sequences, which attend to
    `num_kv_tokens` tokens in pages, all sequences together. Host work included.
    """

    num_tokens: int
    num_kv_tokens: int
    num_sequences: int
    seconds: float
