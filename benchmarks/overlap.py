"""How much of draft and network hides behind verify? Simulated: virtual time, no device.

    python -m benchmarks.overlap --verify-ms 12 --draft-ms 1 --depth 6 --rtt-ms 0,1,2,5,10,20 \
        --batch 1,4,16,64
    python -m benchmarks.overlap --preset 8b-v5e

Ways to decode the same made-up text at the same costs: root-only (plain decoding on the verify
slice, no router between two steps), synchronous (the services as they are: the real verify machine,
its budget and its advice for or against trees), colocated (the same with no round trip, draft and
verify in turn on the verify slice), draft-ahead as built (`overlap_built`: the same machine with
trees ahead), and draft-ahead as it might be (`overlap_ahead`: states reused, a root where no tree
is there, the best depth and number of outcomes for the costs), **a model that no service is**.
`full` is the synchronous way without budget and advice. Rates are tokens per second of all
sequences; per chip, the draft's chips count wherever there is a draft slice.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.overlap_ahead import run_ahead
from benchmarks.overlap_built import run_built
from benchmarks.overlap_costs import PRESETS, Costs, plain
from benchmarks.overlap_recorded import Recording
from benchmarks.overlap_sync import Scenario, SyncRun, Tally
from benchmarks.overlap_text import Head
from benchmarks.serving import print_report
from common.entry import run_program
from common.errors import StartupError


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), help="costs, instead of the two -ms")
    parser.add_argument("--verify-ms", type=float, default=12.0, help="of a step [%(default)s]")
    parser.add_argument("--draft-ms", type=float, default=1.0, help="of a depth [%(default)s]")
    parser.add_argument(
        "--knee-rows", type=int, default=240, help="rows a verify step takes for free [%(default)s]"
    )
    parser.add_argument("--depth", type=int, default=6, help="most depths [%(default)s]")
    parser.add_argument("--max-nodes", type=int, default=60, help="of a tree [%(default)s]")
    parser.add_argument("--rtt-ms", type=numbers, default=[0, 1, 2, 5, 10, 20])
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="at most, added [%(default)s]")
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument(
        "--chances", type=numbers, default=[0.8, 0.78, 0.76, 0.74, 0.72, 0.7],
        help="per depth, that the truth is a candidate [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--recorded", type=Path, metavar="FILE",
        help="text and proposals of overlap_record, instead of made-up chances",
    )  # fmt: skip
    parser.add_argument(
        "--surety", type=float, default=1.15, help="the head's belief over truth [%(default)s]"
    )
    parser.add_argument(
        "--own-states", type=float, default=0.95,
        help="factor on each depth's chance on the head's own states [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--outcomes", type=int, default=12, help="at most, of draft-ahead as built [%(default)s]"
    )
    parser.add_argument(
        "--rounds", type=int, default=1600, help="of each run, all sequences [%(default)s]"
    )
    parser.add_argument(
        "--least-steps", type=int, default=400,
        help="of each run, whatever the batch; the first quarter is not counted [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


@cache
def colocate(scenario: Scenario) -> Tally:
    return SyncRun(scenario, budget=True).run()


def cell(scenario: Scenario, most_outcomes: int) -> dict[str, Any]:
    """All modes at one batch and one round trip."""
    costs, batch = scenario.costs, scenario.batch
    root_only = batch / costs.verify_seconds(batch, batch)
    sync = SyncRun(scenario, budget=True).run()
    full = SyncRun(scenario, budget=False).run()
    colocated = colocate(replace(scenario, rtt=0.0, jitter=0.0))
    built, num_outcomes = run_built(scenario, most_outcomes)
    ahead, plan = run_ahead(scenario)
    both = costs.verify_chips + costs.draft_chips
    return {
        "batch": batch,
        "rtt_ms": round(scenario.rtt * 1e3, 3),
        "root_only_tokens_per_s": round(root_only, 1),
        "sync": mode(sync, root_only, costs.verify_chips / both),
        "full": mode(full, root_only, costs.verify_chips / both),
        "colocated": mode(colocated, root_only, 1.0),
        "built": mode(built, root_only, costs.verify_chips / both)
        | {"hit_rate": round(built.hits / built.rounds, 3), "num_outcomes": num_outcomes},
        "ahead": mode(ahead, root_only, costs.verify_chips / both)
        | {
            "hit_rate": round(ahead.hits / ahead.rounds, 3),
            "depth": plan.depth,
            "num_outcomes": plan.num_outcomes,
            "waits": plan.waits,
        },
    }


def mode(tally: Tally, root_only: float, chips: float) -> dict[str, float | None]:
    return {
        "tokens_per_s": round(tally.rate, 1),
        "over_root_only": round(tally.rate / root_only, 3),
        "over_root_only_per_chip": round(tally.rate / root_only * chips, 3),
        "acceptance_length": round(tally.tokens / tally.rounds, 3),
        "nodes": round(tally.nodes / tally.rounds, 2),
        "rounds_with_tree": round(tally.wished / tally.rounds, 3),
        "step_over_verify_p50": round(tally.step_over_verify(50), 3),
        "step_over_verify_p99": round(tally.step_over_verify(99), 3),
        "hidden": None if tally.hidden is None else round(abs(tally.hidden), 3),
    }


def print_heading() -> None:
    print("SIMULATED. x: tokens/s over root-only; s/v: step over verify, p50 / p99")
    print(
        "batch  rtt |  root/s |  sync x  trees  full x  coloc x  nodes  accept |"
        " built x  hits | ahead x  hits  s/v p50   p99  hidden  accept  plan"
    )


def print_cell(each: dict[str, Any]) -> None:
    s, a, full = each["sync"], each["ahead"], each["full"]["over_root_only"]
    built = each["built"]
    hidden = "–" if a["hidden"] is None else f"{a['hidden']:.2f}"
    plan = f"{a['depth']} deep, {a['num_outcomes']} outcomes{', waits' if a['waits'] else ''}"
    print(
        f"{each['batch']:5} {each['rtt_ms']:4g} | {each['root_only_tokens_per_s']:7.1f} |"
        f" {s['over_root_only']:7.2f} {s['rounds_with_tree']:6.2f} {full:7.2f}"
        f" {each['colocated']['over_root_only']:8.2f} {s['nodes']:6.1f}"
        f" {s['acceptance_length']:7.2f} | {built['over_root_only']:7.2f} {built['hit_rate']:5.2f}"
        f" | {a['over_root_only']:7.2f} {a['hit_rate']:5.2f}"
        f" {a['step_over_verify_p50']:8.2f} {a['step_over_verify_p99']:5.2f}"
        f" {hidden:>7} {a['acceptance_length']:7.2f}  {plan}",
        flush=True,
    )


def report(args: argparse.Namespace) -> dict[str, Any]:
    costs: Costs = (
        PRESETS[args.preset]
        if args.preset
        else plain(args.verify_ms, args.draft_ms, args.knee_rows)
    )
    head = Head(tuple(args.chances), args.surety, args.own_states)
    recorded = None if args.recorded is None else Recording.load(args.recorded)
    if recorded is not None and args.depth > recorded.depth:
        raise StartupError(f"depth: {args.depth}; {args.recorded} has trees of {recorded.depth}")
    print_heading()
    cells = []
    for batch in map(int, args.batch):
        for rtt in args.rtt_ms:
            scenario = Scenario(
                costs=costs, head=head, batch=batch, depth=args.depth, max_nodes=args.max_nodes,
                num_steps=max(args.least_steps, args.rounds // batch), seed=args.seed,
                rtt=rtt * 1e-3, jitter=args.jitter_ms * 1e-3, recorded=recorded,
            )  # fmt: skip
            cells.append(cell(scenario, args.outcomes))
            print_cell(cells[-1])
    return {
        "benchmark": "overlap",
        "simulated": True,
        "costs": asdict(costs),
        "head": asdict(head) if recorded is None else None,
        "recorded": None if recorded is None else recorded.facts(),
        "depth": args.depth,
        "max_nodes": args.max_nodes,
        "jitter_ms": args.jitter_ms,
        "rounds": args.rounds,
        "seed": args.seed,
        "least_over_root_only": {
            name: min(each[name]["over_root_only"] for each in cells)
            for name in ("sync", "full", "colocated", "built", "ahead")
        },
        "cells": cells,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    print_report(report(args), args)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.overlap", main))
