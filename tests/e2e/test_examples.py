"""The examples run against the real services, and the e2e answers of choices are their own."""

from __future__ import annotations

import dataclasses
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.lossless import MARGIN, compare
from canopy.client import Client
from canopy.results import Message, Options
from canopy.stack import Stack

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = [Message("user", "Write one line about a harbour town in the rain.")]
SAMPLED = Options(
    max_tokens=24, temperature=0.9, seed=5, ignore_eos=True, token_ids=True, pick_margins=True
)


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_example_runs(stack: Stack, name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), stack.address],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10
    assert "main" in runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_choices_are_one_text_each_with_trees_and_without(
    client: Client, metric: Callable[[str, str], float]
) -> None:
    """Choice 0 is what n = 1 gives; the others are their own, and share the prompt's rows."""
    one = client.generate(QUESTION, SAMPLED)
    found_before = metric("verify", "canopy_verify_prefix_cache_hit_tokens_total")
    three = client.generate_choices(QUESTION, dataclasses.replace(SAMPLED, n=3))
    found = metric("verify", "canopy_verify_prefix_cache_hit_tokens_total") - found_before
    assert found >= 2 * (one.completion.num_prompt_tokens - 1)
    plain = client.generate_choices(QUESTION, dataclasses.replace(SAMPLED, n=3, speculation=False))
    assert len({choice.token_ids for choice in three}) == 3
    pairs = [(three[0], one), *zip(three, plain, strict=True)]
    for ours, theirs in pairs:
        difference = compare(0, "other", ours, theirs.token_ids, theirs.pick_margins)
        assert difference is None or difference.margin < MARGIN, difference
