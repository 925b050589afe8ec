"""Do the simulated slices agree with real processes? The same scenario, both ways.

    python -m benchmarks.overlap_real --verify-ms 40 --draft-ms 4 --rtt-ms 10 --batch 1,2,4

Real: router, verify and draft as three processes over gRPC, `overlap_services` for the two with a
device, which sleeps for the stated times. Simulated: `overlap_run` with the same costs, text and
head. `--way`: in which all rounds go; the gate chooses unless it is given. What the simulation
cannot know, the time of router, hosts and wires in a round that waits for them, is measured in the
first rounds of the real run and given to it; compared are its last three quarters. `stated` is
without it. The ratio is simulated over real.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.overlap import numbers
from benchmarks.overlap_costs import plain
from benchmarks.overlap_run import Run
from benchmarks.overlap_scenario import Scenario, Tally
from benchmarks.overlap_services import write_scenario
from benchmarks.overlap_text import Head
from benchmarks.router_overhead import announced, process, write_model
from benchmarks.serving import print_report
from canopy.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from common.entry import run_program
from common.errors import StartupError
from common.process import event_loop_factory
from common.types import Drafting

MOST_SECONDS = 300.0  # of one run
OPEN_GAP = 1e-3  # in the simulation, between the first Open and the others; really, any
COMPARED = (
    "tokens_per_s", "step_over_verify_p50", "step_over_verify_mean", "acceptance_length",
    "sequences_per_step",
)  # fmt: skip
MEASURED = 20  # rounds of either kind, for the turns
LAST_STEPS = 4  # of a run, that are not counted: clients go
STALL = 1.5  # an interval of more medians is none of the services' doing


@dataclass(frozen=True, slots=True)
class Step:
    """As verify recorded it."""

    begun: float
    seconds: float
    num_sequences: int
    tokens: int
    nodes: int
    wished: int
    num_ahead: int  # rounds with nodes of a tree ahead


def run_real(
    scenario: Scenario, way: Drafting | None, num_tokens: int, scheduling: str = "off"
) -> list[Step]:
    """The steps of three processes, until one of the sequences has so many tokens."""
    with tempfile.TemporaryDirectory() as folder:
        model, record = Path(folder), Path(folder) / "steps.json"
        write_model(model)
        write_scenario(model / "scenario.json", scenario, way)
        common = ["--scenario", str(model / "scenario.json"), "--port", "0"]
        common += ["--log-level", "warning", "--drain-seconds", "2"]  # clients leave in mid-answer
        verify_flags = ["verify", *common, "--model", str(model), "--record", str(record)]
        verify_flags += ["--async-scheduling", scheduling]
        draft_flags = ["draft", *common, "--head", str(model), "--target", str(model)]
        with (
            process("benchmarks.overlap_services", verify_flags) as verify,
            process("benchmarks.overlap_services", draft_flags) as draft,
        ):
            router_flags = [
                *("--model", str(model), "--port", "0", "--log-level", "warning"),
                *("--verify", announced(verify, event="serving")["address"]),
                *("--draft", announced(draft, event="serving")["address"]),
                *("--tree-depth", str(scenario.depth), "--tree-nodes", str(scenario.max_nodes)),
                *("--tree-seconds", "30"),
            ]
            with process("router", router_flags) as router:
                address = announced(router, event="serving")["address"]
                with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
                    runner.run(_generate(address, scenario.batch, num_tokens))
        steps = [Step(*fields) for fields in json.loads(record.read_text())]
    return steps[:-LAST_STEPS]


async def _generate(address: str, batch: int, num_tokens: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        tasks = [asyncio.create_task(_read(stub, i, num_tokens)) for i in range(batch)]
        done, going = await asyncio.wait(
            tasks, timeout=MOST_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        for task in done:
            task.result()


async def _read(stub: Any, sequence: int, num_tokens: int) -> None:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[0]),
        max_tokens=num_tokens,
        sampling=types_pb2.SamplingParams(seed=sequence),
    )
    async for _ in stub.Generate(request):
        pass


def tally_of(steps: Sequence[Step]) -> tuple[Tally, int]:
    """As the simulation tallies, the first quarter not counted; and how many steps were left out
    because the machine stalled: their interval is more than STALL medians of their kind.
    """
    tally, warm = Tally(), len(steps) // 4
    pairs = [(step, later.begun - step.begun) for step, later in itertools.pairwise(steps)][warm:]
    median = {
        wished: statistics.median(t for step, t in pairs if bool(step.wished) == wished)
        for wished in {bool(step.wished) for step, _ in pairs}
    }
    steady = [(s, t) for s, t in pairs if t <= STALL * median[bool(s.wished)]]
    for step, interval in steady:
        tally.add(interval, step.seconds, 0.0)
        tally.tokens += step.tokens
        tally.rounds += step.num_sequences
        tally.nodes += step.nodes
        tally.trees += step.wished or step.num_ahead
        tally.behind[0] = tally.behind.get(0, 0) + step.num_ahead  # how far is not recorded
    return tally, len(pairs) - len(steady)


def turns_of(scenario: Scenario, steps: Sequence[Step]) -> tuple[float, float]:
    """Seconds that router, hosts and wires take of a round without a tree, which passes the router
    once, and of one with a tree, which passes it twice: medians of the first between two steps that
    both hold all sequences, so that nobody's turn is hidden behind another's step.
    """
    waits: dict[bool, list[float]] = {False: [], True: []}
    for step, later in itertools.pairwise(steps):
        taken = waits[bool(step.wished)]
        if step.num_sequences == later.num_sequences == scenario.batch and len(taken) < MEASURED:
            taken.append(later.begun - step.begun - step.seconds)
    roots = waits[False]
    if not waits[True]:
        if not roots:
            raise StartupError("tokens: too few for a round of all sequences; ask for more")
        return 0.0, 0.0  # nothing passes the router between two rounds
    stated = scenario.depth * scenario.costs.draft + scenario.rtt
    tree_turn = max(0.0, statistics.median(waits[True]) - stated)
    return statistics.median(roots) if roots else tree_turn / 2, tree_turn


def simulate(scenario: Scenario, way: Drafting | None) -> Tally:
    return Run(scenario, way, ahead=way is not Drafting.SYNCHRONOUS).run()


def figures(tally: Tally) -> dict[str, float]:
    return {
        "tokens_per_s": round(tally.rate, 2),
        "step_over_verify_p50": round(tally.step_over_verify(50), 3),
        "step_over_verify_mean": round(sum(tally.intervals) / sum(tally.step_seconds), 3),
        "acceptance_length": round(tally.tokens / tally.rounds, 3),
        "nodes": round(tally.nodes / tally.rounds, 2),
        "rounds_with_tree": round(tally.trees / tally.rounds, 3),
        "rounds_with_tree_ahead": round(sum(tally.behind.values()) / tally.rounds, 3),
        "sequences_per_step": round(tally.rounds / len(tally.intervals), 2),
    }


def compare(
    scenario: Scenario, way: Drafting | None, num_tokens: int, scheduling: str = "off"
) -> dict[str, Any]:
    """One batch, real and simulated with as many steps."""
    steps = run_real(scenario, way, num_tokens, scheduling)
    gap = OPEN_GAP if scenario.batch > 1 else 0.0
    stated = replace(scenario, num_steps=len(steps), open_gap=gap)
    root_turn, tree_turn = turns_of(scenario, steps)
    alike = replace(stated, root_turn=root_turn, tree_turn=tree_turn)
    tally, num_stalls = tally_of(steps)
    real = figures(tally)
    simulated = figures(simulate(alike, way))
    return {
        "batch": scenario.batch,
        "steps": len(steps),
        "stalls": num_stalls,
        "root_turn_ms": round(root_turn * 1e3, 2),
        "tree_turn_ms": round(tree_turn * 1e3, 2),
        "real": real,
        "simulated": simulated,
        "stated": figures(simulate(stated, way)),
        "simulated_over_real": {name: round(simulated[name] / real[name], 3) for name in COMPARED},
    }


def report(args: argparse.Namespace) -> dict[str, Any]:
    scenario = Scenario(
        costs=plain(args.verify_ms, args.draft_ms, args.knee_rows),
        head=Head(tuple(args.chances), surety=1.15),
        batch=1, depth=args.depth, max_nodes=args.max_nodes, num_steps=0, seed=args.seed,
        rtt=args.rtt_ms * 1e-3,
    )  # fmt: skip
    way = None if args.way == "auto" else Drafting[args.way.upper()]
    cells = []
    for batch in map(int, args.batch):
        each = compare(replace(scenario, batch=batch), way, args.tokens, args.async_scheduling)
        cells.append(each)
        for name in ("real", "simulated", "stated"):
            values = "  ".join(f"{key} {value}" for key, value in each[name].items())
            print(f"batch {batch} {name:>9}: {values}", flush=True)
        print(
            f"batch {batch}, simulated over real ({each['stalls']} stalls left out, turns of"
            f" {each['root_turn_ms']} and {each['tree_turn_ms']} ms):"
            f" {each['simulated_over_real']}",
            flush=True,
        )
    return {
        "benchmark": "overlap_real",
        "costs": asdict(scenario.costs),
        "depth": args.depth,
        "max_nodes": args.max_nodes,
        "rtt_ms": args.rtt_ms,
        "way": args.way,
        "async_scheduling": args.async_scheduling,
        "cells": cells,
    }  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verify-ms", type=float, default=40.0, help="of a step [%(default)s]")
    parser.add_argument("--draft-ms", type=float, default=4.0, help="of a depth [%(default)s]")
    parser.add_argument(
        "--knee-rows", type=int, default=240, help="rows a verify step takes for free [%(default)s]"
    )
    parser.add_argument("--depth", type=int, default=4, help="of a tree [%(default)s]")
    parser.add_argument("--max-nodes", type=int, default=20, help="of a tree [%(default)s]")
    parser.add_argument("--rtt-ms", type=float, default=10.0, help="[%(default)s]")
    ways = ["auto", *(way.name.lower() for way in Drafting)]
    parser.add_argument("--way", choices=ways, default="auto", help="[%(default)s]")
    parser.add_argument(
        "--async-scheduling", choices=["on", "off"], default="off", help="of verify [%(default)s]"
    )
    parser.add_argument("--batch", type=numbers, default=[1, 2, 4])
    parser.add_argument("--chances", type=numbers, default=[0.8, 0.78, 0.76, 0.74, 0.72, 0.7])
    parser.add_argument("--tokens", type=int, default=400, help="of a sequence [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    print_report(report(args), args)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.overlap_real", main))
