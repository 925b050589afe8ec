"""The draft engine against a reference that shares no code with it, and against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from common.types import DraftTree, TreeShape
from draft_service.engine import AheadShape, DeviceEngine
from draft_service.step import NoiseKey
from kernels.cpu_matmul.api import is_available
from models import packing
from tests.parity.draft_reference import ReferenceHead, reference_tree
from tests.parity.draft_tiny import (
    VOCAB,
    grow,
    random_history,
    tiny_engine,
    tiny_head,
    work,
)

PAGES = [7, 2, 30, 11, 5, 19]


def reference_of(head: Any, params: Any) -> ReferenceHead:
    spec = head.attention
    return ReferenceHead(
        params, spec.num_heads, spec.num_kv_heads, spec.head_dim, head.norm_eps, head.rope.theta
    )


def assert_same_tree(tree: DraftTree, nodes: list[tuple[int, int, float]]) -> None:
    assert tree.tokens.tolist() == [token for token, _, _ in nodes]
    assert tree.parents.tolist() == [parent for _, parent, _ in nodes]
    np.testing.assert_allclose(tree.scores, [score for _, _, score in nodes], atol=2e-4)


def assert_equal_trees(one: DraftTree, other: DraftTree) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(one.scores, other.scores, atol=2e-4)


def assert_bits_equal(one: DraftTree | None, other: DraftTree | None) -> None:
    assert one is not None
    assert other is not None
    for name in ("tokens", "parents", "scores"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any, DeviceEngine]:
    head, params = tiny_head(3)
    engine = tiny_engine(head, params)
    engine.warm_up()
    return head, params, engine


@pytest.mark.parametrize(
    "shape",
    [
        TreeShape(max_depth=1, top_k=4, max_nodes=4),
        TreeShape(max_depth=4, top_k=1, max_nodes=5),
        TreeShape(max_depth=4, top_k=3, max_nodes=12),
        TreeShape(max_depth=6, top_k=8, max_nodes=60),  # two words of ancestor bits
    ],
)
def test_tree_equals_the_reference(shape: TreeShape) -> None:
    head, params = tiny_head(shape.max_nodes)
    engine = tiny_engine(head, params, tree=shape, max_sequences=1)
    for seed in range(3):
        tokens, features = random_history(seed, 5)
        tree = grow(engine, tokens, features, [], PAGES)
        nodes = reference_tree(
            reference_of(head, params), tokens, features, shape.max_depth, shape.top_k,
            shape.max_nodes,
        )  # fmt: skip
        assert_same_tree(tree, nodes)
        tree.validate(VOCAB, shape.max_nodes)


@pytest.mark.parametrize(
    ("ahead", "top_k", "widths"),
    [
        (AheadShape(max_depth=5, max_nodes=64, top_k=5, max_rows=16), 3, (16, 8)),
        (
            AheadShape(max_depth=3, max_nodes=256, top_k=5, max_rows=3),
            2,
            (2, 2),
        ),  # fewer candidates
    ],
)
def test_trees_ahead_equal_the_reference(
    ahead: AheadShape, top_k: int, widths: tuple[int, int]
) -> None:
    """As wide as one sequence or two let them be, in one and in two words of ancestor bits."""
    shape = TreeShape(max_depth=2, top_k=top_k, max_nodes=5)
    head, params = tiny_head(5)
    engine = tiny_engine(head, params, tree=shape, ahead=ahead)
    tokens, features = random_history(2, 6)
    ordinary = grow(engine, tokens, features, [3], PAGES)
    last = replace(work(tokens, features, 4, 5, PAGES, True), ahead=True)
    for num_sequences, width in enumerate(widths, start=1):
        nodes = reference_tree(
            *(reference_of(head, params), tokens, features, ahead.max_depth),
            top_k=min(5, width), num_nodes=ahead.max_nodes, width=width,
        )  # fmt: skip
        for outcome in engine.run([last] * num_sequences):
            assert outcome.tree is not None
            assert_same_tree(outcome.tree, nodes)
            outcome.tree.validate(VOCAB, ahead.max_nodes)
    again = engine.run([replace(last, ahead=False)])[0].tree
    assert again is not None
    assert_equal_trees(again, ordinary)


def test_a_tree_ahead_that_is_no_wider_is_the_same_bit_for_bit() -> None:
    shape = TreeShape(max_depth=4, top_k=4, max_nodes=12)
    head, params = tiny_head(3)
    ahead = AheadShape(max_depth=4, max_nodes=12, max_rows=4)
    engine = tiny_engine(head, params, tree=shape, ahead=ahead)
    tokens, features = random_history(2, 4)
    last = work(tokens, features, 0, 3, PAGES, True)
    ordinary, same = (engine.run([replace(last, ahead=ahead)])[0].tree for ahead in (False, True))
    assert_bits_equal(same, ordinary)


def test_a_step_is_of_one_kind_and_compiled_for() -> None:
    head, params = tiny_head(5)
    tokens, features = random_history(2, 6)
    last = work(tokens, features, 0, 3, PAGES, True)
    with pytest.raises(ValueError, match="ahead: this engine has no programs"):
        tiny_engine(head, params).run([replace(last, ahead=True)])
    engine = tiny_engine(head, params, ahead=AheadShape())
    with pytest.raises(ValueError, match="ahead: all trees of a step are ahead, or none"):
        engine.run([last, replace(last, ahead=True)])
    narrow = replace(head, windows=(64,))
    with pytest.raises(ValueError, match="attention_window_tokens: 64 must exceed 224"):
        tiny_engine(narrow, params, ahead=AheadShape())


@pytest.mark.parametrize("ahead", [False, True])
def test_sampled_sequences_are_ordered_with_the_targets_noise(ahead: bool) -> None:
    """Beside a greedy one in the same step; positions count from the sequence's beginning."""
    shape = TreeShape(max_depth=4, top_k=3, max_nodes=12)
    head, params = tiny_head(5)
    wide = AheadShape(max_depth=4, max_nodes=12, top_k=3, max_rows=8)
    engine = tiny_engine(head, params, tree=shape, ahead=wide)
    tokens, features = random_history(2, 6)
    grow(engine, tokens, features, [], PAGES)
    last = replace(work(tokens, features, 4, 5, PAGES, True), ahead=ahead)
    seed, temperature = (7 << 32) + 12345, 0.8
    sampled = replace(last, noise=NoiseKey(seed, temperature, len(tokens)))
    one, other = (outcome.tree for outcome in engine.run([sampled, last]))
    assert one is not None
    assert other is not None
    reference = reference_of(head, params)
    width = 4 if ahead else 3
    assert_same_tree(other, reference_tree(reference, tokens, features, 4, 3, 12, width))
    reference.temperature, reference.seed = temperature, seed
    assert_same_tree(one, reference_tree(reference, tokens, features, 4, 3, 12, width))
    assert one.tokens.tolist() != other.tokens.tolist()


