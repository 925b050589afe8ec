"""jax as both engine services use it: the device, promotions, where programs are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from common.errors import StartupError


def set_up_jax(platform: str, compile_cache: str) -> None:
    """Chooses `platform` ("cpu", "gpu" or "tpu") and a directory for compiled programs ("": none).

    To be called before any array is made. Raises StartupError naming the setting and the remedy.
    """
    update: Any = jax.config.update
    update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    update("jax_numpy_dtype_promotion", "strict")
    if compile_cache:
        directory = Path(compile_cache).expanduser()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(
                f"compile_cache: {directory} cannot be made ({error}); choose another directory or"
                " set it to nothing"
            ) from error
        update("jax_compilation_cache_dir", str(directory))
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where jax knows no such platform
        reason = (str(error).splitlines() or ["not installed"])[0]
        raise StartupError(
            f"platform: no {platform} device ({reason}); set --platform cpu"
        ) from error
