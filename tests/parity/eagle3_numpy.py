"""EAGLE-3 in float64 numpy, written from the papers' formulas; shares no code with models/.

A head is a plain dict of arrays in the orientation of checkpoint files ([out, in]):

    fc, fc_bias, joint_norm, state_norms (list)   any may be absent
    norm, lm_head, embedding
    layers: list of dicts q k v o gate up down, ln_hidden, ln_mlp; perhaps ln_embed (then q, k, v
            take [embedding, hidden]), qb kb vb ob gateb upb downb, qn kn
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def linear(x: Array, part: dict[str, Array], name: str) -> Array:
    y = x @ part[name].T
    return y + part[name + "b"] if name + "b" in part else y


def rotate(x: Array, positions: Array, frequencies: Array) -> Array:
    """x [T, heads, D] as complex pairs (x[i], x[i + D/2]), each turned by position · frequency."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    turned = pairs * np.exp(1j * positions[:, None, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], axis=-1)


class Reference:
    """Prefill and drafting of one chain per row, as in make_head_goldens.py.

    Step 0 takes fused features; in step s row t takes tokens[s][t] and its own state of step s - 1,
    sees the rows 0..t of step 0 (the last `window` of the positions, where given) and itself in the
    steps after, at position t + s.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        head_dim: int,
        frequencies: Array,
        eps: float = 1e-5,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        window: int | None = None,
    ) -> None:
        self.head, self.head_dim, self.frequencies, self.eps = head, head_dim, frequencies, eps
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.window = window
        self.keys: list[list[Array]] = [[] for _ in head["layers"]]  # [layer][step] [T, heads, D]
        self.values: list[list[Array]] = [[] for _ in head["layers"]]

    def fuse(self, features: Array) -> Array:
        x = features
        if "joint_norm" in self.head:
            x = rms(x, self.head["joint_norm"], self.eps)
        if "state_norms" in self.head:
            norms = self.head["state_norms"]
            states = np.split(x, len(norms), axis=-1)
            x = np.concatenate(
                [rms(s, w, self.eps) for s, w in zip(states, norms, strict=True)], -1
            )
        if "fc" not in self.head:
            return x
        return x @ self.head["fc"].T + self.head.get("fc_bias", 0.0)

    def layer(self, index: int, embed: Array, state: Array, step: int) -> Array:
        part = self.head["layers"][index]
        normed = rms(state, part["ln_hidden"], self.eps)
        fed, residual = normed, state
        if "ln_embed" in part:
            fed = np.concatenate([rms(embed, part["ln_embed"], self.eps), normed], -1)
            if self.norm_before_residual:
                residual = normed
        stream = residual + self.attention(index, fed, step)
        x = rms(stream, part["ln_mlp"], self.eps)
        gate = linear(x, part, "gate")
        return stream + linear(gate / (1 + np.exp(-gate)) * linear(x, part, "up"), part, "down")

    def attention(self, index: int, fed: Array, step: int) -> Array:
        part, rows = self.head["layers"][index], fed.shape[0]
        q, k, v = (linear(fed, part, n).reshape(rows, -1, self.head_dim) for n in "qkv")
        if "qn" in part:
            q, k = rms(q, part["qn"], self.eps), rms(k, part["kn"], self.eps)
        positions = np.arange(rows) + step
        q, k = rotate(q, positions, self.frequencies), rotate(k, positions, self.frequencies)
        self.keys[index].append(k)
        self.values[index].append(v)
        group = q.shape[1] // k.shape[1]
        out = np.zeros_like(q)
        for t in range(rows):
            first = 0 if self.window is None else max(0, t + step - self.window + 1)
            seen = [(0, s) for s in range(first, t + 1)]
            seen += [(j, t) for j in range(1, step + 1) if t + j >= first]
            for h in range(q.shape[1]):
                key = np.array([self.keys[index][j][s, h // group] for j, s in seen])
                value = np.array([self.values[index][j][s, h // group] for j, s in seen])
                scores = key @ q[t, h] / np.sqrt(self.head_dim)
                weights = np.exp(scores - scores.max())
                out[t, h] = weights @ value / weights.sum()
        return linear(out.reshape(rows, -1), part, "o")

    def run(self, features: Array, tokens: list[Array]) -> Array:
        """logits [steps, T, K] for the tokens (target ids [T]) of each step."""
        logits, state = [], self.fuse(features.astype(np.float64))
        for step, ids in enumerate(tokens):
            embed = self.head["embedding"][ids]
            for index in range(len(self.head["layers"])):
                state = self.layer(index, embed, state, step)
            normed = rms(state, self.head["norm"], self.eps)
            if self.norm_output:
                state = normed
            logits.append(normed @ self.head["lm_head"].T)
        return np.stack(logits)
