"""The same rounds through the verify service's own loop, with one and with two steps in flight.

    python -m benchmarks.run_on_loop --target DIR --batch 1,4

State machine, loop and engine are the service's (`verify_service/loop.py`); the router's part is
played here, in the same process: each result is acknowledged and answered with a tree ahead, three
in four of whose tokens are right. `one`: --async-scheduling off; `two`: on. All in
turns within one run; milliseconds per token of all sequences together. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.run_on import (
    DEPTH,
    PROMPT,
    Texts,
    engine_config,
    parser_of,
    with_candidates,
)
from benchmarks.serving import print_report
from common.metrics import Metrics
from common.types import Drafting, SamplingParams, TreeShape
from models.target import load_target
from verify_service.commands import Acknowledge, Close, Command, Open, TreeAhead
from verify_service.draft_gate import FixedWay
from verify_service.engine import DeviceEngine
from verify_service.events import Event, RoundDone
from verify_service.limits import VerifyLimits
from verify_service.loop import VerifyLoop
from verify_service.machine import VerifyMachine
from verify_service.metrics import VerifyMetrics

STREAM = 1


def limits_for(engine: DeviceEngine, *, ahead: bool) -> VerifyLimits:
    config = engine.config
    return VerifyLimits(
        vocab_size=engine.target.vocab_size,
        max_context_len=config.max_context_len,
        max_tree_nodes=config.max_tree_nodes,
        max_tree_depth=config.max_depth,
        max_sequences=config.max_sequences,
        max_waiting_sequences=config.max_sequences,
        page_size=config.page_size,
        num_pages=config.num_pages,
        max_step_tokens=config.max_rows,
        max_prefill_tokens=max(1, config.max_rows - config.max_sequences),
        max_ahead_nodes=config.max_ahead_nodes if ahead else 0,
        prefix_cache=False,
    )


class Router:
    """Opens the sequences, and answers each result."""

    def __init__(self, texts: Texts, num_tokens: int) -> None:
        self._texts, self._num_tokens = texts, num_tokens
        self.tokens = [[int(token) for token in prompt] for prompt in texts.prompts]
        self.results: list[list[RoundDone]] = [[] for _ in self.tokens]
        self.ended = asyncio.Event()
        self.loop: VerifyLoop | None = None

    @property
    def num_emitted(self) -> int:
        return sum(len(tokens) - PROMPT for tokens in self.tokens)

    def open(self) -> list[Command]:
        return [
            Open(
                sequence_id=_name(i),
                epoch=1,
                tokens=tuple(tokens),
                num_prompt_tokens=len(tokens),
                sampling=SamplingParams(),
                max_total_tokens=len(tokens) + self._num_tokens,
                runs_on=True,
                draft_ahead=True,
            )
            for i, tokens in enumerate(self.tokens)
        ]

    def deliver(self, events: Sequence[Event]) -> None:
        """The answers are a frame of their own, as soon as the loop is through with these."""
        answers: list[Command] = []
        for event in events:
            if not isinstance(event, RoundDone):
                continue
            i = int.from_bytes(event.sequence_id, "big")
            self.results[i].append(event)
            self.tokens[i] += event.result.tokens
            answers.append(self._answer(i, event.result.round))
        if all(len(tokens) >= PROMPT + self._num_tokens for tokens in self.tokens):
            self.ended.set()
        if answers and self.loop is not None:
            asyncio.get_running_loop().call_soon(self.loop.submit, STREAM, answers, [])

    def _answer(self, i: int, round_: int) -> Command:
        tokens = self.tokens[i]
        if len(tokens) >= PROMPT + self._num_tokens:
            return Close(sequence_id=_name(i), epoch=1)
        if len(tokens) > len(self._texts.tokens[i]):
            return Acknowledge(sequence_id=_name(i), epoch=1, acked_round=round_)
        return TreeAhead(
            sequence_id=_name(i),
            epoch=1,
            acked_round=round_,
            round=round_ + 1,
            kv_len=len(tokens) - 1,
            tree=self._texts.candidates(i, len(tokens) - 1),
            most=TreeShape.unbounded(),
        )


def _name(i: int) -> bytes:
    return i.to_bytes(16, "big")


async def generate(
    engine: DeviceEngine, texts: Texts, num_tokens: int, *, ahead: bool
) -> tuple[Router, VerifyMachine, float, Metrics]:
    """Seconds from the first Open to the last token, the loop's own metrics beside."""
    machine = VerifyMachine(limits_for(engine, ahead=ahead), gate=FixedWay(Drafting.AHEAD))
    metrics = Metrics("verify", CollectorRegistry())
    router = Router(texts, num_tokens)
    loop = VerifyLoop(
        machine,
        engine,
        deliver=router.deliver,
        on_features=lambda: None,
        metrics=VerifyMetrics(metrics, engine.config.max_depth, engine.config.max_rows),
        gather_seconds=0.0,
    )
    router.loop = loop
    loop.connect(STREAM)
    task = asyncio.create_task(loop.run())
    begun = time.perf_counter()
    loop.submit(STREAM, router.open(), [])
    ended = asyncio.create_task(router.ended.wait())
    await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
    seconds = time.perf_counter() - begun
    await asyncio.sleep(0.05)  # what was launched behind the end is thrown away
    ended.cancel()
    task.cancel()
    (failed, _) = await asyncio.gather(task, ended, return_exceptions=True)
    loop.stop()
    if not router.ended.is_set():
        raise RuntimeError(f"the loop ended before the text: {failed!r}")
    return router, machine, seconds, metrics


def compare(engine: DeviceEngine, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Least and median milliseconds per token of both ways, and the medians' ratio in turns."""
    texts = Texts(engine, batch, arguments.tokens + DEPTH + 2, engine.target.vocab_size)
    times: dict[str, list[float]] = {"one": [], "two": []}
    step_ms: dict[str, float] = {}
    said: set[str] = set()
    for turn in range(arguments.turns + 1):
        for name in times:
            found = generate(engine, texts, arguments.tokens, ahead=name == "two")
            router, _, seconds, metrics = asyncio.run(found)
            said.add(json.dumps(router.tokens))
            if turn:  # the first warms
                times[name].append(1e3 * seconds / router.num_emitted)
                step_ms[name] = _mean_step_ms(metrics)
    if len(said) != 1:
        raise AssertionError("the ways said different texts")
    result: dict[str, Any] = {"batch": batch}
    for name, values in times.items():
        result[f"{name}_ms_least"] = round(min(values), 3)
        result[f"{name}_ms_p50"] = round(statistics.median(values), 3)
        result[f"{name}_step_ms"] = round(step_ms[name], 3)
    ratios = [two / one for one, two in zip(times["one"], times["two"], strict=True)]
    result["two_over_one"] = round(statistics.median(ratios), 3)
    print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    return result


def _mean_step_ms(metrics: Metrics) -> float:
    total = metrics.registry.get_sample_value("canopy_verify_step_seconds_sum") or 0.0
    count = metrics.registry.get_sample_value("canopy_verify_step_seconds_count") or 1.0
    return 1e3 * total / count


def main() -> None:
    arguments = _arguments()
    target, params = load_target(arguments.target, dtype=np.dtype(np.float32))
    engine = DeviceEngine(target, params, with_candidates(engine_config(arguments)))
    engine.warm_up()
    found = [compare(engine, batch, arguments) for batch in arguments.batch]
    print_report({"benchmark": "run_on_loop", "found": found}, arguments)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=160, help="of each sequence")
    parser.add_argument("--turns", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
