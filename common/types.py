"""The domain's plain values, shared by every service. Pure Python and numpy: no jax, no protobuf.

Axes: N nodes of a draft tree (root included), T rows of a step, F features.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the pick is the argmax."""

MAX_TOP_LOGPROBS = 20
_MANY = 1 << 30
MAX_LOGIT_BIASES = 1024


TopLogprobs = Sequence[tuple[int, float]]
"""(token, log-probability) of the likeliest tokens at one place, best first."""


class Drafting(enum.IntEnum):
    """How rounds are drafted; as canopy.v1.Drafting."""

    NONE = 1  # roots alone
    SYNCHRONOUS = 2  # a round waits for its tree
    AHEAD = 3  # none waits; trees are grown for rounds to come


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of likely next tokens; node 0 is the root, the last committed token.

    `tokens` int32 [N], target vocabulary. `parents` int32 [N]: `parents[0] == -1`, else
    `parents[i] < i`. `scores` float32 [N]: log-probability of the path from the root, 0.0 there,
    never rising along a path and never rising with i, so that every prefix is a tree.
    """

    tokens: Int32Array
    parents: Int32Array
    scores: Float32Array

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[0])

    @staticmethod
    def root_only(token: int) -> DraftTree:
        return DraftTree(
            tokens=np.array([token], np.int32),
            parents=np.array([-1], np.int32),
            scores=np.zeros(1, np.float32),
        )

    def prefix(self, num_nodes: int) -> DraftTree:
        """The first `num_nodes` nodes: a tree again, since parents precede children."""
        return DraftTree(self.tokens[:num_nodes], self.parents[:num_nodes], self.scores[:num_nodes])

    def depths(self) -> Int32Array:
        """int32 [N]; the root is at depth 0."""
        depths = np.zeros(self.num_nodes, np.int32)
        for node in range(1, self.num_nodes):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def within_depth(self, max_depth: int) -> DraftTree:
        """The nodes no deeper than `max_depth`, in their order, parents renumbered."""
        return self._of(np.flatnonzero(self.depths() <= max_depth))

    def within(self, shape: TreeShape) -> DraftTree:
        """What `shape` allows of it: depth, then children per node, then nodes, in their order.

        A head asked for less depth or nodes from the start would have grown the same ones; with
        fewer children per node it might have searched elsewhere.
        """
        tree = self.within_depth(max(0, shape.max_depth))
        keep = tree._within_top_k(shape.top_k)
        if keep.size < tree.num_nodes:
            tree = tree._of(keep)
        return tree.prefix(max(1, shape.max_nodes))

    def below(self, tokens: Sequence[int]) -> DraftTree | None:
        """The tree of the node that `tokens` lead to from the root, with scores from there on; None
        if they lead out of the tree.
        """
        node = self.node_at(tokens)
        return None if node < 0 else self.subtree(self.nodes_below(node, _MANY, _MANY))

    def node_at(self, path: Sequence[int]) -> int:
        """The first node whose path below the root spells `path`; 0 for an empty one, -1 for none.
        Among equal siblings it is one that the path goes on from.
        """
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        length = len(path)
        reached = {0: 0}  # nodes on the way -> how many of the tokens lead there
        if not length:
            return 0
        for node in range(1, len(tokens)):
            depth = reached.get(parents[node])
            if depth is not None and depth < length and tokens[node] == path[depth]:
                if depth + 1 == length:
                    return node
                reached[node] = depth + 1
        return -1

    def nodes_below(self, root: int, max_nodes: int, max_depth: int) -> Int32Array:
        """int32: `root`, then the first nodes that descend from it, in order and at most
        `max_nodes` with it, no deeper than `max_depth` below it.
        """
        depths = {root: 0}
        parents = self.parents.tolist()
        for node in range(root + 1, len(parents)):
            if len(depths) >= max_nodes:
                break
            above = depths.get(parents[node])
            if above is not None and above < max_depth:
                depths[node] = above + 1
        return np.array([*depths], np.int32)

    def subtree(self, nodes: Int32Array) -> DraftTree:
        """Those nodes, rising, as a tree of their own; the first is above all others, and scores
        count from there.
        """
        tree = self._of(nodes)
        return DraftTree(tree.tokens, tree.parents, tree.scores - tree.scores[0])

    def _of(self, nodes: npt.NDArray[np.integer]) -> DraftTree:
        """`nodes`, rising, each with its parent but perhaps the first; parents renumbered."""
        renumbered = np.full(self.num_nodes + 1, -1, np.int32)  # the last slot serves parent -1
        renumbered[nodes] = np.arange(nodes.size, dtype=np.int32)
        return DraftTree(self.tokens[nodes], renumbered[self.parents[nodes]], self.scores[nodes])

    def _within_top_k(self, top_k: int) -> npt.NDArray[np.int64]:
        """Indices of the nodes that are, like all their ancestors, among their parent's best
        `top_k`.
        """
        kept = np.zeros(self.num_nodes, bool)
        kept[0] = True
        children = np.zeros(self.num_nodes, np.int64)
        for node in range(1, self.num_nodes):
            parent = self.parents[node]
            children[parent] += 1
            kept[node] = kept[parent] and children[parent] <= top_k
        return np.flatnonzero(kept)

    def validate(self, vocab_size: int, max_nodes: int) -> None:
        """Raises ValueError naming the first rule that the tree breaks."""
        n = self.num_nodes
        if not 1 <= n <= max_nodes:
            raise ValueError(f"tree has {n} nodes; it must have 1 to {max_nodes}")
        if self.parents.shape != (n,) or self.scores.shape != (n,):
            raise ValueError(
                f"tree has {n} tokens, {self.parents.size} parents and {self.scores.size} scores;"
                " the three must be equal in number"
            )
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            raise ValueError(f"tree has a token outside [0, {vocab_size})")
        if self.parents[0] != -1:
            raise ValueError(f"tree's node 0 must be the root (parent -1, not {self.parents[0]})")
        below = self.parents[1:]
        if (below < 0).any() or (below >= np.arange(1, n)).any():
            raise ValueError("every parent in a tree must stand before its child")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target picks at a node, and what it says of its picks.

    In this order: penalties, `logit_bias`, `min_tokens`, temperature, top_k, top_p, min_p.
    `logit_bias`: (token, what is added to its logit), each token once. `logprobs`: of every emitted
    token, and with `top_logprobs` of so many likeliest ones beside it. `prompt_logprobs`: of the
    prompt's tokens from the second on, and of so many likeliest ones beside each; None: not.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits, unsigned; noise key
    ignore_eos: bool = False  # the walk does not stop at stop tokens
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # stop tokens are not picked before
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def is_penalised(self) -> bool:
        """Whether picks depend on which tokens there were before."""
        neutral = (0.0, 0.0, 1.0)
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != neutral

    def validate(self) -> None:
        """Raises ValueError that starts with the field's name and shows value and limit."""
        self._validate_logit_options()
        if not (0.0 <= self.temperature <= 100.0):  # also refuses NaN
            raise ValueError(f"temperature: {self.temperature} is outside [0, 100]")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is negative; 0 switches it off")
        if not (0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p: {self.top_p} is outside (0, 1]")
        if not (0.0 <= self.min_p <= 1.0):
            raise ValueError(f"min_p: {self.min_p} is outside [0, 1]")
        if not (0 <= self.seed < 2**64):
            raise ValueError(f"seed: {self.seed} is outside [0, 2**64)")

    def _validate_logit_options(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (-2.0 <= value <= 2.0):
                raise ValueError(f"{name}: {value} is outside [-2, 2]")
        if not (0.01 <= self.repetition_penalty <= 10.0):  # logits stay far from overflow
            raise ValueError(f"repetition_penalty: {self.repetition_penalty} is outside [0.01, 10]")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(
                f"logit_bias: {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIASES}"
            )
        for token, bias in self.logit_bias:
            if not (-100.0 <= bias <= 100.0):
                raise ValueError(f"logit_bias[{token}]: {bias} is outside [-100, 100]")
        if not (0 <= self.min_tokens < 2**31):
            raise ValueError(f"min_tokens: {self.min_tokens} is outside [0, 2**31)")
        if not (0 <= self.top_logprobs <= MAX_TOP_LOGPROBS):
            raise ValueError(
                f"top_logprobs: {self.top_logprobs} is outside [0, {MAX_TOP_LOGPROBS}]"
            )
        if not (0 <= (self.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS):
            raise ValueError(
                f"prompt_logprobs: {self.prompt_logprobs} is outside [0, {MAX_TOP_LOGPROBS}]"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set without logprobs; set that as well")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """What a draft may grow. `max_nodes` counts the root; 1 means no speculation.

    The defaults are those of every setting about trees.
    """

    max_depth: int = 5
    top_k: int = 4
    max_nodes: int = 16

    @staticmethod
    def unbounded() -> TreeShape:
        return TreeShape(max_depth=_MANY, top_k=_MANY, max_nodes=_MANY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """What a service believes of a sequence; sent with every acknowledgement and error."""

    epoch: int = 0
    next_round: int = 0  # the first round not yet performed
    committed_len: int = 0  # tokens
    kv_len: int = 0  # tokens with a final KV row


class ErrorCode(enum.IntEnum):
    """Why one sequence's command failed. Values equal `canopy.v1.SequenceErrorCode`."""

    INVALID = 1  # malformed command: bad tree, token, length
    UNKNOWN_SEQUENCE = 2  # never opened, expired or lost with a restart: open again
    CLOSED = 3  # closed before; the id is a tombstone
    STALE_EPOCH = 4  # the frame belongs to an earlier life of the link
    WRONG_ROUND = 5  # older or future round, or lengths that do not fit
    NEVER_FITS = 6  # more pages than the pool has
    OVERLOADED = 7  # the waiting queue is full
    NOT_SERVING = 8  # draining
    INTERNAL = 9
    UNIMPLEMENTED = 10


class SequenceFailure(Exception):
    """One sequence's command failed; becomes an error entry in a frame, never a status."""

    def __init__(
        self, code: ErrorCode, message: str, state: SequenceState | None = None, round_: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.state = state or SequenceState()
        self.round = round_


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Aux features of consecutive positions of one sequence, on the host.

    `rows` [num_rows, F] in the agreed dtype (float32 or bfloat16). Row i is position
    `position + i`: the target's residual stream entering the captured layers when it read the
    token at that position.
    """

    sequence_id: bytes
    epoch: int
    position: int
    rows: npt.NDArray[np.generic] = field(repr=False)
