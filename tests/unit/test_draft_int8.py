"""A head's matrices in 8 bits: what is kept of them, and that the engine reads them right."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.head_weights import rounds_of
from draft_service import assembly
from draft_service.config import DraftConfig
from draft_service.int8 import LM_HEAD_SCALE, SCALE, quantise
from models import packing
from models.target import flatten
from tests.parity.draft_tiny import grow, random_history, tiny_engine, tiny_head

PAGES = [3, 1, 2]


def dequantised(params: Any) -> Any:
    """The float matrices that `params` stand for."""
    if not isinstance(params, dict):
        return params
    plain = {name: dequantised(value) for name, value in params.items()}
    if SCALE in plain:
        plain["kernel"] = plain["kernel"].astype(jnp.float32) * plain.pop(SCALE)
    if LM_HEAD_SCALE in plain:
        scale = plain.pop(LM_HEAD_SCALE)[:, None]
        plain["lm_head"] = plain["lm_head"].astype(jnp.float32) * scale
    return plain


def test_every_matrix_is_within_half_a_step_of_its_channel() -> None:
    _, params = tiny_head(0)
    small = quantise(params)
    before, after = dict(flatten(params)), dict(flatten(dequantised(small)))
    assert before.keys() == after.keys()
    kinds = {path: leaf.dtype for path, leaf in flatten(small)}
    for path, leaf in before.items():
        is_matrix = path[-1] in ("kernel", "lm_head")
        assert (kinds[path] == jnp.int8) == is_matrix
        axis = 1 if path[-1] == "lm_head" else 0
        most = np.abs(leaf).max(axis=axis, keepdims=True) / 127 / 2 if is_matrix else 0.0
        assert (np.abs(np.asarray(leaf) - np.asarray(after[path])) <= most + 1e-7).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    _, params = tiny_head(0)
    params["lm_head"] = params["lm_head"].at[3].set(0.0)
    assert not np.asarray(quantise(params)["lm_head"])[3].any()


@pytest.mark.parametrize("least_packed", [0, 1 << 16], ids=["packed", "too small to pack"])
def test_trees_are_those_of_the_dequantised_head(
    least_packed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_SIZE", least_packed)
    head, params = tiny_head(7, num_layers=2)
    small = quantise(params)
    tokens, features = random_history(3, 9)
    int8, plain = (
        grow(tiny_engine(head, each, max_sequences=1), tokens, features, [4, 6], PAGES)
        for each in (small, dequantised(small))
    )
    assert int8.tokens.tolist() == plain.tokens.tolist()
    assert int8.parents.tolist() == plain.parents.tolist()
    np.testing.assert_allclose(int8.scores, plain.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "available", "expected"),
    [("", True, True), ("", False, False), ("--dtype bfloat16", True, False),
     ("--tensor-parallel 2", True, False), ("--platform gpu", True, False),
     ("--platform tpu --chip v5e --tensor-parallel 2", False, True),
     ("--platform tpu --chip v5e --weights native", True, False), ("--weights int8", False, True)],
)  # fmt: skip
def test_auto_is_int8_where_integers_are_read_as_they_are(
    flags: str, available: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "is_available", lambda: available)
    assert assembly.in_int8(DraftConfig.load(["--head", "h", *flags.split()])) == expected


def test_rounds_follow_from_what_each_position_accepts() -> None:
    """Rounds at places 0, 2 and 3, the last of which accepts up to the end."""
    assert rounds_of(np.array([1, 9, 0, 2, 9, 9])) == 3
