"""The three machines with draft ahead, where verify is slow enough for the draft to foresee.

Each turn: verify has a step under way, frames and features arrive, the draft works, verify's step
ends. What an adversary does to it is in `test_three_machines`.
"""

from __future__ import annotations

from typing import Any

import pytest
from three_machines import DRAFT_LIMITS, VERIFY_LIMITS, Generating, Replica
from verify_toy import continuation

from common.types import SamplingParams, TreeShape
from router import codec
from router.drafting import DraftSettings
from router.generation import Generation
from router.machine import GenerationMachine, MachineSettings, Phase
from router.output_text import OutputText
from router.stops import StopStrings
from tests.protocol.test_router_machine import NumberText

ID = bytes(16)
PROMPT = (0, 1)


class World:
    """One generation on one replica of each service; frames arrive as soon as they are sent."""

    def __init__(self, max_total_tokens: int = 24, stop_tokens: tuple[int, ...] = ()) -> None:
        self.verify, self.draft = Replica("verify"), Replica("draft")
        generation = Generation(
            request_id="r",
            prompt_tokens=PROMPT,
            sampling=SamplingParams(),
            max_total_tokens=max_total_tokens,
            stop_token_ids=stop_tokens,
            tree=TreeShape(max_depth=3, top_k=2, max_nodes=6),
        )
        settings = DraftSettings(deadline_seconds=1e9, max_outcomes=2)
        self.machine = GenerationMachine(
            *(generation, ID, OutputText(NumberText(), StopStrings(()))),
            MachineSettings(draft=settings, max_tree_nodes=8),
            0.0,
        )
        self.here = Generating(self.machine, self.verify, self.draft)
        self.now = 0.0
        self.num_hits = 0
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
            self.num_hits += bool(getattr(said, "next_begun", False))
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


def test_a_foreseen_outcome_goes_on_without_the_router() -> None:
    world = World()
    world.run()
    assert world.num_hits >= 2
    assert world.verify.machine.num_foreseen[0] == world.num_hits
    assert world.machine.num_foreseen_rounds == world.num_hits
    assert world.machine.statistics.num_accepted > 0
    assert len(world.here.tokens) == 22
    assert world.machine.num_reopened == world.machine.statistics.num_rollbacks == 0


def test_trees_that_come_behind_the_result_are_sent_by_the_router() -> None:
    world = World()
    num_late = 0
    while not world.machine.ended:
        world.move_frames()
        while world.machine.phase is Phase.TREE:
            world.draft_works(steps=1)  # the round's tree, and verify is told it
        world.verify.launch(world.now)
        world.draft.launch(world.now)  # trees ahead; their frame waits
        while world.draft.launched:
            world.draft.retire(world.now)
        while world.verify.launched:
            world.verify.retire(world.now)
        before = world.machine.num_foreseen_rounds
        world.move_frames()  # verify's first
        num_late += world.machine.num_foreseen_rounds - before
        assert world.here.tokens == continuation(list(PROMPT), len(world.here.tokens))
    assert num_late >= 2
    assert world.num_hits == 0


def test_a_slow_draft_costs_nothing_but_its_hits() -> None:
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
