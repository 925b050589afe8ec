"""Blocks that follow the step before: what the device fills in is what the host would have packed,
had it known what that step emitted."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from common.types import DraftTree, SamplingParams
from verify_service.batch import BatchShape, Bucket, pack
from verify_service.follow_up import Chosen, FollowUp, places_of
from verify_service.resolve import LastRound, resolve
from verify_service.step import SequenceWork

SHAPE = BatchShape(
    max_sequences=4, pages_per_sequence=4, ancestor_words=2, max_stop_tokens=1, max_depth=4,
    max_ahead_nodes=40,
)  # fmt: skip
BUCKET = Bucket(96, 96)
PACKING = SHAPE.packing(BUCKET)
RESOLVE = jax.jit(resolve)

#          0
#       1     2          tokens 5, 6
#     3   4   5          tokens 7, 8, 7
#     6                  token 9
TREE = DraftTree(
    np.array([1, 5, 6, 7, 8, 7, 9], np.int32),
    np.array([-1, 0, 0, 1, 1, 2, 3], np.int32),
    np.array([0.0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6], np.float32),
)


def chosen(emitted: list[int], num_rows: int = 7, max_depth: int = 4) -> tuple[Any, ...]:
    got = FollowUp(TREE, num_rows, max_depth).choose(emitted)
    return got.tree.tokens.tolist(), got.tree.parents.tolist(), got.nodes.tolist()


def test_what_hangs_where_the_emitted_tokens_lead_is_the_next_tree() -> None:
    assert chosen([5]) == ([5, 7, 8, 9], [-1, 0, 0, 1], [1, 3, 4, 6])
    assert chosen([5], num_rows=3) == ([5, 7, 8], [-1, 0, 0], [1, 3, 4])
    assert chosen([5], max_depth=1) == ([5, 7, 8], [-1, 0, 0], [1, 3, 4])
    assert chosen([5, 7]) == ([7, 9], [-1, 0], [3, 6])
    assert chosen([5, 7, 9]) == ([9], [-1], [6])
    assert chosen([5, 7, 9, 3]) == ([3], [-1], [-1])
    assert chosen([9]) == ([9], [-1], [-1])
    scores = FollowUp(TREE, 7, 4).choose([5]).tree.scores
    np.testing.assert_allclose(scores, [0.0, -0.2, -0.3, -0.5], atol=1e-6)


def test_of_equal_siblings_the_first_with_the_whole_path_counts() -> None:
    twins = DraftTree(
        np.array([1, 5, 5, 7, 8], np.int32), np.array([-1, 0, 0, 2, 1], np.int32),
        np.zeros(5, np.float32),
    )  # fmt: skip
    assert twins.node_at([5]) == 1
    assert twins.node_at([5, 7]) == 3
    assert twins.nodes_below(1, 9, 9).tolist() == [1, 4]


def test_places_in_a_walk() -> None:
    depths, entered, left = places_of(TREE)
    assert depths == [0, 1, 1, 2, 2, 2, 3]
    assert entered == [0, 1, 5, 2, 4, 6, 3]
    assert left == [7, 5, 7, 4, 5, 7, 4]


def random_tree(random: np.random.Generator, num_nodes: int) -> DraftTree:
    """Over few tokens, so that much is hit, equal siblings among them."""
    parents = [-1, *(int(random.integers(max(0, i - 6), i)) for i in range(1, num_nodes))]
    return DraftTree(
        random.integers(0, 3, num_nodes).astype(np.int32), np.array(parents, np.int32),
        -np.arange(num_nodes, dtype=np.float32),
    )  # fmt: skip


def block(slot: int, tree: DraftTree, kv_len: int, num_causal: int = 1) -> SequenceWork:
    """A round over `tree` behind `num_causal` - 1 rows of a prompt."""
    causal = np.arange(num_causal - 1, dtype=np.int32)
    return SequenceWork(
        slot=slot, tokens=np.concatenate([causal, tree.tokens]),
        parents=np.concatenate([causal - 1, tree.parents + np.int32(num_causal - 1)]),
        num_causal=num_causal, samples=True, kv_len=kv_len,
        page_ids=np.arange(4, dtype=np.int32), sampling=SamplingParams(temperature=0.5, seed=slot),
    )  # fmt: skip


def emitted_along(random: np.random.Generator, tree: DraftTree) -> list[int]:
    """Tokens of a path that may leave the tree at its end."""
    tokens, node = list[int](), 0
    while len(tokens) <= SHAPE.max_depth:
        below = np.flatnonzero(tree.parents == node)
        if not below.size or random.random() < 0.2:
            break
        node = int(random.choice(below))
        tokens.append(int(tree.tokens[node]))
    return tokens or [int(random.integers(0, 3))]


def cut_block(v: dict[str, npt.NDArray[Any]], first: int, count: int, node: int) -> dict[str, Any]:
    """A round's rows, which are its nodes as well, as they would be in a step of their own."""
    rows, nodes = slice(first, first + count), slice(node, node + count)
    below = v["node_parents"][nodes]
    return {
        **{name: v[name][rows] for name in ("tokens", "positions", "row_is_causal", "ancestors")},
        "node_parents": np.where(below < 0, -1, below - node),
        "lives": v["node_sequence"][nodes] >= 0,
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_device_fills_in_what_the_host_would_have_packed(seed: int) -> None:
    random = np.random.default_rng(seed)
    prompt = block(3, random_tree(random, 5), 9, num_causal=6)
    works, rounds = [prompt], list[tuple[list[int], Chosen | None]]()
    last = LastRound(np.full((4, 5), -1, np.int32), np.full(4, 20, np.int32))
    before = {}
    for slot, place in zip(range(3), random.permutation(4), strict=False):
        tree = random_tree(random, int(random.integers(1, 41)))
        follows = FollowUp(tree, int(random.integers(1, 29)), int(random.integers(0, 5)))
        emitted = [] if slot == 2 and seed % 4 == 0 else emitted_along(random, tree)
        before[slot] = int(place)
        last.emitted[place, : len(emitted)] = emitted
        last.kv_lens[place] += len(emitted)
        works.insert(0, block(slot, tree, 20).followed_by(follows, 20, np.arange(4)))
        rounds.insert(0, (emitted, follows.choose(emitted) if emitted else None))
    buffer = pack(works, SHAPE, BUCKET, before)
    packed = PACKING.views(buffer.copy())
    resolved = {name: np.asarray(a) for name, a in RESOLVE(PACKING.views(buffer), last).items()}
    row = 0
    for place, (work, (emitted, got)) in enumerate(zip(works[:3], rounds, strict=True)):
        ours = cut_block(resolved, row, work.num_rows, row)
        count = got.tree.num_nodes if got is not None else 0
        if got is not None:
            alone = pack([block(work.slot, got.tree, 20 + len(emitted))], SHAPE, BUCKET)
            theirs = cut_block(PACKING.views(alone), 0, count, 0)
            for name, values in theirs.items():
                np.testing.assert_array_equal(ours[name][:count], values, name)
            assert resolved["kv_lens"][place] == 20 + len(emitted)
        # What is left over: never committed, of no tree, seen by nobody but itself.
        assert not ours["lives"][count:].any()
        assert not ours["row_is_causal"][count:].any()
        own = np.eye(64, dtype=bool)[np.arange(count, work.num_rows) - 1]
        bits = np.unpackbits(ours["ancestors"][count:].view(np.uint8), axis=1, bitorder="little")
        if count:
            np.testing.assert_array_equal(bits[:, :64].astype(bool), own)
        row += work.num_rows
    for name, values in resolved.items():  # the prompt's own, and padding
        if name in ("tokens", "positions", "row_is_causal", "ancestors", "node_parents",
                    "node_sequence"):  # fmt: skip
            np.testing.assert_array_equal(values[row:], packed[name][row:], name)
        elif name == "kv_lens":
            assert values[3] == 9
        else:
            np.testing.assert_array_equal(values, packed[name], name)


def test_a_work_that_follows_has_nothing_that_the_host_must_know() -> None:
    work = block(0, TREE, 9).followed_by(FollowUp(TREE, 4, 2), 9, np.arange(4))
    work.validate(10, 16)
    assert (work.num_rows, work.num_nodes, work.max_depth) == (4, 4, 2)
    one = np.ones(1, np.int32)
    for changes, message in (
        ({"scored": one}, "scored: set beside follows"),
        ({"page_copy": (1, 2)}, "page_copy: set beside follows"),
        ({"token_mask": np.ones((4, 1), np.uint32)}, "token_mask: set beside follows"),
        ({"tokens": one}, "follows: set beside 1 tokens"),
        ({"num_causal": 2}, "follows: set beside 0 tokens, num_causal 2"),
        ({"follows": FollowUp(TREE, 0, 2)}, r"follows\.num_rows: 0 must be 1 or more"),
        ({"follows": FollowUp(TREE, 1, -1)}, r"follows\.max_depth: -1 is negative"),
        ({"sampling": SamplingParams(min_tokens=2)}, "history: None"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(work, **changes).validate(10, 16)
    with pytest.raises(ValueError, match=r"follows\.tree: tree has a token outside \[0, 9\)"):
        work.validate(9, 16)
