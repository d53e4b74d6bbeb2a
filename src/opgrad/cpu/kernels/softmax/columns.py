"""Softmax, log-softmax and their gradients along axes that are not the last in memory: each lane is a row.

A unit is a strip of columns as wide as a vector. A kernel writes a whole strip past the cache while it reduces the next
one. As in `rows`, plain kernels read the caller's arrays, kernels in place work on a buffer of stages, and kernels with
attributes put a strip, after the formulas before softmax, in a buffer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Float, Private, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.chain import joined
from opgrad.cpu.kernels.fused.form import Form, GradientForm, one_after_the_other
from opgrad.cpu.kernels.fused.operands import (
    IN_COLUMNS,
    OF_PLAIN_STRIP,
    OF_STRIP,
    ColumnResults,
    DropoutState,
    Line,
    RowMemory,
    Source,
    Switches,
    keep_strip,
    without_dropout,
)
from opgrad.cpu.kernels.loops import columns as loops
from opgrad.cpu.kernels.loops.map import get, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS, SoftmaxReduction, gradient_result, of_columns
from opgrad.cpu.kernels.softmax.rows import Block

# --- a strip in place: a buffer, or a tile of transposed rows -------------------------------------------------------


def forward_lines(reduction: SoftmaxReduction, meanwhile: Callable[..., None]) -> Callable[..., Vector]:
    """x = softmax(x) down as many columns as a vector has lanes; returns the log-sum-exp of each.

    `fine`: whether the result shows the sums' last digits. `ahead`, `before`: as for column_sum_exp.
    """
    add_up, subtracted, numbers_of = reduction.loop(meanwhile), reduction.subtracted, reduction.numbers
    result, log_sum_exp = reduction.result, reduction.log_sum_exp

    @inline
    def lines(x, x_n: int, n: int, fine, inf_as_zero: int, ahead, before) -> Vector:
        mask = v.first(x, v.lanes(x))
        largest = loops.column_max(x, x_n, n, True, mask)
        m = subtracted(x, largest)
        sums = add_up(x, x, x_n, n, True, mask, m, x, x_n, ahead, x_n, before)
        numbers = numbers_of(x, sums, largest, m, inf_as_zero)
        for i in range(n):
            v.store(x, i * x_n, result(v.load(x, i * x_n), numbers, fine))
        return log_sum_exp(x, sums, largest, m, numbers)

    return lines


def gradient_lines(operator: str, meanwhile: Callable[..., None]) -> Callable[..., None]:
    """The gradient replaces dy, down as many columns as a vector has lanes."""
    term, formula = GRADIENTS[operator]

    @inline
    def value(arrays, i: int, whole: bool, mask, step: int) -> Vector:
        dy, y, dy_ahead, y_ahead = arrays
        v.prefetch(dy_ahead, i * step)
        v.prefetch(y_ahead, i * step)
        return term(v.load(dy, i * step), v.load(y, i * step))

    add_up = loops.column_sum(value, meanwhile)

    @inline
    def lines(dy, y, step: int, n: int, ahead, before) -> None:
        s = add_up(dy, n, (dy, y, ahead[0], ahead[1]), True, v.first(dy, v.lanes(dy)), step, before)
        for i in range(n):
            v.store(dy, i * step, formula(v.load(dy, i * step), v.load(y, i * step), s))

    return lines


def forward_in_place(operator: str, exact: bool) -> Kernel:
    lines = forward_lines(of_columns(operator, exact), loops.nothing)

    @kernel
    def forward_columns_in_place(block: Block):
        for j in range(0, block.width, v.lanes(block.values)):
            x = block.values + j
            v.store(block.stats, j, lines(x, block.width, block.n, True, block.inf_as_zero, x, 0))

    return forward_columns_in_place


def gradient_in_place(operator: str) -> Kernel:
    lines = gradient_lines(operator, loops.nothing)

    @kernel
    def gradient_columns_in_place(block: Block):
        for j in range(0, block.width, v.lanes(block.values)):
            dy, y = block.values + j, block.other + j
            lines(dy, y, block.width, block.n, (dy, y), 0)

    return gradient_columns_in_place


# --- forward -------------------------------------------------------------------------------------------------------


@inline
def _reads_plain(sources, o: int, j: int, n: int, whole: bool, mask, e, numbers):
    """A strip's values, whether all its lanes exist, the mask of those, the next strip, and the largest elements."""
    x = sources[0]
    xs = x.data + (o * x.outer + j)
    return Line(xs, x.step), whole, mask, xs + v.lanes(xs), loops.column_max(xs, x.step, n, whole, mask)


