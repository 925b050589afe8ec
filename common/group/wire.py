"""What the hosts of a slice say to each other, as frames on a TCP connection.

A frame is uint32 size (of all that follows), uint8 kind, body; little-endian. Bodies are empty,
text, JSON, or (DO) an operation: its name and its arrays, raw, each with dtype and shape before it.
"""

from __future__ import annotations

import enum
import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_FRAME_BYTES = 1 << 30
"""A frame that claims to be larger is no frame of ours."""

Array = npt.NDArray[Any]

_HEADER = struct.Struct("<IB")
_DTYPES = ("<i4", "<u4", "<f4", "|u1")


class Kind(enum.IntEnum):
    """Who says it, and what the body is."""

    HELLO = 1  # follower: JSON of what must agree
    WELCOME = 2  # leader
    REFUSED = 3  # leader: text, why
    READY = 4  # follower: JSON of what was loaded; its programs are compiled
    DO = 5  # leader: an operation, to be done in the order in which they come
    PING = 6  # leader
    PONG = 7  # follower
    DRAIN = 8  # follower: was asked to stop; the leader drains for all
    END = 9  # leader: over, in peace
    FAILED = 10  # either: text, why


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that every host's engine does at the same place of the sequence."""

    name: str
    arrays: tuple[Array, ...]


class WireError(Exception):
    """The bytes are no frame of ours."""


def frame(kind: Kind, body: bytes = b"") -> bytes:
    return _HEADER.pack(len(body) + 1, kind) + body


def json_frame(kind: Kind, value: Mapping[str, Any]) -> bytes:
    return frame(kind, json.dumps(value, sort_keys=True).encode())


def operation_frame(name: str, arrays: Sequence[Array]) -> bytes:
    """Raises ValueError for a dtype that does not travel."""
    parts = [bytes([len(name)]), name.encode("ascii"), bytes([len(arrays)])]
    for array in arrays:
        if array.dtype.str not in _DTYPES:
            raise ValueError(f"{name}: an array of dtype {array.dtype}; must be one of {_DTYPES}")
        code = _DTYPES.index(array.dtype.str)
        parts.append(struct.pack(f"<BB{array.ndim}I", code, array.ndim, *array.shape))
        parts.append(array.tobytes())
    return frame(Kind.DO, b"".join(parts))


def read_frame(stream: BufferedReader) -> tuple[Kind, bytes]:
    """The next frame. Raises EOFError at the end, OSError, or WireError."""
    size, kind = _HEADER.unpack(_exactly(stream, _HEADER.size))
    if not 1 <= size <= MAX_FRAME_BYTES or kind not in _KINDS:
        raise WireError("bytes that are no frame of a slice's hosts")
    return Kind(kind), _exactly(stream, size - 1)


def read_json(body: bytes) -> dict[str, Any]:
    """Raises WireError."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise WireError("a body that is no JSON") from error
    if not isinstance(value, dict):
        raise WireError("a body that is no JSON object")
    return value


def read_operation(body: bytes) -> Operation:
    """Raises WireError."""
    try:
        end = 1 + body[0]
        name = body[1:end].decode("ascii")
        arrays: list[Array] = []
        at = end + 1
        for _ in range(body[end]):
            dtype, ndim = np.dtype(_DTYPES[body[at]]), body[at + 1]
            shape = struct.unpack_from(f"<{ndim}I", body, at + 2)
            at += 2 + 4 * ndim
            count = math.prod(shape)
            arrays.append(np.frombuffer(body, dtype, count, at).reshape(shape))
            at += count * dtype.itemsize
    except (IndexError, ValueError, struct.error) as error:
        raise WireError("an operation that cannot be read") from error
    return Operation(name, tuple(arrays))


def tune(connection: socket.socket, silence_seconds: float) -> BufferedReader:
    """Small frames leave at once, a silent end is an error; returns the side to read from."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(silence_seconds)
    return connection.makefile("rb")


def _exactly(stream: BufferedReader, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the connection was closed")
    return data
