"""Softmax and log-softmax along axes that are not the last in memory, with attributes, in one kernel.

A strip is read once: the links before softmax are applied to each vector, and the result is stored in a buffer. Then
the exponentials in the buffer are summed; in the same loop the strip before is divided by its sums, the links behind
softmax are applied to it, and it is written past the cache.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Float, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.chain import joined
from opgrad.cpu.kernels.fused.form import Form, arrays_inwards, arrays_outwards, inwards, one_after_the_other, outwards
from opgrad.cpu.kernels.fused.operands import (
    DECIDE_STRIP,
    IN_COLUMNS,
    OF_STRIP,
    ColumnResults,
    Dropout,
    Line,
    Memory,
    Source,
    Switches,
)
from opgrad.cpu.kernels.loops import columns as loops
from opgrad.cpu.kernels.loops.map import get, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, minus_both
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.softmax import columns as plain
from opgrad.cpu.kernels.softmax import variants

_subtracted = variants.COLUMNS_IN_PLACE[False].subtracted


def strip_reader(form: Form) -> Callable[..., Vector]:
    """(e, n, whole, mask, arrays, numbers): store a strip after the links before softmax in e; the columns' largest."""
    through = inwards(form, IN_COLUMNS)

    @inline
    def read(e, n: int, whole: bool, mask, arrays, numbers) -> Vector:
        w, x, largest = v.lanes(e), arrays[0], v.full(e, MINUS_INFINITY)
        for i in range(n):
            s = through(get(x.data, i * x.step, whole, mask), joined((e,), arrays), i, whole, mask, numbers)
            v.prefetch(x.data, i * x.step + w)
            v.store(e, i * w, s)
            largest = v.maximum(s, largest)
        return largest

    return read


class Sums(NamedTuple):
    """The functions in which softmax and log-softmax differ, as in fused_rows.

    add_up: takes `written` and returns (e, n, m, out, out_n, pending, arrays, numbers): the sums. of_strip: (x, sums,
    largest, m, inf_as_zero): the numbers of a strip for `result`. none: (x): such numbers, before there is a strip.
    note: (sums, largest, m, numbers of the strip): the log-sum-exp.
    """

    add_up: Callable[..., Any]
    of_strip: Callable[..., Any]
    result: Callable[..., Vector]
    none: Callable[..., Any]
    note: Callable[..., Vector]


def _exponentials(written: Callable[..., Vector], adding: lse.Adding) -> Callable[..., Any]:
    sum_exp = loops.column_sum_exp(loops.writing(written), adding)

    @inline
    def add_up(e, n: int, m: Vector, out, out_n: int, pending: int, arrays, numbers):
        w, before = v.lanes(e), (out, out_n, pending, arrays, v.lanes(e), numbers)
        return sum_exp(e, w, n, True, v.first(e, w), m, e, w, e, before)

    return add_up


def _rests(written: Callable[..., Vector], adding: lse.AddingBelow) -> Callable[..., Any]:
    add_rest = loops.column_rest(loops.writing(written), adding)

    @inline
    def add_up(e, n: int, m: Vector, out, out_n: int, pending: int, arrays, numbers):
        w, before = v.lanes(e), (out, out_n, pending, arrays, v.lanes(e), numbers)
        return add_rest(e, w, n, True, v.first(e, w), m, e, before)

    return add_up


_log_sum_exp = plain.log_sum_exp


def _softmax_sums(variant: variants.Variant) -> Sums:
    divide, quotient = variant.divide, variant.quotient
    return Sums(
        partial(_exponentials, adding=variant.sums),
        inline(lambda x, s, largest, m, inf_as_zero: divide(x, s, m, inf_as_zero)),
        inline(lambda e, divisor: quotient(e, divisor, True)),
        variant.no_divisor,
        inline(lambda s, largest, m, divisor: _log_sum_exp(largest, m, s)),
    )


def _log_softmax_sums(variant: variants.Variant) -> Sums:
    count_of = variant.count_of

    @inline
    def log_of_strip(x, sums, largest: Vector, m: Vector, inf_as_zero: int):
        rest, count = sums
        return largest, lse.column_log_of_sum(rest, count_of(largest, count), m)

    return Sums(
        partial(_rests, adding=variant.rests),
        log_of_strip,
        inline(lambda x, numbers: minus_both(x, numbers[0], numbers[1])),
        inline(lambda x: (v.full(x, 0.0), v.full(x, 0.0))),
        inline(lambda sums, largest, m, numbers: numbers[0] + numbers[1]),
    )