def test_every_prefix_is_a_tree_and_scores_fall(tiny: Any) -> None:
    _, _, engine = tiny
    tokens, features = random_history(1, 5)
    tree = grow(engine, tokens, features, [], PAGES)
    assert (np.diff(tree.scores) <= 0).all()
    for size in range(1, tree.num_nodes + 1):
        tree.prefix(size).validate(VOCAB, size)


@pytest.mark.parametrize("cuts", [[9], [1, 2, 3, 11], [6, 10]])
def test_chunked_extension_equals_whole(tiny: Any, cuts: list[int]) -> None:
    head, params, engine = tiny
    tokens, features = random_history(2, 14)
    nodes = reference_tree(reference_of(head, params), tokens, features, 4, 3, 12)
    assert_same_tree(grow(engine, tokens, features, cuts, PAGES), nodes)


def test_tree_states_never_enter_the_pages(tiny: Any) -> None:
    """After any history of rounds the tree is that of true features alone: from scratch."""
    head, params, engine = tiny
    random = np.random.default_rng(0)
    tokens, features = random_history(4, 20)
    fed, length = 0, 4
    while length <= 20:
        outcome = engine.run([work(tokens[:length], features, fed, length - 1, PAGES, True)])
        nodes = reference_tree(
            reference_of(head, params), tokens[:length], features[: length - 1], 4, 3, 12
        )
        assert_same_tree(outcome[0].tree, nodes)
        fed = length - 1
        if random.random() < 0.3:  # roll back, and go on with other tokens
            length = int(random.integers(3, length + 1))
            fresh, fresh_features = random_history(int(random.integers(99)), 20)
            tokens[length - 1 :] = fresh[length - 1 :]
            features[length - 1 :] = fresh_features[length - 1 :]
            fed = length - 2
        length += int(random.integers(1, 4))


