"""The form of a call for which a fused kernel is compiled: the formulas before softmax or its gradient, and behind it.

What an element of a result is, is the same in each layout, and made here; how operands are read is up to the layout's
`Places`. A docstring such as "(s, arrays, i): …" names the parameters of the function that is returned, and then its
result.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.parameters import Float
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused import post_ops
from opgrad.cpu.kernels.fused.chain import ALONG, Formula, Places, arrays_of, chain, halves, read_at, sources_of
from opgrad.cpu.kernels.fused.operands import Source

Formulas = tuple[Formula, ...]


def several(kind: Any, count: int) -> Any:
    """The annotation of a parameter with so many values of a kind; without any, a kernel is given 0."""
    return (kind,) * count or int


class Form(NamedTuple):
    """A forward call's attributes without their numbers."""

    operator: str
    layout: str
    before: Formulas = ()
    after: Formulas = ()
    drops: bool = False
    results: tuple[str, ...] = ()  # results besides y: stats, saved, mask
    exact: bool = False  # whether sums are compensated for the rounding of their terms

    @property
    def groups(self) -> tuple[Formulas, ...]:
        return self.before, self.after

    @property
    def sources(self) -> Any:
        """The annotation of a kernel's arrays: x, and the operands of each group."""
        return Source, *(several(Source, len(sources_of(each))) for each in self.groups)

    @property
    def numbers(self) -> Any:
        """The annotation of the numbers of each group."""
        return tuple(several(Float, 2 * len(each)) for each in self.groups)


class GradientForm(NamedTuple):
    """The formulas of a gradient's call, in the order in which it takes them.

    before: those that dy goes through first. inputs: those that lead from y to the input of the first post-op. applied:
    the post-ops. last: those that the gradient with respect to y goes through. after: those that dx goes through.
    wanted: for each post-op, whether the gradient of its operand is a result.
    """

    operator: str
    layout: str
    before: Formulas = ()
    inputs: Formulas = ()
    applied: Formulas = ()
    last: Formulas = ()
    after: Formulas = ()
    drops: bool = False
    wanted: tuple[bool, ...] = ()

    @property
    def groups(self) -> tuple[Formulas, ...]:
        return self.before, self.inputs, self.applied, self.last, self.after

    @property
    def sources(self) -> Any:
        """The annotation of a kernel's arrays: dy, y, the operands of each group, and the gradients of operands."""
        operands = (several(Source, len(sources_of(each))) for each in self.groups)
        return Source, Source, *operands, several(Source, sum(self.wanted))

    @property
    def numbers(self) -> Any:
        """The annotation of the numbers of each group."""
        return tuple(several(Float, 2 * len(each)) for each in self.groups)


# --- forward ----------------------------------------------------------------------------------------------------------


def softmax_input(form: Form, places: Places) -> Callable[..., Vector]:
    """((x, operands), i, whole, mask, numbers): a vector of x after the formulas before softmax."""
    through, read = chain(form.before, places), places.own

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        return through(read(arrays[0], i, whole, mask), arrays[1], i, whole, mask, numbers[0])

    return value


def softmax_result(form: Form, places: Places, result: Callable[..., Vector]) -> Callable[..., Vector]:
    """((buffer, operands), i, whole, mask, (numbers of the row, numbers)): a vector of y from what was kept of it."""
    through, read = chain(form.after, places), places.own

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        of_row, of_formulas = numbers
        s = result(read(arrays[0], i, whole, mask), of_row, True)
        return through(s, arrays[1], i, whole, mask, of_formulas[1])

    return value


# --- gradients --------------------------------------------------------------------------------------------------------


class GradientArrays(NamedTuple):
    """What a gradient reads and writes at a row, block or strip; operands has those of each group."""

    kept: Any  # the buffer in which the gradient with respect to the softmax is kept
    dy: Any
    y: Any
    operands: Any
    wanted: Any


def gradient_arrays(form: GradientForm, places: Places) -> Callable[..., GradientArrays]:
    """(kept, decisions, sources, at)"""
    own, before, inputs = places.find[ALONG], arrays_of(form.before, places), arrays_of(form.inputs, places)
    applied, last = arrays_of(form.applied, places), arrays_of(form.last, places)
    wanted = arrays_of([Formula("wanted", (ALONG,) * sum(form.wanted))], places)

    @inline
    def found(kept, decisions, sources, at):
        dy, y, of_before, of_inputs, of_applied, of_last, _, of_wanted = sources
        operands = (
            before(decisions, of_before, at),
            inputs(decisions, of_inputs, at),
            applied(decisions, of_applied, at),
            last(decisions, of_last, at),
        )
        return GradientArrays(kept, own(dy, at), own(y, at), operands, wanted(decisions, of_wanted, at))

    return found


