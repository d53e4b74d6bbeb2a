"""Softmax, log-softmax and their gradients with attributes, of contiguous rows.

As in `softmax.rows`, each row is written while the next one is reduced. The formulas before softmax are applied when a
row is read, which then lies in a buffer, and those behind it when the row is written.
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.chain import ALONG, arrays_of
from opgrad.cpu.kernels.fused.form import (
    Form,
    GradientForm,
    gradient_arrays,
    gradient_result,
    softmax_gradient,
    softmax_input,
    softmax_result,
)
from opgrad.cpu.kernels.fused.operands import (
    ROWS,
    DropoutState,
    Memory,
    RowResults,
    do_nothing,
    keep_elements,
    start,
)
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import put, row_writer, write_same
from opgrad.cpu.kernels.loops.rows import combining
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS, of_rows
from opgrad.cpu.kernels.softmax.rows import LATE

# --- forward -------------------------------------------------------------------------------------------------------


def reader(form: Form) -> Callable[..., Any]:
    """(e, n, sources, at, numbers): write n inputs of softmax to e; the largest of them."""
    through, arrays = softmax_input(form, ROWS), arrays_of(form.before, ROWS)
    find = ROWS.find[ALONG]

    @inline
    def visit(total, arrays, i: int, whole: bool, mask, numbers):
        e, x, operands = arrays
        value = through((x, operands), i, whole, mask, numbers)
        put(e, i, value, whole, mask, 0)
        if not whole:
            value = v.select(mask, value, loops.MINUS_INFINITY)
        return (v.maximum(value, total[0]),)

    along = fold(visit)

    @inline
    def read(e, n: int, sources, at, numbers):
        operands = e, find(sources[0], at), arrays(e, sources[1], at)
        return v.reduce_max(along((v.full(e, loops.MINUS_INFINITY),), 0, n, operands, numbers)[0])

    return read


def storing_stats(log_sum_exp: Callable[..., Any]) -> Callable[..., None]:
    """(stats, row, x, sums, largest, m, numbers of the row): store a row's log-sum-exp."""

    @inline
    def store(stats, row: int, x, sums, largest, m, numbers) -> None:
        v.store_one(stats.data, row * stats.step, log_sum_exp(x, sums, largest, m, numbers))

    return store


def forward(form: Form) -> Kernel:
    reduction, read = of_rows(form.operator, form.exact), reader(form)
    subtracted, numbers_of, no_numbers = reduction.subtracted, reduction.numbers, reduction.no_numbers
    arrays_behind = arrays_of(form.after, ROWS)
    step, complete, begin, finish = loops.write_behind(softmax_result(form, ROWS, reduction.result))
    keeps = int(form.operator == "softmax")
    add_up, decide = reduction.loop(step), keep_elements if form.drops else do_nothing
    store_stats = storing_stats(reduction.log_sum_exp) if "stats" in form.results else do_nothing
    write_softmax = row_writer(softmax_result(form._replace(after=()), ROWS, reduction.result))
    write_saved = write_softmax if "saved" in form.results else do_nothing
    write_mask = write_same if "mask" in form.results else do_nothing

    @inline
    def write_rows(first: int, stop: int, n: int, out, stream: int, arguments: Any) -> None:
        sources, y_step, numbers, memory, results, dropout, inf_as_zero = arguments
        e, done, decisions, _ = memory
        late = n <= LATE and not stream
        operands = arrays_behind(decisions, sources[2], (first, 0))
        waiting = loops.no_row(out, n, (done, operands), (no_numbers(e), numbers))
        for row in range(first, stop):
            largest = read(e, n, sources, (row, 0), numbers)
            m, ahead = subtracted(e, largest), start(sources[0], row + 1)
            sums, written = add_up(e, n, m, e, keeps, ahead, waiting)
            complete(waiting, written, n)
            of_row = numbers_of(e, sums, largest, m, inf_as_zero)
            decide(decisions, n, row * n, dropout)
            store_stats(results.stats, row, e, sums, largest, m, of_row)
            write_saved(results.saved.data + row * results.saved.step, 0, n, 0, (e, ()), (of_row, numbers))
            write_mask(results.mask.data + row * results.mask.step, 0, n, 0, (decisions,), ())
            arrays = e, arrays_behind(decisions, sources[2], (row, 0))
            waiting = begin(out + (row - first) * y_step, n, arrays, (of_row, numbers), late, stream)
            e, done = done, e
        finish(waiting, n, stream)

    write = combining(write_rows)

    @kernel
    def fused_rows(
        rows: Units, n, sources: form.sources, y: Rows, numbers: form.numbers, memory: Memory, results: RowResults,
        dropout: DropoutState, inf_as_zero, stream,
    ):  # fmt: skip
        arguments = sources, y.step, numbers, memory, results, dropout, inf_as_zero
        write(rows.start, rows.stop, n, y, memory.buffer, stream, arguments)

    return fused_rows


# --- gradients -----------------------------------------------------------------------------------------------------


def gradient_sum(form: GradientForm, step: Callable[..., int], keeps: bool) -> Callable[..., Any]:
    """The loop of `row_sum_of` over the terms, which also writes the gradients of operands.

    keeps: whether the gradient with respect to the softmax is kept in a buffer.
    """
    (term, _), both = GRADIENTS[form.operator], softmax_gradient(form, ROWS, stores=True)
    keep = put if keeps else do_nothing

    @inline
    def term_at(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        g, y = both(arrays, i, whole, mask, numbers)
        keep(arrays.kept, i, g, whole, mask, 0)
        return term(g, y) if whole else v.select(mask, term(g, y), 0.0)

    return loops.row_sum_of(term_at, step)


def gradient(form: GradientForm) -> Kernel:
    (_, formula), arrays_at = GRADIENTS[form.operator], gradient_arrays(form, ROWS)
    decide = keep_elements if form.drops else do_nothing
    step, complete, begin, finish = loops.write_behind(gradient_result(form, ROWS, formula))
    add_up = gradient_sum(form, step, keeps=True)

    @inline
    def write_rows(first: int, stop: int, n: int, out, stream: int, arguments: Any) -> None:
        sources, dx_step, numbers, memory, dropout = arguments
        e, done, decisions, _ = memory
        waiting = loops.no_row(out, n, arrays_at(done, decisions, sources, (first, 0)), (v.number(e, 0.0), numbers))
        for row in range(first, stop):
            decide(decisions, n, row * n, dropout)
            arrays = arrays_at(e, decisions, sources, (row, 0))
            s, written = add_up(e, n, arrays, numbers, waiting)
            complete(waiting, written, n)
            waiting = begin(out + (row - first) * dx_step, n, arrays, (s, numbers), False, stream)
            e, done = done, e
        finish(waiting, n, stream)

    write = combining(write_rows)

    @kernel
    def fused_gradient_rows(
        rows: Units, n, sources: form.sources, dx: Rows, numbers: form.numbers, memory: Memory, dropout: DropoutState,
        stream,
    ):  # fmt: skip
        arguments = sources, dx.step, numbers, memory, dropout
        write(rows.start, rows.stop, n, dx, memory.buffer, stream, arguments)

    return fused_gradient_rows
