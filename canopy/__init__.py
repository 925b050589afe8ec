"""Canopy's public face: `Client`, `AsyncClient` and their values; the `canopy` command; the stubs.

Names are loaded when first used, so that importing the stubs (`canopy.v1`) brings nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canopy.client import AsyncClient, Client, Retry
    from canopy.results import (
        CanopyError,
        Chunk,
        Completion,
        FinishReason,
        Generation,
        Message,
        Options,
        Round,
    )

__all__ = [
    "AsyncClient",
    "CanopyError",
    "Chunk",
    "Client",
    "Completion",
    "FinishReason",
    "Generation",
    "Message",
    "Options",
    "Retry",
    "Round",
]

_IN_CLIENT = {"AsyncClient", "Client", "Retry"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'canopy' has no attribute {name!r}")
    module = "canopy.client" if name in _IN_CLIENT else "canopy.results"
    return getattr(importlib.import_module(module), name)