def softmax_gradient(form: GradientForm, places: Places, stores: bool) -> Callable[..., tuple[Vector, Vector]]:
    """(arrays, i, whole, mask, numbers): the gradient with respect to the softmax, and y.

    stores: whether the gradients of operands are written.
    """
    before, inputs, last = (chain(each, places) for each in (form.before, form.inputs, form.last))
    wanted = form.wanted if stores else (False,) * len(form.applied)
    back, read = _back(form.applied, wanted, places, 0, 0, 0), places.along

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers):
        operands, y = arrays.operands, read(arrays.y, i, whole, mask)
        g = before(read(arrays.dy, i, whole, mask), operands[0], i, whole, mask, numbers[0])
        s = inputs(y, operands[1], i, whole, mask, numbers[1])
        g = back(g, s, operands[2], arrays.wanted, i, whole, mask, numbers[2])
        return last(g, operands[3], i, whole, mask, numbers[3]), y

    return value


def behind_gradient(form: GradientForm, places: Places) -> Callable[..., Vector]:
    """(dx, i, whole, mask, numbers): dx after the formulas behind the gradient, which have no operands."""
    through = chain(form.after, places)
    return inline(lambda dx, i, whole, mask, numbers: through(dx, (), i, whole, mask, numbers[4]))


def gradient_result(form: GradientForm, places: Places, formula: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, (the sum, numbers)): a vector of dx from what was kept of it and y."""
    after, read = behind_gradient(form, places), places.own

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s, of_formulas = numbers
        dx = formula(read(arrays.kept, i, whole, mask), read(arrays.y, i, whole, mask), s)
        return after(dx, i, whole, mask, of_formulas)

    return value


@inline
def _no_step_back(g: Vector, s: Vector, arrays, results, i: int, whole: bool, mask, numbers) -> Vector:
    return g


def _back(
    formulas: Sequence[Formula], wanted: Sequence[bool], places: Places, array: int, alpha: int, result: int
) -> Callable[..., Vector]:
    """(g, s, …): the gradient with respect to s, the first formula's input; g is that of the last one's result.

    array, alpha, result: the indices of the first formula's arrays, numbers and result.
    """
    if not formulas:
        return _no_step_back
    if len(formulas) == 1:
        return _one_step_back(formulas[0], wanted[0], places, array, alpha, result)
    (first, second), behind = halves(formulas, array, alpha)
    forward, middle = chain(first, places, array, alpha), len(first)
    before = _back(first, wanted[:middle], places, array, alpha, result)
    after = _back(second, wanted[middle:], places, *behind, result + sum(wanted[:middle]))

    @inline
    def through(g: Vector, s: Vector, arrays, results, i: int, whole: bool, mask, numbers) -> Vector:
        g = after(g, forward(s, arrays, i, whole, mask, numbers), arrays, results, i, whole, mask, numbers)
        return before(g, s, arrays, results, i, whole, mask, numbers)

    return through


def _one_step_back(
    formula: Formula, is_wanted: bool, places: Places, array: int, alpha: int, result: int
) -> Callable[..., Vector]:
    beta, gradient, operand = alpha + 1, post_ops.GRADIENTS[formula.name], read_at(formula, places, 0, array)
    store = _storing(formula, places, result) if is_wanted else _nothing_stored

    @inline
    def through(g: Vector, s: Vector, arrays, results, i: int, whole: bool, mask, numbers) -> Vector:
        t = operand(s, arrays, i, whole, mask)
        store(g, s, t, results, i, whole, mask)
        return gradient(g, s, t, numbers[alpha], numbers[beta])

    return through


@inline
def _nothing_stored(g: Vector, s: Vector, t: Vector, results, i: int, whole: bool, mask) -> None:
    pass


def _storing(formula: Formula, places: Places, result: int) -> Callable[..., None]:
    """(g, s, t, results, i, whole, mask): write the gradient of a post-op's operand."""
    gradient, store = post_ops.OPERAND_GRADIENTS[formula.name], places.store

    @inline
    def write(g: Vector, s: Vector, t: Vector, results, i: int, whole: bool, mask) -> None:
        store(results[result], i, gradient(g, s, t, 0.0, 0.0), whole, mask)

    return write
