"""Gradients of softmax and log-softmax with attributes in one kernel, for rows, columns, and few long rows.

dy and y are read once. In one loop, the gradient with respect to the softmax is stored in a buffer, its terms are added
to the sum, and the row or strip before is written.
"""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Float, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.form import GradientForm, arrays_backwards, backwards, out_of_gradient
from opgrad.cpu.kernels.fused.operands import (
    DECIDE_STRIP,
    IN_COLUMNS,
    OF_STRIP,
    Dropout,
    Line,
    Memory,
    Source,
)
from opgrad.cpu.kernels.loops import columns
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import get, put

Gradient = tuple[Callable[..., Vector], Callable[..., Vector]]  # term(dy, y), and formula(dy, y, the sum of the terms)


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