def test_sequences_of_a_step_do_not_touch_each_other(tiny: Any) -> None:
    _, _, engine = tiny
    one, one_features = random_history(5, 4)
    two, two_features = random_history(6, 5)
    alone = [
        grow(engine, one, one_features, [], [1, 2]),
        grow(engine, two, two_features, [], [3, 4]),
    ]
    together = engine.run(
        [
            work(one, one_features, 0, 3, [1, 2], True),
            work(two, two_features, 0, 4, [3, 4], True),
        ]
    )
    for tree, outcome in zip(alone, together, strict=True):
        assert_equal_trees(outcome.tree, tree)
    assert engine.compiles_after_warm_up == 0


def test_a_step_is_one_transfer_up_and_one_down_and_gives_its_pages_up(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = tiny
    sent: list[Any] = []
    given_up: list[jax.Array] = []
    results: list[Any] = []

    def watch(program: Any) -> Any:
        def run(params: Any, pages: jax.Array, *inputs: Any) -> Any:
            sent.extend(inputs)
            given_up.append(pages)
            new_pages, *out = program(params, pages, *inputs)
            results.extend(out)
            return new_pages, *out

        return run

    programs = {bucket: watch(program) for bucket, program in engine._programs.items()}
    monkeypatch.setattr(engine, "_programs", programs)
    tokens, features = random_history(5, 9)
    grow(engine, tokens, features, [5], PAGES)  # a step that extends, one that drafts
    assert [(type(array), array.ndim) for array in sent] == [(np.ndarray, 1)] * 2
    assert len(results) == 2  # of each step one array, beside the pages
    assert all(pages.is_deleted() for pages in given_up)


def test_not_a_number_in_features_costs_the_tree_alone(tiny: Any) -> None:
    _, _, engine = tiny
    tokens, features = random_history(7, 5)
    before = grow(engine, tokens, features, [], [1, 2])
    poisoned = features.copy()
    poisoned[2] = np.nan
    tree = grow(engine, tokens, poisoned, [], [8, 9])
    assert tree.num_nodes == 1
    assert tree.tokens.tolist() == [tokens[-1]]
    # The pages that it leaves behind hold NaN; whoever gets them next must not see it.
    assert_equal_trees(grow(engine, tokens, features, [], [8, 9]), before)


def test_multi_layer_head_drafts_the_same_in_chunks_and_whole() -> None:
    head, params = tiny_head(8, num_layers=2)
    engine = tiny_engine(head, params, max_draft_rows=8)
    tokens, features = random_history(8, 8)
    whole = grow(engine, tokens, features, [], PAGES)
    assert_equal_trees(grow(engine, tokens, features, [2, 5], PAGES), whole)


def test_works_beyond_the_largest_bucket_are_refused_before_anything_runs(tiny: Any) -> None:
    _, _, engine = tiny
    tokens, features = random_history(9, 30)
    with pytest.raises(ValueError, match=r"29 rows in a step; at most 2 and 8"):
        engine.run([work(tokens, features, 0, 29, list(range(8)), True)])
    with pytest.raises(ValueError, match=r"page_ids: 1 pages of 4 hold 4 pairs; 0 \+ 5"):
        engine.run([work(tokens, features, 0, 5, [0], False)])


def test_packed_weights_grow_the_tree_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_available():
        pytest.skip("this machine has no packed product")
    head, params = tiny_head(8, num_layers=2)
    tokens, features = random_history(8, 8)
    plain = grow(tiny_engine(head, params, max_draft_rows=8), tokens, features, [3], PAGES)
    monkeypatch.setattr(packing, "MIN_SIZE", 1)
    packed = grow(tiny_engine(head, params, max_draft_rows=8), tokens, features, [3], PAGES)
    assert_equal_trees(packed, plain)


def test_no_step_copies_the_pages() -> None:
    """What a step needs besides its arguments is less than a part of the pages."""
    head, params = tiny_head(8)
    engine = tiny_engine(head, params, num_pages=32_768)
    program = engine._program(engine.config.buckets()[0])
    assert program.memory_analysis().temp_size_in_bytes < engine.pages_bytes // 4
