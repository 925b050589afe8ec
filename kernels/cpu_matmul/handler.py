"""The custom call, as LLVM IR: reads XLA's frame and shares the matrix's blocks out among the
threads of XLA's own pool.

The caller and its helpers take the next block from a counter until there is none; the caller then
waits for those in hand. So it needs no helper: one that begins late, or never, has nothing to do.
What they share is freed by the last of them.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from typing import Any

from llvmlite import ir

from kernels.cpu_matmul import ffi_frame as ffi
from kernels.cpu_matmul.emit import (
    F32,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    Fields,
    counting,
    elements,
    floats,
    local,
)
from kernels.cpu_matmul.packing import WIDTH
from kernels.cpu_matmul.tile import Registers, tile_function

HANDLER = "packed_matmul"


class Job(ctypes.Structure):
    """What threads share. `taken` and `done` count blocks, `users` the threads that still may look
    at it."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("taken", "done", "users", "m", "k", "blocks")
    )
    _fields_ += tuple((name, ctypes.c_void_p) for name in ("x", "packed", "out"))


def handler_module(registers: Registers, triple: str, *, int8: bool = False) -> ir.Module:
    """A module whose function `HANDLER` is a handler of XLA's: out [M, blocks · WIDTH] = x [M, K]
    times packed [blocks, K, WIDTH], all float32, or `packed` int8; the caller has checked shapes.
    """
    module = ir.Module(HANDLER)
    module.triple = triple
    block = _block_function(module, registers, I8 if int8 else F32)
    work = _work_function(module, block)
    _handler_function(module, work)
    return module


def _block_function(module: ir.Module, registers: Registers, weight: ir.Type) -> ir.Function:
    """`void(job, number)`: one block's columns of all rows, tile by tile."""
    tiles = [
        tile_function(module, registers, rows, weight) for rows in range(1, registers.rows + 1)
    ]
    function = ir.Function(module, ir.FunctionType(VOID, [PTR, I64]), "block")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    job, number = Fields(builder, Job, function.args[0]), function.args[1]
    m, k, blocks = (job.load(name, kind=I64) for name in ("m", "k", "blocks"))
    x, packed, out = (job.load(name) for name in ("x", "packed", "out"))
    width = builder.mul(blocks, I64(WIDTH))
    first = builder.mul(number, I64(WIDTH))
    block = elements(builder, packed, builder.mul(first, k), weight)
    with counting(builder, I64(0), m, registers.rows) as row:
        rows = _least(builder, builder.sub(m, row), I64(registers.rows))
        place = floats(builder, x, builder.mul(row, k))
        target = floats(builder, out, builder.add(builder.mul(row, width), first))
        after = builder.append_basic_block("after")
        switch = builder.switch(rows, after)
        for count, tile in enumerate(tiles, start=1):
            case = builder.append_basic_block(f"rows_{count}")
            switch.add_case(I64(count), case)
            builder.position_at_end(case)
            builder.call(tile, [place, block, target, k, width])
            builder.branch(after)
        builder.position_at_end(after)
    builder.ret_void()
    return function


def _work_function(module: ir.Module, block: ir.Function) -> ir.Function:
    """`void(job)`: blocks until none is left, then lets go of the job; a helper's whole task."""
    free = ir.Function(module, ir.FunctionType(VOID, [PTR]), "free")
    release = ir.Function(module, ir.FunctionType(VOID, [PTR]), "release")
    release.linkage = "internal"
    builder = ir.IRBuilder(release.append_basic_block())
    users = Fields(builder, Job, release.args[0]).address("users")
    left = builder.atomic_rmw("sub", users, I64(1), "acq_rel")
    with builder.if_then(builder.icmp_signed("==", left, I64(1))):
        builder.call(free, [release.args[0]])
    builder.ret_void()

    share = ir.Function(module, ir.FunctionType(VOID, [PTR]), "share")
    share.linkage = "internal"
    builder = ir.IRBuilder(share.append_basic_block())
    job = Fields(builder, Job, share.args[0])
    blocks = job.load("blocks", kind=I64)
    head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.atomic_rmw("add", job.address("taken"), I64(1), "acq_rel")
    builder.cbranch(builder.icmp_signed("<", number, blocks), body, end)
    builder.position_at_end(body)
    builder.call(block, [share.args[0], number])
    builder.atomic_rmw("add", job.address("done"), I64(1), "acq_rel")
    builder.branch(head)
    builder.position_at_end(end)
    builder.ret_void()

    work = ir.Function(module, ir.FunctionType(VOID, [PTR]), "work")
    builder = ir.IRBuilder(work.append_basic_block())
    builder.call(share, [work.args[0]])
    builder.call(release, [work.args[0]])
    builder.ret_void()
    return work


