"""Training-time test equals real drafting: the unrolled batch against the served head, pair by
pair."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_service.training.dataset import DraftVocabulary
from draft_service.training.export import served_config, served_params
from draft_service.training.loss import Batch, Frozen, batch_loss, chain_hits
from draft_service.training.network import HeadShape, layer_shapes
from models.config import TargetConfig
from models.eagle3.description import HeadConfig
from models.eagle3.module import head_embed, head_forward, head_fuse, head_logits
from models.rope import RopeConfig

VOCAB, DRAFT, STEPS = 40, 16, 3
PROMPT_COLUMNS, RESPONSE_COLUMNS = 8, 6
PROMPTS, RESPONSES = (5, 8), (6, 4)  # tokens of the two sequences
ROWS = PROMPT_COLUMNS + RESPONSE_COLUMNS + STEPS

TARGET = TargetConfig(
    family="llama", vocab_size=VOCAB, hidden_size=16, num_layers=8, num_heads=4, num_kv_heads=2,
    head_dim=4, mlp_size=24, norm_eps=1e-5, rope=RopeConfig(theta=1000.0), tied_embeddings=True,
    max_positions=64, windows=(None,) * 8, boundaries=(2, 4, 5),
)  # fmt: skip


def make_head(num_layers: int, fusion: Any) -> tuple[HeadShape, Any, Frozen, DraftVocabulary]:
    shape = HeadShape(16, 48, 4, 2, 4, 24, num_layers, fusion, 1000.0, 1e-5)
    rng = np.random.default_rng(num_layers)

    def noise(*size: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.3, size), jnp.float32)

    layers = [{n: noise(*s) for n, s in layer_shapes(shape, i).items()} for i in range(num_layers)]
    params = {"fc": noise(48, 16), "norm": noise(16), "layers": layers}
    vocabulary = DraftVocabulary(np.arange(0, VOCAB, 3)[:DRAFT].astype(np.int32), VOCAB, 1.0)
    embedding = noise(VOCAB, 16)
    frozen = Frozen(
        embedding,
        embedding[vocabulary.target_ids].T,
        jnp.asarray(vocabulary.draft_ids()),
        jnp.abs(noise(48)) + 0.5,
    )
    return shape, params, frozen, vocabulary


def make_loss(shape: HeadShape) -> Any:
    return jax.jit(partial(batch_loss, shape, num_steps=STEPS, step_decay=0.8))


def make_batch() -> tuple[Batch, list[tuple[Any, Any, Any]]]:
    """Two sequences, padded; and (tokens, features, hidden) of each without padding."""
    rng = np.random.default_rng(7)
    columns = PROMPT_COLUMNS + RESPONSE_COLUMNS - 2
    tokens = np.zeros((2, PROMPT_COLUMNS + RESPONSE_COLUMNS + STEPS), np.int32)
    features = np.zeros((2, columns, 48), np.float16)
    hidden = np.zeros((2, RESPONSE_COLUMNS + STEPS - 1, 16), np.float16)
    plain, starts, ends = [], [], []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        length = prompt + response
        own = rng.integers(0, VOCAB, length).astype(np.int32)
        states = rng.normal(size=(length, 48)).astype(np.float16)
        taught = rng.normal(size=(length, 16)).astype(np.float16)
        start = PROMPT_COLUMNS - prompt
        tokens[row, start : start + length] = own
        fitting = min(length, columns - start)
        features[row, start : start + fitting] = states[:fitting]
        hidden[row, : response + 1] = taught[prompt - 1 :]
        plain.append((own, states.astype(np.float32), taught.astype(np.float32)))
        starts.append(start)
        ends.append(start + length)
    batch = Batch(*map(jnp.asarray, (tokens, features, hidden, np.int32(starts), np.int32(ends))))
    return batch, plain


def make_drafter(config: HeadConfig) -> Any:
    """(params, tokens [N+1], states [N, H]) → out [N, H], logits: the served head on a causal
    chain."""
    causal = np.tril(np.ones((ROWS, ROWS), bool))

    def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        k, v = jnp.split(block_kv, 2, axis=-1)
        group = q.shape[1] // k.shape[1]
        scores = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, group, 1)) * config.attention_scale
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, jnp.repeat(v, group, 1))

    @jax.jit
    def run(params: Any, tokens: jax.Array, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        embed = head_embed(config, params, tokens[1:])
        positions = jnp.arange(ROWS, dtype=jnp.int32)
        out, _ = head_forward(config, params, embed, states, positions, attend)
        return out, head_logits(config, params, out)

    return run


def draft_from(drafter: Any, params: Any, tokens: Any, fused: Any, anchor: int) -> list[Any]:
    """Logits [draft_vocab] of STEPS drafted steps from pair `anchor`, one row after the other.

    Every step runs the whole prefix again, so no cache can hide a mistake. Rows behind are padding.
    """
    padded = np.zeros(ROWS + 1, np.int32)
    padded[: len(tokens)] = tokens
    states = np.zeros((ROWS, 16), np.float32)
    states[: anchor + 1] = fused[: anchor + 1]
    logits = []
    for row in range(anchor, anchor + STEPS):
        out, scored = drafter(params, padded, states)
        logits.append(np.asarray(scored[row]))
        states[row + 1] = out[row]  # the next drafted row reads its parent's output
    return logits


@pytest.mark.parametrize(("num_layers", "fusion"), [(1, "every"), (2, "every"), (3, "first")])
def test_every_anchor_and_step_drafts_as_the_served_head(num_layers: int, fusion: str) -> None:
    shape, params, frozen, vocabulary = make_head(num_layers, fusion)
    config = served_config(shape, vocabulary, TARGET)
    served = served_params(shape, params, frozen, vocabulary)
    served["draft_to_target"] = jnp.asarray(vocabulary.target_ids)
    batch, plain = make_batch()
    expected_loss = np.zeros(STEPS)
    expected_hits, counts = np.zeros(STEPS), np.zeros(STEPS)
    drafter = make_drafter(config)
    for (tokens, features, hidden), prompt in zip(plain, PROMPTS, strict=True):
        fused = head_fuse(config, served, jnp.asarray(features))
        for anchor in range(prompt - 2, len(tokens) - 2):
            drafts = draft_from(drafter, served, tokens, fused, anchor)
            for step, logits in enumerate(drafts):
                predicted = anchor + 2 + step  # position of the token that these logits are for
                if predicted >= len(tokens):
                    break
                label = vocabulary.draft_ids()[tokens[predicted]]
                if label < 0:
                    continue
                taught = hidden[predicted - 1] @ np.asarray(frozen.lm_head)
                teacher = np.exp(taught - taught.max())
                teacher /= teacher.sum()
                shifted = logits - logits.max()
                expected_loss[step] += np.log(np.exp(shifted).sum()) - (teacher * shifted).sum()
                expected_hits[step] += logits.argmax() == label
                counts[step] += 1
    total, metrics = make_loss(shape)(params, frozen, batch)
    np.testing.assert_array_equal(metrics.rows, counts)
    np.testing.assert_array_equal(metrics.correct, expected_hits)
    np.testing.assert_allclose(metrics.loss, expected_loss, rtol=2e-5)
    weighted = (0.8 ** np.arange(STEPS) * expected_loss / counts).sum()
    np.testing.assert_allclose(total, weighted, rtol=2e-5)
    chains = jax.jit(partial(chain_hits, shape, num_steps=STEPS))
    hits, present = chains(params, frozen, batch)
    np.testing.assert_array_equal(hits.sum((0, 1)), expected_hits)
    assert present.sum((0, 1)).tolist() == [10, 8, 6]  # responses of 6 and 4, one fewer a step


def test_gradient_of_the_blocked_loss_is_the_plain_one() -> None:
    """Finite differences along random directions, through the custom gradients."""
    shape, params, frozen, _ = make_head(2, "first")
    batch, _ = make_batch()
    evaluate = make_loss(shape)

    def loss(p: Any) -> jax.Array:
        return evaluate(p, frozen, batch)[0]

    gradient = jax.jit(jax.grad(loss))(params)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        direction = jax.tree.map(lambda p, r=rng: r.normal(size=p.shape).astype(np.float32), params)
        slope = sum(jax.tree.leaves(jax.tree.map(lambda a, b: np.vdot(a, b), gradient, direction)))
        ahead, behind = (
            loss(jax.tree.map(lambda p, d, s=sign: p + s * 1e-3 * d, params, direction))
            for sign in (1.0, -1.0)
        )
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-3, rtol=2e-2, atol=2e-3)


def test_bfloat16_operands_change_the_loss_little() -> None:
    shape, params, frozen, _ = make_head(1, "every")
    batch, _ = make_batch()
    exact, rounded = (
        float(make_loss(s)(params, frozen, batch)[0])
        for s in (shape, replace(shape, matmul_dtype="bfloat16"))
    )
    assert exact != rounded
    assert abs(exact - rounded) < 0.02 * exact
