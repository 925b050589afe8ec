"""How much of draft and network hides behind verify? Simulated: virtual time, no device.

    python -m benchmarks.overlap --verify-ms 12 --draft-ms 1 --depth 6 --rtt-ms 0,1,2,5,10,20 \
        --batch 1,4,16,64
    python -m benchmarks.overlap --preset 8b-v5e

Ways to decode the same made-up text at the same costs, by the services' own state machines
(`overlap_run`). `root-only`: plain decoding on the verify slice. `full`: every round waits for its
tree, all of which is verified. `sync`: the services without draft-ahead, with tree budget and gate.
`coloc`: the same on one device, in turn, without a round trip. `ahead`: draft-ahead in every round.
`auto`: the services with draft-ahead, where the gate chooses. Rates are tokens per second of all
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

from benchmarks.overlap_costs import PRESETS, Costs, plain
from benchmarks.overlap_recorded import Recording
from benchmarks.overlap_run import Run
from benchmarks.overlap_scenario import Scenario, Tally
from benchmarks.overlap_text import Head
from benchmarks.serving import print_report
from common.entry import run_program
from common.errors import StartupError
from common.types import Drafting


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
        "--chances", type=numbers, default=[0.8, 0.78, 0.76, 0.74, 0.72, 0.7, 0.68, 0.66],
        help="per depth, that the truth is a candidate [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--recorded", type=Path, metavar="FILE",
        help="text and proposals of overlap_record, instead of made-up chances",
    )  # fmt: skip
    parser.add_argument(
        "--surety", type=float, default=1.15, help="the head's belief over truth [%(default)s]"
    )
    parser.add_argument("--ahead-depth", type=int, default=8, help="most levels [%(default)s]")
    parser.add_argument("--ahead-nodes", type=int, default=128, help="most nodes [%(default)s]")
    parser.add_argument(
        "--ahead-rows", type=int, default=64, help="nodes of a level, all together [%(default)s]"
    )
    parser.add_argument(
        "--rounds", type=int, default=3200, help="of each run, all sequences [%(default)s]"
    )
    parser.add_argument(
        "--least-steps", type=int, default=300,
        help="of each run, whatever the batch; the first quarter is not counted [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


@cache
def colocate(scenario: Scenario) -> Tally:
    return Run(scenario, ahead=False).run()


def cell(scenario: Scenario) -> dict[str, Any]:
    """All ways at one batch and one round trip."""
    costs, batch = scenario.costs, scenario.batch
    root_only = batch / costs.verify_seconds(batch, batch)
    alone = replace(scenario, rtt=0.0, jitter=0.0, one_device=True)
    tallies = {
        "full": Run(scenario, Drafting.SYNCHRONOUS, budget=False, ahead=False).run(),
        "sync": Run(scenario, ahead=False).run(),
        "colocated": colocate(alone),
        "ahead": Run(scenario, Drafting.AHEAD).run(),
        "auto": Run(scenario).run(),
    }
    share = costs.verify_chips / (costs.verify_chips + costs.draft_chips)
    return {
        "batch": batch,
        "rtt_ms": round(scenario.rtt * 1e3, 3),
        "root_only_tokens_per_s": round(root_only, 1),
        **{
            name: figures(tally, root_only, 1.0 if name == "colocated" else share)
            for name, tally in tallies.items()
        },
    }


def figures(tally: Tally, root_only: float, chips: float) -> dict[str, Any]:
    return {
        "tokens_per_s": round(tally.rate, 1),
        "over_root_only": round(tally.rate / root_only, 3),
        "over_root_only_per_chip": round(tally.rate / root_only * chips, 3),
        "acceptance_length": round(tally.tokens / tally.rounds, 3),
        "nodes": round(tally.nodes / tally.rounds, 2),
        "rounds_with_tree": round(tally.trees / tally.rounds, 3),
        "rounds_with_tree_ahead_by_tokens_behind": {
            behind: round(count / tally.rounds, 3) for behind, count in sorted(tally.behind.items())
        },
        "step_over_verify_p50": round(tally.step_over_verify(50), 3),
        "step_over_verify_p99": round(tally.step_over_verify(99), 3),
        "hidden": None if tally.hidden is None else round(tally.hidden, 3),
    }


def print_heading() -> None:
    print("SIMULATED. x: tokens/s over root-only; s/v: step over verify, p50 / p99")
    print(
        "batch  rtt |  root/s | full x  acc | sync x trees nodes  acc s/v p50 | coloc x |"
        " ahead x trees nodes  acc s/v p50   p99 hidden | auto x  acc s/v p50   p99 hidden"
    )


def print_cell(each: dict[str, Any]) -> None:
    full, sync, ahead, auto = (each[name] for name in ("full", "sync", "ahead", "auto"))
    print(
        f"{each['batch']:5} {each['rtt_ms']:4g} | {each['root_only_tokens_per_s']:7.1f} |"
        f" {full['over_root_only']:6.2f} {full['acceptance_length']:4.2f} |"
        f" {sync['over_root_only']:6.2f} {sync['rounds_with_tree']:5.2f} {sync['nodes']:5.1f}"
        f" {sync['acceptance_length']:4.2f} {sync['step_over_verify_p50']:7.2f} |"
        f" {each['colocated']['over_root_only']:7.2f} |"
        f" {ahead['over_root_only']:7.2f} {ahead['rounds_with_tree']:5.2f} {ahead['nodes']:5.1f}"
        f" {_common(ahead)} | {auto['over_root_only']:6.2f} {_common(auto)}",
        flush=True,
    )


def _common(each: dict[str, Any]) -> str:
    hidden = "–" if each["hidden"] is None else f"{each['hidden']:.2f}"
    return (
        f"{each['acceptance_length']:4.2f} {each['step_over_verify_p50']:7.2f}"
        f" {each['step_over_verify_p99']:5.2f} {hidden:>6}"
    )


def report(args: argparse.Namespace) -> dict[str, Any]:
    costs: Costs = (
        PRESETS[args.preset]
        if args.preset
        else plain(args.verify_ms, args.draft_ms, args.knee_rows)
    )
    head = Head(tuple(args.chances), args.surety)
    recorded = None if args.recorded is None else Recording.load(args.recorded)
    if recorded is not None and args.depth > recorded.depth:
        raise StartupError(f"depth: {args.depth}; {args.recorded} has trees of {recorded.depth}")
    if recorded is not None and args.ahead_depth > recorded.ahead_depth:
        raise StartupError(
            f"ahead-depth: {args.ahead_depth}; {args.recorded} has trees ahead of"
            f" {recorded.ahead_depth}"
        )
    print_heading()
    cells = []
    for batch in map(int, args.batch):
        for rtt in args.rtt_ms:
            scenario = Scenario(
                costs=costs, head=head, batch=batch, depth=args.depth, max_nodes=args.max_nodes,
                num_steps=max(args.least_steps, args.rounds // batch), seed=args.seed,
                rtt=rtt * 1e-3, jitter=args.jitter_ms * 1e-3, recorded=recorded,
                ahead_depth=args.ahead_depth, ahead_nodes=args.ahead_nodes,
                ahead_rows=args.ahead_rows,
            )  # fmt: skip
            cells.append(cell(scenario))
            print_cell(cells[-1])
    return {
        "benchmark": "overlap",
        "simulated": True,
        "costs": asdict(costs),
        "head": asdict(head) if recorded is None else None,
        "recorded": None if recorded is None else recorded.facts(),
        "depth": args.depth,
        "max_nodes": args.max_nodes,
        "ahead_depth": args.ahead_depth,
        "ahead_nodes": args.ahead_nodes,
        "ahead_rows": args.ahead_rows,
        "jitter_ms": args.jitter_ms,
        "rounds": args.rounds,
        "seed": args.seed,
        "least_over_root_only": {
            name: min(each[name]["over_root_only"] for each in cells)
            for name in ("full", "sync", "colocated", "ahead", "auto")
        },
        "cells": cells,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    print_report(report(args), args)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.overlap", main))
