"""An EAGLE-3 head and its dynamic tree in plain numpy, float64, without a cache: the oracle.

Shares no code with the engine or the model: weights are read from the nested parameters by name, a
pair attends by recomputing everything before it, and the tree is grown with Python lists.
Single-layer heads with the embedding beside the state, plain rotary angles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.sample_and_accept.reference import reference_noise


@dataclass
class Node:
    token: int
    parent: int  # index in the pool; -1: the root
    score: float
    depth: int
    state: Any = None  # output of the head, once run
    rows: Any = None  # key and value of its pair, once run


@dataclass
class ReferenceHead:
    params: dict[str, Any]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    temperature: float = 0.0
    seed: int = 0

    def weight(self, *path: str) -> Any:
        node: Any = self.params
        for name in path:
            node = node[name]
        return np.asarray(node, np.float64)

    def norm(self, x: Any, name: str, layer: str | None = "layer_0") -> Any:
        scale = self.weight(layer, name, "scale") if layer else self.weight(name, "scale")
        return x / np.sqrt((x * x).mean() + self.eps) * scale

    def turn(self, x: Any, position: int) -> Any:
        half = self.head_dim // 2
        angles = position / self.theta ** (np.arange(half) * 2.0 / self.head_dim)
        a, b = x[:, :half], x[:, half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    def pair(self, token: int, state: Any, position: int, seen: list[Any]) -> tuple[Any, Any]:
        """Output of one pair that sees `seen` (key, value) rows and itself; and its own row."""
        w = lambda name: self.weight("layer_0", "attention", name, "kernel")  # noqa: E731
        embed = self.weight("embedding")[token]
        x = np.concatenate([self.norm(embed, "embed_norm"), self.norm(state, "hidden_norm")])
        q = self.turn((x @ w("q")).reshape(self.num_heads, self.head_dim), position)
        k = self.turn((x @ w("k")).reshape(self.num_kv_heads, self.head_dim), position)
        v = (x @ w("v")).reshape(self.num_kv_heads, self.head_dim)
        row = (k, v)
        mixed = np.zeros((self.num_heads, self.head_dim))
        for head in range(self.num_heads):
            of = head * self.num_kv_heads // self.num_heads
            scores = [q[head] @ key[of] / np.sqrt(self.head_dim) for key, _ in [*seen, row]]
            weights = np.exp(np.array(scores) - max(scores))
            values = np.array([value[of] for _, value in [*seen, row]])
            mixed[head] = weights @ values / weights.sum()
        r = state + mixed.reshape(-1) @ w("o")
        y = self.norm(r, "mlp_norm")
        m = lambda name: self.weight("layer_0", "mlp", name, "kernel")  # noqa: E731
        gate = y @ m("gate")
        return r + (gate / (1 + np.exp(-gate)) * (y @ m("up"))) @ m("down"), row

    def log_probs(self, state: Any) -> Any:
        logits = self.weight("lm_head") @ self.norm(state, "final_norm", None)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def best(self, state: Any, top_k: int, position: int) -> list[tuple[int, float]]:
        """(target id, log-probability) of the top_k children of a state, of which the target picks
        the token at `position`; with its noise among them where it samples.
        """
        logps = self.log_probs(state)
        to_target = np.asarray(self.params["draft_to_target"])
        if self.temperature:
            words = (self.seed & 0xFFFFFFFF, self.seed >> 32)
            noise = np.array([reference_noise(*words, position, int(t)) for t in to_target])
            scores = logps / self.temperature + noise
            logps = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        order = np.argsort(-logps, kind="stable")[:top_k]
        return [(int(to_target[i]), float(logps[i])) for i in order]


def reference_tree(
    head: ReferenceHead, tokens: list[int], features: Any, depth: int, top_k: int, num_nodes: int,
    width: int | None = None,
) -> list[tuple[int, int, float]]:  # fmt: skip
    """(token, parent node, score) per node, root first, for committed `tokens` and the features
    [len(tokens) - 1, F] of all but the last; `width`: the root's children and a level's nodes that
    are expanded; None: top_k.
    """
    rows: list[Any] = []
    out: Any = None
    for t in range(len(tokens) - 1):
        fused = np.asarray(features[t], np.float64) @ head.weight("fuse", "fc", "kernel")
        out, row = head.pair(tokens[t + 1], fused, t, rows)
        rows.append(row)
    width, length = width or top_k, len(tokens)
    pool = [Node(token, -1, logp, 1) for token, logp in head.best(out, width, length)]
    frontier = list(range(len(pool)))
    for _ in range(depth - 1):
        children: list[int] = []
        for i in frontier:
            node, above, up = pool[i], [], pool[i].parent
            while up >= 0:
                above.append(pool[up].rows)
                up = pool[up].parent
            state = out if node.parent < 0 else pool[node.parent].state
            position = length - 1 + node.depth - 1
            node.state, node.rows = head.pair(node.token, state, position, rows + above[::-1])
            for token, logp in head.best(node.state, top_k, length + node.depth):
                children.append(len(pool))
                pool.append(Node(token, i, node.score + logp, node.depth + 1))
        frontier = sorted(children, key=lambda i: -pool[i].score)[:width]
    chosen = sorted(range(len(pool)), key=lambda i: -pool[i].score)[: num_nodes - 1]
    place = {-1: 0, **{i: n + 1 for n, i in enumerate(chosen)}}
    nodes = [(tokens[-1], -1, 0.0)]
    return nodes + [(pool[i].token, place[pool[i].parent], pool[i].score) for i in chosen]
