"""Penalties, biases and least lengths of tree nodes against the oracle, which knows token lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.adjust_logits.api import adjust_logits, count_tokens, empty_state, seen_row
from kernels.adjust_logits.reference import reference_adjust
from kernels.adjust_logits.types import LogitOptions, SlotState
from kernels.backend import Backend

VOCAB, SLOTS, DEPTH = 13, 5, 4


@dataclass
class Asked:
    """One sequence: tokens committed before the root's place, and what it asks for."""

    slot: int
    prompt: list[int]
    answer: list[int]  # the root is the last of all
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stops: tuple[int, ...] = ()


ASKED = [
    Asked(3, [1, 2, 2, 5], [7, 7, 1], presence=0.5, frequency=0.25, repetition=1.3),
    Asked(0, [4, 4], [], min_tokens=2, stops=(3, 9)),
    Asked(4, [6], [6, 8], bias={2: 4.0, 6: -100.0}),
    Asked(1, [1, 2, 3], [3], repetition=0.7, bias={0: 1.5}, min_tokens=3, stops=(5,)),
    Asked(2, [9, 9], [9, 9, 9]),  # asks for nothing
]
PARENTS = [-1, 0, 0, 1, 1, 3, 5]  # of each sequence's tree: depths 0 1 1 2 2 3 4
TREE = [0, 7, 2, 7, 3, 7, 1]  # token 0 stands for the root


def make(garbage: float = 0.0) -> tuple[dict[str, Any], SlotState, LogitOptions, list[list[int]]]:
    """Columns of the nodes, slots as host and steps would have set them, options, paths."""
    tokens, parents, positions, owner, paths = [], [], [], [], []
    seen, bias = np.full((SLOTS, VOCAB), 999, np.int32), np.full((SLOTS, VOCAB), garbage)
    for number, one in enumerate(ASKED):
        committed = one.prompt + one.answer
        first = len(tokens)
        below: list[list[int]] = []
        for node, parent in enumerate(PARENTS):
            tokens.append(committed[-1] if parent < 0 else TREE[node])
            parents.append(-1 if parent < 0 else first + parent)
            below.append([] if parent < 0 else [*below[parent], TREE[node]])
            positions.append(len(committed) + len(below[-1]))
            owner.append(number)
            paths.append([number, *below[-1]])
        seen[one.slot] = seen_row(np.array(one.prompt), np.array(one.answer, int), VOCAB)
        if one.bias:
            bias[one.slot] = [one.bias.get(token, 0.0) for token in range(VOCAB)]
    columns = {
        name: jnp.asarray(np.array([*values, padding], np.int32))
        for name, values, padding in (
            ("tokens", tokens, 0),
            ("parents", parents, -1),
            ("positions", positions, 0),
            ("node_sequence", owner, -1),
        )
    }
    options = LogitOptions(
        slot=np.array([one.slot for one in ASKED], np.int32),
        presence=np.array([one.presence for one in ASKED], np.float32),
        frequency=np.array([one.frequency for one in ASKED], np.float32),
        repetition=np.array([one.repetition for one in ASKED], np.float32),
        has_bias=np.array([bool(one.bias) for one in ASKED], np.int32),
        min_position=np.array(
            [len(one.prompt) + one.min_tokens if one.min_tokens else 0 for one in ASKED], np.int32
        ),
        num_prompt=np.array([len(one.prompt) for one in ASKED], np.int32),
    )
    state = SlotState(jnp.asarray(seen), jnp.asarray(bias.astype(np.float32)))
    return columns, state, options, paths


def stop_tokens() -> np.ndarray:
    stops = np.full((len(ASKED), 2), -1, np.int32)
    for number, one in enumerate(ASKED):
        stops[number, : len(one.stops)] = one.stops
    return stops


@pytest.mark.parametrize("with_mask", [False, True])
def test_every_node_sees_what_plain_decoding_would(with_mask: bool) -> None:
    columns, state, options, paths = make(garbage=np.nan)
    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (len(paths) + 1, VOCAB)).astype(np.float32)
    mask = random.random(logits.shape) < 0.7 if with_mask else None
    got = adjust_logits(
        jnp.asarray(logits),
        **columns,
        state=state,
        options=options,
        stop_tokens=stop_tokens(),
        token_mask=None if mask is None else jnp.asarray(mask),
        max_depth=DEPTH,
        backend=Backend.XLA,
    )
    for row, (number, *below) in enumerate(paths):
        one = ASKED[number]
        wanted = reference_adjust(
            logits[row],
            one.prompt,
            one.answer + below,
            presence=one.presence,
            frequency=one.frequency,
            repetition=one.repetition,
            bias=one.bias,
            min_tokens=one.min_tokens,
            stop_tokens=one.stops,
            token_mask=None if mask is None else mask[row],
        )
        np.testing.assert_allclose(got[row], wanted, rtol=1e-6, atol=1e-6, err_msg=str(paths[row]))


def test_who_asks_for_nothing_keeps_every_bit() -> None:
    columns, state, options, paths = make(garbage=np.nan)
    logits = np.random.default_rng(1).normal(0, 3, (len(paths) + 1, VOCAB)).astype(np.float32)
    got = adjust_logits(
        jnp.asarray(logits), **columns, state=state, options=options,
        stop_tokens=stop_tokens(), max_depth=DEPTH, backend=Backend.XLA,
    )  # fmt: skip
    rows = [row for row, (number, *_) in enumerate(paths) if number == 4]
    np.testing.assert_array_equal(np.asarray(got)[rows], logits[rows])


def test_committed_answers_are_counted_where_they_matter() -> None:
    _, _, options, _ = make()
    state = empty_state(SLOTS, VOCAB)
    # Sequence 0 (slot 3, prompt of 4): one row of its prompt, two of its answer, one not committed.
    # Sequence 4 asks for nothing.
    rows = [(0, 2, 3, True), (0, 7, 4, True), (0, 7, 5, True), (0, 8, 6, False), (4, 9, 3, True)]
    sequence, tokens, positions, committed = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    got = count_tokens(
        state,
        options,
        tokens.astype(np.int32),
        positions.astype(np.int32),
        sequence.astype(np.int32),
        committed,
        backend=Backend.XLA,
    )
    wanted = np.zeros((SLOTS, VOCAB), np.int32)
    wanted[3, 7] = 4
    np.testing.assert_array_equal(got.seen, wanted)


def test_bad_shapes_show_both() -> None:
    columns, state, options, paths = make()
    logits = jnp.zeros((len(paths) + 1, VOCAB + 1))
    with pytest.raises(ValueError, match=r"state\.seen: .*13.*14"):
        adjust_logits(
            logits, **columns, state=state, options=options,
            stop_tokens=stop_tokens(), max_depth=DEPTH, backend=Backend.XLA,
        )  # fmt: skip
