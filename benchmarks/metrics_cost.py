"""What being counted costs: a verify step, a draft step and a router's rounds, in microseconds.

    python -m benchmarks.metrics_cost [--sequences 64] [--step-ms 5]

`*_percent` is against a device step of `--step-ms` that carries all the sequences. The router's is
against the same time, though it runs beside the device and in another process. The library's own
histogram is timed too, which is why ours exists.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as LibraryHistogram

from benchmarks.serving import print_report
from common.metrics import SECONDS_BUCKETS, Metrics
from common.types import DraftTree, SamplingParams, TreeShape
from draft_service import events as draft_events
from draft_service import step as draft_step
from draft_service.metrics import DraftMetrics
from draft_service.stepper import Plan as DraftPlan
from router.metrics import RouterMetrics
from verify_service import events as verify_events
from verify_service import step as verify_step
from verify_service.metrics import VerifyMetrics
from verify_service.stepper import Plan as VerifyPlan

NUM_NODES = 16
ROUND_SECONDS = 0.02


def microseconds(action: Callable[[], None]) -> float:
    """The least of several means: the rest is other processes' doing."""
    number = 1000
    return min(timeit.repeat(action, number=number, repeat=9)) / number * 1e6


def verify_cost(num_sequences: int) -> float:
    """A step with a tree for each sequence: its plan, its times, its results."""
    metrics = VerifyMetrics(Metrics("verify"), 16, 1024)
    nodes = np.arange(NUM_NODES, dtype=np.int32)
    work = verify_step.SequenceWork(
        slot=0, tokens=nodes, parents=nodes - 1, num_causal=1, samples=True, kv_len=1,
        page_ids=nodes[:2], sampling=SamplingParams(),
    )  # fmt: skip
    result = verify_events.RoundResult(
        round=1, kv_len=1, tokens=(1, 2, 3), margins=(1.0,) * 3, num_nodes=NUM_NODES,
        queue_seconds=ROUND_SECONDS,
    )  # fmt: skip
    event = verify_events.RoundDone(stream=0, sequence_id=b"", epoch=1, result=result)
    plan, events = VerifyPlan([work] * num_sequences, []), [event] * num_sequences

    def count() -> None:
        metrics.note_step(plan, ROUND_SECONDS, ROUND_SECONDS)
        metrics.note_events(events)

    return microseconds(count)


def draft_cost(num_sequences: int) -> float:
    metrics = DraftMetrics(
        Metrics("draft"), TreeShape(max_depth=5, top_k=4, max_nodes=NUM_NODES), 512
    )
    nodes = np.arange(NUM_NODES, dtype=np.int32)
    work = draft_step.SequenceWork(
        sequence_id=b"", tokens=nodes[:3], features=np.zeros((3, 1), np.float32), kv_len=1,
        page_ids=nodes[:2], drafts=True,
    )  # fmt: skip
    tree = DraftTree(tokens=nodes, parents=nodes - 1, scores=-nodes.astype(np.float32))
    grown = draft_events.GrownTree(round=1, committed_len=2, tree=tree, queue_seconds=ROUND_SECONDS)
    event = draft_events.TreeReady(stream=0, sequence_id=b"", epoch=1, grown=grown)
    plan, events = DraftPlan([work] * num_sequences, []), [event] * num_sequences

    def count() -> None:
        metrics.note_step(plan, ROUND_SECONDS, ROUND_SECONDS)
        metrics.note_events(events)

    return microseconds(count)


def router_cost(num_sequences: int) -> float:
    """A round of every sequence."""
    rounds = RouterMetrics(Metrics("router")).rounds

    def count() -> None:
        for _ in range(num_sequences):
            rounds.waited_for_draft(ROUND_SECONDS, ROUND_SECONDS)
            rounds.waited_for_verify(ROUND_SECONDS, ROUND_SECONDS)
            rounds.emitted(3, NUM_NODES - 1, root_only=False)
            rounds.token_gap(ROUND_SECONDS)

    return microseconds(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=5.0)
    arguments = parser.parse_args()
    ours = Metrics("x").histogram("t_seconds", "T").labels("")
    registry = CollectorRegistry()
    theirs = LibraryHistogram("t", "T", buckets=SECONDS_BUCKETS, registry=registry)
    costs = {
        "verify_step": verify_cost(arguments.sequences),
        "draft_step": draft_cost(arguments.sequences),
        "router_rounds": router_cost(arguments.sequences),
    }
    result: dict[str, object] = {"benchmark": "metrics_cost"}
    for name, cost in costs.items():
        result[f"{name}_us"] = round(cost, 1)
        result[f"{name}_percent"] = round(cost / arguments.step_ms / 10, 2)
    result["observe_us"] = round(microseconds(lambda: ours.observe(ROUND_SECONDS)), 3)
    result["library_observe_us"] = round(microseconds(lambda: theirs.observe(ROUND_SECONDS)), 3)
    print_report(result, arguments)


if __name__ == "__main__":
    main()
