"""Tiny random heads, and a cache-keeping driver round the draft engine, for tests."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from common.types import DraftTree, TreeShape
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.step import SequenceWork
from draft_service.training.replay import pairs_work
from models.eagle3 import FeatureKind, FuseNorm, HeadConfig, TableSource
from models.eagle3.module import head_shapes
from models.layers import AttentionSpec
from models.rope import RopeConfig
from models.target import flatten, unflatten

HIDDEN, TARGET_HIDDEN, STATES, VOCAB, DRAFT_VOCAB = 32, 24, 3, 64, 40
FEATURES = STATES * TARGET_HIDDEN


def tiny_head(seed: int, num_layers: int = 1, scale: float = 0.3) -> tuple[HeadConfig, Any]:
    config = HeadConfig(
        layout="test",
        hidden_size=HIDDEN,
        target_hidden_size=TARGET_HIDDEN,
        num_states=STATES,
        feature_kind=FeatureKind.AUX,
        boundaries=(1, 2, 3),
        has_fc=True,
        fc_bias=False,
        fuse_norm=FuseNorm.NONE,
        embedding_layers=tuple(i == 0 for i in range(num_layers)),
        windows=(None,) * num_layers,
        attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, out_features=HIDDEN),
        mlp_size=48,
        mlp_bias=False,
        norm_eps=1e-5,
        norm_before_residual=False,
        norm_output=False,
        rope=RopeConfig(theta=10000.0),
        draft_vocab_size=DRAFT_VOCAB,
        target_vocab_size=VOCAB,
        embedding_source=TableSource.TARGET,
        lm_head_source=TableSource.HEAD,
    )
    random = np.random.default_rng(seed)

    def leaf(path: tuple[str, ...], shape: tuple[int, ...]) -> Any:
        around = 1.0 if path[-1] == "scale" else 0.0
        return jnp.asarray(around + random.normal(0.0, scale, shape), jnp.float32)

    leaves = {path: leaf(path, tuple(s.shape)) for path, s in flatten(head_shapes(config))}
    leaves[("embedding",)] = leaf(("embedding",), (VOCAB, HIDDEN))
    leaves[("lm_head",)] = leaf(("lm_head",), (DRAFT_VOCAB, HIDDEN))
    chosen = np.sort(random.permutation(VOCAB)[:DRAFT_VOCAB]).astype(np.int32)
    leaves[("draft_to_target",)] = jnp.asarray(chosen)
    return config, unflatten(leaves)


def tiny_engine(head: HeadConfig, params: Any, **changes: Any) -> DeviceEngine:
    settings: dict[str, Any] = {
        "num_pages": 32,
        "page_size": 4,
        "max_context_len": 64,
        "tree": TreeShape(max_depth=4, top_k=3, max_nodes=12),
        "max_sequences": 2,
        "max_draft_rows": 4,
        "max_extend_rows": 16,
    }
    return DeviceEngine(head, params, EngineConfig(**(settings | changes)))


def random_history(seed: int, num_tokens: int) -> tuple[list[int], Any]:
    """Tokens, and a feature row [F] for every position."""
    random = np.random.default_rng(seed)
    tokens = [int(t) for t in random.integers(0, VOCAB, num_tokens)]
    return tokens, random.normal(0.0, 1.0, (num_tokens, FEATURES)).astype(np.float32)


def work(
    tokens: list[int], features: Any, first: int, until: int, pages: list[int], drafts: bool
) -> SequenceWork:
    """Pairs [first, until) of a history whose features begin at position 0."""
    page_ids = np.array(pages, np.int32)
    return pairs_work(tokens, features, first, until, page_ids, drafts=drafts)


def grow(
    engine: DeviceEngine, tokens: list[int], features: Any, cuts: list[int], pages: list[int]
) -> DraftTree:
    """The tree below the last token, the pairs fed in chunks that end at `cuts` and the last."""
    first = 0
    for until in cuts:
        engine.run([work(tokens, features, first, until, pages, False)])
        first = until
    outcome = engine.run([work(tokens, features, first, len(tokens) - 1, pages, True)])[0]
    assert outcome.tree is not None
    return outcome.tree
