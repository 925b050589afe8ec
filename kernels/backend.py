"""How a device operation is carried out; always said by the caller, never guessed."""

from __future__ import annotations

import enum


class Backend(enum.Enum):
    """`XLA`: plain jax.numpy, for CPU and GPU. `PALLAS`: the TPU kernel. `INTERPRET`: the TPU
    kernel in Pallas' TPU interpret mode on the CPU, for tests."""

    XLA = "xla"
    PALLAS = "pallas"
    INTERPRET = "interpret"

    @property
    def uses_kernel(self) -> bool:
        """Whether the Pallas kernel runs, compiled or interpreted; such a call names its chip."""
        return self is not Backend.XLA


def backend_for_platform(platform: str) -> Backend:
    """The backend of a jax platform name; for engines that read their platform from config.

    Raises ValueError for a platform that none of our backends serves.
    """
    known = {"cpu": Backend.XLA, "gpu": Backend.XLA, "cuda": Backend.XLA, "tpu": Backend.PALLAS}
    if platform not in known:
        raise ValueError(f"platform: {platform!r} is none of {', '.join(sorted(known))}")
    return known[platform]
