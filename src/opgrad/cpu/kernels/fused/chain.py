"""The chain of formulas that a fused kernel applies to each vector, before softmax and after it.

A formula has a name, and tells for each of its operands whether the operand has a number for each element of a vector
or one for all. Every formula has two numbers, alpha and beta, as post-ops have. How an operand is found and read is up
to the layout (`Places`).

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
    """A formula's name, and for each of its operands whether it has a number for each element of a vector.

    The operand of "dropout" is no array of the call, but the decisions of the elements.
    """

    name: str
    along: tuple[bool, ...] = ()


class Places(NamedTuple):
    """How a layout finds an operand and reads a vector of it."""

    find: Mapping[bool, Callable[..., Any]]  # by ALONG and SAME, (source, at): the operand at a row, block or strip
    along: Callable[..., Vector]  # (operand, i, whole, mask): a vector of an operand of the call
    same: Callable[..., Vector]  # the same where all its elements are one number
    own: Callable[..., Vector]  # the same for a buffer of the kernel
    store: Callable[..., None]  # (operand, i, value, whole, mask)


# The formulas that are no post-ops.
OTHERS: Mapping[str, Callable[..., Vector]] = {
    "times": inline(lambda s, operand, third, alpha, beta: s * alpha),
    "where": inline(lambda s, mask, third, alpha, beta: v.select(mask != 0.0, s, alpha)),
    "dropout": inline(lambda s, kept, third, alpha, beta: v.select(kept != 0.0, s * alpha, 0.0)),
}


def formula_of(name: str) -> Callable[..., Vector]:
    """(s, operand, third, alpha, beta): the result of the formula of this name."""
    return OTHERS.get(name) or post_ops.VALUES[name]


@inline
def joined(first, second):
    """Two tuples joined to one."""
    return first + second


def sources_of(formulas: Sequence[Formula]) -> list[bool]:
    """For each array of the call that is an operand, whether it has a number for each element of a vector."""
    return [each for formula in formulas if formula.name != "dropout" for each in formula.along]


def arrays_of(formulas: Sequence[Formula], places: Places) -> Callable[..., Any]:
    """(decisions, sources, at): the operands of all formulas at a row, block or strip."""
    found: list[Callable[..., Any]] = []
    number = 0
    for formula in formulas:
        for each in formula.along:
            if formula.name == "dropout":
                found.append(inline(lambda decisions, sources, at: (decisions,)))
            else:
                found.append(_one_array(places.find[each], number))
                number += 1
    return _all_arrays(found) if found else inline(lambda decisions, sources, at: ())


def _one_array(find: Callable[..., Any], number: int) -> Callable[..., Any]:
    return inline(lambda decisions, sources, at: (find(sources[number], at),))


def _all_arrays(several: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """One half after the other: Numba runs out of stack if functions of a long chain call each other in turn."""
    if len(several) == 1:
        return several[0]
    first, second = _all_arrays(several[: len(several) // 2]), _all_arrays(several[len(several) // 2 :])
    return inline(lambda decisions, sources, at: joined(first(decisions, sources, at), second(decisions, sources, at)))


def read_at(formula: Formula, places: Places, operand: int, first: int) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask): the vector of a formula's operand; s if the formula has no such operand.

    first: the index of the formula's first array.
    """
    if operand >= len(formula.along):
        return inline(lambda s, arrays, i, whole, mask: s)
    at = first + operand
    read = places.own if formula.name == "dropout" else places.along if formula.along[operand] else places.same
    return inline(lambda s, arrays, i, whole, mask: read(arrays[at], i, whole, mask))


@inline
def _as_it_is(s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
    return s


def chain(formulas: Sequence[Formula], places: Places, array: int = 0, alpha: int = 0) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask, numbers): s after all formulas.

    array, alpha: the indices of the first formula's arrays and numbers.
    """
    if not formulas:
        return _as_it_is
    if len(formulas) == 1:
        return _one_formula(formulas[0], places, array, alpha)
    (first, second), behind = halves(formulas, array, alpha)
    before, after = chain(first, places, array, alpha), chain(second, places, *behind)

    @inline
    def through(s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
        return after(before(s, arrays, i, whole, mask, numbers), arrays, i, whole, mask, numbers)

    return through


def halves(formulas: Sequence[Formula], array: int, alpha: int) -> tuple[tuple[Any, Any], tuple[int, int]]:
    """The halves of a chain, as in `_all_arrays`, and the indices of the second one's arrays and numbers."""
    middle = len(formulas) // 2
    first = formulas[:middle]
    return (first, formulas[middle:]), (array + sum(len(each.along) for each in first), alpha + 2 * middle)


def _one_formula(formula: Formula, places: Places, array: int, alpha: int) -> Callable[..., Vector]:
    apply, beta = formula_of(formula.name), alpha + 1
    operand, third = (read_at(formula, places, each, array) for each in (0, 1))

    @inline
    def through(s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
        first, second = operand(s, arrays, i, whole, mask), third(s, arrays, i, whole, mask)
        return apply(s, first, second, numbers[alpha], numbers[beta])

    return through
