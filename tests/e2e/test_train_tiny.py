"""From prompts to a head that drafts, in seconds: every command of docs/training.md on a target of
random weights. `test_train_smoke.py` does the same with the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.tiny_models import write_tiny_target

pytestmark = [pytest.mark.e2e, pytest.mark.heads]

ROOT = Path(__file__).parents[2]
RECIPE = """
target: target
output: run
head: {draft_vocab_size: 128}
data: {responses: responses.jsonl, cache: cache, num_validation: 2, batch_tokens: 256}
optimiser: {learning_rate: 1.0e-2, warmup_steps: 2, total_steps: 40, num_test_steps: 2}
validate_every_steps: 1000
validation_steps: 2
log_every_steps: 5
"""


def canopy(*arguments: str, directory: Path) -> list[dict[str, Any]]:
    """The JSON lines of `canopy head`."""
    lines = run("canopy.cli", "head", *arguments, directory=directory)
    return [json.loads(line) for line in lines]


def run(module: str, *arguments: str, directory: Path) -> list[str]:
    """The module's lines. Compiled programs are kept: a resumed run need not compile."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(directory / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def write_prompts(directory: Path) -> None:
    lines = [json.dumps({"id": i, "prompt": f"Count from {i}!"}) for i in range(8)]
    (directory / "prompts.jsonl").write_text("\n".join(lines))


def test_prompts_become_a_head_that_drafts(tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "target")
    write_prompts(tmp_path)
    generate = ("generate-data", "--target", "target", "--prompts", "prompts.jsonl",
                "--output", "responses.jsonl", "--max-tokens", "40", "--batch", "4")  # fmt: skip
    assert canopy(*generate, "--limit", "5", directory=tmp_path)[-1]["responses"] == 5
    assert canopy(*generate, directory=tmp_path)[-1]["responses"] == 3  # those that were missing
    rows = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == list(range(8))

    (tmp_path / "recipe.yaml").write_text(RECIPE)
    train = ("train", "--recipe", "recipe.yaml")
    cut = canopy(*train, "--max-steps", "12", directory=tmp_path)
    assert cut[-2]["step"] == 12
    assert cut[-2]["finished"] is False
    whole = canopy(*train, directory=tmp_path)
    assert whole[-2]["step"] == 40
    assert whole[-2]["finished"] is True
    steps = [entry["step"] for entry in whole if "loss" in entry]
    assert steps[0] == 15  # it went on, and did not begin anew
    first, last = (next(e for e in run if "loss" in e)["loss"] for run in (cut, whole[::-1]))
    assert all(after < before for before, after in zip(first, last, strict=True))

    head = whole[-1]["head"]
    report = canopy("inspect", head, "--target", "target", "--json", directory=tmp_path)[0]
    assert report["fits"] is True
    assert report["description"]["boundaries"] == [2, 4, 5]
    check = ("check", "--model", "target", "--prompts", "responses.jsonl", "--json", "--head")
    trained = canopy(*check, head, directory=tmp_path)[0]["readings"][0]
    canopy(*train, "--set", "output=fresh", "--max-steps", "0", directory=tmp_path)
    fresh = canopy(*check, "fresh/head", directory=tmp_path)[0]["readings"][0]
    assert trained["acceptance_length"] > fresh["acceptance_length"] + 0.5


@pytest.mark.slow
def test_layers_of_both_conventions_are_trained_and_measured_alike(tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "target")
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 200, 30).tolist() for _ in range(6)]
    answers = [json.dumps({"prompt_ids": row[:6], "response_ids": row[6:]}) for row in rows]
    (tmp_path / "responses.jsonl").write_text("\n".join(answers))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    lines = run(
        "benchmarks.layers", "--recipe", "recipe.yaml", "--set", "optimiser.total_steps=5",
        "--variants", "1A,2B,1Ax1.6", "--suite", "own=responses.jsonl", "--limit", "2",
        "--output", "layers", directory=tmp_path,
    )  # fmt: skip
    result = json.loads(lines[-1])
    one, two = result["variants"]["1A"], result["variants"]["2B"]
    assert result["variants"]["1Ax1.6"]["steps"] == 8
    assert one["steps"] == two["steps"] == 5
    assert two["parameters"] > one["parameters"]
    for found in (one, two):
        assert found["suites"]["own"]["rounds"] > 0
        assert found["suites"]["own"]["acceptance_length"] >= 1.0
        assert found["tree_milliseconds"] > 0
    assert json.loads((tmp_path / "layers" / "layers.json").read_text()) == result
