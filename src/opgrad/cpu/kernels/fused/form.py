"""The form of a call for which a fused kernel is compiled: the formulas before softmax or its gradient, and behind it.

What an element of a result is, is the same in each layout, and made here; how operands are read is up to the layout's
`Places`. A docstring such as "(s, arrays, i): …" names the parameters of the function that is returned, and then its
result.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.parameters import Columns, Float, Pointer, Private, Rows
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_word
from opgrad.cpu.kernels.dropout import keep_run
from opgrad.cpu.kernels.loops.columns import Line
from opgrad.cpu.kernels.loops.map import get, mapped, put
from opgrad.cpu.kernels.loops.rows import AHEAD
from opgrad.cpu.kernels.numerics import eltwise

# --- the formulas of post-ops and of their gradients, for one vector -------------------------------------------------
#
# One of POST_OPS gives f(s), where a post-op f may take an operand t. One of POST_OP_GRADIENTS gives the gradient with
# respect to s from the gradient g with respect to f(s), and one of OPERAND_GRADIENTS that with respect to t. All have
# the same parameters: of values s, t or select's condition, select's t, alpha, beta; of gradients g, s, t or select's
# condition, alpha, beta.


def of_values(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    inline(formula)
    return inline(lambda values, operand, third, alpha, beta: formula(values, alpha, beta))


def with_operand(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    inline(formula)
    return inline(lambda values, operand, third, alpha, beta: formula(values, operand, alpha, beta))


def with_third(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    inline(formula)
    return inline(lambda values, operand, third, alpha, beta: formula(values, third, alpha, beta))


@inline
def _truth(s: Vector, holds) -> Vector:
    """1.0 in the lanes for which the mask holds, 0.0 in the others."""
    return v.select(holds, v.like(s, 1.0), 0.0)


BINARY: dict[str, Callable[..., Vector]] = {
    "add": lambda s, t, alpha, beta: s + t,
    "sub": lambda s, t, alpha, beta: s - t,
    "mul": lambda s, t, alpha, beta: s * t,
    "div": lambda s, t, alpha, beta: s / t,
    "max": lambda s, t, alpha, beta: v.select(s == s, v.maximum(s, t), s),
    "min": lambda s, t, alpha, beta: v.select(s == s, v.select(s < t, s, t), s),
    "ge": lambda s, t, alpha, beta: _truth(s, s >= t),
    "gt": lambda s, t, alpha, beta: _truth(s, s > t),
    "le": lambda s, t, alpha, beta: _truth(s, s <= t),
    "lt": lambda s, t, alpha, beta: _truth(s, s < t),
    "eq": lambda s, t, alpha, beta: _truth(s, s == t),
    "ne": lambda s, t, alpha, beta: _truth(s, s != t),
}


@inline
def _larger(g: Vector, s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    """The gradient of max(s, t) with respect to s: g where s is larger, 0 where it is smaller, half of g on a tie."""
    return v.select(s > t, g, v.select(s == t, g * 0.5, 0.0))


@inline
def _smaller(g: Vector, s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return _larger(g, t, s, alpha, beta)


POST_OPS: dict[str, Callable[..., Vector]] = {
    **{name: of_values(formula) for name, formula in eltwise.FORMULAS.items()},
    **{name: with_operand(formula) for name, formula in BINARY.items()},
    "select": inline(lambda s, condition, t, alpha, beta: v.select(condition != 0.0, s, t)),
}
POST_OP_GRADIENTS: dict[str, Callable[..., Vector]] = {
    **{name: with_operand(formula) for name, formula in eltwise.GRADIENTS.items()},
    "add": of_values(lambda g, alpha, beta: g),
    "sub": of_values(lambda g, alpha, beta: g),
    "mul": with_third(BINARY["mul"]),
    "div": with_third(BINARY["div"]),
    "max": _larger,
    "min": _smaller,
    "select": with_third(lambda g, condition, alpha, beta: v.select(condition != 0.0, g, 0.0)),
}
OPERAND_GRADIENTS: dict[str, Callable[..., Vector]] = {
    "add": POST_OP_GRADIENTS["add"],
    "sub": of_values(lambda g, alpha, beta: -g),
    "mul": with_operand(BINARY["mul"]),
    "div": inline(lambda g, s, t, alpha, beta: -(g * s / t / t)),
    "max": _smaller,
    "min": _larger,
    "select": with_third(lambda g, condition, alpha, beta: v.select(condition == 0.0, g, 0.0)),
}


# --- chains: formulas that are applied to each vector, one after the other -------------------------------------------
#
# A formula has a name, and tells for each of its operands whether the operand has a number for each element of a vector
# or one for all. Every formula has two numbers, alpha and beta, as post-ops have.

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


def chain(formulas: Sequence[Formula], places: Places, array: int = 0, alpha: int = 0) -> Callable[..., Vector]:
    """(s, arrays, i, whole, mask, numbers): s after all formulas.

    array, alpha: the indices of the first formula's arrays and numbers.
    """
    if not formulas:
        return inline(lambda s, arrays, i, whole, mask, numbers: s)
    if len(formulas) == 1:
        name, beta = formulas[0].name, alpha + 1
        apply = OTHERS.get(name) or POST_OPS[name]
        operand, third = (read_at(formulas[0], places, each, array) for each in (0, 1))

        @inline
        def apply_one(s: Vector, arrays, i: int, whole: bool, mask, numbers) -> Vector:
            first, second = operand(s, arrays, i, whole, mask), third(s, arrays, i, whole, mask)
            return apply(s, first, second, numbers[alpha], numbers[beta])

        return apply_one
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


# --- operands: where they lie, and how each layout reads them --------------------------------------------------------

# Words of a table: an operand's stride along n, the number of its outer loops, and then two words for each loop, the
# innermost first: its size, and its stride. Strides count elements.
STEP, LOOPS, FIRST_LOOP = 0, 1, 2
ALL_ARE_KEPT = -1  # in place of dropout's threshold


class Source(NamedTuple):
    """An array of the call: its first element, and the address of the table that tells where the others lie."""

    data: Pointer
    table: int


class RowResults(NamedTuple):
    """The results besides y that a forward kernel writes as rows; each may be missing."""

    saved: Rows
    mask: Rows
    stats: Rows


class ColumnResults(NamedTuple):
    """The results besides y that a forward kernel writes as columns; stats has one number for each column."""

    saved: Columns
    mask: Columns
    stats: Rows


class Memory(NamedTuple):
    """A part's private memory: values of this row or strip and of the one before, dropout's decisions, and the buffer
    in which short rows are put together.
    """

    e: Private
    done: Private
    kept: Private
    buffer: Private


class DropoutState(NamedTuple):
    """The array with seed and offset, and the threshold: an element is dropped if its random word is not above it."""

    state: Pointer
    threshold: int


@inline
def start(source: Source, outer: int):
    """The first element of an operand at this outer index."""
    place, rest, loop = 0, outer, FIRST_LOOP
    for _ in range(load_word(source.table, LOOPS) - 1):
        size = load_word(source.table, loop)
        above = rest // size
        place += (rest - above * size) * load_word(source.table, loop + 1)
        rest, loop = above, loop + 2
    return source.data + (place + rest * load_word(source.table, loop + 1))


_write_ones = mapped(lambda kept: v.like(kept, 1.0))


@inline
def keep_elements(kept, count: int, index: int, dropout: DropoutState) -> None:
    """Write dropout's decisions for `count` elements from `index` on: 1 for an element that is kept, else 0."""
    if dropout.threshold == ALL_ARE_KEPT:
        _write_ones(kept, 0, count, 0, (kept,), ())
    else:
        seed, offset = v.load_one(dropout.state, 0), v.load_one(dropout.state, 1)
        keep_run(kept, count, index, seed, offset, dropout.threshold)


