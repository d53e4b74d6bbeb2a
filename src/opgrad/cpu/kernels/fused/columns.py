"""Softmax, log-softmax and their gradients with attributes, along axes that are not the last in memory.

As in `softmax.columns`, each strip is written while the next one is reduced. As in `rows`, a strip lies in a buffer
after the formulas before softmax, and those behind it are applied when the strip is written.
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Pointer, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.form import (
    ALONG,
    COLUMNS,
    ColumnResults,
    DropoutState,
    Form,
    GradientForm,
    Memory,
    arrays_of,
    do_nothing,
    gradient_arrays,
    gradient_result,
    keep_strip,
    softmax_gradient,
    softmax_input,
    softmax_result,
)
from opgrad.cpu.kernels.loops import columns as loops
from opgrad.cpu.kernels.loops.columns import Line, Strip
from opgrad.cpu.kernels.loops.map import both_offsets, write_same
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS, of_columns


@inline
def _line_in(buffer):
    return Line(buffer, v.lanes(buffer))


@inline
def _strip_of(y, o: int, j: int, whole: bool, mask):
    return Strip(y.data + (o * y.outer + j), y.step, whole, mask)


@inline
def _streams(y, e, stream: int) -> int:
    """Whether y is written past the cache, which takes vectors of at least a line."""
    return stream if v.lanes(e) >= v.line(y.data) else 0


def _reader(form: Form) -> Callable[..., Any]:
    """(e, n, x, operands, whole, mask, numbers): write the inputs of softmax to e; the largest of each column."""
    through = softmax_input(form, COLUMNS)

    @inline
    def read(e, n: int, x, operands, whole: bool, mask, numbers):
        w, largest = v.lanes(e), v.full(e, MINUS_INFINITY)
        for i in range(n):
            s = through((x, operands), i, whole, mask, numbers)
            v.prefetch(x.data, i * x.step + w)
            v.store(e, i * w, s)
            largest = v.maximum(s, largest)
        return largest

    return read


@inline
def _write_mask(out, n: int, kept) -> None:
    for i in range(n):
        v.store_masked(out.data, i * out.step, v.load(kept, i * v.lanes(kept)), out.mask)


def forward_columns(form: Form) -> Kernel:
    reduction, read, find = of_columns(form.operator, form.exact), _reader(form), COLUMNS.find[ALONG]
    subtracted, numbers_of, no_numbers = reduction.subtracted, reduction.numbers, reduction.no_numbers
    decide = keep_strip if form.drops else do_nothing
    arrays_before, arrays_behind = arrays_of(form.before, COLUMNS), arrays_of(form.after, COLUMNS)
    meanwhile, begin, finish = loops.write_strip_behind(softmax_result(form, COLUMNS, reduction.result))
    add_up = reduction.loop(meanwhile)
    log_sum_exp, result = reduction.log_sum_exp, reduction.result

    @inline
    def write_log_sum_exp(stats, o: int, j: int, mask, x, sums, largest, m, numbers) -> None:
        found = log_sum_exp(x, sums, largest, m, numbers)
        v.store_masked(stats.data, o * stats.step + j, found, mask)

    @inline
    def write_softmax(out, n: int, e, numbers) -> None:
        for i in range(n):
            v.store_masked(out.data, i * out.step, result(v.load(e, i * v.lanes(e)), numbers, True), out.mask)

    store_stats = write_log_sum_exp if "stats" in form.results else do_nothing
    write_saved = write_softmax if "saved" in form.results else do_nothing
    write_mask = _write_mask if "mask" in form.results else do_nothing

    @kernel
    def fused_columns(
        units: Units, strips: Strips, n, sources: form.sources, y: Columns, numbers: form.numbers, memory: Memory,
        results: ColumnResults, dropout: DropoutState, inf_as_zero, stream,
    ):  # fmt: skip
        e, done, kept, _ = memory
        w, past, decisions = v.lanes(e), _streams(y, e, stream), _line_in(kept)
        operands = arrays_behind(decisions, sources[2], (0, 0))
        waiting = loops.no_strip(y, (_line_in(done), operands), (no_numbers(e), numbers))
        for unit in units:
            o, j, whole, mask = loops.aligned_strip(unit, strips, y, y, w, past)
            if j >= strips.inner:
                continue
            at, strip = (o, j), loops.in_buffer(e)
            operands = arrays_before(decisions, sources[1], at)
            largest = read(e, n, find(sources[0], at), operands, whole, mask, numbers)
            m = subtracted(e, largest)
            sums = add_up(e, strip, n, m, e, w, _line_in(e), waiting)
            of_strip = numbers_of(e, sums, largest, m, inf_as_zero)
            decide(kept, n, o * n * strips.inner + j, strips.inner, dropout)
            store_stats(results.stats, o, j, mask, e, sums, largest, m, of_strip)
            write_saved(_strip_of(results.saved, o, j, whole, mask), n, e, of_strip)
            write_mask(_strip_of(results.mask, o, j, whole, mask), n, kept)
            arrays = _line_in(e), arrays_behind(decisions, sources[2], at)
            waiting = begin(_strip_of(y, o, j, whole, mask), n, arrays, (of_strip, numbers), past)
            e, done = done, e
        finish(waiting, n)

    return fused_columns


def gradient_columns(form: GradientForm) -> Kernel:
    (term, formula), decide = GRADIENTS[form.operator], keep_strip if form.drops else do_nothing
    both, arrays_at = softmax_gradient(form, COLUMNS, stores=True), gradient_arrays(form, COLUMNS)

    @inline
    def term_at(arrays: Any, i: int, whole: bool, mask, numbers) -> Vector:
        dy, own = arrays.dy, arrays.y
        v.prefetch(dy.data, i * dy.step + v.lanes(dy.data))
        v.prefetch(own.data, i * own.step + v.lanes(own.data))
        g, y = both(arrays, i, whole, mask, numbers)
        v.store(arrays.kept.data, i * arrays.kept.step, g)
        return term(g, y)

    meanwhile, begin, finish = loops.write_strip_behind(gradient_result(form, COLUMNS, formula))
    add_up = loops.column_sum(term_at, meanwhile)

    @kernel
    def fused_gradient_columns(
        units: Units, strips: Strips, n, sources: form.sources, dx: Columns, numbers: form.numbers, memory: Memory,
        dropout: DropoutState, stream,
    ):  # fmt: skip
        e, done, kept, _ = memory
        w, past, decisions = v.lanes(e), _streams(dx, e, stream), _line_in(kept)
        arrays = arrays_at(_line_in(done), decisions, sources, (0, 0))
        waiting = loops.no_strip(dx, arrays, (v.full(e, 0.0), numbers))
        for unit in units:
            o, j, whole, mask = loops.aligned_strip(unit, strips, dx, dx, w, past)
            if j >= strips.inner:
                continue
            decide(kept, n, o * n * strips.inner + j, strips.inner, dropout)
            arrays = arrays_at(_line_in(e), decisions, sources, (o, j))
            s = add_up(e, n, arrays, whole, mask, numbers, waiting)
            waiting = begin(_strip_of(dx, o, j, whole, mask), n, arrays, (s, numbers), past)
            e, done = done, e
        finish(waiting, n)

    return fused_gradient_columns


# --- copies of operands that fused kernels cannot read, or write, where they lie -------------------------------------


@inline
def _size(p) -> int:
    return v.address_of(p + 1) - v.address_of(p)


@kernel
def copy_runs(runs: Units, axes, table, count, x: Pointer, x_step, y: Pointer, y_step):
    """y = x, a run of `count` elements for each index of the axes in the table; all strides are in bytes."""
    for run in runs:
        x_offset, y_offset = both_offsets(table, axes, run)
        source, target = v.at_byte(x, x_offset), v.at_byte(y, y_offset)
        if x_step == _size(x) and y_step == _size(y):
            write_same(target, 0, count, 0, (source,), ())
        else:
            for i in range(count):
                v.store_one(v.at_byte(target, i * y_step), 0, v.load_one(v.at_byte(source, i * x_step), 0))
