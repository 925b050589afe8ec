"""A head wired to know its target drafts without a miss: a real head's misses are its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from common.types import TreeShape
from models.eagle3 import HeadConfig
from models.layers import AttentionSpec
from tests.parity.draft_tiny import FEATURES, HIDDEN, VOCAB, tiny_engine, tiny_head, work

KNOWN = 20  # tokens that the target ever says
ALWAYS = KNOWN  # a column of the embedding that is on for every token
DEPTH = 4


def perfect_head() -> tuple[HeadConfig, Any, list[int]]:
    """A head whose pair with token x gives next[x] for sure, and `next`.

    Attention of a sharp cosine in the distance sees its own pair alone; values carry the token, the
    output projection its successor, far louder than the normed state beside it.
    """
    config, params = tiny_head(0)
    spec = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=8, out_features=HIDDEN)
    config = dataclasses.replace(config, attention=spec, norm_before_residual=True)
    following = np.random.default_rng(5).permutation(KNOWN)
    embedding = np.zeros((VOCAB, HIDDEN), np.float32)
    embedding[:KNOWN, :KNOWN] = np.eye(KNOWN)
    embedding[:, ALWAYS] = 1.0
    sharp = np.zeros((2 * HIDDEN, 32), np.float32)
    sharp[ALWAYS, ::8] = 40.0  # the first rotary frequency of each head
    value = np.zeros((2 * HIDDEN, 32), np.float32)
    value[:KNOWN, :KNOWN] = np.eye(KNOWN)
    output = np.zeros((32, HIDDEN), np.float32)
    output[np.arange(KNOWN), following] = 100.0
    layer = params["layer_0"]
    for name, kernel in {"q": sharp, "k": sharp, "v": value, "o": output}.items():
        layer["attention"][name] = {"kernel": jnp.asarray(kernel)}
    layer["mlp"]["down"]["kernel"] = jnp.zeros_like(layer["mlp"]["down"]["kernel"])
    for norm in (layer["embed_norm"], layer["hidden_norm"], params["final_norm"]):
        norm["scale"] = jnp.ones_like(norm["scale"])
    params["embedding"] = jnp.asarray(embedding)
    table = np.zeros(params["lm_head"].shape, np.float32)
    table[:KNOWN, :KNOWN] = 20.0 * np.eye(KNOWN)
    params["lm_head"] = jnp.asarray(table)
    params["draft_to_target"] = jnp.arange(table.shape[0], dtype=jnp.int32)
    return config, params, following.tolist()


def test_perfect_head_is_accepted_to_full_depth_every_round() -> None:
    head, params, following = perfect_head()
    engine = tiny_engine(
        head, params, max_draft_rows=DEPTH + 2, max_sequences=1,
        tree=TreeShape(max_depth=DEPTH, top_k=3, max_nodes=12),
    )  # fmt: skip
    tokens = [3, 7]
    features = np.random.default_rng(1).normal(size=(32, FEATURES)).astype(np.float32)
    fed = 0
    for _ in range(4):
        pairs = len(tokens) - 1
        tree = engine.run([work(tokens, features, fed, pairs, list(range(8)), True)])[0].tree
        assert tree is not None
        fed = pairs
        node = accepted = 0
        while True:  # the target's walk: its pick depends on the last token alone
            pick = following[tokens[-1]]
            tokens.append(pick)
            children = np.flatnonzero((tree.parents == node) & (tree.tokens == pick))
            if not children.size:
                break
            node, accepted = int(children[0]), accepted + 1
        assert accepted == DEPTH