@inline
def keep_strip(kept, n: int, index: int, step: int, dropout: DropoutState) -> None:
    """Write dropout's decisions down a strip of columns, whose lines are `step` elements apart."""
    w = v.lanes(kept)
    for i in range(n):
        keep_elements(kept + i * w, w, index + i * step, dropout)


do_nothing = inline(lambda *arguments: None)  # in place of a function whose work a form has not

# --- rows, and blocks of rows: an operand is a pointer, or a vector of the row's number -------------------------------


@inline
def _in_row(row, i: int, whole: bool, mask):
    if whole:
        v.prefetch(row, i + AHEAD)
    return get(row, i, whole, mask)


ROWS = Places(  # at: a row, and an element of it
    {
        ALONG: inline(lambda source, at: start(source, at[0]) + at[1]),
        SAME: inline(lambda source, at: v.full(source.data, v.load_one(start(source, at[0]), 0))),
    },
    _in_row,
    inline(lambda number, i, whole, mask: number),
    get,
    inline(lambda row, i, value, whole, mask: put(row, i, value, whole, mask, 0)),
)

# --- columns ----------------------------------------------------------------------------------------------------------


@inline
def _in_strip(line, i: int, whole: bool, mask):
    return get(line.data, i * line.step, whole, mask)


COLUMNS = Places(  # at: an outer index, and the strip's first column
    {
        ALONG: inline(lambda source, at: Line(start(source, at[0]) + at[1], load_word(source.table, STEP))),
        SAME: inline(lambda source, at: Line(start(source, at[0]), load_word(source.table, STEP))),
    },
    _in_strip,
    inline(lambda line, i, whole, mask: v.full(line.data, v.load_one(line.data, i * line.step))),
    _in_strip,
    inline(lambda line, i, value, whole, mask: put(line.data, i * line.step, value, whole, mask, 0)),
)


