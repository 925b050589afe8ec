"""The real verify and draft services with devices that sleep: stated costs, made-up text.

    python -m benchmarks.overlap_services verify --scenario FILE --model DIR
    python -m benchmarks.overlap_services draft --scenario FILE --head DIR

Loop, machine, budget, gate, streams and frames are those of `canopy serve`; the engines are those
of `overlap_devices` and sleep for what they say a step takes, so that neither the machine's cores
nor a model blur the times. The round trip lies between draft and router: each frame waits half of
it on either way.

Verify writes each step to `--record FILE` when it ends: [begun, seconds slept, sequences, tokens,
nodes, rounds that wish for a tree and wait, rounds with nodes of a tree ahead].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.overlap_costs import Costs
from benchmarks.overlap_devices import FEATURES, SimulatedHead, SimulatedTarget
from benchmarks.overlap_run import MAX_TREE_NODES, draft_limits, verify_limits
from benchmarks.overlap_scenario import MAX_CONTEXT, Scenario
from benchmarks.overlap_text import WIDTH, Head
from common.entry import run_program
from common.metrics import Metrics
from common.server import Health, run_service
from common.tensors import FeatureDtype
from common.types import Drafting, FeatureRows
from draft_service import commands as draft_commands
from draft_service import step as draft_step
from draft_service.config import DraftConfig
from draft_service.info import DraftInfo
from draft_service.loop import DraftLoop
from draft_service.machine import DraftMachine
from draft_service.main import DraftService
from router.tokenizer import ModelTokenizer
from verify_service.budget import TreeBudget
from verify_service.codec import encode_info
from verify_service.config import VerifyConfig
from verify_service.draft_gate import DraftGate, FixedWay
from verify_service.events import Event, RoundDone
from verify_service.info import VerifyInfo
from verify_service.loop import VerifyLoop
from verify_service.machine import VerifyMachine
from verify_service.main import VerifyService
from verify_service.step import Launched, SequenceOutcome, SequenceWork

VOCAB_SIZE = 256  # the router's toy tokenizer; the text uses the first few
PAGE_SIZE = 64


def write_scenario(path: Path, scenario: Scenario, way: Drafting | None) -> None:
    """`way`: see `overlap_run.Run`. Trees ahead are to be had unless it is to wait for trees."""
    path.write_text(json.dumps(asdict(scenario) | {"way": None if way is None else way.name}))


def read_scenario(path: Path) -> tuple[Scenario, Drafting | None]:
    fields: dict[str, Any] = json.loads(path.read_text())
    name, head = fields.pop("way"), fields.pop("head")
    head["chances"] = tuple(head["chances"])
    costs = Costs(**fields.pop("costs"))
    way = None if name is None else Drafting[name]
    return Scenario(costs=costs, head=Head(**head), **fields), way


class SleepingTarget:
    """Implements `verify_service.step.AheadEngine`: a step begins when the one before has ended,
    wherever the host is by then.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._target = SimulatedTarget(scenario)
        self._launched: deque[tuple[float, float]] = deque()  # begun, ends
        self._ends = 0.0  # all that was launched
        self._last: dict[int, SequenceOutcome] = {}  # of the step that ended last, by slot
        self.steps: list[list[float]] = []

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        return self.finish(self.launch(works))

    def launch(self, works: Sequence[SequenceWork]) -> Launched:
        begun = max(time.perf_counter(), self._ends)
        self._ends = begun + self._target.seconds(works)
        self._launched.append((begun, self._ends))
        return Launched(works, len(self.steps) + len(self._launched))

    def finish(self, launched: Launched) -> list[SequenceOutcome]:
        begun, ends = self._launched.popleft()
        outcomes = [self._outcome(work) for work in launched.works]
        _sleep_until(ends)
        if not self._launched:
            self._ends = ends = time.perf_counter()  # a sleep may last longer
        self._last = {
            work.slot: outcome for work, outcome in zip(launched.works, outcomes, strict=True)
        }
        emitted = sum(outcome.num_emitted for outcome in outcomes)
        nodes = sum(outcome.num_nodes for outcome in outcomes)
        self.steps.append([begun, ends - begun, len(outcomes), emitted, nodes, 0, 0])
        return outcomes

    def _outcome(self, work: SequenceWork) -> SequenceOutcome:
        if work.follows is not None:
            return self._target.follow(work, self._last[work.slot])
        return self._target.run([work])[0][0]