def _reads_with_attributes(form: Form) -> Callable[..., Any]:
    through, inner = form.inwards(IN_COLUMNS), form.arrays_inwards(OF_STRIP)

    @inline
    def read(sources, o: int, j: int, n: int, whole: bool, mask, e, numbers):
        arrays, w, largest = inner(e, sources, (o, j)), v.lanes(e), v.full(e, MINUS_INFINITY)
        x = arrays[0]
        for i in range(n):
            s = through(get(x.data, i * x.step, whole, mask), joined((e,), arrays), i, whole, mask, numbers)
            v.prefetch(x.data, i * x.step + w)
            v.store(e, i * w, s)
            largest = v.maximum(s, largest)
        return Line(e, w), True, v.first(e, w), e, largest

    return read


_in_buffer, _where_they_lie = inline(lambda x, e: Line(e, v.lanes(e))), inline(lambda x, e: x)


def _written(form: Form, result: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, (numbers of the strip, fine, numbers)): a vector of y from the values kept."""
    through = form.outwards(IN_COLUMNS)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        (of_strip, fine, of_formulas), line = numbers, arrays[0]
        s = result(get(line.data, i * line.step, whole, mask), of_strip, fine)
        return through(s, arrays, i, whole, mask, of_formulas)

    return value


def _other_results(form: Form, reduction: SoftmaxReduction) -> Callable[..., None]:
    """(results, o, j, inner, n, mask, e, dropped, found): write the results besides y that the form has."""
    log_sum_exp, result = reduction.log_sum_exp, reduction.result

    @inline
    def stats(results, o: int, j: int, inner: int, n: int, mask, e, dropped, found) -> None:
        of_strip, s, largest, m = found
        v.store_masked(results.stats, o * inner + j, log_sum_exp(e, s, largest, m, of_strip), mask)

    @inline
    def saved(results, o: int, j: int, inner: int, n: int, mask, e, dropped, found) -> None:
        w, out = v.lanes(e), results.saved.data + (o * results.saved.outer + j)
        for i in range(n):
            v.store_masked(out, i * results.saved.step, result(v.load(e, i * w), found[0], True), mask)

    @inline
    def decisions(results, o: int, j: int, inner: int, n: int, mask, e, dropped, found) -> None:
        w, out = v.lanes(e), results.mask.data + (o * results.mask.outer + j)
        for i in range(n):
            v.store_masked(out, i * results.mask.step, v.load(dropped.data, i * w), mask)

    every = {"stats": stats, "saved": saved, "mask": decisions}
    return one_after_the_other([every[name] for name in form.results])


class StripArguments(NamedTuple):
    """The arguments of a forward body that are the same for all strips."""

    x: Any  # a pointer of the dtype of the values that are summed
    sources: Any
    numbers: Any
    e: Any
    done: Any
    dropped: Any
    results: Any
    dropout: Any
    inf_as_zero: int


def forward_body(
    form: Form, reduction: SoftmaxReduction, read: Callable[..., Any], is_kept: bool
) -> Callable[..., None]:
    """Write the strips `units` of y, each while the next one is reduced, if it is written past the cache.

    is_kept: whether values or exponentials wait in a buffer until they are written, and are not read from x again.
    """
    value, others = _written(form, reduction.result), _other_results(form, reduction)
    decide = keep_strip if form.drops else without_dropout
    add_up, outer = reduction.loop(loops.writing(value)), form.arrays_outwards(OF_STRIP)
    subtracted, numbers_of, no_numbers = reduction.subtracted, reduction.numbers, reduction.no_numbers
    place = _in_buffer if is_kept else _where_they_lie

    @inline
    def write_strips(units, strips, n: int, y, stream: int, arguments) -> None:
        x, sources, numbers, e, done, dropped, results, dropout, inf_as_zero = arguments
        w, fine, out, pending, of_strip = v.lanes(e), v.is_fine(x), y.data, 0, no_numbers(x)
        arrays = outer(place(Line(x, sources[0].step), done), dropped, e, sources, (0, 0))
        for unit in units:
            o, j, whole, mask = loops.aligned_strip(unit, strips, y, y, w, stream)
            if j >= strips.inner:
                continue
            xs, every, lanes, ahead, largest = read(sources, o, j, n, whole, mask, e, numbers)
            m = subtracted(xs.data, largest)
            before = out, y.step, pending, arrays, (of_strip, fine, numbers)
            s = add_up(x, xs.data, xs.step, n, every, lanes, m, e, w if is_kept else 0, ahead, xs.step, before)
            out, of_strip = y.data + (o * y.outer + j), numbers_of(xs.data, s, largest, m, inf_as_zero)
            decide(dropped, n, o * n * strips.inner + j, strips.inner, dropout)
            others(results, o, j, strips.inner, n, mask, e, dropped, (of_strip, s, largest, m))
            arrays = outer(place(xs, e), dropped, e, sources, (o, j))
            pending = loops.streams_columns(out, y.step, stream) if whole else 0
            if not pending:
                for i in range(n):
                    found = value(arrays, i, whole, mask, (of_strip, fine, numbers))
                    put(out, i * y.step, found, whole, mask, 0)
            if is_kept:
                e, done = done, e
        if pending:
            for i in range(n):
                found = value(arrays, i, True, v.first(out, w), (of_strip, fine, numbers))
                v.store_streaming(out, i * y.step, found)

    return write_strips


_softmax = forward_body(Form("softmax", "columns"), of_columns("softmax"), _reads_plain, is_kept=True)


@kernel
def softmax_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, e: Private, done: Private, stream):
    _softmax(units, strips, n, y, stream, StripArguments(x.data, (x,), 0, e, done, e, 0, 0, 0))


def _without_memory(operator: str) -> Kernel:
    """The plain kernel that reads x again when it writes; softmax computes its exponentials twice."""
    reduction = of_columns(operator, recomputed=True)
    body = forward_body(Form(operator, "columns"), reduction, _reads_plain, is_kept=False)

    @kernel
    def by_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, stream):
        body(units, strips, n, y, stream, StripArguments(x.data, (x,), 0, x.data, x.data, x.data, 0, 0, 0))

    return by_columns


log_softmax_columns, softmax_long_columns = _without_memory("log_softmax"), _without_memory("softmax")


def forward_with_attributes(form: Form) -> Kernel:
    reduction, read = of_columns(form.operator, form.exact), _reads_with_attributes(form)
    body, count, floats = forward_body(form, reduction, read, is_kept=True), form.sources, form.numbers

    @kernel
    def fused_columns(
        units: Units, strips: Strips, n, sources: (Source,) * count, y: Columns, numbers: (Float,) * floats,
        memory: RowMemory, results: ColumnResults, dropout: DropoutState, switches: Switches,
    ):  # fmt: skip
        e, done, dropped, w = memory.e, memory.done, Line(memory.kept, v.lanes(memory.e)), v.lanes(memory.e)
        stream = switches.stream if w >= v.line(y.data) else 0
        arguments = StripArguments(e, sources, numbers, e, done, dropped, results, dropout, switches.inf_as_zero)
        body(units, strips, n, y, stream, arguments)

    return fused_columns


# --- gradients -----------------------------------------------------------------------------------------------------


def _gradient_terms(form: GradientForm) -> Callable[..., tuple[Vector, Vector]]:
    """(arrays, i, whole, mask, numbers): the gradient with respect to the softmax, and y."""
    back, dy, y = form.backwards(IN_COLUMNS), 1 + form.drops, 2 + form.drops

    @inline
    def both(arrays, i: int, whole: bool, mask, numbers):
        of_dy, of_y = arrays[dy], arrays[y]
        y_i = get(of_y.data, i * of_y.step, whole, mask)
        return back(get(of_dy.data, i * of_dy.step, whole, mask), y_i, arrays, i, whole, mask, numbers), y_i

    return both


def _gradient_value(form: GradientForm, keep: Callable[..., None]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, numbers): a term of the sum; keep(buffer, i, gradient with respect to the softmax)."""
    term, both, dy, y = GRADIENTS[form.operator][0], _gradient_terms(form), 1 + form.drops, 2 + form.drops

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        of_dy, of_y = arrays[dy], arrays[y]
        v.prefetch(of_dy.data, i * of_dy.step + v.lanes(of_dy.data))
        v.prefetch(of_y.data, i * of_y.step + v.lanes(of_y.data))
        g, y_i = both(arrays, i, whole, mask, numbers)
        keep(arrays[0], i, g)
        return term(g, y_i)

    return value


