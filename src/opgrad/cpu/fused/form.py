"""What a fused kernel is made for: the links on the way into softmax or its gradient, and on the way out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.fused import post_ops
from opgrad.cpu.fused.chain import Link, Places, chain, each_operand, formula_of, joined, operands_of, read_at


class Form(NamedTuple):
    """The attributes of a forward call without their numbers; dropout's decisions are the first operand behind."""

    operator: str
    layout: str
    before: tuple[Link, ...] = ()
    after: tuple[Link, ...] = ()
    drops: bool = False
    results: tuple[str, ...] = ()  # besides y: stats, saved, mask
    exact: bool = False  # whether sums keep what is rounded off their terms

    @property
    def sources(self) -> int:
        """How many operands are read, x the first."""
        return 1 + len(operands_of(self.before)) + len(operands_of(self.after)) - self.drops

    @property
    def numbers(self) -> int:
        return 2 * (len(self.before) + len(self.after))


class GradientForm(NamedTuple):
    """The attributes of a gradient's call, in the order in which it takes them.

    before: what dy goes through first. inputs: what y goes through on its way to the first post-op. applied: the
    post-ops. last: what the gradient with respect to y goes through, after: dx.
    """

    operator: str
    layout: str
    before: tuple[Link, ...] = ()
    inputs: tuple[Link, ...] = ()
    applied: tuple[Link, ...] = ()
    last: tuple[Link, ...] = ()
    after: tuple[Link, ...] = ()
    drops: bool = False

    @property
    def links(self) -> tuple[Link, ...]:
        return (*self.before, *self.inputs, *self.applied, *self.last, *self.after)

    @property
    def operands(self) -> tuple[bool, ...]:
        """How the arrays lie that are read besides dy and y: the post-ops' operands, and the mask."""
        return operands_of((*self.applied, *(link for link in self.last if link.name == "where")))

    @property
    def sources(self) -> int:
        return 2 + len(self.operands)

    @property
    def numbers(self) -> int:
        return 2 * len(self.links)


def inwards(form: Form, places: Places) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask, numbers): s through the links before; arrays: buffer, x, operands."""
    return chain(form.before, places, 2)


def outwards(form: Form, places: Places) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask, numbers): s through the links behind; arrays: buffer, perhaps decisions, operands."""
    return chain(form.after, places, 1, 2 * len(form.before))


def arrays_inwards(form: Form, place: Any) -> Callable[..., Any]:
    """(like, sources, at): where the operands of the links before lie at a row, or strip; x is the first."""
    return each_operand(place, (True, *operands_of(form.before)), 0)


def arrays_outwards(form: Form, place: Any) -> Callable[..., Any]:
    """(buffer, kept, like, sources, at): buffer, perhaps dropout's decisions, the operands of the links behind."""
    skipped = 1 + len(operands_of(form.before))
    operands = each_operand(place, operands_of(form.after)[form.drops :], skipped)
    if form.drops:
        return inline(lambda buffer, kept, like, sources, at: joined((buffer, kept), operands(like, sources, at)))
    return inline(lambda buffer, kept, like, sources, at: joined((buffer,), operands(like, sources, at)))


def backwards(form: GradientForm, places: Places) -> Callable[..., Vector]:
    """(g, y, arrays, i, whole, mask, numbers): dy to the gradient with respect to the softmax.

    arrays: buffer, perhaps decisions, dy, y, operands.
    """
    first = 3 + form.drops  # of the post-ops' operands
    at = [2 * len(links) for links in (form.before, form.inputs, form.applied)]
    before, inputs = chain(form.before, places, 1), chain(form.inputs, places, 1, at[0])
    back = _back(form.applied, places, first, at[0] + at[1])
    own = [link for link in form.last if link.name != "where"]
    rest = [link for link in form.last if link.name == "where"]
    last = chain(own, places, 1, sum(at))
    masked = chain(rest, places, first + len(operands_of(form.applied)), sum(at) + 2 * len(own))

    @inline
    def through(g: Vector, y: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
        g, s = before(g, arrays, i, whole, mask, numbers), inputs(y, arrays, i, whole, mask, numbers)
        g = last(back(g, s, arrays, i, whole, mask, numbers), arrays, i, whole, mask, numbers)
        return masked(g, arrays, i, whole, mask, numbers)

    return through


@inline
def _no_step_back(g: Vector, s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
    return g


def _back(links: Sequence[Link], places: Places, array: int, alpha: int) -> Callable[..., Vector]:
    """(g, s, …): the gradient of all links with respect to the first one's input s."""
    if not links:
        return _no_step_back
    link, beta = links[0], alpha + 1
    others = _back(links[1:], places, array + len(link.along), alpha + 2)
    forward, gradient = formula_of(link.name), post_ops.GRADIENTS[link.name].on_vectors
    operand, third = (read_at(places, link.along, each, array) for each in (0, 1))

    @inline
    def through(g: Vector, s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
        t, u = operand(s, arrays, i, whole, mask), third(s, arrays, i, whole, mask)
        after = forward(s, t, u, numbers[alpha], numbers[beta])
        g = others(g, after, arrays, i, whole, mask, numbers)
        return gradient(g, s, t, numbers[alpha], numbers[beta])

    return through


def arrays_backwards(form: GradientForm, place: Any) -> Callable[..., Any]:
    """(buffer, kept, like, sources, at): what `backwards` reads, at a row or strip."""
    operands = each_operand(place, (True, True, *form.operands), 0)
    if form.drops:
        return inline(lambda buffer, kept, like, sources, at: joined((buffer, kept), operands(like, sources, at)))
    return inline(lambda buffer, kept, like, sources, at: joined((buffer,), operands(like, sources, at)))


def out_of_gradient(form: GradientForm, places: Places) -> Callable[..., Vector]:
    """(dx, arrays, i, whole, mask, numbers): dx through the links behind."""
    return chain(form.after, places, 1, 2 * (len(form.links) - len(form.after)))


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
