"""Compiles the custom call for this machine's CPU and registers it; needs llvmlite."""

from __future__ import annotations

import llvmlite.binding as llvm

from kernels.cpu_matmul.ffi_frame import register
from kernels.cpu_matmul.handler import HANDLER, handler_module
from kernels.cpu_matmul.tile import AVX2, AVX512, Registers

_compiled: list[object] = []  # code lives as long as its engine does


def host_registers(features: dict[str, bool]) -> Registers:
    """Raises RuntimeError for a CPU that has neither AVX-512 nor AVX2."""
    if features.get("avx512f"):
        return AVX512
    if features.get("avx2") and features.get("fma"):
        return AVX2
    raise RuntimeError("this CPU has neither AVX-512 nor AVX2 with FMA")


def compile_handler(registers: Registers, *, int8: bool = False) -> int:
    """The handler's address in this process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = str(handler_module(registers, llvm.get_process_triple(), int8=int8))
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
    )
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False  # the tiles are unrolled as far as registers go
    options.loop_vectorization = options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _compiled.append(engine)
    address: int = engine.get_function_address(HANDLER)
    return address


def register_handler(name: str, registers: Registers | None = None, *, int8: bool = False) -> None:
    """Makes jax know the custom call by `name`, once a process; `registers`: None for this
    CPU's; `int8`: of packed weights that are.

    Raises RuntimeError for a CPU that cannot, and what llvmlite and jax raise.
    """
    if registers is None:
        registers = host_registers(dict(llvm.get_host_cpu_features()))
    register(name, compile_handler(registers, int8=int8))
