"""The three real machines wired together in simulated time: replicas, links, frames under way.

Frames are the real messages, through both sides' codecs. Devices are toys whose "KV rows" are
tokens. A broken link loses what was under way, or delivers it late, in any order: the service
notices the break some time after the router does, and until then takes late frames of the old
stream.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from draft_toy import PAGE_SIZE as DRAFT_PAGE_SIZE
from draft_toy import ToyEngine as DraftPages
from verify_toy import VOCAB, next_token
from verify_toy import ToyEngine as VerifyEngine

from canopy.v1 import draft_pb2, types_pb2, verify_pb2
from common.tensors import split_rows
from common.types import Drafting, DraftTree, TreeShape
from draft_service import codec as draft_codec
from draft_service.limits import DraftLimits
from draft_service.machine import DraftMachine
from draft_service.step import SequenceOutcome, SequenceWork
from router import codec
from router.actions import (
    Action,
    Emitted,
    Failed,
    Finished,
    ReleaseFeatures,
    ToDraft,
    ToVerify,
)
from router.drafting import FeatureRoute
from router.machine import GenerationMachine
from verify_service import codec as verify_codec
from verify_service.draft_gate import DraftGate
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine

VERIFY_LIMITS = VerifyLimits(
    vocab_size=VOCAB, max_context_len=24, max_tree_nodes=8, max_tree_depth=4, max_sequences=3,
    max_waiting_sequences=8, page_size=3, num_pages=14, max_step_tokens=10, max_prefill_tokens=4,
    feature_window_tokens=64, grace_seconds=30.0, pause_seconds=0.5,
)  # fmt: skip
DRAFT_LIMITS = DraftLimits(
    vocab_size=VOCAB, feature_size=2, max_context_len=24,
    tree=TreeShape(max_depth=3, top_k=2, max_nodes=6), max_sequences=4,
    page_size=DRAFT_PAGE_SIZE, num_pages=9, max_step_sequences=2, max_draft_rows=3,
    max_extend_rows=8, recent_rows=4, grace_seconds=30.0,
    ahead=TreeShape(max_depth=6, top_k=2, max_nodes=16),
)  # fmt: skip


class DraftEngine(DraftPages):
    """Checks that features and tokens in pages belong together; guesses rightly two times in three
    where it has read the whole sequence.
    """

    def _one(self, work: SequenceWork) -> SequenceOutcome:
        work.validate(VOCAB, 2, DRAFT_PAGE_SIZE)
        for i, (token, row) in enumerate(zip(work.tokens, work.features, strict=True)):
            page, place = divmod(work.kv_len + i, DRAFT_PAGE_SIZE)
            self.pages[work.page_ids[page]][place] = (int(token), float(row[0]), float(row[1]))
        if not work.drafts:
            return SequenceOutcome(tree=None)
        places = [divmod(p, DRAFT_PAGE_SIZE) for p in range(work.kv_len + work.num_rows)]
        pairs = [self.pages[work.page_ids[page]][place] for page, place in places]
        for before, after in itertools.pairwise(pairs):
            assert before is not None
            assert after is not None
            assert after[1] == before[1] + 1, "a feature is missing"
            assert after[2] == before[0], "a feature of another token"
        assert pairs[0] is not None
        known = [int(pairs[0][2]), *(pair[0] for pair in pairs if pair is not None)]
        whole = pairs[0][1] == 0
        nodes, parents, path = [known[-1]], [-1], list(known)
        last = 0
        for depth in range(1, 7 if work.ahead else 4):
            right = next_token(path) if whole else 0
            wrong = (right + 1) % VOCAB
            token, other = (right, wrong) if (len(known) + depth) % 3 else (wrong, right)
            nodes += [token, other]
            parents += [last, last]
            if work.ahead and token != right:  # goes on where the target does
                token = right
            last = len(nodes) - (2 if nodes[-2] == token else 1)
            path.append(token)
        scores = -np.arange(len(nodes), dtype=np.float32)
        tree = DraftTree(np.array(nodes, np.int32), np.array(parents, np.int32), scores)
        return SequenceOutcome(tree=tree)


class FickleGate(DraftGate):
    """Each way for some rounds, and so the way from each to the next."""

    num_rounds = 0

    @property
    def drafting(self) -> Drafting:
        ways = (Drafting.SYNCHRONOUS, Drafting.AHEAD, Drafting.NONE, Drafting.AHEAD)
        return ways[self.num_rounds // 5 % 4]

    def note_round(self, way: Drafting, tokens: int, seconds: float, num_sequences: int) -> None:
        super().note_round(way, tokens, seconds, num_sequences)
        self.num_rounds += 1


@dataclass
class Replica:
    """One service's machine, its device, and the link between it and the router.

    `late`: frames of broken streams that may still arrive. `dead_streams`: broken, unnoticed yet.
    """

    kind: str
    gate: Callable[[], Any] = FickleGate  # verify's
    machine: Any = None
    engine: Any = None
    up: bool = True
    stream: int = 0
    inbox: deque[tuple[int, Any]] = field(default_factory=deque)
    outbox: deque[tuple[int, Any]] = field(default_factory=deque)
    blocks: deque[Any] = field(default_factory=deque)  # verify → router, or router → draft
    late: list[tuple[int, Any]] = field(default_factory=list)
    dead_streams: list[int] = field(default_factory=list)
    launched: list[list[Any]] = field(default_factory=list)
    epochs: dict[bytes, int] = field(default_factory=dict)
    num_lives: int = 0

    def __post_init__(self) -> None:
        self.crash()
        self.connect()

    # -- life

    def crash(self) -> None:
        """The process is started anew and knows nothing."""
        if self.kind == "verify":
            self.machine = VerifyMachine(VERIFY_LIMITS, gate=self.gate())
            self.engine = VerifyEngine(VERIFY_LIMITS.num_pages, VERIFY_LIMITS.page_size)
        else:
            self.machine = DraftMachine(DRAFT_LIMITS)
            self.engine = DraftEngine(DRAFT_LIMITS.num_pages)
        self.launched.clear()
        self.late.clear()
        self.dead_streams.clear()
        self.epochs.clear()
        self.num_lives += 1

    def connect(self) -> None:
        self.up = True
        self.stream += 1
        self.machine.connect(self.stream)

    def break_link(self, *, keep_late: bool) -> None:
        """For the router; the service has not noticed yet."""
        self.up = False
        self.dead_streams.append(self.stream)
        if keep_late:
            self.late += self.inbox
        self.inbox.clear()
        self.outbox.clear()
        self.blocks.clear()

    def notice_break(self, now: float) -> None:
        gone = self.dead_streams.pop(0)
        self.machine.disconnect(gone, now)
        self.late = [(stream, frame) for stream, frame in self.late if stream != gone]

    # -- frames

    def hear(self, stream: int, message: Any, now: float) -> None:
        if self.kind == "verify":
            request = verify_pb2.VerifyRequest(commands=[message])
            commands, errors = verify_codec.decode_request(stream, request)
        else:
            frame = draft_pb2.DraftRequest(commands=[message])
            commands, errors = draft_codec.decode_request(stream, frame, DRAFT_LIMITS.tree)
        assert not errors, errors
        self.say(self.machine.handle(stream, commands, now))

    def say(self, events: Sequence[Any]) -> None:
        """Events of the present stream are under way to the router; others reach nobody."""
        encode = verify_codec.encode_events if self.kind == "verify" else draft_codec.encode_events
        for event in events:
            if event.stream == self.stream and self.up:
                (message,) = encode([event]).events
                self.outbox.append((event.stream, message))

    def send_features(self, max_bytes: int) -> None:
        """Verify puts waiting rows on their way."""
        while self.up and (rows := self.machine.next_features(self.stream, max_bytes)) is not None:
            self.blocks += verify_codec.encode_pieces(split_rows(rows)).blocks

    def take_features(self, block: types_pb2.FeatureBlock, now: float) -> None:
        self.say(self.machine.receive(draft_codec.decode_features(block), now))

    # -- device

    def launch(self, now: float) -> None:
        plan = self.machine.plan(now)
        self.say(plan.events)
        if plan.works:
            self.launched.append(plan.works)

    def retire(self, now: float) -> None:
        works = self.launched.pop(0)
        self.say(self.machine.retire(works, self.engine.run(works), now))

    # -- what must hold

    def check(self, sequence_ids: Sequence[bytes]) -> None:
        """Pages balance, and the epoch of a sequence never falls."""
        self.machine.check_balance()
        for sequence_id in sequence_ids:
            sequence = self.machine._registry.get(sequence_id)
            if sequence is not None:
                before = self.epochs.get(sequence_id, 0)
                assert sequence.epoch >= before, "an earlier life has come back"
                self.epochs[sequence_id] = sequence.epoch


@dataclass
class Generating:
    """A router's session without its client: one machine, the replicas that have it."""

    machine: GenerationMachine
    verify: Replica
    draft: Replica
    tokens: list[int] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    ending: Finished | Failed | None = None
    num_excuses: int = 0  # reasons to open it again: its replica crashed, or it was moved

    @property
    def sequence_id(self) -> bytes:
        return self.machine.sequence_id

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ToVerify():
                    message = codec.encode_verify(action.command)
                    if self.verify.up:
                        self.verify.inbox.append((self.verify.stream, message))
                case ToDraft():
                    message = codec.encode_draft(action.command)
                    if self.draft.up:
                        self.draft.inbox.append((self.draft.stream, message))
                case Emitted():
                    assert self.ending is None
                    self.tokens += action.tokens
                case ReleaseFeatures():
                    for block in self.held:
                        block.epoch = action.epoch
                        self.draft.blocks.append(block)
                    self.held.clear()
                case Finished() | Failed():
                    assert self.ending is None
                    self.ending = action

    def take_features(self, block: types_pb2.FeatureBlock) -> None:
        route, epoch, actions = self.machine.route_features(
            block.epoch, block.position, block.num_rows
        )
        self.perform(actions)
        if route is FeatureRoute.FORWARD and self.draft.up:
            block.epoch = epoch
            self.draft.blocks.append(block)
        elif route is FeatureRoute.HOLD:
            self.held.append(block)
