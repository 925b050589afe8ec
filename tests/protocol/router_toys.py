"""Small verify and draft services for the router's own protocol tests: the wire's rules, no model.

They speak protobuf, keep the protocol as docs/protocol.md has it, and check what the router
sends: a broken rule of the router raises AssertionError at once. The target is a rule: a token
follows from the three before it. The real services are tested with the router in tests/e2e.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from canopy.v1 import draft_pb2, types_pb2, verify_pb2

VOCAB_SIZE = 300
ROW_WIDTH = 4


def target_token(tokens: Sequence[int], choice_index: int = 0) -> int:
    """The target's pick after `tokens`."""
    value = 17 + choice_index
    for token in tokens[-3:]:
        value = (value * 31 + token + 7) % 100_003
    return value % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_tokens: int, choice_index: int = 0) -> list[int]:
    """What the target alone would write."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(target_token(tokens, choice_index))
    return tokens[len(prompt) :]


def toy_logprob(token: int) -> float:
    """What the toy says of a pick."""
    return -token / 8


@dataclass
class ToyVerifySequence:
    epoch: int
    tokens: list[int]
    next_round: int
    max_total_tokens: int
    stop_token_ids: frozenset[int]
    wants_features: bool
    logprobs: bool = False
    top_logprobs: int = 0
    choice_index: int = 0
    results: dict[int, verify_pb2.VerifyResult] = field(default_factory=dict)
    next_feature: int = 0
    window_start: int = 0


class ToyVerify:
    """Answers each command at once. `window_tokens`: how many rows back features are kept."""

    def __init__(self, window_tokens: int = 10_000) -> None:
        self.sequences: dict[bytes, ToyVerifySequence] = {}
        self.closed: dict[bytes, int] = {}
        self.window_tokens = window_tokens
        self.num_opens = 0
        self.last_open = verify_pb2.VerifyOpen()
        self.num_rounds = 0

    def crash(self) -> None:
        """A restart: everything is forgotten."""
        self.sequences.clear()
        self.closed.clear()

    def handle(self, command: verify_pb2.VerifyCommand) -> list[verify_pb2.VerifyEvent]:
        kind = command.WhichOneof("command")
        assert len(command.sequence_id) == 16
        assert command.epoch > 0
        if kind == "open":
            return self._open(command)
        if kind == "close":
            self.sequences.pop(command.sequence_id, None)
            self.closed[command.sequence_id] = command.epoch
            return [self._event(command, closed=verify_pb2.VerifyClosed())]
        sequence = self.sequences.get(command.sequence_id)
        if sequence is None:
            return [self._error(command, types_pb2.SEQUENCE_ERROR_CODE_UNKNOWN_SEQUENCE)]
        if kind == "attach":
            return self._attach(command, sequence)
        if kind == "rollback":
            return self._rollback(command, sequence)
        return self._verify_tree(command, sequence)

    def features(self, max_rows: int = 64) -> list[types_pb2.FeatureBlock]:
        """Rows not sent yet, at most one block for each sequence."""
        blocks = []
        for sequence_id, sequence in self.sequences.items():
            end = len(sequence.tokens) - 1
            sequence.window_start = max(sequence.window_start, end - self.window_tokens)
            start = max(sequence.next_feature, sequence.window_start)
            num_rows = min(max_rows, end - start)
            if not sequence.wants_features or num_rows <= 0:
                continue
            blocks.append(
                types_pb2.FeatureBlock(
                    sequence_id=sequence_id,
                    epoch=sequence.epoch,
                    position=start,
                    num_rows=num_rows,
                    row_width=ROW_WIDTH,
                    dtype=types_pb2.FEATURE_DTYPE_FLOAT32,
                    data=bytes(num_rows * ROW_WIDTH * 4),
                )
            )
            sequence.next_feature = start + num_rows
        return blocks

    def _open(self, command: verify_pb2.VerifyCommand) -> list[verify_pb2.VerifyEvent]:
        body = command.open
        known = self.sequences.get(command.sequence_id)
        if known is not None and command.epoch <= known.epoch:
            return [self._state(command, known)]
        assert body.tokens
        assert len(body.tokens) < body.max_total_tokens
        assert 1 <= body.num_prompt_tokens <= len(body.tokens)
        sequence = self.sequences[command.sequence_id] = ToyVerifySequence(
            epoch=command.epoch,
            tokens=list(body.tokens),
            next_round=body.round,
            max_total_tokens=body.max_total_tokens,
            stop_token_ids=frozenset(body.stop_token_ids),
            wants_features=body.wants_features,
            logprobs=body.logprobs,
            top_logprobs=body.top_logprobs,
            choice_index=body.choice_index,
        )
        self.last_open = body
        self.num_opens += 1
        state = self._state(command, sequence)
        root = types_pb2.DraftTree(tokens=[body.tokens[-1]], parents=[0], scores=[0.0])
        return [state, self._run(command, sequence, body.round, root)]

    def _attach(
        self, command: verify_pb2.VerifyCommand, sequence: ToyVerifySequence
    ) -> list[verify_pb2.VerifyEvent]:
        if command.epoch < sequence.epoch:
            return [self._error(command, types_pb2.SEQUENCE_ERROR_CODE_STALE_EPOCH, sequence)]
        if command.epoch == sequence.epoch:
            return [self._state(command, sequence)]
        self._acknowledge(command, sequence)
        sequence.epoch = command.epoch
        if command.attach.HasField("features_from"):
            sequence.next_feature = min(sequence.next_feature, command.attach.features_from)
        replayed = [
            self._event(command, result=result) for _, result in sorted(sequence.results.items())
        ]
        return [self._state(command, sequence), *replayed]

    def _rollback(
        self, command: verify_pb2.VerifyCommand, sequence: ToyVerifySequence
    ) -> list[verify_pb2.VerifyEvent]:
        if command.epoch > sequence.epoch:
            assert command.rollback.committed_len <= len(sequence.tokens)
            del sequence.tokens[command.rollback.committed_len :]
            sequence.next_round = command.rollback.round
            sequence.epoch = command.epoch
            sequence.results.clear()
            sequence.next_feature = min(sequence.next_feature, len(sequence.tokens) - 1)
        return [self._state(command, sequence)]

    def _verify_tree(
        self, command: verify_pb2.VerifyCommand, sequence: ToyVerifySequence
    ) -> list[verify_pb2.VerifyEvent]:
        body = command.verify_tree
        if command.epoch < sequence.epoch:
            return [self._error(command, types_pb2.SEQUENCE_ERROR_CODE_STALE_EPOCH, sequence)]
        if command.epoch > sequence.epoch:
            return [self._error(command, types_pb2.SEQUENCE_ERROR_CODE_WRONG_ROUND, sequence)]
        self._acknowledge(command, sequence)
        if body.round in sequence.results:
            return [self._event(command, result=sequence.results[body.round])]
        if body.round != sequence.next_round or body.kv_len != len(sequence.tokens) - 1:
            return [self._error(command, types_pb2.SEQUENCE_ERROR_CODE_WRONG_ROUND, sequence)]
        assert len(sequence.results) < 2
        assert body.tree.tokens[0] == sequence.tokens[-1]
        return [self._run(command, sequence, body.round, body.tree)]

    def _run(
        self,
        command: verify_pb2.VerifyCommand,
        sequence: ToyVerifySequence,
        round_: int,
        tree: types_pb2.DraftTree,
    ) -> verify_pb2.VerifyEvent:
        kv_len = len(sequence.tokens) - 1
        emitted: list[int] = []
        accepted: list[int] = []
        node = 0
        while True:
            pick = target_token([*sequence.tokens, *emitted], sequence.choice_index)
            emitted.append(pick)
            full = len(sequence.tokens) + len(emitted) >= sequence.max_total_tokens
            children = [
                child
                for child in range(1, len(tree.tokens))
                if tree.parents[child] == node and tree.tokens[child] == pick
            ]
            if not children or full or pick in sequence.stop_token_ids:
                break
            node = children[0]
            accepted.append(node)
        result = verify_pb2.VerifyResult(
            round=round_,
            kv_len=kv_len,
            tokens=emitted,
            pick_margins=[1.0] * len(emitted),
            num_nodes=len(tree.tokens),
            accepted_nodes=accepted,
            logprobs=[toy_logprob(t) for t in emitted] if sequence.logprobs else [],
            top_logprobs=[
                types_pb2.TokenLogprobs(
                    tokens=range(t, t + sequence.top_logprobs),
                    logprobs=[toy_logprob(t)] * sequence.top_logprobs,
                )
                for t in (emitted if sequence.top_logprobs else [])
            ],
            step_seconds=0.001,
        )
        sequence.tokens += emitted
        sequence.next_round = round_ + 1
        sequence.results[round_] = result
        self.num_rounds += 1
        return self._event(command, result=result)

    def _acknowledge(self, command: verify_pb2.VerifyCommand, sequence: ToyVerifySequence) -> None:
        if command.HasField("acked_round"):
            assert command.acked_round < sequence.next_round
            for round_ in [r for r in sequence.results if r <= command.acked_round]:
                del sequence.results[round_]

    def _state(
        self, command: verify_pb2.VerifyCommand, sequence: ToyVerifySequence
    ) -> verify_pb2.VerifyEvent:
        return verify_pb2.VerifyEvent(
            sequence_id=command.sequence_id,
            epoch=sequence.epoch,
            state=types_pb2.SequenceState(
                epoch=sequence.epoch,
                next_round=sequence.next_round,
                committed_len=len(sequence.tokens),
                kv_len=len(sequence.tokens) - 1,
            ),
        )

    def _event(self, command: verify_pb2.VerifyCommand, **body: object) -> verify_pb2.VerifyEvent:
        return verify_pb2.VerifyEvent(
            sequence_id=command.sequence_id,
            epoch=command.epoch,
            **body,  # type: ignore[arg-type]
        )

    def _error(
        self,
        command: verify_pb2.VerifyCommand,
        code: types_pb2.SequenceErrorCode.ValueType,
        sequence: ToyVerifySequence | None = None,
    ) -> verify_pb2.VerifyEvent:
        state = self._state(command, sequence).state if sequence is not None else None
        kind = command.WhichOneof("command")
        round_ = command.verify_tree.round if kind == "verify_tree" else 0
        error = types_pb2.SequenceError(code=code, message="toy", round=round_, state=state)
        return self._event(command, error=error)


@dataclass
class ToyDraftSequence:
    epoch: int
    tokens: list[int]
    next_row: int
    depth: int
    grown: draft_pb2.DraftTreeReady | None = None
    pending: int | None = None


class ToyDraft:
    """Grows chains with a wrong sibling a level; every `wrong_every`-th goes wrong at depth 2.

    A tree is grown once the rows of all positions before the root are here, as in the real draft.
    """

    def __init__(self, wrong_every: int = 3) -> None:
        self.sequences: dict[bytes, ToyDraftSequence] = {}
        self.wrong_every = wrong_every
        self.num_trees = 0
        self.num_ignored_rows = 0

    def crash(self) -> None:
        self.sequences.clear()

    def evict(self) -> list[draft_pb2.DraftEvent]:
        evicted = [
            draft_pb2.DraftEvent(
                sequence_id=sequence_id,
                epoch=sequence.epoch,
                evicted=draft_pb2.DraftEvicted(),
            )
            for sequence_id, sequence in self.sequences.items()
        ]
        self.sequences.clear()
        return evicted

    def handle(self, command: draft_pb2.DraftCommand) -> list[draft_pb2.DraftEvent]:
        kind = command.WhichOneof("command")
        sequence = self.sequences.get(command.sequence_id)
        if kind == "open":
            if sequence is None or command.epoch > sequence.epoch:
                assert command.open.tokens
                sequence = self.sequences[command.sequence_id] = ToyDraftSequence(
                    epoch=command.epoch,
                    tokens=list(command.open.tokens),
                    next_row=command.open.features_from,
                    depth=command.open.tree.max_depth,
                )
            return [self._state(command, sequence)]
        if kind == "close":
            self.sequences.pop(command.sequence_id, None)
            closed = draft_pb2.DraftClosed()
            return [
                draft_pb2.DraftEvent(
                    sequence_id=command.sequence_id, epoch=command.epoch, closed=closed
                )
            ]
        if sequence is None:
            return [self._error(command, types_pb2.SEQUENCE_ERROR_CODE_UNKNOWN_SEQUENCE)]
        if kind == "attach":
            sequence.epoch = max(sequence.epoch, command.epoch)
            return [self._state(command, sequence)]
        return self._extend(command, sequence)

    def take(self, block: types_pb2.FeatureBlock) -> list[draft_pb2.DraftEvent]:
        """Rows that go on from what is here; others are ignored and counted."""
        sequence = self.sequences.get(block.sequence_id)
        known = sequence is not None and block.epoch == sequence.epoch
        if sequence is None or not known or block.position > sequence.next_row:
            self.num_ignored_rows += block.num_rows
            return []
        sequence.next_row = max(sequence.next_row, block.position + block.num_rows)
        return self._grow(block.sequence_id, sequence)

    def _extend(
        self, command: draft_pb2.DraftCommand, sequence: ToyDraftSequence
    ) -> list[draft_pb2.DraftEvent]:
        body = command.extend
        if command.epoch != sequence.epoch:
            return [self._error(command, types_pb2.SEQUENCE_ERROR_CODE_STALE_EPOCH, sequence)]
        if sequence.grown is not None and sequence.grown.round == body.round:
            return [self._tree(command.sequence_id, sequence)]
        if body.base_len != len(sequence.tokens):
            return [self._error(command, types_pb2.SEQUENCE_ERROR_CODE_WRONG_ROUND, sequence)]
        assert body.tokens
        sequence.tokens += body.tokens
        sequence.pending, sequence.grown = body.round, None
        return self._grow(command.sequence_id, sequence)

    def _grow(self, sequence_id: bytes, sequence: ToyDraftSequence) -> list[draft_pb2.DraftEvent]:
        if sequence.pending is None or sequence.next_row < len(sequence.tokens) - 1:
            return []
        self.num_trees += 1
        wrong_from = 2 if self.num_trees % self.wrong_every == 0 else 99
        tree = types_pb2.DraftTree(tokens=[sequence.tokens[-1]], parents=[0], scores=[0.0])
        path, node = list(sequence.tokens), 0
        for depth in range(1, sequence.depth + 1):
            pick = target_token(path)
            guess = pick if depth < wrong_from else (pick + 1) % VOCAB_SIZE
            for token, score in ((guess, -depth / 10), ((guess + 5) % VOCAB_SIZE, -depth / 9)):
                tree.tokens.append(token)
                tree.parents.append(node)
                tree.scores.append(score)
            node = len(tree.tokens) - 2
            path.append(guess)
        sequence.grown = draft_pb2.DraftTreeReady(
            round=sequence.pending,
            committed_len=len(sequence.tokens),
            tree=tree,
            step_seconds=0.0005,
        )
        sequence.pending = None
        return [self._tree(sequence_id, sequence)]

    def _tree(self, sequence_id: bytes, sequence: ToyDraftSequence) -> draft_pb2.DraftEvent:
        return draft_pb2.DraftEvent(
            sequence_id=sequence_id, epoch=sequence.epoch, tree=sequence.grown
        )

    def _state(
        self, command: draft_pb2.DraftCommand, sequence: ToyDraftSequence
    ) -> draft_pb2.DraftEvent:
        return draft_pb2.DraftEvent(
            sequence_id=command.sequence_id,
            epoch=sequence.epoch,
            state=types_pb2.SequenceState(
                epoch=sequence.epoch,
                committed_len=len(sequence.tokens),
                kv_len=sequence.next_row,
            ),
        )

    def _error(
        self,
        command: draft_pb2.DraftCommand,
        code: types_pb2.SequenceErrorCode.ValueType,
        sequence: ToyDraftSequence | None = None,
    ) -> draft_pb2.DraftEvent:
        state = self._state(command, sequence).state if sequence is not None else None
        error = types_pb2.SequenceError(code=code, message="toy", state=state)
        return draft_pb2.DraftEvent(
            sequence_id=command.sequence_id, epoch=command.epoch, error=error
        )
