"""What can go wrong when a model is read; each message names the place and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import StartupError


class ModelError(ValueError):
    """A model directory cannot be served as it is. The message is one line for the operator."""


class CheckpointError(ModelError):
    """A weight file is missing, truncated or does not hold what the model needs."""


class UnsupportedModelError(ModelError):
    """The model asks for something that is not built; the message names that feature."""


class FetchError(ModelError):
    """A model could not be downloaded or converted."""


@contextmanager
def of_setting(field: str) -> Iterator[None]:
    """A ModelError within is the fault of this setting: raises StartupError that begins with it."""
    try:
        yield
    except ModelError as error:
        named = str(error).startswith(f"{field}: ")
        raise StartupError(str(error) if named else f"{field}: {error}") from error
