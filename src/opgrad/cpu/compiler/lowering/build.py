"""From a Python function to an LLVM module."""

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import types
from numba.extending import overload, register_jitable

from opgrad.cpu.compiler import memory, native, simd
from opgrad.cpu.compiler.lowering.memory import word_at
from opgrad.cpu.compiler.lowering.words import I64, PointerType, VectorType, defines

OPTIONS = {"error_model": "numpy", "boundscheck": False, "no_rewrites": True, "_nrt": False}
# Helpers are only called from compiled code; without their Python wrappers they compile a tenth faster.
INLINED = {**OPTIONS, "forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _choose(helper: Callable[..., Any]) -> None:
    @overload(helper, strict=False, jit_options=INLINED)
    def _(*arguments: Any) -> Any:
        kind = next(a for a in arguments if isinstance(a, VectorType))
        return helper(int(kind.element[1:]))


def register_helpers() -> None:
    """Make the helpers known that were marked since the last call."""
    while native.INLINE:
        register_jitable(**INLINED)(native.INLINE.pop())
    while native.CHOOSE:
        _choose(native.CHOOSE.pop())


def argument_types(function: Callable[..., Any], dtypes: list[str]) -> list[Any]:
    """The Numba types of a kernel's parameters after `part`, given the dtypes of its pointers in order."""
    precision = 64 if "float64" in dtypes else 32
    pointers = iter(dtypes)
    kinds = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.annotation == simd.Pointer:
            kinds.append(PointerType(next(pointers), precision))
        else:
            kinds.append(types.float64 if parameter.annotation == simd.Float else types.int64)
    return kinds


def unpack(kinds: list[Any]) -> Callable[..., Any]:
    """A word that reads a tuple of these types from consecutive 8-byte words."""

    def read(address: int) -> Any:
        raise TypeError

    @defines(read)
    def _(address: Any) -> Any:
        result = types.Tuple(kinds)

        def emit(context: Any, builder: Any, a: Any) -> Any:
            values = [
                builder.load(word_at(builder, a, I64(i), context.get_value_type(kind), 8))
                for i, kind in enumerate(kinds)
            ]
            return context.make_tuple(builder, result, values)

        return result, emit

    return read


def _task(function: Callable[..., Any], dtypes: list[str], fences: bool) -> Any:
    compute = numba.njit(**INLINED)(function)
    read, fence = unpack(argument_types(function, dtypes)), memory.store_fence

    def task(arguments: int, part: int) -> int:
        compute(part, *read(arguments))
        if fences:
            fence()
        return 0

    return numba.cfunc(types.int64(types.int64, types.int64), **OPTIONS)(task)


def _native(function: Callable[..., Any], count: int) -> Any:
    return numba.cfunc(types.int64(*[types.int64] * count), **OPTIONS)(function)


def build(function: Callable[..., Any], form: str, entry: str) -> Any:
    """The optimised LLVM module of `function` as a task, a stage or a native function (`form`), exported as `entry`."""
    register_helpers()
    kind, _, inside = form.rstrip(")").partition("(")
    if kind in ("task", "stage"):
        compiled = _task(function, [name for name in inside.split(",") if name], fences=kind == "task")
    else:
        compiled = _native(function, int(inside))
    parsed = llvm.parse_assembly(compiled.inspect_llvm())
    parsed.get_function(compiled.native_name).name = entry
    return parsed
