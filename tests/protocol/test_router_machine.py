"""The generation machine against an adversary: drops, repeats, delays, reconnects, crashes.

Whatever happens, the tokens are the target's own, once each and in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from common.types import SamplingParams, TreeShape
from router import codec
from router.actions import Emitted, Failed, Finished, ReleaseFeatures, ToDraft, ToVerify
from router.drafting import DraftSettings, FeatureRoute
from router.generation import Generation
from router.machine import GenerationMachine, MachineSettings, Phase
from router.output_text import OutputText
from router.stops import StopStrings
from tests.protocol.router_toys import ToyDraft, ToyVerify, continuation


class NumberText:
    """A detokenizer whose text is the tokens' numbers."""

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        return ""


class Adversary(RuleBasedStateMachine):
    """Frames wait in queues that the rules deliver, repeat, or lose with their link."""

    def __init__(self) -> None:
        super().__init__()
        self.verify, self.draft = ToyVerify(window_tokens=40), ToyDraft()
        self.now = 0.0
        self.verify_up = self.draft_up = True
        self.to_verify: deque = deque()
        self.from_verify: deque = deque()
        self.to_draft: deque = deque()
        self.from_draft: deque = deque()
        self.blocks: deque = deque()  # verify → router
        self.held: list = []
        self.draft_blocks: deque = deque()  # router → draft
        self.tokens: list[int] = []
        self.text = ""
        self.ending = None

    @initialize(
        prompt=st.lists(st.integers(0, 299), min_size=1, max_size=20),
        num_tokens=st.integers(1, 60),
        depth=st.integers(1, 5),
        speculate=st.booleans(),
    )
    def begin(self, prompt: list[int], num_tokens: int, depth: int, speculate: bool) -> None:
        self.prompt, self.num_tokens = prompt, num_tokens
        generation = Generation(
            request_id="r",
            prompt_tokens=tuple(prompt),
            sampling=SamplingParams(),
            max_total_tokens=len(prompt) + num_tokens,
            tree=TreeShape(max_depth=depth, max_nodes=12) if speculate else None,
        )
        text = OutputText(NumberText(), StopStrings(()))
        self.machine = GenerationMachine(
            generation,
            b"0123456789abcdef",
            text,
            MachineSettings(
                draft=DraftSettings(deadline_seconds=1.0, catch_up_tokens=16),
                verify_lost_seconds=1e9,
                max_recoveries=1000,
            ),
            self.now,
        )
        self.perform(self.machine.start(self.now, draft_up=self.draft_up))

    def perform(self, actions) -> None:
        for action in actions:
            match action:
                case ToVerify():
                    assert self.verify_up
                    self.to_verify.append(codec.encode_verify(action.command))
                case ToDraft():
                    assert self.draft_up
                    self.to_draft.append(codec.encode_draft(action.command))
                case Emitted():
                    assert self.ending is None
                    self.tokens += action.tokens
                    self.text += action.text
                case ReleaseFeatures():
                    for block in self.held:
                        block.epoch = action.epoch
                        self.draft_blocks.append(block)
                    self.held.clear()
                case Finished() | Failed():
                    assert self.ending is None
                    self.ending = action

    # -- frames arrive

    @precondition(lambda self: self.to_verify)
    @rule(again=st.booleans())
    def verify_hears(self, again: bool) -> None:
        command = self.to_verify[0] if again else self.to_verify.popleft()
        self.from_verify += self.verify.handle(command)
        self.blocks += self.verify.features(max_rows=7)

    @precondition(lambda self: self.from_verify)
    @rule(again=st.booleans())
    def router_hears_verify(self, again: bool) -> None:
        event = codec.decode_verify(self.from_verify[0] if again else self.from_verify.popleft())
        if event is not None:
            self.perform(self.machine.on_verify(event, self.now))

    @precondition(lambda self: self.to_draft)
    @rule(again=st.booleans())
    def draft_hears(self, again: bool) -> None:
        command = self.to_draft[0] if again else self.to_draft.popleft()
        if again and command.WhichOneof("command") == "extend":
            return  # the same extend twice is answered by an error; nothing of ours sends it
        self.from_draft += self.draft.handle(command)

    @precondition(lambda self: self.from_draft)
    @rule(again=st.booleans())
    def router_hears_draft(self, again: bool) -> None:
        event = codec.decode_draft(self.from_draft[0] if again else self.from_draft.popleft())
        if event is not None:
            self.perform(self.machine.on_draft(event, self.now))

    @precondition(lambda self: self.blocks)
    @rule()
    def router_takes_features(self) -> None:
        block = self.blocks.popleft()
        route, epoch, actions = self.machine.route_features(
            block.epoch, block.position, block.num_rows
        )
        self.perform(actions)
        if route is FeatureRoute.FORWARD:
            block.epoch = epoch
            self.draft_blocks.append(block)
        elif route is FeatureRoute.HOLD:
            self.held.append(block)

    @precondition(lambda self: self.draft_blocks)
    @rule()
    def draft_takes_features(self) -> None:
        self.from_draft += self.draft.take(self.draft_blocks.popleft())

    # -- trouble

    @rule(crash=st.booleans())
    def verify_link_breaks(self, crash: bool) -> None:
        if self.verify_up:
            self.verify_up = False
            self.to_verify.clear()
            self.from_verify.clear()
            self.blocks.clear()
            self.machine.on_verify_down(self.now)
        if crash:
            self.verify.crash()

    @precondition(lambda self: not self.verify_up)
    @rule()
    def verify_link_returns(self) -> None:
        self.verify_up = True
        self.perform(self.machine.on_verify_up(self.now))

    @rule(crash=st.booleans())
    def draft_link_breaks(self, crash: bool) -> None:
        if self.draft_up:
            self.draft_up = False
            self.to_draft.clear()
            self.from_draft.clear()
            self.draft_blocks.clear()
            self.held.clear()
            self.perform(self.machine.on_draft_down(self.now))
        if crash:
            self.draft.crash()

    @precondition(lambda self: not self.draft_up)
    @rule()
    def draft_link_returns(self) -> None:
        self.draft_up = True
        self.perform(self.machine.on_draft_up())

    @rule()
    def draft_evicts(self) -> None:
        if self.draft_up:
            self.from_draft += self.draft.evict()

    @rule(seconds=st.floats(0.1, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.machine.tick(self.now))

    @rule(pause=st.booleans())
    def client_is_slow_or_not(self, pause: bool) -> None:
        if pause:
            self.machine.pause()
        else:
            self.perform(self.machine.resume(self.now))

    # -- what must hold

    @invariant()
    def tokens_are_the_targets_own(self) -> None:
        if hasattr(self, "prompt"):
            assert self.tokens == continuation(self.prompt, self.num_tokens)[: len(self.tokens)]
            assert self.text == "".join(f"{token} " for token in self.tokens)
            assert not isinstance(self.ending, Failed)

    def teardown(self) -> None:
        """Once the trouble is over, the generation comes to its end."""
        if not hasattr(self, "prompt"):
            return
        self.client_is_slow_or_not(pause=False)
        if not self.verify_up:
            self.verify_link_returns()
        if not self.draft_up:
            self.draft_link_returns()
        for _ in range(5000):
            if self.ending is not None:
                break
            if self.to_verify:
                self.verify_hears(again=False)
            elif self.from_verify:
                self.router_hears_verify(again=False)
            elif self.blocks:
                self.router_takes_features()
            elif self.to_draft:
                self.draft_hears(again=False)
            elif self.draft_blocks:
                self.draft_takes_features()
            elif self.from_draft:
                self.router_hears_draft(again=False)
            else:
                self.time_passes(2.0)
        assert isinstance(self.ending, Finished)
        assert self.tokens == continuation(self.prompt, self.num_tokens)
        assert self.machine.phase is Phase.ENDED
        while self.to_verify:
            self.verify_hears(again=False)
        assert not self.verify.sequences


TestAdversary = Adversary.TestCase
TestAdversary.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
