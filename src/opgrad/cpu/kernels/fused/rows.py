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
from opgrad.cpu.compiler.words import store_f64
from opgrad.cpu.kernels.fused.form import (
    ALONG,
    ROWS,
    DropoutState,
    Form,
    GradientForm,
    Memory,
    RowResults,
    arrays_of,
    behind_gradient,
    chain,
    do_nothing,
    gradient_arrays,
    gradient_result,
    keep_elements,
    softmax_gradient,
    softmax_input,
    softmax_result,
    start,
)
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.columns import Line, nothing
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import put, row_writer, write_same
from opgrad.cpu.kernels.loops.rows import combining, transpose_in, transpose_out
from opgrad.cpu.kernels.softmax.columns import forward_lines, gradient_lines
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS, of_columns, of_rows
from opgrad.cpu.kernels.softmax.rows import LATE
from opgrad.cpu.kernels.softmax.split import block_of, block_reduction, sum_of_blocks

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


def _storing_stats(log_sum_exp: Callable[..., Any]) -> Callable[..., None]:
    """(stats, row, x, sums, largest, m, numbers of the row): store a row's log-sum-exp."""

    @inline
    def store(stats, row: int, x, sums, largest, m, numbers) -> None:
        v.store_one(stats.data, row * stats.step, log_sum_exp(x, sums, largest, m, numbers))

    return store


def forward_rows(form: Form) -> Kernel:
    reduction, read = of_rows(form.operator, form.exact), reader(form)
    subtracted, numbers_of, no_numbers = reduction.subtracted, reduction.numbers, reduction.no_numbers
    arrays_behind = arrays_of(form.after, ROWS)
    step, complete, begin, finish = loops.write_behind(softmax_result(form, ROWS, reduction.result))
    keeps = int(form.operator == "softmax")
    add_up, decide = reduction.loop(step), keep_elements if form.drops else do_nothing
    store_stats = _storing_stats(reduction.log_sum_exp) if "stats" in form.results else do_nothing
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


def gradient_rows(form: GradientForm) -> Kernel:
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


# --- few long rows: the steps of `softmax.split` ---------------------------------------------------------------------
#
# The formulas before softmax are applied to a block in each of the two steps that read it.


