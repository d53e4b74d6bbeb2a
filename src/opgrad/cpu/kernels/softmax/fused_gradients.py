"""Gradients of softmax and log-softmax with attributes in one kernel, for rows, columns, and few long rows.

dy and y are read once. In one loop, the gradient with respect to the softmax is stored in a buffer, its terms are added
to the sum, and the row or strip before is written.
"""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_f64, store_f64
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Float, Rows, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.form import GradientForm, arrays_backwards, backwards, out_of_gradient
from opgrad.cpu.kernels.fused.operands import (
    DECIDE,
    DECIDE_STRIP,
    IN_COLUMNS,
    IN_ROWS,
    OF_BLOCK,
    OF_ROW,
    OF_STRIP,
    BlockMemory,
    Cut,
    Dropout,
    Line,
    Memory,
    Source,
)
from opgrad.cpu.kernels.loops import columns, combine, rows
from opgrad.cpu.kernels.loops.fold import BLOCK, CHUNK
from opgrad.cpu.kernels.loops.map import get, put, row_stepper, row_writer
from opgrad.cpu.kernels.softmax.variants import no_step

Gradient = tuple[Callable[..., Vector], Callable[..., Vector]]  # term(dy, y), and formula(dy, y, the sum of the terms)


def of_rows(form: GradientForm, gradient: Gradient) -> tuple[Kernel, ...]:
    """The kernel of a form for contiguous rows."""
    write_rows, count, floats = _rows_writer(form, gradient), form.sources, form.numbers

    @kernel
    def fused_gradient_rows(
        rows: Units, n, sources: (Source,) * count, dx: Rows, numbers: (Float,) * floats, memory: Memory,
        dropout: Dropout, stream,
    ):  # fmt: skip
        arguments = sources, dx.step, numbers, memory, dropout
        write_rows(rows.start, rows.stop, n, dx, memory.buffer, stream, arguments)

    return (fused_gradient_rows,)


def _rows_writer(form: GradientForm, gradient: Gradient) -> Callable[..., None]:
    """Write dx of the rows from first to stop, each while the next one is read."""
    term, formula = map(inline, gradient)
    place, decide = arrays_backwards(form, OF_ROW), DECIDE[form.drops]
    value, result = _row_value(form, term), _row_result(form, formula)
    add_up, write = rows.row_sum_of(value, row_stepper(result)), row_writer(result)

    @combine.combining
    def write_rows(first, stop, n, out, past, arguments):
        sources, dx_row, numbers, memory, dropout = arguments
        e, done, kept = memory.e, memory.done, memory.kept
        dxs, head, s_before, before = out, n, v.number(e, 0.0), place(done, kept, e, sources, first)
        for row in range(first, stop):
            decide(kept, n, row * n, dropout)
            arrays = place(e, kept, e, sources, row)
            s, j = add_up(e, 0, n, arrays, numbers, dxs, head, n, before, (s_before, numbers))
            write(dxs, j, n, 0, before, (s_before, numbers))
            dxs, before, s_before = out + (row - first) * dx_row, arrays, s
            head = rows.line_head(dxs, n, past)
            write(dxs, 0, head, 0, before, (s_before, numbers))
            e, done = done, e
        write(dxs, head, n, past, before, (s_before, numbers))

    return write_rows


