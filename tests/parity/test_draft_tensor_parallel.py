"""A head split over forced host devices grows one device's trees."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from draft_tiny import tiny_head

from models.errors import ModelError

TESTS = Path(__file__).parents[1]

CASES = {2: "two layers", 4: "odd vocabulary", 8: "odd vocabulary, int8"}
"""8 heads, 2 KV heads (so that 4 and 8 devices hold each several times); a vocabulary of 39 tokens
ends in padding."""


@pytest.mark.timeout(900)  # as many devices as chips, on two cores
@pytest.mark.parametrize("num_devices", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_split_head_grows_the_trees_of_one_device(num_devices: int) -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "parity" / "draft_tensor_parallel.py"), CASES[num_devices]],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "parity")]),
        },
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["trees"] == result["same"] == 6, result
    assert min(result["nodes"]) > 20
    assert result["scores"] < 1e-4, result
    assert len(result["pages"]) == num_devices
    assert all(shape[2] == 1 for shape in result["pages"]), "a KV head a device"
    assert ("int8" in result["dtypes"]) == (num_devices == 8)
    assert result["kernels"]["q"] == [128, 64 // num_devices]


@pytest.mark.parametrize(
    ("num_shards", "what"), [(3, "attention heads"), (5, "attention heads"), (16, "MLP width")]
)
def test_numbers_of_chips_that_do_not_divide_a_head_are_refused(num_shards: int, what: str) -> None:
    head, _ = tiny_head(0)
    attention = dataclasses.replace(head.attention, num_heads=16)
    head = dataclasses.replace(head, attention=attention, mlp_size=40)
    with pytest.raises(ModelError, match=rf"tensor_parallel: {num_shards} chips .* head's {what}"):
        head.with_shards(num_shards)
