"""What `tile` and `handler` write LLVM IR with: types, loops, fields of C structures."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

F32 = ir.FloatType()
I8 = ir.IntType(8)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
PTR = ir.PointerType()
VOID = ir.VoidType()


class Fields:
    """A C structure at `pointer`, read and written by the names of its ctypes twin."""

    def __init__(
        self, builder: ir.IRBuilder, kind: type[ctypes.Structure], pointer: ir.Value
    ) -> None:
        self._builder, self._kind, self._pointer = builder, kind, pointer

    def address(self, *path: str) -> ir.Value:
        """Of a field, through structures that are fields themselves."""
        offset, kind = 0, self._kind
        for name in path:
            offset += getattr(kind, name).offset
            kind = _field_types(kind)[name]
        return at(self._builder, self._pointer, offset)

    def load(self, *path: str, kind: ir.Type = PTR) -> ir.Value:
        return self._builder.load(self.address(*path), typ=kind)

    def store(self, value: ir.Value, *path: str) -> None:
        self._builder.store(value, self.address(*path))


def _field_types(kind: type[ctypes.Structure]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found.update((entry[0], entry[1]) for entry in vars(base).get("_fields_", ()))
    return found


def local(builder: ir.IRBuilder, kind: ir.Type | type[ctypes.Structure]) -> ir.Value:
    """Room on the stack; LLVM turns what fits into registers."""
    if isinstance(kind, type):
        kind = ir.ArrayType(I64, -(-ctypes.sizeof(kind) // 8))
    with builder.goto_entry_block():
        room = builder.alloca(kind)
    room.type = PTR  # llvmlite gives it the old, typed kind of pointer
    return room


def at(builder: ir.IRBuilder, pointer: ir.Value, offset: int) -> ir.Value:
    """`offset` bytes behind a pointer."""
    return builder.gep(pointer, [I64(offset)], source_etype=ir.IntType(8))


def elements(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """`index` elements of `kind` behind a pointer."""
    return builder.gep(pointer, [index], source_etype=kind)


def floats(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
    """`index` floats behind a pointer."""
    return elements(builder, pointer, index, F32)


@contextmanager
def counting(
    builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int
) -> Iterator[ir.Value]:
    """The block within runs for start, start + step, … below stop."""
    counter = local(builder, I64)
    builder.store(start, counter)
    head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.load(counter, typ=I64)
    builder.cbranch(builder.icmp_signed("<", index, stop), body, end)
    builder.position_at_end(body)
    yield index
    builder.store(builder.add(index, I64(step)), counter)
    builder.branch(head)
    builder.position_at_end(end)
