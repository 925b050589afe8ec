"""The inner loop, as LLVM IR: a few rows of x times one packed block of a matrix, in registers.

y[i, j] = Σ_k x[i, k] · w[k, j], added up in the order of k: whatever tile a row falls into, and
however many rows a call has, it gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from kernels.cpu_matmul.emit import F32, I32, I64, PTR, VOID, counting, elements, floats, local
from kernels.cpu_matmul.packing import WIDTH


@dataclass(frozen=True, slots=True)
class Registers:
    """What a CPU multiplies with: float32 lanes of a register, and the most rows of x whose sums
    stay in registers beside the operands."""

    lanes: int
    rows: int


AVX512 = Registers(lanes=16, rows=8)  # 24 of 32 registers hold sums
AVX2 = Registers(lanes=8, rows=2)  # 12 of 16


def tile_function(
    module: ir.Module, registers: Registers, rows: int, weight: ir.Type
) -> ir.Function:
    """`void(x, block, out, k, n)`: out [rows, WIDTH] = x [rows, k] @ block [k, WIDTH]; rows of out
    are n floats apart. `weight`: of a block's elements, F32 or I8, which is exact in float32.
    """
    kind = ir.FunctionType(VOID, [PTR, PTR, PTR, I64, I64])
    function = ir.Function(module, kind, f"tile_{rows}")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    x, block, out, size, stride = function.args
    lanes = registers.lanes
    vector = ir.VectorType(F32, lanes)
    fma_type = ir.FunctionType(vector, [vector] * 3)
    fma = module.declare_intrinsic(f"llvm.fma.v{lanes}f32", (), fma_type)
    places = [(row, part) for row in range(rows) for part in range(WIDTH // lanes)]
    sums = {place: local(builder, vector) for place in places}
    for place in places:
        builder.store(ir.Constant(vector, None), sums[place])

    with counting(builder, I64(0), size, 1) as k:
        line = elements(builder, block, builder.mul(k, I64(WIDTH)), weight)
        weights = [
            _as_floats(builder, elements(builder, line, I64(part * lanes), weight), weight, lanes)
            for part in range(WIDTH // lanes)
        ]
        for row in range(rows):
            index = builder.add(builder.mul(size, I64(row)), k)
            factor = _spread(builder, builder.load(floats(builder, x, index), typ=F32), lanes)
            for part, weight in enumerate(weights):
                place = sums[row, part]
                value = builder.call(fma, [factor, weight, builder.load(place, typ=vector)])
                builder.store(value, place)
    for row, part in places:
        index = builder.add(builder.mul(stride, I64(row)), I64(part * lanes))
        value = builder.load(sums[row, part], typ=vector)
        builder.store(value, floats(builder, out, index), align=4)
    builder.ret_void()
    return function


def _as_floats(builder: ir.IRBuilder, place: ir.Value, weight: ir.Type, lanes: int) -> ir.Value:
    align = 4 if weight == F32 else 1
    loaded = builder.load(place, typ=ir.VectorType(weight, lanes), align=align)
    if weight == F32:
        return loaded
    wide = builder.sext(loaded, ir.VectorType(I32, lanes))
    return builder.sitofp(wide, ir.VectorType(F32, lanes))


def _spread(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(F32, lanes)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    first = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), first)
