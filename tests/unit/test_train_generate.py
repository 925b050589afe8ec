"""Batched generation for training data gives what the target gives, one sequence at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from draft_service.training.generate import generate_batch
from draft_service.training.target_states import make_target_states
from models.config import TargetConfig
from models.rope import RopeConfig
from models.target import init_target, target_logits

CONFIG = TargetConfig(
    family="llama",
    vocab_size=30,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_size=24,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1000.0),
    tied_embeddings=True,
    max_positions=64,
    windows=(None, 3),
    boundaries=(1,),
)
MAX_TOKENS, COLUMNS = 6, 16
PROMPTS = ([3, 9, 4, 1, 7], [5, 2])


def plain_greedy(states: Any, params: Any, prompt: list[int]) -> list[int]:
    """The whole sequence run again for every token, without a cache."""
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        padded = np.zeros((1, COLUMNS), np.int32)
        padded[0, : len(tokens)] = tokens
        _, hidden = states(padded)
        logits = target_logits(CONFIG, params, jnp.asarray(hidden[0, len(tokens) - 1 :][:1]))
        tokens.append(int(jnp.argmax(logits)))
    return tokens[len(prompt) :]


def test_batch_equals_one_sequence_without_cache_and_ends_at_a_stop_token() -> None:
    params = jax.tree.map(lambda leaf: leaf * 8, init_target(CONFIG, seed=1))  # far from ties
    states = make_target_states(CONFIG, params)
    expected = [plain_greedy(states, params, prompt) for prompt in PROMPTS]
    assert expected[0] != expected[1]
    tokens, lengths = np.zeros((2, 8), np.int32), np.array([5, 2], np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    generate = jax.jit(
        partial(generate_batch, CONFIG), static_argnames=("max_tokens", "temperature", "stop_ids")
    )
    arguments = (params, tokens, lengths, jax.random.key(0))
    free = generate(*arguments, max_tokens=MAX_TOKENS, temperature=0.0, stop_ids=())
    assert np.asarray(free).tolist() == expected
    stop = expected[0][2]
    stopped = np.asarray(
        generate(*arguments, max_tokens=MAX_TOKENS, temperature=0.0, stop_ids=(stop,))
    )
    for row, full in zip(stopped.tolist(), expected, strict=True):
        kept = full[: full.index(stop) + 1] if stop in full else full
        assert row == kept + [-1] * (MAX_TOKENS - len(kept))
