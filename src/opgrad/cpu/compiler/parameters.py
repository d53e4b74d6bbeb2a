"""What kernels are declared with: the kinds of their parameters, and the functions that they call.

A kernel's first parameter may be `Units`: the range of the units of work that one part does. A parameter without an
annotation is an int64. A named tuple, or a tuple, of annotations is an operand with its strides, or several operands.
"""

import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar


class Units:
    """The range of units that a part does: rows, blocks, strips, elements."""


class Part:
    """The number of the part, with which a kernel finds a place in memory that no other part writes."""


class Pointer:
    """The address of elements of some dtype."""


class Private:
    """A pointer into working memory that no other part uses meanwhile."""


class Float:
    """A float64."""


class Rows(NamedTuple):
    """An operand as rows: its first element, and how many elements lie from one row to the next."""

    data: Pointer
    step: int


class Columns(NamedTuple):
    """An operand as columns: its first element, and its strides in elements along the outer axis and down a column."""

    data: Pointer
    outer: int
    step: int


class Strips(NamedTuple):
    """Columns cut into strips of one or more vectors: how many strips, and how many columns, an outer index has."""

    count: int
    inner: int


# The words before a kernel's arguments. A kernel with units has two: the units of each part, and the number of all
# units. A kernel with private memory has four more: the memory's address, the bytes of each slot, the address of the
# word that tells which slots are in use, and the number of slots.
PER_PART, UNITS, UNITS_HEADER = 0, 1, 2
PRIVATE, PRIVATE_BYTES, IN_USE, SLOTS, PRIVATE_HEADER = 0, 1, 2, 3, 4
POINTERS: Final = (Pointer, Private)


def annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a kernel's parameters by name, `int` where there is none."""
    empty = inspect.Parameter.empty
    parameters = inspect.signature(function).parameters.values()
    return {each.name: int if each.annotation is empty else each.annotation for each in parameters}


def fields(annotation: Any) -> tuple[Any, ...]:
    """The annotations of the items of a tuple, named or not; an empty tuple for any other annotation."""
    if isinstance(annotation, tuple):
        return annotation
    return tuple(annotation.__annotations__.values()) if hasattr(annotation, "_fields") else ()


def leaves(annotation: Any) -> Iterator[Any]:
    """The annotations of the words that a parameter takes."""
    inside = fields(annotation)
    return chain.from_iterable(map(leaves, inside)) if inside else iter([annotation])


def values(annotation: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Each word of a parameter as a pair of annotation and value. All values of a missing operand are None."""
    inside = fields(annotation)
    if not inside:
        return iter([(annotation, value)])
    given = (None,) * len(inside) if value is None else value
    return chain.from_iterable(values(each, part) for each, part in zip(inside, given, strict=True))


def lanes_of(interface: str) -> int:
    """The elements in a kernel's vectors that its interface names, as "task of 32"; 0 if none."""
    return int(interface.partition(" of ")[2] or 0)


class Parameters:
    """The parameters of a kernel, by their annotations: whether it takes units or a part, and all other parameters."""

    def __init__(self, function: Callable[..., None]):
        self.function = function
        kinds = annotations(function)
        self.takes_units = Units in kinds.values()
        self.takes_part = Part in kinds.values()
        self.parameters = {name: kind for name, kind in kinds.items() if kind not in (Units, Part)}
        self.takes_private = any(leaf is Private for kind in self.parameters.values() for leaf in leaves(kind))


F = TypeVar("F", bound=Callable[..., Any])
INLINE: list[Callable[..., Any]] = []
KNOWN: set[Callable[..., Any]] = set()
CHOOSE: list[Callable[..., Any]] = []


def inline(function: F) -> F:
    """Mark a function as one that kernels may call.

    It is inlined into each of them. Marking it twice changes nothing.
    """
    if function not in KNOWN:
        KNOWN.add(function)
        INLINE.append(function)
    return function


def by_precision(single: Callable[..., Any], double: Callable[..., Any]) -> Callable[..., Any]:
    """A helper that calls `single` if its vectors hold float32, and `double` if they hold float64."""

    def chosen(bits: int) -> Callable[..., Any]:
        return single if bits == 32 else double

    CHOOSE.append(chosen)
    return chosen


def constant(single: float, double: float) -> Callable[..., float]:
    """A number that depends on the precision: constant(vector)."""
    return by_precision(inline(lambda x: single), inline(lambda x: double))