# --- forms -----------------------------------------------------------------------------------------------------------

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


def _back(
    formulas: Sequence[Formula], wanted: Sequence[bool], places: Places, array: int, alpha: int, result: int
) -> Callable[..., Vector]:
    """(g, s, …): the gradient with respect to s, the first formula's input; g is that of the last one's result.

    array, alpha, result: the indices of the first formula's arrays, numbers and result.
    """
    if not formulas:
        return inline(lambda g, s, arrays, results, i, whole, mask, numbers: g)
    if len(formulas) == 1:
        formula, beta = formulas[0], alpha + 1
        gradient, operand = POST_OP_GRADIENTS[formula.name], read_at(formula, places, 0, array)
        store = _storing(formula, places, result) if wanted[0] else do_nothing

        @inline
        def through_one(g: Vector, s: Vector, arrays, results, i: int, whole: bool, mask, numbers) -> Vector:
            t = operand(s, arrays, i, whole, mask)
            store(g, s, t, results, i, whole, mask)
            return gradient(g, s, t, numbers[alpha], numbers[beta])

        return through_one
    (first, second), behind = halves(formulas, array, alpha)
    forward, middle = chain(first, places, array, alpha), len(first)
    before = _back(first, wanted[:middle], places, array, alpha, result)
    after = _back(second, wanted[middle:], places, *behind, result + sum(wanted[:middle]))

    @inline
    def through(g: Vector, s: Vector, arrays, results, i: int, whole: bool, mask, numbers) -> Vector:
        g = after(g, forward(s, arrays, i, whole, mask, numbers), arrays, results, i, whole, mask, numbers)
        return before(g, s, arrays, results, i, whole, mask, numbers)

    return through


def _storing(formula: Formula, places: Places, result: int) -> Callable[..., None]:
    """(g, s, t, results, i, whole, mask): write the gradient of a post-op's operand."""
    gradient, store = OPERAND_GRADIENTS[formula.name], places.store

    @inline
    def write(g: Vector, s: Vector, t: Vector, results, i: int, whole: bool, mask) -> None:
        store(results[result], i, gradient(g, s, t, 0.0, 0.0), whole, mask)

    return write