def _row_value(form: GradientForm, term: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, numbers): a term of the sum; the gradient with respect to the softmax to the buffer."""
    back, along, dy, y = backwards(form, IN_ROWS), IN_ROWS.along, 1 + form.drops, 2 + form.drops

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        like = v.full(arrays[0], 0.0)
        of_y = along(like, arrays[y], i, whole, mask)
        g = back(along(like, arrays[dy], i, whole, mask), of_y, arrays, i, whole, mask, numbers)
        put(arrays[0], i, g, whole, mask, 0)
        if not whole:
            return v.select(mask, term(g, of_y), 0.0)
        return term(g, of_y)

    return value


def _row_result(form: GradientForm, formula: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, (the sum, numbers)): dx from the buffer."""
    out, y = out_of_gradient(form, IN_ROWS), 2 + form.drops

    @inline
    def result(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s, of_links = numbers
        dx = formula(get(arrays[0], i, whole, mask), get(arrays[y], i, whole, mask), s)
        return out(dx, arrays, i, whole, mask, of_links)

    return result


def strip_sum(value: Callable[..., Vector], written: Callable[..., Vector]) -> Callable[..., Vector]:
    """(like, n, arrays, whole, mask, numbers, out, out_n, pending, before, of_before): the sums of value down a strip.

    If `pending`, it also writes the strip before past the cache: out[i] = written(before, i, of_before).
    """

    @inline
    def add_up(like, n: int, arrays, whole: bool, mask, numbers, out, out_n: int, pending: int, before, of_before):
        total = v.full(like, 0.0)
        for begin in range(0, n, CHUNK):
            chunk = v.full(like, 0.0)
            for i in range(begin, min(begin + CHUNK, n)):
                chunk = chunk + value(arrays, i, whole, mask, numbers)
                if pending:
                    v.store_streaming(out, i * out_n, written(before, i, of_before))
            total = total + chunk
        return total

    return add_up


def of_columns(form: GradientForm, gradient: Gradient) -> tuple[Kernel, ...]:
    """The kernel of a form for columns."""
    term, formula = map(inline, gradient)
    place, decide = arrays_backwards(form, OF_STRIP), DECIDE_STRIP[form.drops]
    count, floats, result = form.sources, form.numbers, _column_result(form, formula)
    every = inline(lambda p: v.first(p, v.lanes(p)))
    written = inline(lambda arrays, i, numbers: result(arrays, i, numbers, True, every(arrays[0])))
    add_up = strip_sum(_column_value(form, term), written)

    @kernel
    def fused_gradient_columns(
        units: Units, strips: Strips, n, sources: (Source,) * count, dx: Columns, numbers: (Float,) * floats,
        memory: Memory, dropout: Dropout, stream,
    ):  # fmt: skip
        e, done, w, pending = memory.e, memory.done, v.lanes(memory.e), 0
        kept = Line(memory.kept, w)
        past = stream if w >= v.line(dx.data) else 0
        dxs, s, before = dx.data, v.full(e, 0.0), place(done, kept, e, sources, (0, 0))
        for unit in units:
            o, j, whole, mask = columns.strip_of(unit, strips, dx, dx, w, past)
            if j >= strips.inner:
                continue
            decide(kept, n, o * n * strips.inner + j, strips.inner, dropout)
            arrays = place(e, kept, e, sources, (o, j))
            total = add_up(e, n, arrays, whole, mask, numbers, dxs, dx.step, pending, before, (s, numbers))
            dxs, before, s = dx.data + (o * dx.outer + j), arrays, total
            pending = columns.streams_columns(dxs, dx.step, past) if whole else 0
            if not pending:
                for i in range(n):
                    put(dxs, i * dx.step, result(before, i, (s, numbers), whole, mask), whole, mask, 0)
            e, done = done, e
        if pending:
            for i in range(n):
                v.store_streaming(dxs, i * dx.step, written(before, i, (s, numbers)))

    return (fused_gradient_columns,)


def _column_value(form: GradientForm, term: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, numbers): a term of the sum; the gradient with respect to the softmax to the buffer."""
    back, dy, y = backwards(form, IN_COLUMNS), 1 + form.drops, 2 + form.drops

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        e, of_dy, of_y = arrays[0], arrays[dy], arrays[y]
        w = v.lanes(e)
        v.prefetch(of_dy.data, i * of_dy.step + w)
        v.prefetch(of_y.data, i * of_y.step + w)
        y_i = get(of_y.data, i * of_y.step, whole, mask)
        g = back(get(of_dy.data, i * of_dy.step, whole, mask), y_i, arrays, i, whole, mask, numbers)
        v.store(e, i * w, g)
        return term(g, y_i)

    return value


def _column_result(form: GradientForm, formula: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, (the sum, numbers), whole, mask): dx from the buffer."""
    out, y = out_of_gradient(form, IN_COLUMNS), 2 + form.drops

    @inline
    def result(arrays, i: int, numbers, whole: bool, mask) -> Vector:
        s, of_links = numbers
        y_i = get(arrays[y].data, i * arrays[y].step, whole, mask)
        return out(formula(v.load(arrays[0], i * v.lanes(arrays[0])), y_i, s), arrays, i, whole, mask, of_links)

    return result


def of_split(form: GradientForm, gradient: Gradient) -> tuple[Kernel, ...]:
    """The steps of a form for few long rows: the sums of blocks, the sums of rows, and the blocks of dx."""
    term, formula = map(inline, gradient)
    return _block_sums(form, term), _block_results(form, formula)


def _block_sums(form: GradientForm, term: Callable[..., Vector]) -> Kernel:
    """The first step."""
    place, decide, count, floats = arrays_backwards(form, OF_BLOCK), DECIDE[form.drops], form.sources, form.numbers
    with_y = _gradient_with_y(form)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        g, of_y = with_y(arrays, i, whole, mask, numbers)
        return term(g, of_y) if whole else v.select(mask, term(g, of_y), 0.0)

    add_up = rows.row_sum_of(value, no_step)

    @kernel
    def fused_gradient_sums(
        units: Units, cut: Cut, sources: (Source,) * count, numbers: (Float,) * floats, memory: BlockMemory,
        dropout: Dropout, partial,
    ):  # fmt: skip
        e, kept = memory.e, memory.kept
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            size = min(BLOCK, cut.n - begin)
            decide(kept, size, row * cut.n + begin, dropout)
            arrays = place(e, kept, e, sources, (row, begin))
            s, _ = add_up(e, 0, size, arrays, numbers, e, size, size, arrays, numbers)
            store_f64(partial, unit, s)

    return fused_gradient_sums


def _block_results(form: GradientForm, formula: Callable[..., Vector]) -> Kernel:
    """The last step, which adds up the blocks' sums."""
    place, decide, count, floats = arrays_backwards(form, OF_BLOCK), DECIDE[form.drops], form.sources, form.numbers
    out, with_y = out_of_gradient(form, IN_ROWS), _gradient_with_y(form)

    @inline
    def result(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s, of_links = numbers
        g, of_y = with_y(arrays, i, whole, mask, of_links)
        return out(formula(g, of_y, s), arrays, i, whole, mask, of_links)

    write = row_writer(result)

    @kernel
    def fused_gradient_blocks(
        units: Units, cut: Cut, sources: (Source,) * count, dx: Rows, numbers: (Float,) * floats, memory: BlockMemory,
        dropout: Dropout, partial, stream,
    ):  # fmt: skip
        e, kept = memory.e, memory.kept
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            size, s = min(BLOCK, cut.n - begin), 0.0
            for block in range(cut.blocks * row, cut.blocks * (row + 1)):
                s += load_f64(partial, block)
            decide(kept, size, row * cut.n + begin, dropout)
            arrays = place(e, kept, e, sources, (row, begin))
            write(dx.data + (row * dx.step + begin), 0, size, stream, arrays, (v.number(e, s), numbers))

    return fused_gradient_blocks


def _gradient_with_y(form: GradientForm) -> Callable[..., tuple[Vector, Vector]]:
    """(arrays, i, whole, mask, numbers): the gradient with respect to the softmax, and y."""
    back, along, dy, y = backwards(form, IN_ROWS), IN_ROWS.along, 1 + form.drops, 2 + form.drops

    @inline
    def with_y(arrays, i: int, whole: bool, mask, numbers):
        like = v.full(arrays[0], 0.0)
        of_y = along(like, arrays[y], i, whole, mask)
        return back(along(like, arrays[dy], i, whole, mask), of_y, arrays, i, whole, mask, numbers), of_y

    return with_y
