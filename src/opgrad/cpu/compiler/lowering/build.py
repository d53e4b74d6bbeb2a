"""From a Python function to an LLVM module."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import types
from numba.extending import overload, register_jitable

from opgrad.cpu.compiler import helpers, memory
from opgrad.cpu.compiler.lowering.memory import word_at
from opgrad.cpu.compiler.lowering.words import I64, PointerType, VectorType, defines
from opgrad.cpu.compiler.parameters import (
    IN_USE,
    PER_PART,
    POINTERS,
    PRIVATE,
    PRIVATE_BYTES,
    PRIVATE_HEADER,
    SLOTS,
    UNITS,
    UNITS_HEADER,
    Float,
    Parameters,
    Private,
    fields,
)
from opgrad.cpu.compiler.slots import release_slot, take_slot

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
    while helpers.INLINE:
        register_jitable(**INLINED)(helpers.INLINE.pop())
    while helpers.CHOOSE:
        _choose(helpers.CHOOSE.pop())


def type_of(annotation: Any, dtypes: Iterator[str], precision: int) -> Any:
    """The Numba type of a parameter, given the dtypes of the pointers in it and behind it."""
    inside = [type_of(each, dtypes, precision) for each in fields(annotation)]
    if inside:
        return types.NamedTuple(inside, annotation) if isinstance(annotation, type) else types.Tuple(inside)
    if annotation in POINTERS:
        return PointerType(next(dtypes), precision)
    return types.float64 if annotation is Float else types.int64


def unpack(kinds: list[Any], dtypes: list[str]) -> Callable[..., Any]:
    """A word that reads a tuple of parameters from consecutive 8-byte words; private memory begins at `private`."""
    pointers, precision = iter(dtypes), 64 if "float64" in dtypes else 32
    result = types.Tuple([type_of(kind, pointers, precision) for kind in kinds])

    def read(address: int, private: int) -> Any:
        raise TypeError

    @defines(read)
    def _(address: Any, private: Any) -> Any:
        def emit(context: Any, builder: Any, a: Any, own: Any) -> Any:
            places = count()

            def value(annotation: Any, kind: Any) -> Any:
                if fields(annotation):
                    values = [value(*each) for each in zip(fields(annotation), kind, strict=True)]
                    return context.make_tuple(builder, kind, values)
                word = word_at(builder, a, I64(next(places)), I64, 8)
                if annotation is Private:
                    return builder.inttoptr(builder.add(builder.load(word), own), context.get_value_type(kind))
                return builder.load(builder.bitcast(word, context.get_value_type(kind).as_pointer()))

            values = [value(*each) for each in zip(kinds, result, strict=True)]
            return context.make_tuple(builder, result, values)

        return result, emit

    return read


def _task(kernel: Parameters, dtypes: list[str], fences: bool) -> Any:
    call = numba.njit(**INLINED)(_call(kernel))
    read, fence = unpack(list(kernel.parameters.values()), dtypes), memory.store_fence
    made = _task_with_private if kernel.takes_private else _task_with_units if kernel.takes_units else _task_alone
    inside = numba.njit(**INLINED)(made(call, read))

    def task(arguments: int, part: int) -> int:
        inside(arguments, part)
        if fences:
            fence()
        return 0

    return numba.cfunc(types.int64(types.int64, types.int64), **OPTIONS, forceinline=True)(task)


def _call(kernel: Parameters) -> Any:
    """The kernel's call with units, part and its own arguments, whichever of the first two it takes."""
    compute = numba.njit(**INLINED)(kernel.function)
    if kernel.takes_units and kernel.takes_part:
        return lambda units, part, given: compute(units, part, *given)
    if kernel.takes_units:
        return lambda units, part, given: compute(units, *given)
    return lambda units, part, given: compute(*given)


def _task_alone(call: Any, read: Any) -> Any:
    def task(arguments: int, part: int) -> None:
        call(0, part, read(arguments, 0))

    return task


def _task_with_units(call: Any, read: Any) -> Any:
    def task(arguments: int, part: int) -> None:
        call(units_of(arguments, part), part, read(arguments + 8 * UNITS_HEADER, 0))

    return task


def _task_with_private(call: Any, read: Any) -> Any:
    def task(arguments: int, part: int) -> None:
        given = arguments + 8 * UNITS_HEADER
        in_use = memory.load_word(given, IN_USE)
        slot = take_slot(in_use, memory.load_word(given, SLOTS))
        own = memory.load_word(given, PRIVATE) + slot * memory.load_word(given, PRIVATE_BYTES)
        call(units_of(arguments, part), part, read(given + 8 * PRIVATE_HEADER, own))
        release_slot(in_use, slot)

    return task


@helpers.inline
def units_of(arguments: int, part: int) -> Any:
    """The units of a part, as a range."""
    per_part = memory.load_word(arguments, PER_PART)
    begin = part * per_part
    return range(begin, min(begin + per_part, memory.load_word(arguments, UNITS)))


def _native(function: Callable[..., Any], count: int) -> Any:
    return numba.cfunc(types.int64(*[types.int64] * count), **OPTIONS)(function)


def build(function: Callable[..., Any], form: str, entry: str) -> Any:
    """The optimised LLVM module of `function` as a task, a stage or a native function (`form`), exported as `entry`."""
    register_helpers()
    kind, _, inside = form.rstrip(")").partition("(")
    if kind in ("task", "stage"):
        compiled = _task(Parameters(function), [name for name in inside.split(",") if name], fences=kind == "task")
    else:
        compiled = _native(function, int(inside))
    parsed = llvm.parse_assembly(compiled.inspect_llvm())
    parsed.get_function(compiled.native_name).name = entry
    return parsed
