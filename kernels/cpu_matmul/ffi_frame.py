"""The few structures of XLA's C interface for custom calls that the program reads, and how one is
registered.

As in `jaxlib/include/xla/ffi/api/c_api.h`, version 0.3 (public, stable within a major version);
XLA itself compares versions when a handler is registered, and refuses another major one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

VERSION = (0, 3)


Layout = Sequence[tuple[str, Any]]


class _Struct(ctypes.Structure):
    """All of them begin so."""

    _fields_: ClassVar[Layout] = (("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class Version(_Struct):
    _fields_: ClassVar[Layout] = (("major", ctypes.c_int32), ("minor", ctypes.c_int32))


class Metadata(ctypes.Structure):
    _fields_: ClassVar[Layout] = (
        ("struct_size", ctypes.c_size_t),
        ("version", Version),
        ("traits", ctypes.c_uint32),
        ("state_type", ctypes.c_int64),
    )


class MetadataExtension(ctypes.Structure):
    """What XLA hangs on a call that asks for a handler's version instead of running it."""

    _fields_: ClassVar[Layout] = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    )


class Buffers(_Struct):
    """Arguments, or results: `items` points to `size` pointers to `Buffer`s."""

    _fields_: ClassVar[Layout] = (
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
    )


class Buffer(_Struct):
    _fields_: ClassVar[Layout] = (
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_void_p),
    )


class CallFrame(_Struct):
    _fields_: ClassVar[Layout] = (
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int32),
        ("arguments", Buffers),
        ("results", Buffers),
    )


class Api(_Struct):
    """The functions that XLA offers a handler; those before `error_destroy` and after
    `num_threads` are not used here."""

    _fields_: ClassVar[Layout] = (
        ("version", Version),
        ("internal", ctypes.c_void_p),
        ("unused_errors", ctypes.c_void_p * 2),
        ("error_destroy", ctypes.c_void_p),
        ("unused_others", ctypes.c_void_p * 8),
        ("schedule", ctypes.c_void_p),
        ("num_threads", ctypes.c_void_p),
    )


class ErrorDestroy(_Struct):
    _fields_: ClassVar[Layout] = (("error", ctypes.c_void_p),)


class Schedule(_Struct):
    """Asks for a task on XLA's own pool of threads."""

    _fields_: ClassVar[Layout] = (
        ("context", ctypes.c_void_p),
        ("task", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    )


class NumThreads(_Struct):
    _fields_: ClassVar[Layout] = (("context", ctypes.c_void_p), ("count", ctypes.c_void_p))


def register(name: str, address: int) -> None:
    """Makes the handler at `address` known to jax as `name`, for the CPU.

    Raises whatever jax raises, for instance where its interface has another major version.
    """
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, new(address, None, None), platform="cpu")
