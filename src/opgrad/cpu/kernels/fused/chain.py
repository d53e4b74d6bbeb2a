"""The chain of formulas that a fused kernel applies to each vector, before softmax and after it.

A formula has a name, and tells for each of its operands whether the operand has a number for each element or one for
each row. Every formula has two numbers, alpha and beta, as post-ops have. The functions that load an operand's vector
come from the layout (`Places`), since rows and columns read operands differently.

A docstring such as "(s, arrays, i): …" names the parameters of the function that is returned, and then its result.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused import post_ops

ALONG, SAME = True, False


class Formula(NamedTuple):
    """A formula's name, and for each of its operands whether it has a number for each element of a vector."""

    name: str
    along: tuple[bool, ...] = ()


class Places(NamedTuple):
    """How a layout reads an operand: (s, operand, i, whole, mask): the vector; s is a vector of the same type."""

    along: Callable[..., Vector]
    same: Callable[..., Vector]


# The formulas that are no post-ops.
OTHERS: Mapping[str, Callable[..., Vector]] = {
    "times": inline(lambda s, operand, third, alpha, beta: s * alpha),
    "where": inline(lambda s, mask, third, alpha, beta: v.select(mask != 0.0, s, alpha)),
    "dropout": inline(lambda s, kept, third, alpha, beta: v.select(kept != 0.0, s * alpha, 0.0)),
}


def formula_of(name: str) -> Callable[..., Vector]:
    """(s, operand, third, alpha, beta): the result of the formula of this name."""
    return OTHERS.get(name) or post_ops.VALUES[name]


def read_at(places: Places, along: Sequence[bool], operand: int, first: int) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask): the vector of a formula's operand; s if the formula has no such operand.

    first: the index of the formula's first array.
    """
    if operand >= len(along):
        return inline(lambda s, arrays, i, whole, mask: s)
    read, at = places[0 if along[operand] else 1], first + operand
    return inline(lambda s, arrays, i, whole, mask: read(s, arrays[at], i, whole, mask))


@inline
def joined(first, second):
    """Two tuples joined to one."""
    return first + second


@inline
def _as_it_is(s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
    return s


def chain(formulas: Sequence[Formula], places: Places, array: int, number: int = 0) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask, numbers): s after all formulas; array, number: the indices of the first's."""
    through: Callable[..., Vector] = _as_it_is
    for each in formulas:
        through = _then(through, each, places, array, number)
        array, number = array + len(each.along), number + 2
    return through


def _then(
    before: Callable[..., Vector], formula: Formula, places: Places, array: int, alpha: int
) -> Callable[..., Vector]:
    apply, beta = formula_of(formula.name), alpha + 1
    operand, third = (read_at(places, formula.along, each, array) for each in (0, 1))

    @inline
    def through(s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s = before(s, arrays, i, whole, mask, numbers)
        first, second = operand(s, arrays, i, whole, mask), third(s, arrays, i, whole, mask)
        return apply(s, first, second, numbers[alpha], numbers[beta])

    return through


def operands_of(formulas: Sequence[Formula]) -> tuple[bool, ...]:
    """For each operand of all formulas, whether it has a number for each element."""
    return tuple(each for formula in formulas for each in formula.along)


def each_operand(place: Mapping[bool, Callable[..., Any]], along: Sequence[bool], first: int) -> Callable[..., Any]:
    """(like, sources, at): a tuple with place[along](like, source, at) for each source from `first` on."""
    found = inline(lambda like, sources, at: ())
    for number, each in enumerate(along):
        found = _one_more(found, place[each], first + number)
    return found


def _one_more(others: Callable[..., Any], place: Callable[..., Any], number: int) -> Callable[..., Any]:
    return inline(lambda like, sources, at: joined(others(like, sources, at), (place(like, sources[number], at),)))
