"""A target split over forced host devices gives one device's tokens, up to near ties."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import load_golden

from models.config import read_target_config
from models.errors import ModelError

TESTS = Path(__file__).parents[1]
MAX_MARGIN = 1e-3

CASES = {2: ["qwen2"], 4: ["qwen3_moe_some_dense"], 8: ["eight_heads"]}
"""All have 2 KV heads, so that 4 devices hold each twice and 8 four times; the vocabularies, 61 and
260, end in padding."""


@pytest.mark.timeout(900)  # as many devices as chips, on two cores
@pytest.mark.parametrize("num_devices", CASES)
def test_split_target_gives_the_tokens_of_one_device(num_devices: int) -> None:
    names = CASES[num_devices]
    done = subprocess.run(
        [sys.executable, str(TESTS / "parity" / "tensor_parallel.py"), *names],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        },
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["name"] for result in results] == names
    for result in results:
        assert max([*result["roots"], *result["trees"], 0.0]) < MAX_MARGIN, result
        assert result["trees_accepted"] > 20, result
        assert max(result["roots_features"], result["trees_features"]) < 1e-4, result
        assert max(result["roots_logprobs"], result["trees_logprobs"]) < 1e-4, result
        if result["name"] == "qwen2":
            assert max(result["ahead"], default=0.0) < MAX_MARGIN, result
            assert result["ahead_accepted"] > 10, result
        assert len(result["pages"]) == num_devices
        assert all(shape[2] == 1 for shape in result["pages"]), "a KV head a device"


@pytest.mark.parametrize(("num_shards", "field"), [(3, "heads"), (16, "heads"), (0, "heads")])
def test_numbers_of_chips_that_do_not_divide_are_refused(
    num_shards: int, field: str, tmp_path: Path
) -> None:
    raw, _, _ = load_golden("llama_untied")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_target_config(tmp_path, boundaries=[])
    with pytest.raises(ModelError, match=rf"tensor_parallel: {num_shards} chips .*{field}"):
        config.with_shards(num_shards)
