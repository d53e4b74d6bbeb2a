"""Converts integers and booleans in memory to and from the floats with which kernels compute."""

from typing import Any, Final

from llvmlite import ir

from opgrad.cpu.compiler.lowering.operations import I8, I32, VectorType, constant, intrinsic

LIMITS: Final = {"int8": (-128, 127), "uint8": (0, 255), "int32_number": (-(2**31), 2**31 - 1)}
STORED: Final = {*LIMITS, "bool"}


def from_whole(builder: Any, storage: str, v: Any, kind: VectorType) -> Any:
    """Convert integers to floats of `kind`; as a boolean, any byte but 0 is true."""
    if storage == "bool":
        true = builder.icmp_unsigned("!=", v, ir.Constant(v.type, None))
        return builder.select(true, constant(kind, 1.0), constant(kind, 0.0))
    word = ir.VectorType(I32, kind.lanes)
    wide = builder.zext(v, word) if storage == "uint8" else builder.sext(v, word)
    return builder.sitofp(wide, kind.llvm)


def to_whole(builder: Any, storage: str, v: Any, kind: VectorType) -> Any:
    """Floats of `kind` to integers: the nearest, half to even, within the type's limits, 0 for NaN."""
    if storage == "bool":
        true = builder.fcmp_unordered("!=", v, constant(kind, 0.0))
        return builder.zext(true, ir.VectorType(I8, kind.lanes))
    lowest, highest = LIMITS[storage]
    # float32 has no 2**31 - 1: it stops at the number below 2**31, and what lay above is set apart.
    rounds_up = storage == "int32_number" and kind.element == "f32"
    top = constant(kind, 2.0**31 - 128 if rounds_up else float(highest))
    bottom = constant(kind, float(lowest))
    near = intrinsic(builder, "llvm.rint", kind.llvm, [v])
    near = builder.select(builder.fcmp_ordered(">", near, bottom), near, bottom)
    near = builder.select(builder.fcmp_ordered("<", near, top), near, top)
    near = builder.select(builder.fcmp_ordered("ord", v, v), near, constant(kind, 0.0))
    word = VectorType("i32", kind.lanes)
    whole = builder.fptosi(near, word.llvm)
    if rounds_up:
        whole = builder.select(builder.fcmp_ordered(">=", v, constant(kind, 2.0**31)), constant(word, highest), whole)
    return builder.trunc(whole, ir.VectorType(I32 if storage == "int32_number" else I8, kind.lanes))
