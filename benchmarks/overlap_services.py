"""The real verify and draft services with devices that sleep: stated costs, made-up text.

    python -m benchmarks.overlap_services verify --scenario FILE --model DIR
    python -m benchmarks.overlap_services draft --scenario FILE --head DIR

Loop, machine, budget, gate, streams and frames are those of `canopy serve`; the engine sleeps for
what a `Scenario` says a step takes and knows the text of `overlap_text`, so that neither the
machine's cores nor a model blur the times. The sequence's number is its request's seed; verify
tells it to the draft as its features, with the position: [sequence, position]. The round trip lies
between draft and router: each frame waits half of it on either way.

Verify writes each step to `--record FILE` when it ends: [begun, seconds slept, sequences, tokens,
nodes, rounds that ended with a tree wished, rounds begun by itself].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.overlap_costs import Costs
from benchmarks.overlap_sync import MAX_CONTEXT, Scenario, SimulatedDevice
from benchmarks.overlap_text import WIDTH, Head
from common.entry import run_program
from common.metrics import Metrics
from common.server import Health, run_service
from common.tensors import FeatureDtype
from common.types import DraftTree, FeatureRows, TreeShape
from draft_service import commands as draft_commands
from draft_service import step as draft_step
from draft_service.config import DraftConfig
from draft_service.info import DraftInfo
from draft_service.limits import DraftLimits
from draft_service.loop import DraftLoop
from draft_service.machine import DraftMachine
from draft_service.main import DraftService
from router.tokenizer import ModelTokenizer
from verify_service.budget import TreeBudget
from verify_service.codec import encode_info
from verify_service.config import VerifyConfig
from verify_service.draft_gate import DraftGate
from verify_service.events import Event, RoundDone
from verify_service.info import VerifyInfo
from verify_service.limits import VerifyLimits
from verify_service.loop import VerifyLoop
from verify_service.machine import VerifyMachine
from verify_service.main import VerifyService
from verify_service.step import SequenceOutcome, SequenceWork

VOCAB_SIZE = 256  # the router's toy tokenizer; the text uses the first few
FEATURES = 2  # sequence, position
PAGE_SIZE = 64


def write_scenario(path: Path, scenario: Scenario, num_outcomes: int) -> None:
    path.write_text(json.dumps(asdict(scenario) | {"num_outcomes": num_outcomes}))


def read_scenario(path: Path) -> tuple[Scenario, int]:
    fields: dict[str, Any] = json.loads(path.read_text())
    num_outcomes = int(fields.pop("num_outcomes"))
    head = fields.pop("head")
    head["chances"] = tuple(head["chances"])
    costs = Costs(**fields.pop("costs"))
    return Scenario(costs=costs, head=Head(**head), **fields), num_outcomes


class SleepingTarget:
    """Implements `verify_service.step.VerifyEngine`."""

    def __init__(self, scenario: Scenario) -> None:
        self._costs = scenario.costs
        self._device = SimulatedDevice([scenario.text(i) for i in range(scenario.batch)])
        self.steps: list[list[float]] = []

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        begun = time.perf_counter()
        outcomes = [
            _with_features(work, outcome)
            for work, outcome in zip(works, self._device.run(works), strict=True)
        ]
        num_rows = sum(work.num_rows for work in works)
        _sleep_until(begun + self._costs.verify_seconds(num_rows, len(works)))
        seconds = time.perf_counter() - begun
        emitted = sum(outcome.num_emitted for outcome in outcomes)
        nodes = sum(outcome.num_nodes for outcome in outcomes)
        self.steps.append([begun, seconds, len(works), emitted, nodes, 0, 0])
        return outcomes


def _with_features(work: SequenceWork, outcome: SequenceOutcome) -> SequenceOutcome:
    rows = np.empty((outcome.num_committed, FEATURES), np.float32)
    rows[:, 0] = work.sampling.seed
    rows[:, 1] = np.arange(work.kv_len, work.kv_len + outcome.num_committed)
    return replace(outcome, features=rows)


class SleepingHead:
    """Implements `draft_service.step.DraftEngine`: a pass for each guessed token and each level."""

    def __init__(self, scenario: Scenario, grown: TreeShape) -> None:
        self._s, self._grown = scenario, grown
        self._texts = [scenario.text(i) for i in range(scenario.batch)]

    def run(self, works: Sequence[draft_step.SequenceWork]) -> list[draft_step.SequenceOutcome]:
        begun, costs = time.perf_counter(), self._s.costs
        if not works[0].drafts:
            _sleep_until(begun + costs.draft_seconds(sum(work.num_rows for work in works)))
            return [draft_step.SequenceOutcome(tree=None) for _ in works]
        levels = min(self._grown.max_depth, max(work.max_levels for work in works))
        outcomes = [draft_step.SequenceOutcome(tree=self._tree(work, levels)) for work in works]
        longest = max(int(work.guessed.size) for work in works)
        seconds = (1 + longest) * costs.draft_seconds(len(works))
        seconds += (levels - 1) * costs.draft_seconds(WIDTH * len(works))
        _sleep_until(begun + seconds)
        return outcomes

    def _tree(self, work: draft_step.SequenceWork, levels: int) -> DraftTree:
        sequence, position = (int(value) for value in work.features[-1])
        root = position + 1 + int(work.guessed.size)
        stem = int(work.guessed.size)
        tree = self._texts[sequence].tree(root, levels, self._grown.max_nodes, stem)
        token = work.guessed[-1:] if work.guessed.size else work.tokens[-1:]
        return DraftTree(np.concatenate([token, tree.tokens[1:]]), tree.parents, tree.scores)


class DistantDraftLoop(DraftLoop):
    """What comes in waits half a round trip first."""

    way: Callable[[Callable[[], None]], None]

    def submit(self, stream: int, commands: Iterable[draft_commands.Command]) -> None:
        self.way(lambda: super(DistantDraftLoop, self).submit(stream, commands))

    def receive(self, blocks: Iterable[FeatureRows]) -> None:
        taken = list(blocks)
        self.way(lambda: super(DistantDraftLoop, self).receive(taken))


def make_way(seconds: float) -> Callable[[Callable[[], None]], None]:
    """Acts so much later, in order."""

    def act_later(act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, act)

    return act_later if seconds else lambda act: act()


class SleepingVerify(VerifyService):
    """The verify service on a `SleepingTarget`."""

    def __init__(
        self, config: VerifyConfig, metrics: Metrics, scenario: Scenario, record: Path | None
    ) -> None:
        super().__init__(config, metrics)
        self._scenario, self._record = scenario, record
        self._target = SleepingTarget(scenario)

    async def start(self, health: Health) -> None:
        s = self._scenario
        limits = VerifyLimits(
            vocab_size=VOCAB_SIZE, max_context_len=MAX_CONTEXT, max_tree_nodes=128,
            max_tree_depth=16, max_sequences=s.batch, max_waiting_sequences=0,
            page_size=PAGE_SIZE, num_pages=s.batch * (MAX_CONTEXT // PAGE_SIZE + 1),
            max_step_tokens=1024, max_prefill_tokens=64,
        )  # fmt: skip
        loop = VerifyLoop(
            VerifyMachine(limits, TreeBudget(s.costs.curve(), s.depth), DraftGate()),
            self._target,
            deliver=self._deliver,
            on_features=self._hub.wake_receivers,
            metrics=self._metrics,
            gather_seconds=self._settings.gather_seconds,
        )
        self._servicer.loop = loop
        self._servicer.info = encode_info(
            VerifyInfo(
                identity=identity(self._settings.model), boundaries=(1,),
                feature_dtype=FeatureDtype.FLOAT32, row_width=FEATURES,
                max_context_len=MAX_CONTEXT, max_tree_nodes=128, max_sequences=s.batch,
                page_size_tokens=PAGE_SIZE, num_pages=limits.num_pages,
            )
        )  # fmt: skip
        self._run(loop)

    def _deliver(self, events: Sequence[Event]) -> None:
        """Events of a step are delivered before the next step's: the last one's are these."""
        done = [event.result for event in events if isinstance(event, RoundDone)]
        if done and self._target.steps:
            self._target.steps[-1][5] += sum(result.wants_tree for result in done)
            self._target.steps[-1][6] += sum(result.next_begun for result in done)
        self._hub.deliver(events)

    async def stop(self) -> None:
        await super().stop()
        if self._record is not None:
            self._record.write_text(json.dumps(self._target.steps))


class SleepingDraft(DraftService):
    """The draft service on a `SleepingHead`, half a round trip away from the router."""

    def __init__(self, config: DraftConfig, metrics: Metrics, scenario: Scenario) -> None:
        super().__init__(config, metrics)
        self._scenario = scenario

    async def start(self, health: Health) -> None:
        s, config = self._scenario, self._settings
        limits = DraftLimits(
            vocab_size=VOCAB_SIZE, feature_size=FEATURES, max_context_len=MAX_CONTEXT,
            tree=config.tree, max_sequences=s.batch, page_size=PAGE_SIZE,
            num_pages=s.batch * (MAX_CONTEXT // PAGE_SIZE + 1),
            max_step_sequences=s.batch * max(1, config.draft_ahead),
            max_draft_rows=config.max_draft_tokens, max_extend_rows=config.max_extend_tokens,
            max_outcomes=config.draft_ahead,
        )  # fmt: skip
        way = make_way(s.rtt / 2)
        loop = DistantDraftLoop(
            DraftMachine(limits),
            SleepingHead(s, config.grown_tree),
            deliver=lambda events: way(lambda: self._hub.deliver(events)),
            on_room=self._hub.share_credit,
            metrics=self._metrics,
            gather_seconds=config.gather_seconds,
        )
        loop.way = way
        self._servicer.loop = loop
        self._servicer.info = DraftInfo(
            head_name="sleeping", target=identity(config.target_directory),
            feature_kind="aux", boundaries=(1,), feature_dtype=FeatureDtype.FLOAT32,
            row_width=FEATURES, max_context_len=MAX_CONTEXT, max_tree=config.tree,
            max_sequences=s.batch, max_outcomes=config.draft_ahead,
        )  # fmt: skip
        self._run(loop)


def draft_flags(scenario: Scenario, num_outcomes: int) -> list[str]:
    """Settings of the draft that the scenario decides."""
    return [
        *("--max-depth", str(scenario.depth), "--top-k", str(WIDTH)),
        *("--max-nodes", str(scenario.max_nodes), "--draft-ahead", str(num_outcomes)),
        # A result and the one before it, on the way together.
        *("--max-draft-tokens", str(2 * (scenario.depth + 1))),
    ]


def identity(model: Path) -> dict[str, Any]:
    """Of a target that has a tokenizer and nothing else."""
    return {
        "vocab_size": VOCAB_SIZE,
        "padded_vocab_size": VOCAB_SIZE,
        "tokenizer_hash": ModelTokenizer(model).tokenizer_hash,
        "hidden_size": 1,
        "weights_hash": "none",
    }


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=("verify", "draft"))
    parser.add_argument("--scenario", type=Path, required=True)
    parser.add_argument("--record", type=Path, help="verify: where its steps are written")
    args, flags = parser.parse_known_args(argv)
    scenario, num_outcomes = read_scenario(args.scenario)
    metrics = Metrics(args.role)
    if args.role == "verify":
        verify = VerifyConfig.load(flags)
        return run_service(SleepingVerify(verify, metrics, scenario, args.record), verify, metrics)
    draft = DraftConfig.load([*draft_flags(scenario, num_outcomes), *flags])
    return run_service(SleepingDraft(draft, metrics, scenario), draft, metrics)


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.overlap_services", main))
