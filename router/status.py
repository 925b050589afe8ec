"""From a RequestError to a gRPC status; BadRequest names the field, RetryInfo the pause."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from router.requests import ErrorKind, RequestError

RETRY_SECONDS = 1.0

_CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorKind.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
}


def to_status(error: RequestError) -> Any:
    """A `grpc.Status` for `context.abort_with_status`."""
    code = _CODES[error.kind]
    status = status_pb2.Status(code=code.value[0], message=str(error))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=str(error)
        )
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.kind in (ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE):
        pause = duration_pb2.Duration()
        pause.FromMilliseconds(int(RETRY_SECONDS * 1000))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=pause))
    return rpc_status.to_status(status)


def _pack(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
