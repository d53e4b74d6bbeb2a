"""Softmax and log-softmax of rows with attributes in one kernel, which applies to vectors what stages apply to blocks.

A row is read once: the links before softmax are applied to each vector, the result is stored in a buffer, and the row's
maximum is found. Then the exponentials in the buffer are summed; in the same loop the row before is divided by its sum,
the links behind softmax are applied to it, and it is written.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.chain import joined
from opgrad.cpu.kernels.fused.form import Form, arrays_inwards, arrays_outwards, inwards, one_after_the_other, outwards
from opgrad.cpu.kernels.fused.operands import DECIDE, IN_ROWS, OF_ROW, Dropout, Memory, Results, Source, Switches, start
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import get, put, row_stepper, row_writer, write_same
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.softmax import rows as plain
from opgrad.cpu.kernels.softmax import variants

_subtracted = variants.ROWS_IN_PLACE[False].subtracted


def row_reader(form: Form) -> Callable[..., Any]:
    """(like, n, arrays, numbers): store a row after the links before softmax in the buffer, arrays[0].

    Its largest element.
    """
    through = inwards(form, IN_ROWS)

    @inline
    def visit(total, arrays, i: int, whole: bool, mask, numbers):
        e, x = arrays[0], arrays[1]
        value = through(get(x, i, whole, mask), arrays, i, whole, mask, numbers)
        put(e, i, value, whole, mask, 0)
        if not whole:
            value = v.select(mask, value, loops.MINUS_INFINITY)
        return (v.maximum(value, total[0]),)

    along = fold(visit)

    @inline
    def read(e, n: int, arrays, numbers):
        return v.reduce_max(along((v.full(e, loops.MINUS_INFINITY),), 0, n, joined((e,), arrays), numbers)[0])

    return read


class Sums(NamedTuple):
    """The functions in which softmax and log-softmax differ.

    add_up: takes `step`, which writes another row in the same loop, and returns (x, n, m, ahead, out, j, stop, arrays,
    numbers): the sums, and the index behind the last element written. of_row: (x, sums, largest, m, inf_as_zero): the
    numbers of a row. result: (value in the buffer, *numbers of the row): an element of the softmax. none: (x): numbers
    of a row, before there is one. note: (stats, row, x, sums, largest, m, numbers of the row): keeps the log-sum-exp.
    """

    add_up: Callable[..., Any]
    of_row: Callable[..., Any]
    result: Callable[..., Vector]
    none: Callable[..., Any]
    note: Callable[..., None]


def _exponentials(step: Callable[..., int], adding: lse.Adding) -> Callable[..., Any]:
    sum_exp = plain.in_blocks(loops.row_sum_exp(step, adding))
    return inline(
        lambda e, n, m, ahead, out, j, stop, arrays, numbers: sum_exp(
            e, 0, n, m, e, 1, ahead, out, j, stop, arrays, numbers
        )
    )


def _rests(step: Callable[..., int], adding: lse.AddingBelow) -> Callable[..., Any]:
    add_rest = plain.rest_in_blocks(loops.row_rest(step, adding))

    @inline
    def add_up(e, n: int, m, ahead, out, j: int, stop: int, arrays, numbers):
        rest, count, j = add_rest(e, 0, n, m, ahead, out, j, stop, arrays, numbers)
        return (rest, count), j

    return add_up


_note_sum = plain._log_sum_exp


def _softmax_sums(variant: variants.Variant) -> Sums:
    divide, quotient = variant.divide, variant.quotient
    return Sums(
        partial(_exponentials, adding=variant.sums),
        inline(lambda x, s, largest, m, inf_as_zero: divide(x, s, m, inf_as_zero)),
        inline(lambda e, divisor: quotient(e, divisor, True)),
        variant.no_divisor,
        inline(lambda stats, row, x, s, largest, m, numbers: _note_sum(stats, row, x, s, largest, m, True)),
    )


def _log_softmax_sums(variant: variants.Variant) -> Sums:
    count_of = variant.count_of

    @inline
    def log_of_row(x, sums, largest, m, inf_as_zero: int):
        rest, equal = sums
        return v.full(x, largest), lse.row_log_of_sum(x, rest, count_of(largest, equal), m)

    return Sums(
        partial(_rests, adding=variant.rests),
        log_of_row,
        inline(lambda x, numbers: loops.minus_both(x, numbers[0], numbers[1])),
        inline(lambda x: (v.full(x, 0.0), v.full(x, 0.0))),
        inline(lambda stats, row, x, sums, largest, m, of: v.store_one(stats, row, largest + v.first_lane(of[1]))),
    )


# By whether sums are exact.
SOFTMAX = {exact: _softmax_sums(variant) for exact, variant in variants.ROWS_IN_PLACE.items()}
LOG_SOFTMAX = {exact: _log_softmax_sums(variant) for exact, variant in variants.ROWS_IN_PLACE.items()}


def row_value(form: Form, result: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, (numbers of the row, numbers)): y from the buffer, after the links behind softmax."""
    through = outwards(form, IN_ROWS)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        of_row, of_links = numbers
        return through(result(get(arrays[0], i, whole, mask), of_row), arrays, i, whole, mask, of_links)

    return value


