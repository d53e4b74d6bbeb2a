"""What a fused kernel does to each element on its way in and out: the formulas of stages, one after the other.

A link is a formula by its name, with how its operands lie: along the vectors, or one number for each row of them. Every
link has two numbers, alpha and beta, as post-ops have. Where an operand's vector comes from is the layout's to know.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.fused import post_ops

ALONG, SAME = True, False


class Link(NamedTuple):
    """A formula, and for each of its operands whether its numbers lie along vectors."""

    name: str
    along: tuple[bool, ...] = ()


class Places(NamedTuple):
    """How a layout reads an operand: (s, operand, i, whole, mask), s being a vector like the one that comes out."""

    along: Callable[..., Vector]
    same: Callable[..., Vector]


# What post-ops are not.
OTHERS: Mapping[str, post_ops.OnBuffers] = {
    "times": post_ops.multiply,
    "where": post_ops.mask_out,
    "dropout": post_ops.drop,
}


def formula_of(name: str) -> Callable[..., Vector]:
    """(s, operand, third, alpha, beta) of a link."""
    return (OTHERS.get(name) or post_ops.VALUES[name]).on_vectors


def read_at(places: Places, along: Sequence[bool], operand: int, first: int) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask): an operand's vector, `first` being its link's first array; s if it has none."""
    if operand >= len(along):
        return inline(lambda s, arrays, i, whole, mask: s)
    read, at = places[0 if along[operand] else 1], first + operand
    return inline(lambda s, arrays, i, whole, mask: read(s, arrays[at], i, whole, mask))


@inline
def joined(first, second):
    """The tuple of what two tuples hold."""
    return first + second


@inline
def _as_it_is(s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
    return s


def chain(links: Sequence[Link], places: Places, array: int, number: int = 0) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask, numbers): s through all links, whose operands and numbers begin at these."""
    through: Callable[..., Vector] = _as_it_is
    for link in links:
        through = _then(through, link, places, array, number)
        array, number = array + len(link.along), number + 2
    return through


def _then(before: Callable[..., Vector], link: Link, places: Places, array: int, alpha: int) -> Callable[..., Vector]:
    formula, beta = formula_of(link.name), alpha + 1
    operand, third = (read_at(places, link.along, each, array) for each in (0, 1))

    @inline
    def through(s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s = before(s, arrays, i, whole, mask, numbers)
        first, second = operand(s, arrays, i, whole, mask), third(s, arrays, i, whole, mask)
        return formula(s, first, second, numbers[alpha], numbers[beta])

    return through


def operands_of(links: Sequence[Link]) -> tuple[bool, ...]:
    """How the operands of all links lie."""
    return tuple(each for link in links for each in link.along)


def each_operand(place: Mapping[bool, Callable[..., Any]], along: Sequence[bool], first: int) -> Callable[..., Any]:
    """(sources, *where): a tuple of place[along](source, *where) for each source from `first` on."""
    found = inline(lambda like, sources, at: ())
    for number, each in enumerate(along):
        found = _one_more(found, place[each], first + number)
    return found


def _one_more(others: Callable[..., Any], place: Callable[..., Any], number: int) -> Callable[..., Any]:
    return inline(lambda like, sources, at: joined(others(like, sources, at), (place(like, sources[number], at),)))