def gradient_body(form: GradientForm, place: Any, is_kept: bool) -> Callable[..., None]:
    """Write the strips `units` of dx, as `forward_body` writes y; place, is_kept: as in `rows`."""
    y, keep, again = 2 + form.drops, inline(lambda buffer, i, g: None), _gradient_terms(form)
    if is_kept:
        keep = inline(lambda buffer, i, g: v.store(buffer, i * v.lanes(buffer), g))
        again = inline(
            lambda a, i, whole, mask, numbers: (
                v.load(a[0], i * v.lanes(a[0])),
                get(a[y].data, i * a[y].step, whole, mask),
            )
        )
    result, arrays_of = gradient_result(form, again, IN_COLUMNS), form.arrays_backwards(place)
    decide = keep_strip if form.drops else without_dropout
    add_up = loops.column_sum(_gradient_value(form, keep), loops.writing(result))

    @inline
    def write_strips(units, strips, n: int, dx, past: int, arguments) -> None:
        beside, sources, numbers, e, done, dropped, dropout = arguments
        w, out, pending, s = v.lanes(e), dx.data, 0, v.full(e, 0.0)
        before = arrays_of(done, dropped, e, sources, (0, 0))
        for unit in units:
            o, j, whole, mask = loops.aligned_strip(unit, strips, beside, dx, w, past)
            if j >= strips.inner:
                continue
            decide(dropped, n, o * n * strips.inner + j, strips.inner, dropout)
            arrays = arrays_of(e, dropped, e, sources, (o, j))
            s = add_up(e, n, arrays, whole, mask, numbers, (out, dx.step, pending, before, (s, numbers)))
            out, before = dx.data + (o * dx.outer + j), arrays
            pending = loops.streams_columns(out, dx.step, past) if whole else 0
            if not pending:
                for i in range(n):
                    put(out, i * dx.step, result(before, i, whole, mask, (s, numbers)), whole, mask, 0)
            if is_kept:
                e, done = done, e
        if pending:
            for i in range(n):
                v.store_streaming(out, i * dx.step, result(before, i, True, v.first(out, w), (s, numbers)))

    return write_strips


def gradient_columns(operator: str) -> Kernel:
    body = gradient_body(GradientForm(operator, "columns"), OF_PLAIN_STRIP, is_kept=False)

    @kernel
    def by_columns(units: Units, strips: Strips, n, dy: Columns, y: Columns, dx: Columns, stream):
        body(units, strips, n, dx, stream, (dy, (dy, y), 0, dy.data, dy.data, dy.data, 0))

    return by_columns


def gradient_with_attributes(form: GradientForm) -> Kernel:
    body, count, floats = gradient_body(form, OF_STRIP, is_kept=True), form.sources, form.numbers

    @kernel
    def fused_gradient_columns(
        units: Units, strips: Strips, n, sources: (Source,) * count, dx: Columns, numbers: (Float,) * floats,
        memory: RowMemory, dropout: DropoutState, stream,
    ):  # fmt: skip
        e, done, w = memory.e, memory.done, v.lanes(memory.e)
        past = stream if w >= v.line(dx.data) else 0
        body(units, strips, n, dx, past, (dx, sources, numbers, e, done, Line(memory.kept, w), dropout))

    return fused_gradient_columns
