"""Log-probabilities of prompts, chunk by chunk beside sequences that decode, through machine and
engine; the oracle is a dense forward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import dense_causal
from test_distribution import TARGET

from common.types import DraftTree, SamplingParams
from kernels.token_logprobs.reference import reference_logprobs
from models.target import init_target, target_forward, target_logits
from verify_service.commands import Open, VerifyTree
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.events import Event, RoundDone, RoundResult
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine

PROMPT = tuple(int(t) for t in np.random.default_rng(2).integers(0, TARGET.vocab_size, 27))
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
NODES, PAGE, CONTEXT = 8, 4, 64


@pytest.fixture(scope="module")
def params() -> Any:
    return jax.tree.map(lambda leaf: leaf * (8.0 if leaf.ndim > 1 else 1.0), init_target(TARGET, 5))


@pytest.fixture(scope="module")
def expected(params: Any) -> np.ndarray:
    """[prompt, vocabulary] log-probabilities of what follows each token."""
    positions = jnp.arange(len(PROMPT), dtype=jnp.int32)
    attend = dense_causal(TARGET.attention_scale, len(PROMPT))
    hidden, _, _ = target_forward(TARGET, params, jnp.array(PROMPT), positions, attend)
    return np.stack([reference_logprobs(row) for row in target_logits(TARGET, params, hidden)])


class Bench:
    def __init__(self, params: Any) -> None:
        config = EngineConfig(
            num_pages=64, page_size=PAGE, max_sequences=3, max_context_len=CONTEXT,
            max_tree_nodes=NODES, max_depth=4, row_buckets=(8, 32), max_rows=32, max_stop_tokens=2,
        )  # fmt: skip
        self.engine = DeviceEngine(TARGET, params, config)
        self.machine = VerifyMachine(
            VerifyLimits(
                vocab_size=TARGET.vocab_size, max_context_len=CONTEXT, max_tree_nodes=NODES,
                max_tree_depth=4, max_sequences=3, max_waiting_sequences=3, page_size=PAGE,
                num_pages=64, max_step_tokens=32, max_prefill_tokens=20, max_stop_tokens=2,
            )
        )  # fmt: skip
        self.machine.connect(1)

    def open(self, name: bytes, tokens: tuple[int, ...], sampling: SamplingParams) -> None:
        command = Open(
            sequence_id=name, epoch=1, tokens=tokens, num_prompt_tokens=len(tokens),
            sampling=sampling, max_total_tokens=CONTEXT,
        )  # fmt: skip
        self.machine.handle(1, [command], 0.0)

    def step(self) -> list[Event]:
        plan = self.machine.plan(0.0)
        return self.machine.retire(plan.works, self.engine.run(plan.works), 0.0)

    def first_result(self, name: bytes) -> tuple[RoundResult, int]:
        """And after how many steps; meanwhile B decodes with trees."""
        for num_steps in range(1, 20):
            for event in self.step():
                assert isinstance(event, RoundDone)
                if event.sequence_id == name:
                    return event.result, num_steps
                root, last = event.result.tokens[-1], event.result.round
                length = event.result.kv_len + 1 + len(event.result.tokens)
                nodes = np.array([root, 1, 2, 3], np.int32)
                tree = DraftTree(nodes, np.array([-1, 0, 0, 1], np.int32), -np.arange(4.0))
                command = VerifyTree(
                    sequence_id=event.sequence_id, epoch=1, acked_round=last, round=last + 1,
                    kv_len=length - 1, tree=tree,
                )  # fmt: skip
                self.machine.handle(1, [command], 0.0)
        raise AssertionError("no result in time")


@pytest.mark.parametrize("num_top", [0, 3])
def test_prompts_are_scored_in_chunks_beside_others(
    params: Any, expected: np.ndarray, num_top: int
) -> None:
    bench = Bench(params)
    bench.open(B, (1, 2, 3), SamplingParams())
    bench.step()
    bench.open(A, PROMPT, SamplingParams(prompt_logprobs=num_top))
    result, num_steps = bench.first_result(A)
    assert num_steps == 4  # every scored row is a node: at most eight a step
    assert len(result.prompt_logprobs) == len(PROMPT) - 1
    for place, value in enumerate(result.prompt_logprobs):
        assert value == pytest.approx(expected[place, PROMPT[place + 1]], abs=1e-4)
    assert len(result.prompt_top_logprobs) == (len(PROMPT) - 1 if num_top else 0)
    for place, top in enumerate(result.prompt_top_logprobs):
        tokens, values = zip(*top, strict=True)
        assert len(tokens) == num_top
        np.testing.assert_allclose(values, np.sort(expected[place])[::-1][:num_top], atol=1e-4)
        np.testing.assert_allclose(expected[place][list(tokens)], values, atol=1e-4)


def test_cached_rows_are_computed_again_for_their_logits_and_told_once(
    params: Any, expected: np.ndarray
) -> None:
    bench = Bench(params)
    bench.open(B, PROMPT, SamplingParams())
    bench.first_result(B)
    bench.open(A, PROMPT, SamplingParams(prompt_logprobs=0))
    result, _ = bench.first_result(A)
    assert result.num_cached_tokens == 0
    wanted = expected[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(result.prompt_logprobs, wanted, atol=1e-4)
    root, length = result.tokens[-1], len(PROMPT) + 1
    command = VerifyTree(
        sequence_id=A, epoch=1, acked_round=0, round=1, kv_len=length - 1,
        tree=DraftTree.root_only(root),
    )  # fmt: skip
    bench.machine.handle(1, [command], 0.0)
    following, _ = bench.first_result(A)
    assert following.prompt_logprobs == ()


def test_prompt_of_one_token_has_none(params: Any) -> None:
    bench = Bench(params)
    bench.open(A, (3,), SamplingParams(prompt_logprobs=2))
    result, num_steps = bench.first_result(A)
    assert (num_steps, result.prompt_logprobs) == (1, ())
