"""jax as both engine services use it: the device, promotions, where programs are kept, and the
hosts whose devices together make one mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax

from common.device_config import DeviceConfig
from common.errors import StartupError

_JOIN_SECONDS = 300
_HEARTBEAT_SECONDS = 100

MAX_COMPILES = 4
"""At a time; each holds a program's whole intermediate form, which for many layers is large."""

Bucket = TypeVar("Bucket")


def set_up_jax(config: DeviceConfig) -> None:
    """Chooses the platform and the directory for compiled programs, and joins the other hosts of a
    slice, each of which must call this.

    To be called before any array is made. Raises StartupError naming the setting and the remedy.
    """
    update: Any = jax.config.update
    update("jax_platforms", {"gpu": "cuda"}.get(config.platform, config.platform))
    update("jax_numpy_dtype_promotion", "strict")
    if config.compile_cache:
        directory = Path(config.compile_cache).expanduser()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(
                f"compile_cache: {directory} cannot be made ({error}); choose another directory or"
                " set it to nothing"
            ) from error
        update("jax_compilation_cache_dir", str(directory))
    else:
        update("jax_enable_compilation_cache", False)
    if config.num_hosts > 1:
        _join_hosts(config)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where jax knows no such platform
        reason = (str(error).splitlines() or ["not installed"])[0]
        raise StartupError(
            f"platform: no {config.platform} device ({reason}); set --platform cpu, or"
            " install what the device needs (for a TPU: pip install 'canopy-spec[tpu]')"
        ) from error


def compile_all(
    compile_one: Callable[[Bucket], object],
    buckets: Sequence[Bucket],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Calls `compile_one` for every bucket, on as many threads as there are cores: the compiler
    does not hold Python's lock, and one program is traced while others are compiled.

    `progress` gets the number of those done, in their order, and of all. Raises what the first
    call that failed has raised; those not begun are left out then.
    """
    num_threads = min(MAX_COMPILES, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool:
        for done, _ in enumerate(pool.map(compile_one, buckets), start=1):
            if progress is not None:
                progress(done, len(buckets))


def leave_hosts() -> None:
    """Takes this process's devices out of the group, before the leader and its coordinator go."""
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


def _join_hosts(config: DeviceConfig) -> None:
    """jax's own coordinator is on the leader, one port above the group's."""
    update: Any = jax.config.update
    update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    # Without it jax aborts every process as soon as one is gone; common/group ends them in order.
    update("jax_enable_recoverability", True)
    host, port = config.group_address
    shown = f"[{host}]" if ":" in host else host
    local = host in ("localhost", "127.0.0.1", "::1")
    try:
        jax.distributed.initialize(
            f"{shown}:{port + 1}",
            config.num_hosts,
            config.host_id,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{shown}:{port + 1}" if local else None,
            initialization_timeout=_JOIN_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except RuntimeError as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise StartupError(
            f"coordinator_address: jax's coordinator on port {port + 1} of {host} does not answer"
            f" ({reason}); let the hosts of the slice reach that port"
        ) from error
