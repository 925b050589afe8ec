"""The real model: fetched, converted, and held against transformers' greedy answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from model_files import GOLDENS, dense_causal
from tokenizers import Tokenizer

from models.checkpoint import read_json
from models.eagle3 import load_head
from models.eagle3.init import init_head
from models.fetch import default_cache_dir, fetch_smollm2
from models.identity import target_identity
from models.layers import Params
from models.target import load_target, target_forward, target_logits

pytestmark = pytest.mark.e2e

MARGIN = 1e-3  # below, float32 sums of another order may choose differently


@pytest.fixture(scope="module")
def directory() -> Path:
    return fetch_smollm2(default_cache_dir())


def goldens() -> Iterator[dict[str, Any]]:
    for line in (GOLDENS / "smollm2_greedy.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def test_tokenizer_and_template_give_the_goldens_ids(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    template = read_json(directory / "tokenizer_config.json")["chat_template"]
    render = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        template
    )
    for golden in goldens():
        text = render.render(messages=golden["messages"], add_generation_prompt=True)
        assert tokenizer.encode(text, add_special_tokens=False).ids == golden["prompt_ids"]
        response = tokenizer.decode(golden["response_ids"])
        assert "<|im_end|>" not in response


def test_digits_stand_alone(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    text = "Zahl: 42, 漢字, 🧲\n\n  def f():\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_greedy_picks_are_those_of_transformers(directory: Path) -> None:
    config, params = load_target(directory)
    assert config.eos_token_ids == (2,)
    assert config.boundaries == (2, 15, 27)
    rows = 256  # one compilation for all: causal rows do not see the padding behind them

    @jax.jit
    def picks(params: Params, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(rows, dtype=jnp.int32)
        attend = dense_causal(config.attention_scale, rows)
        hidden, _, _ = target_forward(config, params, tokens, positions, attend)
        return jnp.argmax(target_logits(config, params, hidden), axis=-1)

    checked = 0
    for golden in goldens():
        prompt, response = golden["prompt_ids"], golden["response_ids"]
        tokens = np.zeros(rows, np.int32)
        tokens[: len(prompt) + len(response)] = [*prompt, *response]
        first = len(prompt) - 1
        chosen = np.asarray(picks(params, jnp.asarray(tokens)))[first : first + len(response)]
        clear = np.asarray(golden["margins"]) > MARGIN
        np.testing.assert_array_equal(chosen[clear], np.asarray(response)[clear])
        checked += int(clear.sum())
    assert checked > 600


def test_warm_head_fits_the_target(directory: Path, tmp_path: Path) -> None:
    made = init_head(directory, tmp_path / "head", draft_vocab_size=512)
    config, params = load_head(tmp_path / "head", directory)
    assert config == made
    ids = np.asarray(params["draft_to_target"])
    assert set(range(17)) <= set(ids.tolist())  # the special tokens, the end of turn among them
    assert target_identity(directory).vocab_size == 49152
