"""Steps launched before the last has ended give what the same rounds give one at a time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from ahead_driver import Ahead, Record, generate_ahead, run_again, tree_below

from common.group.leader import Leader
from common.types import DraftTree, SamplingParams
from models.target import init_target
from tests.protocol.test_following_engines import Hosts
from tests.unit.test_verify_program import WINDOWED
from tests.unit.test_verify_random_load import counted_compiles
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.follow_up import FollowUp
from verify_service.step import SequenceOutcome, SequenceWork

CONFIG = EngineConfig(
    num_pages=64, page_size=4, max_sequences=4, max_context_len=64, max_tree_nodes=12,
    row_buckets=(), max_rows=48, max_stop_tokens=4, max_depth=4, max_ahead_nodes=24,
)  # fmt: skip
ROWS, DEPTH = 7, 3


@functools.cache
def warm(layers_per_program: int | None) -> DeviceEngine:
    params = jax.tree.map(lambda x: x * (8.0 if x.ndim > 1 else 1.0), init_target(WINDOWED, 5))
    config = dataclasses.replace(CONFIG, layers_per_program=layers_per_program)
    engine = DeviceEngine(WINDOWED, params, config)
    engine.warm_up()
    return engine


def fresh(layers_per_program: int | None, group: Leader | None = None) -> DeviceEngine:
    """Nothing in its pages; programs hold no state, so that it takes the warm one's."""
    done = warm(layers_per_program)
    engine = DeviceEngine(WINDOWED, done._params, done.config, group=group)
    engine._programs = done._programs
    return engine


def sequences(stop_tokens: tuple[int, ...] = ()) -> list[Ahead]:
    """Prompts at once and later, in one piece and in several, greedy, sampled and penalised."""
    prompts = [[(7 * i + k) % 61 for i in range(4 + 3 * k)] for k in range(4)]
    return [
        Ahead(prompts[0], SamplingParams(), (4,), stop_tokens=stop_tokens),
        Ahead(prompts[1], SamplingParams(temperature=0.9, top_k=9, seed=3), (4, 3),
              pauses=frozenset({4, 9}), stop_tokens=stop_tokens),
        Ahead(prompts[2], SamplingParams(temperature=1.1, min_p=0.02, seed=8, logprobs=True,
                                         top_logprobs=2), (6, 2, 2), opens=3),
        Ahead(prompts[3], SamplingParams(temperature=0.7, frequency_penalty=0.9, min_tokens=9,
                                         logit_bias=((5, 2.0),), seed=1), (13,), opens=2,
              pauses=frozenset({6})),
    ]  # fmt: skip


def guessing(truth: list[list[int]], right: float) -> Any:
    """Candidates along `truth`, five deep, each token right with that probability, wrong ones
    beside it; now and then the root alone."""
    random = np.random.default_rng(4)

    def guess(sequence: int, tokens: list[int]) -> DraftTree:
        nodes, parents, above = list[int](), list[int](), 0
        for token in truth[sequence][len(tokens) : len(tokens) + 5]:
            if random.random() < 0.05:
                break
            likely = token if random.random() < right else int(random.integers(61))
            nodes += [int(random.integers(61)), likely, int(random.integers(61))]
            parents += [above] * 3
            above = len(nodes) - 1
        return tree_below(tokens[-1], nodes, parents)

    return guess


def roots_only(sequence: int, tokens: list[int]) -> DraftTree:
    return DraftTree.root_only(tokens[-1])


@functools.cache
def truth() -> list[list[int]]:
    """Root by root, one step at a time."""
    found = sequences()
    engine = fresh(None)
    for i, one in enumerate(found):
        one.chunks = (len(one.prompt),)
        one.opens = 0
        kv_len = 0
        while len(one.response) < 40:
            tokens = np.array(one.tokens[kv_len:], np.int32)
            work = SequenceWork(
                slot=i, tokens=tokens, parents=np.arange(-1, tokens.size - 1, dtype=np.int32),
                num_causal=tokens.size, samples=True, kv_len=kv_len, sampling=one.sampling,
                page_ids=np.arange(16 * i, 16 * i + 16, dtype=np.int32), history=one.history,
            )  # fmt: skip
            kv_len = len(one.tokens)
            one.tokens += engine.run([work])[0].tokens.tolist()
    return [one.tokens for one in found]


