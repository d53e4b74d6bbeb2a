"""Compiles a Python function to an LLVM module with the entry through which native code calls it."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from numba.core import types
from numba.extending import overload, register_jitable

from opgrad.cpu.compiler import helpers, memory
from opgrad.cpu.compiler.lowering.entry import OPTIONS, Entry, compiled, compiled_once
from opgrad.cpu.compiler.lowering.memory import word_at
from opgrad.cpu.compiler.lowering.modules import optimised, unoptimised
from opgrad.cpu.compiler.lowering.words import I64, PointerType, VectorType
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
from opgrad.cpu.compiler.slots import release_slot, take_slot


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


def _read(entry: Entry, annotation: Any, kind: Any, words: Iterator[Any], private: Any) -> Any:
    """Load a parameter from its 8-byte words. The word of private memory is an offset, to which `private` is added."""
    if fields(annotation):
        inside = zip(fields(annotation), kind, strict=True)
        values = [_read(entry, *each, words, private) for each in inside]
        return entry.context.make_tuple(entry.builder, kind, values)
    word, form = next(words), entry.context.get_value_type(kind)
    if annotation is Private:
        return entry.builder.inttoptr(entry.builder.add(entry.builder.load(word), private), form)
    return entry.builder.load(entry.builder.bitcast(word, form.as_pointer()))


def _task(kernel: Parameters, dtypes: list[str], form: str, name: str) -> Any:
    """A module with the function task(address of the arguments, number of the part), which calls the kernel."""
    entry = Entry(name, 2)
    arguments, part = entry.function.args
    kinds, values, private = [], [], I64(0)

    def words(start: int) -> Iterator[Any]:
        return (word_at(entry.builder, arguments, I64(start + place), I64, 8) for place in count())

    def word(place: int) -> Any:
        return entry.builder.load(next(words(place)))

    start = UNITS_HEADER if kernel.takes_units or kernel.takes_private else 0
    if start:
        units = compiled_once(units_of, types.int64, types.int64)
        kinds, values = [units.signature.return_type], [entry.call(units, arguments, part)]
    if kernel.takes_part:
        kinds, values = [*kinds, types.int64], [*values, part]
    if kernel.takes_private:
        in_use = word(start + IN_USE)
        slot = entry.call(compiled_once(take_slot, types.int64, types.int64), in_use, word(start + SLOTS))
        own = entry.builder.mul(slot, word(start + PRIVATE_BYTES))
        private = entry.builder.add(word(start + PRIVATE), own)
        start += PRIVATE_HEADER
    given = _parameters(kernel, dtypes, lanes_of(form))
    places = words(start)
    values += [_read(entry, *each, places, private) for each in zip(kernel.parameters.values(), given, strict=True)]
    entry.call(compiled(kernel.function, *kinds, *given), *values)
    if kernel.takes_private:
        entry.call(compiled_once(release_slot, types.int64, types.int64), in_use, slot)
    if form != "stage":
        entry.emit(memory.store_fence)
    return entry.finish(I64(0))


@helpers.inline
def units_of(arguments: int, part: int) -> Any:
    """The units of a part, as a range."""
    per_part = memory.load_word(arguments, PER_PART)
    begin = part * per_part
    return range(begin, min(begin + per_part, memory.load_word(arguments, UNITS)))


def _native(function: Callable[..., Any], count: int, name: str) -> Any:
    """A module with a function of `count` integers, which calls `function`. It returns 0 if that returns nothing."""
    entry = Entry(name, count)
    callee = compiled(function, *[types.int64] * count)
    result = entry.call(callee, *entry.function.args)
    kind = callee.signature.return_type
    return entry.finish(I64(0) if kind == types.none else entry.context.cast(entry.builder, result, kind, types.int64))


def build(function: Callable[..., Any], form: str, name: str, machine: Any) -> Any:
    """The optimised LLVM module of `function` as a task, a stage or a native function (`form`), exported as `name`."""
    register_helpers()
    kind, _, inside = form.rstrip(")").partition("(")
    with unoptimised():
        if kind == "native":
            return optimised(_native(function, int(inside), name), name, machine)
        dtypes = [each for each in inside.split(",") if each]
        return optimised(_task(Parameters(function), dtypes, kind, name), name, machine)
