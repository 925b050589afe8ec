"""From prompts to a head that serves: the commands of docs/training.md on the smoke recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.eagle3.loader import load_head

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heads]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "draft_service" / "training" / "recipes" / "smoke.yaml"
SUBJECTS = ("rivers", "bread", "chess", "copper", "whales", "maps", "clocks", "rain")
QUESTIONS = ("What are {}?", "Write a short poem about {}.", "Why do people like {}?")


def canopy(*arguments: str, directory: Path) -> list[dict[str, object]]:
    """The command's JSON lines."""
    done = subprocess.run(
        [sys.executable, "-m", "canopy", *arguments],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(1800)
def test_prompts_become_a_head_that_loads(model: Path, tmp_path: Path) -> None:
    prompts = [q.format(s) for s in SUBJECTS for q in QUESTIONS]
    lines = [json.dumps({"id": i, "prompt": p}) for i, p in enumerate(prompts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    generate = ("head", "generate-data", "--target", str(model), "--prompts", "prompts.jsonl",
                "--output", "responses.jsonl", "--max-tokens", "64", "--batch", "24")  # fmt: skip
    assert canopy(*generate, directory=tmp_path)[-1]["responses"] == len(prompts)
    assert canopy(*generate, directory=tmp_path) == []  # all there: nothing is generated twice
    rows = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert {row["id"] for row in rows} == set(range(len(prompts)))

    train = ("head", "train", "--recipe", str(RECIPE), "--set", f"target={model}")
    canopy(*train, "--max-steps", "8", directory=tmp_path)
    reports = canopy(*train, directory=tmp_path)
    assert any(entry.get("finished") is True for entry in reports)
    log = (tmp_path / "runs" / "smoke" / "log.jsonl").read_text().splitlines()
    losses = [entry["loss"][0] for entry in map(json.loads, log) if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]

    config, params = load_head(tmp_path / "runs" / "smoke" / "head", model)
    assert config.draft_vocab_size == 2048
    assert config.boundaries == (2, 15, 27)
    assert np.isfinite(np.asarray(params["fuse"]["fc"]["kernel"])).all()
