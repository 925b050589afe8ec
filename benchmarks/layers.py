"""What do more head layers bring? Heads of several depths, the same data and the same steps.

    python -m benchmarks.layers --recipe RECIPE --variants 1A,2A,2B,3B --suite mt_bench=FILE \\
        --output runs/layers --set optimiser.total_steps=400

A variant is a number of layers and a convention: A feeds [embedding, hidden] to every layer, B to
the first alone. `1Ax1.5` is trained for one and a half times the recipe's steps: what one layer
makes of the time that more layers take. Each is trained by the same recipe (`canopy head train`),
one after another, so that batches, order and schedule are equal; then its trees are replayed on the
target's own greedy answers (`canopy head check`). With `head.init_from` in the recipe every variant
starts from that head, the added layers as the identity. A variant whose run has ended is not
trained again. Beside acceptance stand the time of a training step, and of growing one tree, all
variants in turn; both of this machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from benchmarks.serving import print_report
from common.entry import run_program
from common.errors import StartupError
from common.types import TreeShape
from draft_service.step import SequenceWork
from draft_service.training.check import CheckSettings, check_head
from draft_service.training.recipe import Recipe, load_recipe
from draft_service.training.replay import make_engine
from draft_service.training.run import train
from models.eagle3 import load_head
from models.errors import ModelError

FUSIONS = {"A": "every", "B": "first"}
TIMED_TREES = 30


def variant_recipe(arguments: argparse.Namespace, variant: str) -> Recipe:
    """The common recipe with the variant's layers, in a directory of its own."""
    overrides: dict[str, object] = {}
    for item in arguments.set:
        field, equals, value = item.partition("=")
        if not equals:
            raise StartupError(f"--set: {item!r} must be FIELD=VALUE")
        overrides[field] = yaml.safe_load(value)
    layers, _, times = variant.partition("x")
    overrides["head.num_layers"] = int(layers[:-1])
    overrides["head.fusion"] = FUSIONS[layers[-1]]
    overrides["output"] = str(arguments.output / variant)
    recipe = load_recipe(arguments.recipe, overrides)
    if times:
        overrides["optimiser.total_steps"] = round(recipe.optimiser.total_steps * float(times))
        recipe = load_recipe(arguments.recipe, overrides)
    return recipe


def tree_shape(arguments: argparse.Namespace) -> TreeShape:
    return TreeShape(max_depth=arguments.max_depth, top_k=4, max_nodes=arguments.max_nodes)


def measure(arguments: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Trains one variant, if that was not done, and measures it."""
    recipe = variant_recipe(arguments, variant)
    head = train(recipe)
    log = [json.loads(line) for line in (recipe.output / "log.jsonl").read_text().splitlines()]
    trained = [entry for entry in log if "loss" in entry]
    suites = {}
    for suite in arguments.suite:
        name, equals, path = suite.partition("=")
        if not equals:
            raise StartupError(f"--suite: {suite!r} must be NAME=FILE")
        settings = CheckSettings(
            model=recipe.target,
            head=head,
            prompts=Path(path),
            limit=arguments.limit,
            max_tokens=arguments.max_tokens,
            tree=tree_shape(arguments),
        )
        found = check_head(settings, lambda line: print(line, file=sys.stderr, flush=True))
        suites[name] = {
            "acceptance_length": found.readings[0].acceptance_length,
            "rounds": found.readings[0].rounds,
            "per_depth": found.readings[0].per_depth,
        }
    return {
        "parameters": _num_parameters(head, recipe.target),
        "steps": trained[-1]["step"],
        "training_seconds": trained[-1]["seconds"],
        "loss": trained[-1]["loss"],
        "validation": [e for e in log if "validation" in e][-1]["validation"],
        "suites": suites,
    }


def tree_milliseconds(heads: Sequence[Path], target: Path, tree: TreeShape) -> list[float]:
    """Median time of a step that takes one new pair and grows a tree; the heads in turn."""
    loaded = [load_head(directory, target) for directory in heads]
    engines = [make_engine(head, params, tree, 256) for head, params in loaded]
    pages = np.arange(engines[0].config.pages_per_sequence, dtype=np.int32)
    seconds = np.zeros((TIMED_TREES, len(heads)))
    for position in range(TIMED_TREES):
        for number, (engine, (head, _)) in enumerate(zip(engines, loaded, strict=True)):
            work = SequenceWork(
                sequence_id=b"",
                tokens=np.array([position], np.int32),
                features=np.ones((1, head.feature_size), head.dtype),
                kv_len=position,
                page_ids=pages,
                drafts=True,
            )
            started = time.monotonic()
            engine.run([work])
            seconds[position, number] = time.monotonic() - started
    medians = np.median(seconds[5:], axis=0) * 1e3  # the first ones compile and warm up
    return [round(float(median), 2) for median in medians]


def _num_parameters(head: Path, target: Path) -> int:
    """Of the layers, fc and the norm: tables are frozen."""
    _, params = load_head(head, target)
    tables = ("embedding", "lm_head", "draft_to_target")
    own = {name: value for name, value in params.items() if name not in tables}
    return sum(int(leaf.size) for leaf in jax.tree.leaves(own))


def parse_variants(text: str) -> list[str]:
    """Raises StartupError for what is not a number of layers and a convention."""
    variants = text.split(",")
    for variant in variants:
        if not re.fullmatch(r"[1-8][AB](x[0-9]+(\.[0-9]+)?)?", variant):
            raise StartupError(
                f"--variants: {variant!r} must be 1A to 8A or 1B to 8B, and may end in xSTEPS, a"
                " multiple of the recipe's steps"
            )
    return variants


def run(arguments: argparse.Namespace) -> int:
    cores = len(os.sched_getaffinity(0))
    jax.config.update("jax_num_cpu_devices", cores)  # type: ignore[no-untyped-call]
    variants = parse_variants(arguments.variants)
    try:
        figures = {variant: measure(arguments, variant) for variant in variants}
        recipes = [variant_recipe(arguments, variant) for variant in variants]
        heads = [recipe.output / "head" for recipe in recipes]
        times = tree_milliseconds(heads, recipes[0].target, tree_shape(arguments))
        for found, milliseconds in zip(figures.values(), times, strict=True):
            found["tree_milliseconds"] = milliseconds
    except (ModelError, ValueError, OSError) as error:
        raise StartupError(str(error)) from error
    arguments.output.mkdir(parents=True, exist_ok=True)
    result: dict[str, object] = {"benchmark": "layers", "variants": figures}
    (arguments.output / "layers.json").write_text(json.dumps(result, indent=1) + "\n")
    for variant, found in figures.items():
        lengths = "  ".join(f"{n} {s['acceptance_length']}" for n, s in found["suites"].items())
        print(f"{variant}: {lengths}  tree {found['tree_milliseconds']} ms")
    print_report(result, arguments)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.layers", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="common to all variants")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--variants", default="1A,2A,2B,3A,3B", help="[%(default)s]")
    parser.add_argument("--suite", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--output", type=Path, required=True, help="directory for runs and figures")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer [%(default)s]")
    parser.add_argument("--max-nodes", type=int, default=16, help="of a tree [%(default)s]")
    parser.add_argument("--max-depth", type=int, default=5, help="of a tree [%(default)s]")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.layers", main))
