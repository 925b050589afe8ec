"""Samples through the real acceptance path follow the target's exact filtered distribution.

Thousands of seeds run through the real engine on a tiny random model: prefill, then rounds with
trees whose nodes are the likeliest tokens. The tokens at the first, second and third place after
the prompt are compared, by chi-square, with the distribution computed densely in numpy. Trees must
change nothing: the drafter only decides how many rounds it takes.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from common.types import SamplingParams
from models.config import TargetConfig
from models.rope import RopeConfig
from models.target import init_target, target_forward, target_logits
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.step import SequenceOutcome, SequenceWork

VOCAB = 12
PROMPT = (3, 7, 1, 5)
NUM_SAMPLES = 4096
BATCH = 128
PLACES = 3
PAGE_SIZE = 8
TARGET = TargetConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_size=24,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    tied_embeddings=False,
    max_positions=64,
    windows=(None, None),
)
FILTERS = {
    "temperature": {"temperature": 0.9},
    "hot": {"temperature": 2.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "all": {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
}


def filtered(logits: np.ndarray, *, temperature, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Exact probabilities [V] in float64; ties at a threshold are kept."""
    scaled = logits.astype(np.float64) / temperature
    keep = np.ones(VOCAB, bool)
    if top_k:
        keep &= scaled >= np.sort(scaled)[-top_k]
    p = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
    p /= p.sum()
    if top_p < 1.0:
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p = np.where(p >= p[order][before < top_p].min(), p, 0.0)
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


@pytest.fixture(scope="module")
def params():
    # Larger weights than a fresh model's, so that the distribution is far from uniform.
    return jax.tree.map(lambda leaf: leaf * (8.0 if leaf.ndim > 1 else 1.0), init_target(TARGET, 5))


@pytest.fixture(scope="module")
def next_logits(params):
    """(prefixes [n, length]) -> float32 [n, V] by a plain dense forward."""

    def dense(tokens: jax.Array) -> jax.Array:
        length = tokens.shape[0]
        mask = jnp.tril(jnp.ones((length, length), bool))

        def attend(layer, q, block_kv):
            k, v = jnp.split(block_kv, 2, axis=-1)
            k, v = (jnp.repeat(x, TARGET.num_heads // TARGET.num_kv_heads, axis=1) for x in (k, v))
            scores = jnp.einsum("qhd,khd->hqk", q, k) * TARGET.attention_scale
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
            return jnp.einsum("hqk,khd->qhd", weights, v)

        positions = jnp.arange(length, dtype=jnp.int32)
        hidden, _, _ = target_forward(TARGET, params, tokens, positions, attend)
        return target_logits(TARGET, params, hidden[-1:])[0]

    batched = jax.jit(jax.vmap(dense))
    return lambda prefixes: np.asarray(batched(jnp.asarray(prefixes, jnp.int32)))


@pytest.fixture(scope="module")
def exact(next_logits):
    """Filter settings -> three arrays [V]: the marginal of each place after the prompt."""
    logits = [
        next_logits([[*PROMPT, *tail] for tail in itertools.product(range(VOCAB), repeat=length)])
        for length in range(PLACES)
    ]

    def marginals(settings: dict) -> list[np.ndarray]:
        reach = np.ones(1)  # probability of each prefix
        places = []
        for rows in logits:
            joint = reach[:, None] * np.stack([filtered(row, **settings) for row in rows])
            places.append(joint.sum(axis=0))
            reach = joint.reshape(-1)
        return places

    return marginals


@pytest.fixture(scope="module")
def engine(params):
    config = EngineConfig(
        num_pages=4 * BATCH,
        page_size=PAGE_SIZE,
        max_sequences=BATCH,
        max_context_len=32,
        max_tree_nodes=8,
        max_depth=3,
        max_rows=1024,
    )
    return DeviceEngine(TARGET, params, config)


def work(slot: int, sampling: SamplingParams, tokens, parents, kv_len: int) -> SequenceWork:
    causal = len(tokens) if kv_len == 0 else 1
    return SequenceWork(
        slot=slot,
        tokens=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        num_causal=causal,
        samples=True,
        kv_len=kv_len,
        page_ids=np.arange(4 * slot, 4 * slot + 4, dtype=np.int32),
        sampling=sampling,
        wants_features=False,
    )


def tree(root: int, likely: list[int]) -> tuple[list[int], list[int]]:
    """Three children of the root, and two below the first and the second of them."""
    return [root, *likely[:3], *likely[:2], *likely[1:3]], [-1, 0, 0, 0, 1, 1, 2, 2]


def draw(engine: DeviceEngine, settings: dict, likely: list[int], first_seed: int):
    """[BATCH, PLACES] tokens of BATCH seeds, and the rounds it took beyond the prefill."""
    samplings = [SamplingParams(seed=(first_seed + i) * 0x9E3779B97F4A7C15 % 2**64, **settings)
                 for i in range(BATCH)]  # fmt: skip
    chain = list(range(-1, len(PROMPT) - 1))
    outcomes: list[SequenceOutcome] = engine.run(
        [work(i, s, PROMPT, chain, 0) for i, s in enumerate(samplings)]
    )
    tokens = [list(outcome.tokens) for outcome in outcomes]
    kv_lens = [len(PROMPT)] * BATCH
    rounds = 0
    while open_ := [i for i in range(BATCH) if len(tokens[i]) < PLACES]:
        works = [work(i, samplings[i], *tree(tokens[i][-1], likely), kv_lens[i]) for i in open_]
        for i, outcome in zip(open_, engine.run(works), strict=True):
            tokens[i] += list(outcome.tokens)
            kv_lens[i] += outcome.num_committed
        rounds += len(open_)
    return np.array([row[:PLACES] for row in tokens]), rounds


@pytest.mark.parametrize("name", FILTERS)
def test_samples_through_trees_follow_the_exact_filtered_distribution(name, engine, exact):
    settings = FILTERS[name]
    expected = exact(settings)
    likely = [int(token) for token in np.argsort(-expected[1])[:3]]
    drawn = [
        draw(engine, settings, likely, first_seed) for first_seed in range(1, NUM_SAMPLES, BATCH)
    ]
    samples = np.concatenate([tokens for tokens, _ in drawn])
    assert sum(rounds for _, rounds in drawn) < 2 * len(samples), "no tree was ever accepted"
    for place in range(PLACES):
        counts = np.bincount(samples[:, place], minlength=VOCAB)
        p = expected[place]
        assert counts[p == 0].sum() == 0, "a token that the filters exclude was drawn"
        rare = (p > 0) & (p * len(samples) < 5)
        kept = (p > 0) & ~rare
        observed = np.append(counts[kept], counts[rare].sum())
        wanted = np.append(p[kept], p[rare].sum()) * len(samples)
        if wanted[-1] == 0:
            observed, wanted = observed[:-1], wanted[:-1]
        assert stats.chisquare(observed, wanted).pvalue > 1e-4, (place, observed, wanted)
