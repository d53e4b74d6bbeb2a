"""What a fused kernel is made for: the links on the way into softmax or its gradient, and on the way out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.fused.chain import Link, Places, chain, each_operand, operands_of


class Form(NamedTuple):
    """A set of attributes, without their numbers. A dropout's decisions are the first operand behind softmax."""

    operator: str
    layout: str
    before: tuple[Link, ...] = ()
    after: tuple[Link, ...] = ()
    drops: bool = False
    results: tuple[str, ...] = ()  # besides y: stats, saved, mask

    @property
    def sources(self) -> int:
        """How many operands are read; x, or dy and y, come first."""
        return self.first + len(operands_of(self.before)) + len(operands_of(self.after)) - self.drops

    @property
    def first(self) -> int:
        return 2 if self.operator.endswith("_grad") else 1

    @property
    def numbers(self) -> int:
        return 2 * (len(self.before) + len(self.after))


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
    """(buffer, kept, sources, at): the buffer, dropout's decisions if there are any, the operands of the links behind."""
    skipped = form.first + len(operands_of(form.before))
    operands = each_operand(place, operands_of(form.after)[form.drops :], skipped)
    if form.drops:
        return inline(lambda buffer, kept, like, sources, at: (buffer, kept) + operands(like, sources, at))
    return inline(lambda buffer, kept, like, sources, at: (buffer,) + operands(like, sources, at))


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
