"""Compiles a Python function to an LLVM module with the exported function that native code calls."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from numba.core import types
from numba.extending import overload, register_jitable

from opgrad.cpu.compiler import helpers, words
from opgrad.cpu.compiler.lowering.exported import OPTIONS, Exported, compiled, compiled_once
from opgrad.cpu.compiler.lowering.modules import unoptimised
from opgrad.cpu.compiler.lowering.operations import I64, PointerType, VectorType
from opgrad.cpu.compiler.lowering.words import word_at
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
    lanes_of,
)


def _choose(helper: Callable[..., Any]) -> None:
    @overload(helper, strict=False, jit_options=OPTIONS)
    def _(*arguments: Any) -> Any:
        kind = next(a for a in arguments if isinstance(a, VectorType))
        return helper(int(kind.element[1:]))


def register_helpers() -> None:
    """Register with Numba the helpers that `inline` and `by_precision` have marked since the last call."""
    while helpers.INLINE:
        register_jitable(**OPTIONS)(helpers.INLINE.pop())
    while helpers.CHOOSE:
        _choose(helpers.CHOOSE.pop())


def type_of(annotation: Any, dtypes: Iterator[str], precision: int, lanes: int) -> Any:
    """The Numba type of a parameter. `dtypes` gives the dtypes of its pointers, and then those of later parameters."""
    inside = [type_of(each, dtypes, precision, lanes) for each in fields(annotation)]
    if inside:
        return types.NamedTuple(inside, annotation) if isinstance(annotation, type) else types.Tuple(inside)
    if annotation in POINTERS:
        return PointerType(next(dtypes), precision, lanes)
    return types.float64 if annotation is Float else types.int64


def _parameters(kernel: Parameters, dtypes: list[str], lanes: int) -> list[Any]:
    """The Numba types of a kernel's arguments."""
    pointers, precision = iter(dtypes), 64 if "float64" in dtypes else 32
    return [type_of(kind, pointers, precision, lanes) for kind in kernel.parameters.values()]


def _read(exported: Exported, annotation: Any, kind: Any, words: Iterator[Any], private: Any) -> Any:
    """Load a parameter from its 8-byte words. The word of private memory is an offset, to which `private` is added."""
    if fields(annotation):
        inside = zip(fields(annotation), kind, strict=True)
        values = [_read(exported, *each, words, private) for each in inside]
        return exported.context.make_tuple(exported.builder, kind, values)
    word, llvm_kind = next(words), exported.context.get_value_type(kind)
    if annotation is Private:
        return exported.builder.inttoptr(exported.builder.add(exported.builder.load(word), private), llvm_kind)
    return exported.builder.load(exported.builder.bitcast(word, llvm_kind.as_pointer()))


def _task(kernel: Parameters, dtypes: list[str], interface: str, name: str) -> Any:
    """A module with the function task(address of the arguments, number of the part), which calls the kernel."""
    exported = Exported(name, 2)
    arguments, part = exported.function.args
    kinds, values, private = [], [], I64(0)

    def places_from(start: int) -> Iterator[Any]:
        return (word_at(exported.builder, arguments, I64(start + place), I64, 8) for place in count())

    def word(place: int) -> Any:
        return exported.builder.load(next(places_from(place)))

    start = UNITS_HEADER if kernel.takes_units or kernel.takes_private else 0
    if start:
        units = compiled_once(units_of, types.int64, types.int64)
        kinds, values = [units.signature.return_type], [exported.call(units, arguments, part)]
    if kernel.takes_part:
        kinds, values = [*kinds, types.int64], [*values, part]
    if kernel.takes_private:
        in_use = word(start + IN_USE)
        slot = exported.call(compiled_once(take_slot, types.int64, types.int64), in_use, word(start + SLOTS))
        own = exported.builder.mul(slot, word(start + PRIVATE_BYTES))
        private = exported.builder.add(word(start + PRIVATE), own)
        start += PRIVATE_HEADER
    given = _parameters(kernel, dtypes, lanes_of(interface))
    places = places_from(start)
    values += [_read(exported, *each, places, private) for each in zip(kernel.parameters.values(), given, strict=True)]
    exported.call(compiled(kernel.function, *kinds, *given), *values)
    if kernel.takes_private:
        exported.call(compiled_once(release_slot, types.int64, types.int64), in_use, slot)
    exported.emit(words.store_fence)
    return exported.finish(I64(0))


@helpers.inline
def units_of(arguments: int, part: int) -> Any:
    """The units of a part, as a range."""
    per_part = words.load_word(arguments, PER_PART)
    begin = part * per_part
    return range(begin, min(begin + per_part, words.load_word(arguments, UNITS)))


@helpers.inline
def take_slot(in_use: int, slots: int) -> int:
    """The number of a slot of private memory that no other part uses; the word at `in_use` has a bit for each.

    Where more threads than slots are at work, which have been set since the call was planned, a part waits for one
    that is done; whoever has a slot waits for nobody.
    """
    while True:
        taken = words.atomic_load(in_use)
        for slot in range(slots):
            if not taken >> slot & 1:
                if words.atomic_swap_if(in_use, taken, taken | 1 << slot):
                    return slot
                break
        words.spin_hint()


@helpers.inline
def release_slot(in_use: int, slot: int) -> None:
    words.atomic_add(in_use, -(1 << slot))


def _native(function: Callable[..., Any], count: int, name: str) -> Any:
    """A module with a function of `count` integers, which calls `function`. It returns 0 if that returns nothing."""
    exported = Exported(name, count)
    callee = compiled(function, *[types.int64] * count)
    result = exported.call(callee, *exported.function.args)
    kind = callee.signature.return_type
    return exported.finish(
        I64(0) if kind == types.none else exported.context.cast(exported.builder, result, kind, types.int64)
    )


def build(function: Callable[..., Any], interface: str, name: str) -> Any:
    """The LLVM module of `function`, exported as `name`, which `optimised` is given.

    interface: that of a task or a native function.
    """
    register_helpers()
    kind, _, inside = interface.rstrip(")").partition("(")
    with unoptimised():
        if kind == "native":
            return _native(function, int(inside), name)
        dtypes = [each for each in inside.split(",") if each]
        return _task(Parameters(function), dtypes, kind, name)