# By whether sums are exact.
SOFTMAX = {exact: _softmax_sums(variant) for exact, variant in variants.COLUMNS_IN_PLACE.items()}
LOG_SOFTMAX = {exact: _log_softmax_sums(variant) for exact, variant in variants.COLUMNS_IN_PLACE.items()}


def strip_value(form: Form, result: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, w, i, (numbers of the strip, numbers)): y from the buffer, after the links behind softmax."""
    through = outwards(form, IN_COLUMNS)

    @inline
    def value(arrays, w: int, i: int, numbers, whole: bool, mask) -> Vector:
        of_strip, of_links = numbers
        return through(result(v.load(arrays[0], i * w), of_strip), arrays, i, whole, mask, of_links)

    return value


def beside(form: Form, sums: Sums) -> Callable[..., None]:
    """(results, o, j, inner, n, whole, mask, e, kept, found): write the results besides y that the form has."""
    note, result = sums.note, sums.result

    @inline
    def stats(results, o: int, j: int, inner: int, n: int, mask, e, kept, found) -> None:
        of_strip, s, largest, m = found
        v.store_masked(results.stats, o * inner + j, note(s, largest, m, of_strip), mask)

    @inline
    def saved(results, o: int, j: int, inner: int, n: int, mask, e, kept, found) -> None:
        w, out = v.lanes(e), results.saved.data + (o * results.saved.outer + j)
        for i in range(n):
            v.store_masked(out, i * results.saved.step, result(v.load(e, i * w), found[0]), mask)

    @inline
    def decisions(results, o: int, j: int, inner: int, n: int, mask, e, kept, found) -> None:
        w, out = v.lanes(e), results.mask.data + (o * results.mask.outer + j)
        for i in range(n):
            v.store_masked(out, i * results.mask.step, v.load(kept, i * w), mask)

    every = {"stats": stats, "saved": saved, "mask": decisions}
    return one_after_the_other([every[name] for name in form.results])


def forward(form: Form, sums: Sums) -> Kernel:
    """The kernel of a form."""
    read, value, others = strip_reader(form), strip_value(form, sums.result), beside(form, sums)
    written = inline(lambda a, a_n, i, numbers: value(a, a_n, i, numbers, True, v.first(a[0], a_n)))
    add_up, of_strip, none, subtracted = sums.add_up(written), sums.of_strip, sums.none, _subtracted
    decide, inner, outer = DECIDE_STRIP[form.drops], arrays_inwards(form, OF_STRIP), arrays_outwards(form, OF_STRIP)
    count, floats = form.sources, form.numbers

    @kernel
    def fused_columns(
        units: Units, strips: Strips, n, sources: (Source,) * count, y: Columns, numbers: (Float,) * floats,
        memory: Memory, results: ColumnResults, dropout: Dropout, switches: Switches,
    ):  # fmt: skip
        e, done, kept, w = memory.e, memory.done, Line(memory.kept, v.lanes(memory.e)), v.lanes(memory.e)
        stream = switches.stream if w >= v.line(y.data) else 0
        out, pending, divisor, arrays = y.data, 0, none(e), outer(done, kept, e, sources, (0, 0))
        for unit in units:
            o, j, whole, mask = loops.strip_of(unit, strips, y, y, w, stream)
            if j >= strips.inner:
                continue
            ys = y.data + (o * y.outer + j)
            largest = read(e, n, whole, mask, inner(e, sources, (o, j)), numbers)
            m = subtracted(e, largest)
            s = add_up(e, n, m, out, y.step, pending, arrays, (divisor, numbers))
            out, divisor = ys, of_strip(e, s, largest, m, switches.inf_as_zero)
            decide(kept, n, o * n * strips.inner + j, strips.inner, dropout)
            others(results, o, j, strips.inner, n, mask, e, memory.kept, (divisor, s, largest, m))
            arrays = outer(e, kept, e, sources, (o, j))
            pending = loops.streams_columns(ys, y.step, stream) if whole else 0
            if not pending:
                for i in range(n):
                    put(ys, i * y.step, value(arrays, w, i, (divisor, numbers), whole, mask), whole, mask, 0)
            e, done = done, e
        if pending:
            for i in range(n):
                v.store_streaming(out, i * y.step, written(arrays, w, i, (divisor, numbers)))

    return fused_columns


def softmax(form: Form) -> tuple[Kernel, ...]:
    return (forward(form, SOFTMAX[form.exact]),)


def log_softmax(form: Form) -> tuple[Kernel, ...]:
    return (forward(form, LOG_SOFTMAX[form.exact]),)
