"""What can go wrong when a model is read; each message names the place and the remedy."""

from __future__ import annotations


class ModelError(ValueError):
    """A model directory cannot be served as it is. The message is one line for the operator."""


class CheckpointError(ModelError):
    """A weight file is missing, truncated or does not hold what the model needs."""


class UnsupportedModelError(ModelError):
    """The model asks for something that is not built; the message names that feature."""


class FetchError(ModelError):
    """A model could not be downloaded or converted."""