def beside(form: Form, sums: Sums) -> Callable[..., None]:
    """(results, row, e, kept, n, of_row, sums, largest, m): write the results besides y that the form has."""
    note, result = sums.note, sums.result
    write_saved = row_writer(inline(lambda arrays, i, whole, mask, of: result(get(arrays[0], i, whole, mask), of)))

    @inline
    def stats(results, row: int, e, kept, n: int, of_row, sums, largest, m) -> None:
        note(results.stats.data, row, e, sums, largest, m, of_row)

    @inline
    def saved(results, row: int, e, kept, n: int, of_row, sums, largest, m) -> None:
        write_saved(results.saved.data + row * results.saved.step, 0, n, 0, (e,), of_row)

    @inline
    def mask(results, row: int, e, kept, n: int, of_row, sums, largest, m) -> None:
        write_same(results.mask.data + row * results.mask.step, 0, n, 0, (kept,), ())

    every = {"stats": stats, "saved": saved, "mask": mask}
    return one_after_the_other([every[name] for name in form.results])


def forward(form: Form, sums: Sums) -> Kernel:
    """The kernel of a form."""
    read, value = row_reader(form), row_value(form, sums.result)
    add_up, write, others = sums.add_up(row_stepper(value)), row_writer(value), beside(form, sums)
    of_row, none, subtracted, decide = sums.of_row, sums.none, _subtracted, DECIDE[form.drops]
    inner, outer = arrays_inwards(form, OF_ROW), arrays_outwards(form, OF_ROW)

    @combine.combining
    def write_rows(first, stop, n, out, past, arguments):
        sources, y_row, numbers, memory, results, dropout, inf_as_zero = arguments
        e, done, kept = memory.e, memory.done, memory.kept
        is_late = n <= plain.LATE and not past
        limit = 0 if is_late else n
        ys, head, divisor, arrays = out, n, none(e), outer(done, kept, e, sources, first)
        for row in range(first, stop):
            largest = read(e, n, inner(e, sources, row), numbers)
            m = subtracted(e, largest)
            ahead = start(sources[0], row + 1)
            s, j = add_up(e, n, m, ahead, ys, head, limit, arrays, (divisor, numbers))
            write(ys, j, n, 0, arrays, (divisor, numbers))
            ys, divisor = out + (row - first) * y_row, of_row(e, s, largest, m, inf_as_zero)
            decide(kept, n, row * n, dropout)
            arrays = outer(e, kept, e, sources, row)
            head = 0 if is_late else loops.line_head(ys, n, past)
            others(results, row, e, kept, n, divisor, s, largest, m)
            write(ys, 0, head, 0, arrays, (divisor, numbers))
            e, done = done, e
        write(ys, head, n, past, arrays, (divisor, numbers))

    count, floats = form.sources, form.numbers

    @kernel
    def fused_rows(
        rows: Units, n, sources: (Source,) * count, y: Rows, numbers: (Float,) * floats, memory: Memory,
        results: Results, dropout: Dropout, switches: Switches,
    ):  # fmt: skip
        arguments = sources, y.step, numbers, memory, results, dropout, switches.inf_as_zero
        write_rows(rows.start, rows.stop, n, y, memory.buffer, switches.stream, arguments)

    return fused_rows


def softmax(form: Form) -> tuple[Kernel, ...]:
    return (forward(form, SOFTMAX[form.exact]),)


def log_softmax(form: Form) -> tuple[Kernel, ...]:
    return (forward(form, LOG_SOFTMAX[form.exact]),)