class SleepingHead:
    """Implements `draft_service.step.DraftEngine`."""

    def __init__(self, scenario: Scenario) -> None:
        self._head = SimulatedHead(scenario)

    def run(self, works: Sequence[draft_step.SequenceWork]) -> list[draft_step.SequenceOutcome]:
        begun = time.perf_counter()
        outcomes, seconds = self._head.run(works)
        _sleep_until(begun + seconds)
        return outcomes


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
        self, config: VerifyConfig, metrics: Metrics, scenario: Scenario, way: Drafting | None,
        record: Path | None,
    ) -> None:  # fmt: skip
        super().__init__(config, metrics)
        self._scenario, self._way, self._record = scenario, way, record
        self._target = SleepingTarget(scenario)

    async def start(self, health: Health) -> None:
        s = self._scenario
        limits = replace(
            verify_limits(s, VOCAB_SIZE, PAGE_SIZE),
            max_ahead_nodes=self._settings.max_ahead_nodes,
        )
        gate = DraftGate() if self._way is None else FixedWay(self._way)
        loop = VerifyLoop(
            VerifyMachine(limits, TreeBudget(s.costs.curve(), s.depth), gate),
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
                max_context_len=MAX_CONTEXT, max_tree_nodes=MAX_TREE_NODES,
                max_sequences=s.batch,
                page_size_tokens=PAGE_SIZE, num_pages=limits.num_pages,
            )
        )  # fmt: skip
        self._run(loop)

    def _deliver(self, events: Sequence[Event]) -> None:
        """Events of a step are delivered before the next step's: the last one's are these."""
        done = [event.result for event in events if isinstance(event, RoundDone)]
        if done and self._target.steps:
            wished = [result.drafting is Drafting.SYNCHRONOUS for result in done]
            self._target.steps[-1][5] += sum(wished)
            self._target.steps[-1][6] += sum(result.ahead is not None for result in done)
        self._hub.deliver(events)

    async def stop(self) -> None:
        await super().stop()
        if self._record is not None:
            self._record.write_text(json.dumps(self._target.steps))


class SleepingDraft(DraftService):
    """The draft service on a `SleepingHead`, half a round trip away from the router."""

    def __init__(
        self, config: DraftConfig, metrics: Metrics, scenario: Scenario, *, ahead: bool
    ) -> None:
        super().__init__(config, metrics)
        self._scenario, self._ahead = scenario, ahead

    async def start(self, health: Health) -> None:
        s, config = self._scenario, self._settings
        limits = draft_limits(s, VOCAB_SIZE, PAGE_SIZE, ahead=self._ahead)
        way = make_way(s.rtt / 2)
        loop = DistantDraftLoop(
            DraftMachine(limits),
            SleepingHead(s),
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
            row_width=FEATURES, max_context_len=MAX_CONTEXT, max_tree=s.tree,
            max_sequences=s.batch, draft_ahead=self._ahead,
        )  # fmt: skip
        self._run(loop)


def draft_flags(scenario: Scenario) -> list[str]:
    """Settings of the draft that the scenario decides."""
    return [
        *("--max-depth", str(scenario.depth), "--top-k", str(WIDTH)),
        *("--max-nodes", str(scenario.max_nodes)),
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
    scenario, way = read_scenario(args.scenario)
    metrics = Metrics(args.role)
    if args.role == "verify":
        verify = VerifyConfig.load(flags)
        service = SleepingVerify(verify, metrics, scenario, way, args.record)
        return run_service(service, verify, metrics)
    draft = DraftConfig.load([*draft_flags(scenario), *flags])
    ahead = way is not Drafting.SYNCHRONOUS
    return run_service(SleepingDraft(draft, metrics, scenario, ahead=ahead), draft, metrics)


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.overlap_services", main))
