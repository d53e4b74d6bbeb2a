"""The form of a call for which a fused kernel is compiled: the formulas before softmax or its gradient, and behind it.

A docstring such as "(s, arrays, i): …" names the parameters of the function that is returned, and then its result.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused import post_ops
from opgrad.cpu.kernels.fused.chain import (
    Formula,
    Places,
    chain,
    each_operand,
    formula_of,
    joined,
    operands_of,
    read_at,
)


class Form(NamedTuple):
    """A forward call's attributes without their numbers.

    Dropout's decisions are the first operand of the formulas behind.
    """

    operator: str
    layout: str
    before: tuple[Formula, ...] = ()
    after: tuple[Formula, ...] = ()
    drops: bool = False
    results: tuple[str, ...] = ()  # results besides y: stats, saved, mask
    exact: bool = False  # whether sums are compensated for the rounding of their terms

    @property
    def sources(self) -> int:
        """How many operands are read, x included."""
        return 1 + len(operands_of(self.before)) + len(operands_of(self.after)) - self.drops

    @property
    def numbers(self) -> int:
        return 2 * (len(self.before) + len(self.after))

    def inwards(self, places: Places) -> Callable[..., Vector]:
        """(s, arrays, i, whole, mask, numbers): s after the formulas before softmax; arrays: buffer, x, operands."""
        return chain(self.before, places, 2)

    def outwards(self, places: Places) -> Callable[..., Vector]:
        """(s, arrays, i, whole, mask, numbers): s after the formulas behind.

        arrays: buffer, decisions of dropout, operands.
        """
        return chain(self.after, places, 1, 2 * len(self.before))

    def arrays_inwards(self, place: Any) -> Callable[..., Any]:
        """(like, sources, at): the operands of the formulas before softmax at a row or a strip; x is the first."""
        return each_operand(place, (True, *operands_of(self.before)), 0)

    def arrays_outwards(self, place: Any) -> Callable[..., Any]:
        """(buffer, kept, like, sources, at): the buffer, `kept` if there is dropout, operands of formulas behind."""
        skipped = 1 + len(operands_of(self.before))
        return _behind_buffers(self.drops, each_operand(place, operands_of(self.after)[self.drops :], skipped))


class GradientForm(NamedTuple):
    """The formulas of a gradient's call, in the order in which it takes them.

    before: those that dy goes through first. inputs: those that lead from y to the input of the first post-op. applied:
    the post-ops. last: those that the gradient with respect to y goes through. after: those that dx goes through.
    """

    operator: str
    layout: str
    before: tuple[Formula, ...] = ()
    inputs: tuple[Formula, ...] = ()
    applied: tuple[Formula, ...] = ()
    last: tuple[Formula, ...] = ()
    after: tuple[Formula, ...] = ()
    drops: bool = False

    @property
    def formulas(self) -> tuple[Formula, ...]:
        return (*self.before, *self.inputs, *self.applied, *self.last, *self.after)

    @property
    def operands(self) -> tuple[bool, ...]:
        """For each operand of the post-ops and for the mask, whether it has a number for each element."""
        return operands_of((*self.applied, *(each for each in self.last if each.name == "where")))

    @property
    def sources(self) -> int:
        return 2 + len(self.operands)

    @property
    def numbers(self) -> int:
        return 2 * len(self.formulas)

    def backwards(self, places: Places) -> Callable[..., Vector]:
        """(g, y, arrays, i, whole, mask, numbers): the gradient with respect to the softmax, from dy.

        arrays: buffer, decisions if there is dropout, dy, y, operands.
        """
        first = 3 + self.drops  # the index of the first operand of the post-ops
        at = [2 * len(each) for each in (self.before, self.inputs, self.applied)]
        before, inputs = chain(self.before, places, 1), chain(self.inputs, places, 1, at[0])
        back = _back(self.applied, places, first, at[0] + at[1])
        own = [each for each in self.last if each.name != "where"]
        rest = [each for each in self.last if each.name == "where"]
        last = chain(own, places, 1, sum(at))
        masked = chain(rest, places, first + len(operands_of(self.applied)), sum(at) + 2 * len(own))

        @inline
        def through(g: Vector, y: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
            g, s = before(g, arrays, i, whole, mask, numbers), inputs(y, arrays, i, whole, mask, numbers)
            g = last(back(g, s, arrays, i, whole, mask, numbers), arrays, i, whole, mask, numbers)
            return masked(g, arrays, i, whole, mask, numbers)

        return through

    def arrays_backwards(self, place: Any) -> Callable[..., Any]:
        """(buffer, kept, like, sources, at): the arrays that `backwards` reads, at a row or a strip."""
        return _behind_buffers(self.drops, each_operand(place, (True, True, *self.operands), 0))

    def out_of_gradient(self, places: Places) -> Callable[..., Vector]:
        """(dx, arrays, i, whole, mask, numbers): dx after the formulas behind the gradient."""
        return chain(self.after, places, 1, 2 * (len(self.formulas) - len(self.after)))


def _behind_buffers(drops: bool, operands: Callable[..., Any]) -> Callable[..., Any]:
    """(buffer, kept, like, sources, at): the operands behind the buffer and, if there is dropout, its decisions."""
    if drops:
        return inline(lambda buffer, kept, like, sources, at: joined((buffer, kept), operands(like, sources, at)))
    return inline(lambda buffer, kept, like, sources, at: joined((buffer,), operands(like, sources, at)))


@inline
def _no_step_back(g: Vector, s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
    return g


def _back(formulas: Sequence[Formula], places: Places, array: int, alpha: int) -> Callable[..., Vector]:
    """(g, s, …): the gradient with respect to s, the first formula's input; g is that of the last one's result."""
    if not formulas:
        return _no_step_back
    formula, beta = formulas[0], alpha + 1
    others = _back(formulas[1:], places, array + len(formula.along), alpha + 2)
    forward, gradient = formula_of(formula.name), post_ops.GRADIENTS[formula.name]
    operand, third = (read_at(places, formula.along, each, array) for each in (0, 1))

    @inline
    def through(g: Vector, s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
        t, u = operand(s, arrays, i, whole, mask), third(s, arrays, i, whole, mask)
        after = forward(s, t, u, numbers[alpha], numbers[beta])
        g = others(g, after, arrays, i, whole, mask, numbers)
        return gradient(g, s, t, numbers[alpha], numbers[beta])

    return through


def one_after_the_other(several: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Call all of them with the same arguments."""
    every: Callable[..., None] = inline(lambda *arguments: None)
    for each in several:
        every = _both(every, each)
    return every


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    @inline
    def both(*arguments: Any) -> None:
        first(*arguments)
        second(*arguments)

    return both
