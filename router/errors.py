"""What can go wrong with a request, as the client is told: a status, its details, a remedy."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ErrorKind(enum.Enum):
    """Names of the gRPC status codes; `status.py` maps them."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a generation ended without a completion.

    `message`: field, value, limit and remedy, or what was lost. `retry_seconds` None: trying again
    will not help.
    """

    kind: ErrorKind
    message: str
    retry_seconds: float | None = None
    field: str = ""


class RequestError(Exception):
    """A request that cannot be served as it stands. `field` is the path in GenerateRequest."""

    def __init__(
        self, field: str, message: str, kind: ErrorKind = ErrorKind.INVALID_ARGUMENT
    ) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.kind = kind

    @property
    def failure(self) -> Failure:
        return Failure(self.kind, str(self), field=self.field)


class GenerationError(Exception):
    """A generation failed; carries what to tell the client."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
