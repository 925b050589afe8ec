"""The ops inside `shard_map`, on 2 and 4 devices of the host: same results as on one.

Sampling, its options and log-probabilities over a split vocabulary; attention and commit over split
KV heads, the interpreted kernel among them. That no collective carries logits is asserted on the
compiled programs in `tests/aot`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.mark.parametrize("num_devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_ops_equal_the_whole_ones(num_devices: int) -> None:
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "split_programs.py")],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            # Threads of the CPU client: interpreted kernels of two devices wait for each other, and
            # as many threads as a small machine has cores are not enough for that.
            "NPROC": "8",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