def forward_split(form: Form) -> tuple[Kernel, Kernel, Kernel]:
    """The three steps: the sums of blocks, those of rows, and the results."""
    reduction, reduce, join, numbers_of = block_reduction(form.operator, form.exact)
    reduction_numbers, result, read, find = reduction.numbers, reduction.result, reader(form), ROWS.find[ALONG]
    through, behind = softmax_input(form, ROWS), chain(form.after, ROWS)
    arrays_before, arrays_behind = arrays_of(form.before, ROWS), arrays_of(form.after, ROWS)
    decide = keep_elements if form.drops else do_nothing
    store_stats = _storing_stats(reduction.log_sum_exp) if "stats" in form.results else do_nothing

    @inline
    def of_softmax(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        """arrays: x, the operands before, those behind. numbers: of the row, and of the formulas."""
        x, operands, _ = arrays
        of_row, of_formulas = numbers
        return result(through((x, operands), i, whole, mask, of_formulas), of_row, True)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s = of_softmax(arrays, i, whole, mask, numbers)
        return behind(s, arrays[2], i, whole, mask, numbers[1][1])

    write = row_writer(value)
    write_saved = row_writer(of_softmax) if "saved" in form.results else do_nothing
    write_mask = write_same if "mask" in form.results else do_nothing

    @kernel
    def split_sums(units: Units, blocks, n, sources: form.sources, numbers: form.numbers, memory: Memory, stats):
        for unit in units:
            row, begin, size = block_of(unit, blocks, n)
            largest = read(memory.e, size, sources, (row, begin), numbers)
            reduce(memory.e, size, largest, stats, unit)

    @kernel
    def split_rows(rows: Units, blocks, sources: form.sources, results: RowResults, stats, total):
        x = sources[0].data
        for row in rows:
            largest, m, sums = join(x, stats, total, row, blocks)
            store_stats(results.stats, row, x, sums, largest, m, reduction_numbers(x, sums, largest, m, 0))

    @kernel
    def split_results(
        units: Units, blocks, n, sources: form.sources, y: Rows, numbers: form.numbers, memory: Memory,
        results: RowResults, dropout: DropoutState, inf_as_zero, stream, total,
    ):  # fmt: skip
        for unit in units:
            row, begin, size = block_of(unit, blocks, n)
            x, at, decisions = sources[0].data, (row, begin), memory.kept
            found = numbers_of(x, total, row, inf_as_zero), numbers
            decide(decisions, size, row * n + begin, dropout)
            before, after = arrays_before(decisions, sources[1], at), arrays_behind(decisions, sources[2], at)
            arrays = find(sources[0], at), before, after
            write_saved(results.saved.data + (row * results.saved.step + begin), 0, size, 0, arrays, found)
            write_mask(results.mask.data + (row * results.mask.step + begin), 0, size, 0, (decisions,), ())
            write(y.data + (row * y.step + begin), 0, size, stream, arrays, found)

    return split_sums, split_rows, split_results


def gradient_split(form: GradientForm) -> tuple[Kernel, Kernel]:
    """The two steps: the sums of blocks, and the blocks of dx, for which the sums of a row's blocks are added up."""
    (_, formula), arrays_at = GRADIENTS[form.operator], gradient_arrays(form, ROWS)
    decide = keep_elements if form.drops else do_nothing
    add_up = gradient_sum(form, loops.no_step, keeps=False)
    both, after = softmax_gradient(form, ROWS, stores=False), behind_gradient(form, ROWS)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s, of_formulas = numbers
        g, y = both(arrays, i, whole, mask, of_formulas)
        return after(formula(g, y, s), i, whole, mask, of_formulas)

    write = row_writer(value)

    @kernel
    def split_gradient_sums(
        units: Units, blocks, n, sources: form.sources, numbers: form.numbers, memory: Memory, dropout: DropoutState,
        partial,
    ):  # fmt: skip
        dy, decisions = sources[0].data, memory.kept
        for unit in units:
            row, begin, size = block_of(unit, blocks, n)
            decide(decisions, size, row * n + begin, dropout)
            arrays = arrays_at(memory.e, decisions, sources, (row, begin))
            s, _ = add_up(dy, size, arrays, numbers, loops.no_row(dy, size, (), ()))
            store_f64(partial, unit, s)

    @kernel
    def split_gradient_results(
        units: Units, blocks, n, sources: form.sources, dx: Rows, numbers: form.numbers, memory: Memory,
        dropout: DropoutState, partial, stream,
    ):  # fmt: skip
        dy, decisions = sources[0].data, memory.kept
        for unit in units:
            row, begin, size = block_of(unit, blocks, n)
            s = sum_of_blocks(dy, partial, row, blocks)
            decide(decisions, size, row * n + begin, dropout)
            arrays = arrays_at(memory.e, decisions, sources, (row, begin))
            write(dx.data + (row * dx.step + begin), 0, size, stream, arrays, (s, numbers))

    return split_gradient_sums, split_gradient_results


# --- short rows, transposed into columns of as many rows as a vector has lanes ---------------------------------------
#
# Formulas that have operands are applied before the rows are transposed or after they are transposed back: row by row,
# or to all rows of a group at once where the rows of all arrays are `packed`, without gaps.
#
# 65,536 float32 in rows of 4 with a scale took 0.11 ms on one thread, and 0.15 ms row by row; not transposed 0.28 ms.


def _storing_stats_of_group(log_sum_exp: Callable[..., Any]) -> Callable[..., None]:
    """(stats, first, rows, buffer, what `forward_lines` returns): store the rows' log-sum-exps."""

    @inline
    def store(stats, first: int, rows: int, buffer, found) -> None:
        v.store(buffer, 0, log_sum_exp(buffer, found[0], found[1], found[2], found[3]))
        for r in range(rows):
            v.store_one(stats.data, (first + r) * stats.step, v.load_one(buffer, r))

    return store


def forward_transposed(form: Form) -> Kernel:
    reduction, find = of_columns(form.operator, form.exact), ROWS.find[ALONG]
    lines, write_input = forward_lines(reduction, nothing), row_writer(softmax_input(form, ROWS))
    write = row_writer(softmax_result(form, ROWS, inline(lambda s, of_row, fine: s)))
    before, behind = arrays_of(form.before, ROWS), arrays_of(form.after, ROWS)
    decide = keep_elements if form.drops else do_nothing
    store_stats = _storing_stats_of_group(reduction.log_sum_exp) if "stats" in form.results else do_nothing
    write_saved = write_same if "saved" in form.results else do_nothing
    write_mask = write_same if "mask" in form.results else do_nothing

    @kernel
    def fused_transposed_rows(
        units: Units, count, n, sources: form.sources, y: Rows, numbers: form.numbers, memory: Memory,
        results: RowResults, dropout: DropoutState, inf_as_zero, packed,
    ):  # fmt: skip
        e, tile, kept, _ = memory
        w = v.lanes(e)
        for first in range(units.start * w, min(units.stop * w, count), w):
            rows = min(w, count - first)
            runs, size = (1, rows * n) if packed else (rows, n)
            for r in range(runs):
                at = (first + r, 0)
                write_input(e + r * n, 0, size, 0, (find(sources[0], at), before(kept, sources[1], at)), numbers)
            transpose_in(tile, e, n, n, rows)
            found = lines(tile, w, n, True, inf_as_zero, Line(tile, w), 0)
            transpose_out(e, n, tile, n, rows)
            decide(kept, rows * n, first * n, dropout)
            store_stats(results.stats, first, rows, tile, found)
            for r in range(runs):
                row, s, decisions = first + r, e + r * n, kept + r * n
                write_saved(results.saved.data + row * results.saved.step, 0, size, 0, (s,), ())
                write_mask(results.mask.data + row * results.mask.step, 0, size, 0, (decisions,), ())
                arrays = s, behind(decisions, sources[2], (row, 0))
                write(y.data + row * y.step, 0, size, 0, arrays, ((), numbers))

    return fused_transposed_rows


def gradient_transposed(form: GradientForm) -> Kernel:
    arrays_at, both = gradient_arrays(form, ROWS), softmax_gradient(form, ROWS, stores=True)
    lines, behind = gradient_lines(form.operator, nothing), behind_gradient(form, ROWS)
    decide = keep_elements if form.drops else do_nothing

    @inline
    def value(arrays: Any, i: int, whole: bool, mask, numbers) -> Vector:
        """The gradient with respect to the softmax; y is written to the buffer in place of it."""
        g, y = both(arrays, i, whole, mask, numbers)
        put(arrays.kept, i, y, whole, mask, 0)
        return g

    write = row_writer(value)

    @inline
    def change_lines(tile, n: int, numbers) -> None:
        w = v.lanes(tile)
        for i in range(n):
            v.store(tile, i * w, behind(v.load(tile, i * w), i, True, v.first(tile, w), numbers))

    write_behind = change_lines if form.after else do_nothing

    @kernel
    def fused_gradient_transposed_rows(
        units: Units, count, n, sources: form.sources, dx: Rows, numbers: form.numbers, memory: Memory,
        dropout: DropoutState, packed,
    ):  # fmt: skip
        e, tile, kept, _ = memory
        w = v.lanes(e)
        ys, y_tile = e + (n + 1) * w, tile + (n + w) * w
        for first in range(units.start * w, min(units.stop * w, count), w):
            rows = min(w, count - first)
            runs, size = (1, rows * n) if packed else (rows, n)
            decide(kept, rows * n, first * n, dropout)
            for r in range(runs):
                arrays = arrays_at(ys + r * n, kept + r * n, sources, (first + r, 0))
                write(e + r * n, 0, size, 0, arrays, numbers)
            transpose_in(tile, e, n, n, rows)
            transpose_in(y_tile, ys, n, n, rows)
            lines(tile, y_tile, w, n, (e, ys), 0)
            write_behind(tile, n, numbers)
            transpose_out(dx.data + first * dx.step, dx.step, tile, n, rows)

    return fused_gradient_transposed_rows
