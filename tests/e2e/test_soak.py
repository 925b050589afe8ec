"""`benchmarks.soak`, small: every random request ends as it should and nothing is left behind."""

from __future__ import annotations

import pytest

from benchmarks import soak
from canopy.client import Client
from canopy.stack import Stack

pytestmark = pytest.mark.e2e


def test_random_requests_are_all_answered_and_leave_nothing(stack: Stack, client: Client) -> None:
    arguments = soak.parse(["--requests", "40", "--streams", "8", "--max-prompt-tokens", "200",
                            "--max-tokens", "12"])  # fmt: skip
    addresses = {name: child.metrics_address for name, child in stack.children.items()}
    result = soak.soak(client, addresses, arguments)
    assert soak.is_well(result), result
    assert result["answered"] + result["left"] + result["past_deadline"] + result["refused"] == 40
    assert result["answered"] > 20
    assert result["prefix_cache_hit_tokens"] > 0
