"""The three machines where no round waits for a tree, and trees are grown for rounds to come.

Each turn: verify has a step under way, frames and features arrive, the draft works, verify's step
ends. What an adversary does to it is in `test_three_machines`.
"""

from __future__ import annotations

from typing import Any

import pytest
from three_machines import DRAFT_LIMITS, VERIFY_LIMITS, Generating, Replica
from verify_toy import continuation

from common.types import Drafting, SamplingParams, TreeShape
from router import codec
from router.drafting import DraftSettings
from router.generation import Generation
from router.machine import GenerationMachine, MachineSettings
from router.output_text import OutputText
from router.stops import StopStrings
from tests.protocol.test_router_machine import NumberText
from verify_service.draft_gate import FixedWay

ID = bytes(16)
PROMPT = (0, 1)


class World:
    """One generation on one replica of each service; frames arrive as soon as they are sent."""

    def __init__(self, max_total_tokens: int = 24, stop_tokens: tuple[int, ...] = ()) -> None:
        self.verify = Replica("verify", gate=lambda: FixedWay(Drafting.AHEAD))
        self.draft = Replica("draft")
        generation = Generation(
            request_id="r",
            prompt_tokens=PROMPT,
            sampling=SamplingParams(),
            max_total_tokens=max_total_tokens,
            stop_token_ids=stop_tokens,
            tree=TreeShape(max_depth=3, top_k=2, max_nodes=6),
        )
        settings = DraftSettings(deadline_seconds=1e9, draft_ahead=True)
        self.machine = GenerationMachine(
            *(generation, ID, OutputText(NumberText(), StopStrings(()))),
            MachineSettings(draft=settings, max_tree_nodes=8),
            0.0,
        )
        self.here = Generating(self.machine, self.verify, self.draft)
        self.now = 0.0
        self.here.perform(self.machine.start(0.0, draft_up=True))

    def move_frames(self) -> None:
        """Until nothing is under way but steps."""
        while self.verify.inbox or self.draft.inbox or self.verify.outbox or self.draft.outbox:
            for replica in (self.verify, self.draft):
                while replica.inbox:
                    replica.hear(*replica.inbox.popleft(), self.now)
                while replica.outbox:
                    self._deliver(replica, replica.outbox.popleft()[1])
            self.verify.send_features(4096)
            while self.verify.blocks:
                self.here.take_features(self.verify.blocks.popleft())
            while self.draft.blocks:
                self.draft.take_features(self.draft.blocks.popleft(), self.now)

    def _deliver(self, replica: Replica, message: Any) -> None:
        if replica is self.verify:
            said = codec.decode_verify(message)
            self.here.perform([] if said is None else self.machine.on_verify(said, self.now))
        else:
            heard = codec.decode_draft(message)
            self.here.perform([] if heard is None else self.machine.on_draft(heard, self.now))

    def draft_works(self, steps: int = 4) -> None:
        for _ in range(steps):
            self.draft.launch(self.now)
            while self.draft.launched:
                self.draft.retire(self.now)
            self.move_frames()

    def turn(self, *, draft_is_fast: bool = True) -> None:
        """One step of verify."""
        self.now += 0.1
        self.move_frames()
        self.verify.launch(self.now)
        if draft_is_fast:
            self.draft_works()
        while self.verify.launched:
            self.verify.retire(self.now)
        self.move_frames()
        if not draft_is_fast:
            self.draft_works()
        if not self.machine.ended:
            self.verify.check([ID])
            self.draft.check([ID])

    def run(self, **how: bool) -> None:
        for _ in range(80):
            if self.machine.ended:
                break
            self.turn(**how)
            assert self.here.tokens == continuation(list(PROMPT), len(self.here.tokens))
        assert self.machine.ended
        self.move_frames()
        while self.verify.launched:
            self.verify.retire(self.now)
        assert self.verify.machine.num_sequences == self.draft.machine.num_sequences == 0
        assert self.verify.machine.page_counts.available == VERIFY_LIMITS.num_pages
        assert self.draft.machine.page_counts.available == DRAFT_LIMITS.num_pages


def test_rounds_come_from_what_is_left_of_trees_ahead() -> None:
    world = World()
    world.run()
    ahead, alone = world.verify.machine.num_ahead
    assert ahead > alone, "the first rounds had none to be there"
    # A tree may be left with its root alone, at the sequence's end.
    assert 2 <= world.machine.num_ahead_rounds <= ahead
    assert world.machine.statistics.num_accepted > 0
    assert len(world.here.tokens) == 22
    assert world.machine.num_reopened == world.machine.statistics.num_rollbacks == 0


def test_no_round_waits_for_a_draft_that_is_away() -> None:
    world = World()
    world.draft_works = lambda steps=4: None
    turns = 0
    while not world.machine.ended:
        world.turn()
        turns += 1
    assert turns <= 22 + 2
    assert world.machine.num_ahead_rounds == 0


def test_trees_that_come_a_round_late_are_of_use_from_where_the_sequence_is() -> None:
    """Each tree's step ends behind the round that it was wished in, when a newer wish is there."""
    world = World()
    while not world.machine.ended:
        world.now += 0.1
        world.move_frames()
        world.verify.launch(world.now)
        while world.draft.launched:
            world.draft.retire(world.now)
        while world.verify.launched:
            world.verify.retire(world.now)
        late = list(world.draft.outbox)
        world.draft.outbox.clear()
        world.move_frames()
        for _ in range(3):  # rows alone, then a tree
            works = world.draft.launched[-1] if world.draft.launched else ()
            if any(work.ahead for work in works):
                break
            while world.draft.launched:
                world.draft.retire(world.now)
            world.draft.launch(world.now)
        world.draft.outbox += late
        assert world.here.tokens == continuation(list(PROMPT), len(world.here.tokens))
    assert world.machine.num_ahead_rounds >= 2
    assert len(world.here.tokens) == 22


def test_a_slow_draft_costs_nothing_but_its_trees() -> None:
    world = World()
    world.run(draft_is_fast=False)
    assert len(world.here.tokens) == 22


@pytest.mark.parametrize("length", range(4, 24))
def test_no_round_is_begun_beyond_the_end(length: int) -> None:
    world = World(max_total_tokens=length)
    world.run()
    assert len(world.here.tokens) == length - len(PROMPT)


@pytest.mark.parametrize("stop", range(7))
def test_no_round_is_begun_behind_a_stop_token(stop: int) -> None:
    world = World(stop_tokens=(stop,))
    world.run()
    assert stop not in world.here.tokens[:-1]


def test_a_paused_client_gets_at_most_one_round_more() -> None:
    world = World()
    for _ in range(4):
        world.turn()
    world.machine.pause()
    before = world.machine.round
    for _ in range(6):
        world.turn()
    assert world.machine.round <= before + 2
    world.here.perform(world.machine.resume(world.now))
    world.run()


def test_a_client_that_leaves_frees_everything_at_once() -> None:
    world = World()
    for _ in range(4):
        world.turn()
    world.verify.launch(world.now)
    world.draft_works()
    world.here.perform(world.machine.cancel())
    world.move_frames()
    while world.verify.launched:
        world.verify.retire(world.now)
    assert world.verify.machine.page_counts.available == VERIFY_LIMITS.num_pages
    assert world.draft.machine.page_counts.available == DRAFT_LIMITS.num_pages
