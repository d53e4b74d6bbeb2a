"""What the parameters of a kernel are, by their annotations, and the words that its arguments take.

A kernel's first parameter may be `Units`: the range of the units of work that one part does. A parameter without an
annotation is an int64. A named tuple, or a tuple, of annotations is an operand with its strides, or several operands.
"""

import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, NamedTuple


class Units:
    """The range of units that a part does: rows, blocks, strips, elements."""


class Part:
    """The number of the part, for what it leaves in a place of its own."""


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
    """An operand as columns: its first element, and the elements from one to the next of the axes outside, and of n."""

    data: Pointer
    outer: int
    step: int


class Strips(NamedTuple):
    """Columns cut into strips of one or more vectors: how many strips, and how many columns, an outer index has."""

    count: int
    inner: int


# Words before the arguments of a kernel with units, and those of one with private memory after them: the memory's
# address and size in bytes for each slot, the address of the word that tells which slots are in use, their number.
PER_PART, UNITS, UNITS_HEADER = 0, 1, 2
PRIVATE, PRIVATE_BYTES, IN_USE, SLOTS, PRIVATE_HEADER = 0, 1, 2, 3, 4
POINTERS: Final = (Pointer, Private)


def annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a kernel's parameters by name, `int` where there is none."""
    empty = inspect.Parameter.empty
    parameters = inspect.signature(function).parameters.values()
    return {each.name: int if each.annotation is empty else each.annotation for each in parameters}


def fields(annotation: Any) -> tuple[Any, ...]:
    """The annotations inside a tuple of them, named or not; none of a plain one."""
    if isinstance(annotation, tuple):
        return annotation
    return tuple(annotation.__annotations__.values()) if hasattr(annotation, "_fields") else ()


def leaves(annotation: Any) -> Iterator[Any]:
    """The annotations of the words that a parameter takes."""
    inside = fields(annotation)
    return chain.from_iterable(map(leaves, inside)) if inside else iter([annotation])


def values(annotation: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """The words of a parameter as annotation and value; a missing operand is None in each."""
    inside = fields(annotation)
    if not inside:
        return iter([(annotation, value)])
    given = (None,) * len(inside) if value is None else value
    return chain.from_iterable(values(each, part) for each, part in zip(inside, given, strict=True))


class Parameters:
    """What a kernel takes, by its annotations: its units, its part, and the others, whose words are its arguments."""

    def __init__(self, function: Callable[..., None]):
        self.function = function
        kinds = annotations(function)
        self.takes_units = Units in kinds.values()
        self.takes_part = Part in kinds.values()
        self.parameters = {name: kind for name, kind in kinds.items() if kind not in (Units, Part)}
        self.takes_private = any(leaf is Private for kind in self.parameters.values() for leaf in leaves(kind))
