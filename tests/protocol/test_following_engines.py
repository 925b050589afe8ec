"""What a follower does with each of its leader's operations, the two hosts being threads here: each
has all of the model, so that the follower's pages must come out the same. Compiled programs, which
hold no state, they share.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from engine_driver import generate, guessing
from group_of_threads import Group

from common.group.life import FollowingEngine
from common.group.terms import GroupLost
from common.types import SamplingParams
from draft_service.engine import AheadShape
from draft_service.engine import DeviceEngine as DraftEngine
from draft_service.step import NoiseKey
from models.target import init_target
from tests.parity.draft_tiny import random_history, tiny_engine, tiny_head, work
from tests.parity.test_distribution import TARGET, VOCAB
from verify_service.engine import DeviceEngine as VerifyEngine
from verify_service.engine import EngineConfig


class Hosts:
    """A pair, joined by `follow`; `names`: the operations that the follower was told."""

    def __init__(self) -> None:
        self.group = Group(2)
        self.names: list[str] = []
        self._failed: BaseException | None = None

    def follow(self, engine: FollowingEngine) -> None:
        (self._follower,) = self.group.joined()
        self._thread = threading.Thread(target=self._follow, args=(engine,), daemon=True)
        self._thread.start()

    def _follow(self, engine: FollowingEngine) -> None:
        try:
            for operation in self._follower.operations():
                engine.follow(operation.name, operation.arrays)
                self.names.append(operation.name)
        except BaseException as error:
            self._failed = error
        finally:
            self._follower.close()

    def end(self) -> None:
        """Ends the group in peace; what the follower was told is done then."""
        self.group.leader.end()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self._failed is None
        assert self.group.lost.empty()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.group.close()


def drafting(tokens: Sequence[int], features: Any, **changes: Any) -> Any:
    """Of the last pairs of a history, the others being in pages."""
    last = len(tokens) - 1
    return replace(work(list(tokens), features, last - 3, last, [3, 1, 4, 9], True), **changes)


def test_a_drafts_follower_has_the_leaders_pages(hosts: Hosts) -> None:
    """Extends, drafts, trees ahead, ordered by noise, a page copied, fewer levels."""
    head, params = tiny_head(3)
    follower = tiny_engine(head, params, ahead=AheadShape(), max_sequences=1)
    follower.warm_up()
    leader = DraftEngine(head, params, follower.config, group=hosts.group.leader)
    leader._programs = follower._programs
    hosts.follow(follower)
    tokens, features = random_history(1, 14)
    noise = NoiseKey(seed=2**40 + 7, temperature=0.8, pick_position=14)
    steps = [
        [work(tokens, features, 0, 10, [3, 1, 4, 9], False)],
        [drafting(tokens, features, noise=noise)],
        [drafting(tokens, features, ahead=True)],
        [drafting(tokens, features, page_ids=np.array([3, 1, 7, 9], np.int32), page_copy=(4, 7))],
        [drafting(tokens, features, max_levels=1, least_reach=0.5)],
    ]
    for works in steps:
        assert (leader.run(works)[0].tree is not None) == works[0].drafts
    hosts.end()
    assert hosts.names == ["step"] * len(steps)
    pages = np.asarray(leader._pages)
    np.testing.assert_array_equal(pages, np.asarray(follower._pages))
    assert pages.any()


@pytest.mark.slow  # its programs, masks and all, compile for a minute
def test_a_verifys_follower_has_the_leaders_pages_and_slots(hosts: Hosts) -> None:
    """Prefills and trees, penalties and biases in slots, and a token mask."""
    config = EngineConfig(
        num_pages=16, page_size=8, max_sequences=2, max_context_len=64, max_tree_nodes=10,
        max_depth=3, row_buckets=(), max_rows=32, max_stop_tokens=2, token_masks=True,
    )  # fmt: skip
    params = target_params()
    follower = VerifyEngine(TARGET, params, config)
    follower.warm_up()
    leader = VerifyEngine(TARGET, params, config, group=hosts.group.leader)
    leader._programs = follower._programs
    hosts.follow(follower)
    prompts = [[3, 7, 1, 5], [2, 2, 9]]
    samplings = [
        SamplingParams(frequency_penalty=0.8, logit_bias=((2, 3.5),)),
        SamplingParams(temperature=0.9, seed=5),
    ]

    def even(tokens: list[int]) -> Any:
        return np.arange(VOCAB) % 2 == 0

    first = generate(leader, prompts, samplings, 6, allow=[even, None])
    guess = guessing([one.tokens for one in first], VOCAB, 0.8)
    generate(leader, prompts, samplings, 6, guess, allow=[even, None])
    hosts.end()
    assert hosts.names.count("slot") == 2
    assert hosts.names.count("step") == hosts.names.count("finish") == len(hosts.names) // 2 - 1
    for ours, theirs in (
        (leader._pages, follower._pages),
        (leader._slots.state.seen, follower._slots.state.seen),
        (leader._slots.state.bias, follower._slots.state.bias),
    ):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        assert np.asarray(ours).any()


def test_a_drafts_step_that_fails_ends_the_group(hosts: Hosts) -> None:
    head, params = tiny_head(3)
    leader = tiny_engine(head, params)
    leader = DraftEngine(head, params, leader.config, group=hosts.group.leader)
    tokens, features = random_history(1, 14)
    with pytest.raises(ValueError, match="page_ids: 1 pages"):  # refused before anybody is told
        leader.run([work(tokens, features, 0, 10, [3], False)])
    assert hosts.group.lost.empty()
    leader._programs = dict.fromkeys(leader.config.buckets(), _no_memory)
    with pytest.raises(GroupLost, match="a step failed on host 0 of the slice: no memory"):
        leader.run([work(tokens, features, 0, 10, [3, 1, 4, 9], False)])


def _no_memory(*_: object) -> None:
    raise RuntimeError("no memory")


def target_params() -> Any:
    return jax.tree.map(lambda leaf: leaf * (8.0 if leaf.ndim > 1 else 1.0), init_target(TARGET, 5))
