"""Failures as gRPC statuses with google.rpc details (BadRequest, RetryInfo)."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

from router.errors import ErrorKind, Failure

DETAILS_KEY = "grpc-status-details-bin"
"""Where every gRPC library looks for google.rpc.Status."""


async def abort(context: grpc.aio.ServicerContext[Any, Any], failure: Failure) -> NoReturn:
    """Ends the call with the failure's status."""
    code = grpc.StatusCode[failure.kind.name]
    status = status_pb2.Status(code=code.value[0], message=failure.message)
    status.details.extend(_details(failure))
    trailer = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code, failure.message, trailing_metadata=trailer)


def _details(failure: Failure) -> list[any_pb2.Any]:
    details: list[message.Message] = []
    if failure.kind is ErrorKind.INVALID_ARGUMENT and failure.field:
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=failure.field, description=failure.message
                    )
                ]
            )
        )
    if failure.retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(failure.retry_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return packed