def _handler_function(module: ir.Module, work: ir.Function) -> None:
    """`error*(frame)`; null: all is well."""
    share, release = (module.get_global(name) for name in ("share", "release"))
    malloc = ir.Function(module, ir.FunctionType(PTR, [I64]), "malloc")
    give_way = ir.Function(module, ir.FunctionType(I32, []), "sched_yield")
    function = ir.Function(module, ir.FunctionType(PTR, [PTR]), HANDLER)
    builder = ir.IRBuilder(function.append_basic_block())
    frame = Fields(builder, ffi.CallFrame, function.args[0])
    null = ir.Constant(PTR, None)
    _answer_version(builder, frame)

    memory = builder.call(malloc, [I64(ctypes.sizeof(Job))])
    job = Fields(builder, Job, memory)
    x, packed = (_buffer(builder, frame, "arguments", number) for number in (0, 1))
    out = _buffer(builder, frame, "results", 0)
    m, k = (_dimension(builder, x, axis) for axis in (0, 1))
    blocks = _dimension(builder, packed, 0)
    numbers = {"m": m, "k": k, "blocks": blocks, "taken": I64(0), "done": I64(0)}
    for name, value in numbers.items():
        job.store(value, name)
    for name, buffer in {"x": x, "packed": packed, "out": out}.items():
        job.store(buffer.load("data"), name)
    helpers = _least(builder, _num_threads(builder, frame), blocks)
    helpers = builder.sub(helpers, I64(1))
    job.store(builder.add(helpers, I64(1)), "users")
    with counting(builder, I64(0), helpers, 1):
        _ask_for_help(builder, frame, work, memory, release)
    builder.call(share, [memory])
    head, wait, end = (builder.append_basic_block(name) for name in ("head", "wait", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    done = builder.load_atomic(job.address("done"), "acquire", 8, typ=I64)
    builder.cbranch(builder.icmp_signed("<", done, blocks), wait, end)
    builder.position_at_end(wait)
    builder.call(give_way, [])
    builder.branch(head)
    builder.position_at_end(end)
    builder.call(release, [memory])
    builder.ret(null)


def _answer_version(builder: ir.IRBuilder, frame: Fields) -> None:
    """When it is registered, a handler is asked for the interface's version that it knows."""
    extension = frame.load("extension")
    with _where_set(builder, extension):
        metadata = Fields(
            builder,
            ffi.Metadata,
            Fields(builder, ffi.MetadataExtension, extension).load("metadata"),
        )
        for name, value in zip(("major", "minor"), ffi.VERSION, strict=True):
            metadata.store(I32(value), "version", name)
        metadata.store(I32(0), "traits")
        builder.ret(ir.Constant(PTR, None))


def _ask_for_help(
    builder: ir.IRBuilder, frame: Fields, work: ir.Function, job: ir.Value, release: ir.Function
) -> None:
    """One more thread on the job; where the pool takes none, its share of the job is let go."""
    context = frame.load("context")
    error = _call(builder, frame, "schedule", ffi.Schedule, context=context, task=work, data=job)
    with _where_set(builder, error):
        _call(builder, frame, "error_destroy", ffi.ErrorDestroy, error=error)
        builder.call(release, [job])


def _num_threads(builder: ir.IRBuilder, frame: Fields) -> ir.Value:
    """Of XLA's pool, 1 where it cannot say."""
    count, context = local(builder, I64), frame.load("context")
    builder.store(I64(1), count)
    error = _call(builder, frame, "num_threads", ffi.NumThreads, context=context, count=count)
    with _where_set(builder, error):
        _call(builder, frame, "error_destroy", ffi.ErrorDestroy, error=error)
    found = builder.load(count, typ=I64)
    return builder.select(builder.icmp_signed(">", found, I64(1)), found, I64(1))


def _call(
    builder: ir.IRBuilder,
    frame: Fields,
    name: str,
    kind: type[ctypes.Structure],
    **fields: ir.Value,
) -> ir.Value:
    """Calls a function of XLA's with arguments of `kind`; what it returns is an error, or null."""
    memory = local(builder, kind)
    arguments = Fields(builder, kind, memory)
    arguments.store(I64(ctypes.sizeof(kind)), "struct_size")
    arguments.store(ir.Constant(PTR, None), "extension")
    for field, value in fields.items():
        arguments.store(value, field)
    return builder.call(_api_function(builder, frame, name), [memory])


def _where_set(builder: ir.IRBuilder, pointer: ir.Value) -> AbstractContextManager[Any]:
    """The block within runs where `pointer` is not null."""
    return builder.if_then(  # type: ignore[no-any-return]
        builder.icmp_unsigned("!=", builder.ptrtoint(pointer, I64), I64(0))
    )


def _api_function(builder: ir.IRBuilder, frame: Fields, name: str) -> ir.Value:
    kind = ir.FunctionType(PTR, [PTR]).as_pointer()
    return Fields(builder, ffi.Api, frame.load("api")).load(name, kind=kind)


def _buffer(builder: ir.IRBuilder, frame: Fields, of: str, number: int) -> Fields:
    items = frame.load(of, "items")
    place = builder.gep(items, [I64(number)], source_etype=PTR)
    return Fields(builder, ffi.Buffer, builder.load(place, typ=PTR))


def _dimension(builder: ir.IRBuilder, buffer: Fields, axis: int) -> ir.Value:
    place = builder.gep(buffer.load("dims"), [I64(axis)], source_etype=I64)
    return builder.load(place, typ=I64)


def _least(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", a, b), a, b)