def assert_same(ours: SequenceOutcome, theirs: SequenceOutcome) -> None:
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.accepted_nodes.tolist() == theirs.accepted_nodes.tolist()
    assert (ours.num_nodes, ours.num_committed) == (theirs.num_nodes, theirs.num_committed)
    assert [[t for t, _ in place] for place in ours.top_logprobs] == [
        [t for t, _ in place] for place in theirs.top_logprobs
    ]
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    np.testing.assert_allclose(ours.features, theirs.features, rtol=1e-4, atol=1e-5)


def assert_same_one_at_a_time(record: Record, ahead: DeviceEngine, split: int | None) -> None:
    """Step by step, and all that is in pages and slots afterwards."""
    engine = fresh(split)
    for ours, theirs in zip(record.outcomes, run_again(engine, record), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    np.testing.assert_allclose(ahead._pages, engine._pages, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ahead._slots.state.seen, engine._slots.state.seen)


@pytest.mark.parametrize(
    ("right", "layers_per_program"), [(0.8, None), (0.4, 2), (0.0, None), (None, 2)]
)
def test_steps_in_flight_together_give_what_they_give_alone(
    right: float | None, layers_per_program: int | None
) -> None:
    engine, ours = fresh(layers_per_program), sequences()
    guess = roots_only if right is None else guessing(truth(), right)
    truth()
    with counted_compiles() as compiles:
        record = generate_ahead(engine, ours, 24, guess, ROWS, DEPTH)
    assert not compiles
    for one, true in zip(ours, truth(), strict=True):
        assert len(one.response) >= 24
        assert one.tokens == true[: len(one.tokens)]
    assert record.num_followed > 40
    assert (record.num_accepted > 6) == bool(right)
    assert (record.num_chosen > 40) == bool(right)
    assert_same_one_at_a_time(record, engine, layers_per_program)


def test_what_is_launched_behind_a_stop_token_harms_nobody() -> None:
    stops = (truth()[0][4 + 8], truth()[1][7 + 11])
    engine, ours = fresh(None), sequences(stops)
    record = generate_ahead(engine, ours, 24, guessing(truth(), 0.8), ROWS, DEPTH)
    for one, true in zip(ours, truth(), strict=True):
        assert one.tokens == true[: len(one.tokens)]
    assert {ours[0].tokens[-1], ours[1].tokens[-1]} <= {*stops}
    assert_same_one_at_a_time(record, engine, None)


def test_a_slices_other_hosts_launch_what_the_leader_launches() -> None:
    hosts = Hosts()
    follower, ours = fresh(None), sequences()
    hosts.follow(follower)
    leader = fresh(None, hosts.group.leader)
    record = generate_ahead(leader, ours, 24, guessing(truth(), 0.8), ROWS, DEPTH)
    hosts.end()
    hosts.group.close()
    assert record.num_accepted > 20
    told = [name for name in hosts.names if name != "slot"]
    assert told[:4] == ["step", "step", "finish", "step"]
    assert told.count("step") == told.count("finish") == len(record.works)
    assert "slot" in hosts.names
    np.testing.assert_array_equal(leader._pages, follower._pages)
    for one, other in zip(leader._state().last or (), follower._state().last or (), strict=True):
        np.testing.assert_array_equal(one, other)


def round_at(tokens: list[int], kv_len: int, **changes: Any) -> SequenceWork:
    work = SequenceWork(
        slot=0, tokens=np.array(tokens, np.int32), num_causal=len(tokens), samples=True,
        parents=np.arange(-1, len(tokens) - 1, dtype=np.int32), kv_len=kv_len,
        page_ids=np.arange(4, dtype=np.int32), sampling=SamplingParams(),
    )  # fmt: skip
    return dataclasses.replace(work, **changes)


def test_what_cannot_be_launched_is_refused_by_name_and_nothing_is_lost() -> None:
    engine = fresh(None)
    work = round_at([3, 4, 5], 0)

    def follows(root: int = 5, position: int = 2, **changes: Any) -> SequenceWork:
        follow_up = FollowUp(changes.pop("tree", DraftTree.root_only(root)), 1, 0)
        pages = changes.pop("page_ids", work.page_ids)
        return dataclasses.replace(work.followed_by(follow_up, position, pages), **changes)

    with pytest.raises(ValueError, match="slot 0 had no round in the step launched before"):
        engine.launch([follows()])
    first = engine.launch([work])
    for refused, message in (
        (follows(slot=1), "slot 1 had no round in the step launched before"),
        (follows(root=4), "token 5 at position 2 as its root, the candidates have 4 at kv_len 2"),
        (follows(position=3), "the candidates have 5 at kv_len 3"),
        (follows(tree=tree_below(5, [1] * 24, range(24))), "25 nodes; at most 24"),
        (follows(page_ids=np.zeros(0, np.int32)), "page_ids: 0 pages of 4 tokens hold 0 tokens;"
         " prefix and deepest paths of this round and the one before need 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            engine.launch([refused])
    with pytest.raises(ValueError, match="run: 1 steps are in flight"):
        engine.run([work])
    second = engine.launch([follows()])
    with pytest.raises(ValueError, match="launch: 2 steps are in flight; finish one first"):
        engine.launch([work])
    with pytest.raises(ValueError, match="is not the oldest of those in flight"):
        engine.finish(second)
    tokens = [engine.finish(one)[0].tokens.tolist() for one in (first, second)]
    alone = fresh(None)
    assert tokens[0] == alone.run([work])[0].tokens.tolist()
    assert tokens[1] == alone.run([round_at(tokens[0], 3)])[0].tokens.tolist()
    chunk = engine.launch([dataclasses.replace(work, samples=False)])
    with pytest.raises(ValueError, match="slot 0 had no round in the step launched before"):
        engine.launch([follows()])
    engine.finish(chunk)


def test_behind_a_round_that_picks_nothing_nothing_is_committed() -> None:
    """Its prefix has no numbers in it; the sequence beside it goes on."""
    engine = fresh(None)
    engine._pages = engine._pages.at[:, 0].set(np.nan)
    sick = round_at([5], 4)
    well = round_at([3, 4, 5], 0, slot=1, page_ids=np.arange(4, 8, dtype=np.int32))
    follow_up = FollowUp(tree_below(5, [1, 2], [0, 1]), 3, 2)
    first = engine.launch([sick, well])
    second = engine.launch(
        [
            sick.followed_by(follow_up, 4, sick.page_ids),
            well.followed_by(follow_up, 2, well.page_ids),
        ]
    )
    lost, right = engine.finish(first)
    assert (lost.num_emitted, lost.num_committed, right.num_emitted) == (0, 1, 1)
    lost, further = engine.finish(second)
    assert (lost.chosen, lost.num_emitted, lost.num_committed, lost.num_nodes) == (None, 0, 0, 0)
    assert np.shape(lost.features)[0] == 0
    alone = fresh(None)
    alone.run([well])
    again = round_at([int(right.tokens[-1])], 3, slot=1, page_ids=well.page_ids)
    assert further.tokens.tolist() == alone.run([again])[0].tokens[: further.num_emitted].tolist()
    with pytest.raises(ValueError, match="slot 0 had no round in the step launched before"):
        engine.launch([sick.followed_by(FollowUp(DraftTree.root_only(5), 1, 0), 4, sick.page_ids)])


def test_a_step_that_fails_takes_those_behind_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh(None)
    work = round_at([3, 4, 5], 0)
    first = engine.launch([work])
    second = engine.launch(
        [work.followed_by(FollowUp(DraftTree.root_only(5), 1, 0), 2, work.page_ids)]
    )
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_fetch", _no_memory)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.finish(first)
    with pytest.raises(ValueError, match="a step that failed takes those behind it along"):
        engine.finish(second)
    assert engine.run([work])[0].num_emitted == 1


def _no_memory(*_: object) -> None:
    raise RuntimeError("no memory")
