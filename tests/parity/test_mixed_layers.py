"""A target whose layers differ (windows, experts, norms of q and k) through the engine in parts.

The oracle is a dense forward of the whole sequence for every token. Prompts are longer than the
window, so that a layer that saw too much or too little would pick other tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from engine_driver import generate, guessing
from model_files import masked_attention

from common.types import SamplingParams
from models.config import TargetConfig
from models.experts import ExpertSpec
from models.rope import RopeConfig
from models.target import init_target, target_forward, target_logits
from verify_service.engine import DeviceEngine, EngineConfig

NUM_TOKENS, LENGTH, MARGIN = 12, 96, 1e-3
TARGET = TargetConfig(
    family="qwen3_moe",
    vocab_size=29,
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=24,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    tied_embeddings=True,
    max_positions=128,
    windows=(None, 40, None),
    qk_norm=True,
    experts=ExpertSpec(num_experts=5, num_per_token=2, size=12, normalise=True),
    sparse_layers=(False, True, False),
)


def test_layers_of_several_kinds_give_the_dense_tokens() -> None:
    random = np.random.default_rng(4)
    params = jax.tree.map(lambda x: x * (8.0 if x.ndim > 1 else 1.0), init_target(TARGET, 2))
    config = EngineConfig(
        num_pages=64,
        page_size=8,
        max_sequences=2,
        max_context_len=128,
        max_tree_nodes=10,
        max_depth=3,
        row_buckets=(128,),
        max_rows=128,
        layers_per_program=1,
    )
    engine = DeviceEngine(TARGET, params, config)
    prompts = [random.integers(29, size=size).tolist() for size in (57, 44)]
    samplings = [SamplingParams()] * 2
    alone = generate(engine, prompts, samplings, NUM_TOKENS)
    guess = guessing([one.tokens for one in alone], TARGET.vocab_size, right=0.8)
    with_trees = generate(engine, prompts, samplings, NUM_TOKENS, guess)

    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    masks = [(behind >= 0) & (behind < (window or LENGTH)) for window in TARGET.windows]
    attend = masked_attention(TARGET.attention_scale, None, np.stack(masks))

    @jax.jit
    def dense(tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)
        hidden, _, _ = target_forward(TARGET, params, tokens, positions, attend)
        return target_logits(TARGET, params, hidden)

    assert sum(one.accepted for one in with_trees) > 8
    for one in (*alone, *with_trees):
        padded = np.array(one.tokens + [0] * (LENGTH - len(one.tokens)), np.int32)
        wanted = np.asarray(dense(padded)).argmax(axis=1)
        for place, token in enumerate(one.response[:NUM_TOKENS]):
            pick = wanted[one.num_prompt + place - 1]
            assert pick == token or one.margins[place] < MARGIN
