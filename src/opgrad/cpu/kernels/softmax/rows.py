"""Softmax, log-softmax and their gradients of contiguous rows: vectors run along a row.

A kernel writes each row past the cache while it reduces the next one. Writing a row by itself leaves the memory idle
while the next one is read and computed: 2048 x 32000 took 18 ms that way, and takes 16 ms.

One body makes three kinds of kernels. The plain kernels read the caller's rows. Kernels in place work on a buffer that
stages fill and empty. Kernels with attributes apply formulas to each vector: those before softmax when a row is read,
which then lies in a buffer, and those behind it when the row is written.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.chain import joined
from opgrad.cpu.kernels.fused.form import Form, GradientForm, one_after_the_other
from opgrad.cpu.kernels.fused.operands import (
    IN_ROWS,
    OF_PLAIN_ROW,
    OF_ROW,
    DropoutState,
    RowMemory,
    RowResults,
    Source,
    Switches,
    keep_elements,
    start,
    without_dropout,
)
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import get, put, row_stepper, row_writer, write_same
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS, SoftmaxReduction, gradient_result, of_rows

no_step = inline(lambda out, i, end, arrays, numbers: i)  # in place of `row_stepper`: no row is written meanwhile

# Rows up to this length that are not written past the cache are written after the exponentials of the next row. A row's
# divisor is the result of a long chain of dependent operations; rows of 1,000 would otherwise wait for it.
LATE: Final = 2048


class Block(NamedTuple):
    """The arguments of a kernel in place: a buffer of rows of length n, or of n lines of a strip of `width` columns."""

    values: Pointer
    other: Pointer  # y, in gradients
    stats: Pointer
    tile: Pointer
    rows: int
    n: int
    width: int
    inf_as_zero: int


# --- forward: reading ----------------------------------------------------------------------------------------------


def reader_to_buffer(form: Form) -> Callable[..., Any]:
    """(e, n, arrays, numbers): the largest of n values, which are x after the formulas before softmax; they go to e."""
    through = form.inwards(IN_ROWS)

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


def _reads_with_attributes(form: Form) -> Callable[..., Any]:
    read_all, operands = reader_to_buffer(form), form.arrays_inwards(OF_ROW)

    @inline
    def read(sources, row: int, n: int, e, numbers):
        return e, e, start(sources[0], row + 1), read_all(e, n, operands(e, sources, row), numbers)

    return read


@inline
def _reads_plain(sources, row: int, n: int, e, numbers):
    """Where a row lies, where its exponentials shall go, where the next row lies, and the row's largest element."""
    xs = sources[0].data + row * sources[0].step
    return xs, e, xs + sources[0].step, loops.row_max(xs, 0, n)


@inline
def _reads_in_place(sources, row: int, n: int, e, numbers):
    xs = sources[0].data + row * sources[0].step
    return xs, xs, xs + sources[0].step, loops.row_max(xs, 0, n)


# --- forward: writing ----------------------------------------------------------------------------------------------


def _written(form: Form, result: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, (numbers of the row, fine, numbers)): an element of y from what was kept of its row."""
    through = form.outwards(IN_ROWS)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        of_row, fine, of_formulas = numbers
        return through(result(get(arrays[0], i, whole, mask), of_row, fine), arrays, i, whole, mask, of_formulas)

    return value


def result_in_buffer(result: Callable[..., Vector]) -> Callable[..., Vector]:
    """(arrays, i, whole, mask, numbers of the row): an element of the softmax from a buffer."""
    return inline(lambda arrays, i, whole, mask, of_row: result(get(arrays[0], i, whole, mask), of_row, True))


def _other_results(form: Form, reduction: SoftmaxReduction) -> Callable[..., None]:
    """(results, row, e, kept, n, of_row, sums, largest, m): write the results besides y that the form has."""
    log_sum_exp, result = reduction.log_sum_exp, reduction.result
    write_saved = row_writer(result_in_buffer(result))

    @inline
    def stats(results, row: int, e, kept, n: int, of_row, sums, largest, m) -> None:
        v.store_one(results.stats.data, row, log_sum_exp(e, sums, largest, m, of_row))

    @inline
    def saved(results, row: int, e, kept, n: int, of_row, sums, largest, m) -> None:
        write_saved(results.saved.data + row * results.saved.step, 0, n, 0, (e,), of_row)

    @inline
    def mask(results, row: int, e, kept, n: int, of_row, sums, largest, m) -> None:
        write_same(results.mask.data + row * results.mask.step, 0, n, 0, (kept,), ())

    every = {"stats": stats, "saved": saved, "mask": mask}
    return one_after_the_other([every[name] for name in form.results])


class RowArguments(NamedTuple):
    """The arguments of a forward body that are the same for all rows."""

    x: Any  # a pointer of the dtype of the values that are summed
    sources: Any
    y_step: int
    numbers: Any
    memory: Any
    results: Any
    dropout: Any
    inf_as_zero: int


def forward_body(
    form: Form, reduction: SoftmaxReduction, read: Callable[..., Any], is_kept: bool, in_result: bool = False
) -> Callable[..., None]:
    """Write y of the rows from `first` to `stop` to `out`, each row while the next one is reduced.

    is_kept: whether values or exponentials wait in a buffer until they are written, and are not read from x again.
    in_result: whether they wait in the row's own place in y, or that is prefetched: so its lines are fetched while
    exponentials are computed. Then nothing is written past the cache.
    """
    place_of = inline((lambda buffer, ys: ys) if in_result else (lambda buffer, ys: buffer))
    keep = int(in_result or form.operator == "softmax")
    value, others = _written(form, reduction.result), _other_results(form, reduction)
    decide = keep_elements if form.drops else without_dropout
    add_up = reduction.loop(no_step if in_result else row_stepper(value))
    write, outer = row_writer(value), form.arrays_outwards(OF_ROW)
    subtracted, numbers_of, none = reduction.subtracted, reduction.numbers, reduction.no_numbers

    @inline
    def write_rows(first, stop, n, out, past, arguments):
        x, sources, y_step, numbers, memory, results, dropout, inf_as_zero = arguments
        fine, dropped = v.is_fine(x), memory.kept
        is_late = n <= LATE and not past
        limit = 0 if is_late else n
        # There is no row before the first, so `head` is n at first: nothing is written.
        e, done, ys, head, of_row = memory.e, memory.done, out, n, none(x)
        arrays = outer(done, dropped, e, sources, first)
        for row in range(first, stop):
            new_ys = out + (row - first) * y_step
            xs, kept, ahead, largest = read(sources, row, n, place_of(e, new_ys), numbers)
            m, place = subtracted(xs, largest), place_of(kept, new_ys)
            s, j = add_up(xs, 0, n, m, place, keep, ahead, ys, head, limit, arrays, (of_row, fine, numbers))
            write(ys, j, n, 0, arrays, (of_row, fine, numbers))
            ys, of_row = new_ys, numbers_of(xs, s, largest, m, inf_as_zero)
            decide(dropped, n, row * n, dropout)
            arrays = outer(kept, dropped, e, sources, row)
            head = 0 if is_late else loops.line_head(ys, n, past)
            others(results, row, kept, dropped, n, of_row, s, largest, m)
            write(ys, 0, head, 0, arrays, (of_row, fine, numbers))
            if is_kept:
                e, done = done, e
        write(ys, head, n, past, arrays, (of_row, fine, numbers))

    return write_rows


_softmax = forward_body(Form("softmax", "rows"), of_rows("softmax"), _reads_plain, is_kept=True)
_softmax_in_result = forward_body(
    Form("softmax", "rows"), of_rows("softmax"), _reads_plain, is_kept=True, in_result=True
)
_log_softmax = forward_body(Form("log_softmax", "rows"), of_rows("log_softmax"), _reads_in_place, is_kept=False)
_log_softmax_in_result = forward_body(
    Form("log_softmax", "rows"), of_rows("log_softmax"), _reads_in_place, is_kept=False, in_result=True
)


@kernel
def softmax_rows(rows: Units, n, x: Rows, y: Rows, e: Private, done: Private, stream):
    arguments = RowArguments(x.data, (x,), y.step, 0, RowMemory(e, done, e, e), 0, 0, 0)
    _softmax(rows.start, rows.stop, n, y.data + rows.start * y.step, stream, arguments)


@kernel
def softmax_rows_in_result(rows: Units, n, x: Rows, y: Rows):
    """The plain kernel for results that are written through the cache and have the digits of the computation."""
    ys = y.data
    arguments = RowArguments(x.data, (x,), y.step, 0, RowMemory(ys, ys, ys, ys), 0, 0, 0)
    _softmax_in_result(rows.start, rows.stop, n, ys + rows.start * y.step, 0, arguments)


@kernel
def log_softmax_rows(rows: Units, n, x: Rows, y: Rows, stream):
    arguments = RowArguments(x.data, (x,), y.step, 0, RowMemory(x.data, x.data, x.data, x.data), 0, 0, 0)
    _log_softmax(rows.start, rows.stop, n, y.data + rows.start * y.step, stream, arguments)


@kernel
def log_softmax_rows_in_result(rows: Units, n, x: Rows, y: Rows):
    """The plain kernel for results that are written through the cache."""
    arguments = RowArguments(x.data, (x,), y.step, 0, RowMemory(x.data, x.data, x.data, x.data), 0, 0, 0)
    _log_softmax_in_result(rows.start, rows.stop, n, y.data + rows.start * y.step, 0, arguments)


def forward_in_place(operator: str, exact: bool) -> Kernel:
    """A stage's kernel; exact ones also keep each row's log-sum-exp."""
    form = Form(operator, "rows", results=("stats",) if exact else ())
    body = forward_body(form, of_rows(operator, exact), _reads_in_place, is_kept=False)

    @kernel
    def forward_rows_in_place(block: Block):
        x, n = block.values, block.n
        results, memory = RowResults(x, x, Rows(block.stats, 1)), RowMemory(x, x, x, x)
        body(0, block.rows, n, x, 0, RowArguments(x, (Rows(x, n),), n, 0, memory, results, 0, block.inf_as_zero))

    return forward_rows_in_place


def forward_with_attributes(form: Form) -> Kernel:
    reduction, read = of_rows(form.operator, form.exact), _reads_with_attributes(form)
    write_rows = combine.combining(forward_body(form, reduction, read, is_kept=True))
    count, floats = form.sources, form.numbers

    @kernel
    def fused_rows(
        rows: Units, n, sources: (Source,) * count, y: Rows, numbers: (Float,) * floats, memory: RowMemory,
        results: RowResults, dropout: DropoutState, switches: Switches,
    ):  # fmt: skip
        arguments = memory.e, sources, y.step, numbers, memory, results, dropout, switches.inf_as_zero
        write_rows(rows.start, rows.stop, n, y, memory.buffer, switches.stream, arguments)

    return fused_rows


# --- gradients -----------------------------------------------------------------------------------------------------


def gradient_terms(form: GradientForm, read: Callable[..., Vector]) -> Callable[..., tuple[Vector, Vector]]:
    """(arrays, i, whole, mask, numbers): the gradient with respect to the softmax, and y."""
    back, dy, y = form.backwards(IN_ROWS), 1 + form.drops, 2 + form.drops

    @inline
    def both(arrays, i: int, whole: bool, mask, numbers):
        like = v.full(arrays[0], 0.0)
        of_y = read(like, arrays[y], i, whole, mask)
        return back(read(like, arrays[dy], i, whole, mask), of_y, arrays, i, whole, mask, numbers), of_y

    return both


def gradient_loop(
    form: GradientForm, step: Callable[..., int], keep: Callable[..., None], read: Callable[..., Vector] = IN_ROWS.along
) -> Callable[..., Any]:
    """The loop of `row_sum_of` over the terms; keep(buffer, i, gradient with respect to the softmax, whole, mask).

    read: how dy and y are read, if not with a prefetch of what lies ahead.
    """
    term, both = GRADIENTS[form.operator][0], gradient_terms(form, read)
    ask = inline(lambda arrays, i, ahead: None) if read is IN_ROWS.along else _ask_ahead

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        ask(arrays, i, numbers)
        g, y = both(arrays, i, whole, mask, numbers)
        keep(arrays[0], i, g, whole, mask)
        return term(g, y) if whole else v.select(mask, term(g, y), 0.0)

    return loops.row_sum_of(value, step)


@inline
def _ask_ahead(arrays, i: int, ahead: int) -> None:
    """Prefetch dy and y so many elements further, if at all."""
    if ahead:
        v.prefetch(arrays[1], i + ahead)
        v.prefetch(arrays[2], i + ahead)


nothing_kept = inline(lambda buffer, i, g, whole, mask: None)
read_again = inline(lambda like, row, i, whole, mask: get(row, i, whole, mask))  # without asking for what lies ahead


def gradient_body(form: GradientForm, place: Any, is_kept: bool) -> Callable[..., None]:
    """Write dx of the rows from `first` to `stop` to `out`, each row while the next one is reduced.

    is_kept: whether the gradient with respect to the softmax is kept in a buffer meanwhile, not computed again. If not,
    the numbers of formulas are one, how many elements further dy and y are prefetched.
    """
    y, keep, again = 2 + form.drops, nothing_kept, gradient_terms(form, read_again)
    if is_kept:
        keep = inline(lambda buffer, i, g, whole, mask: put(buffer, i, g, whole, mask, 0))
        again = inline(lambda a, i, whole, mask, numbers: (get(a[0], i, whole, mask), get(a[y], i, whole, mask)))
    result, arrays_of = gradient_result(form, again, IN_ROWS), form.arrays_backwards(place)
    decide = keep_elements if form.drops else without_dropout
    read = IN_ROWS.along if is_kept else read_again
    add_up, write = gradient_loop(form, row_stepper(result), keep, read), row_writer(result)

    @inline
    def write_rows(first, stop, n, out, past, arguments):
        like, sources, dx_step, numbers, e, done, dropped, dropout = arguments
        dxs, head, s_before, before = out, n, v.number(like, 0.0), arrays_of(done, dropped, e, sources, first)
        for row in range(first, stop):
            decide(dropped, n, row * n, dropout)
            arrays = arrays_of(e, dropped, e, sources, row)
            s, j = add_up(like, 0, n, arrays, numbers, dxs, head, n, before, (s_before, numbers))
            write(dxs, j, n, 0, before, (s_before, numbers))
            dxs, before, s_before = out + (row - first) * dx_step, arrays, s
            head = loops.line_head(dxs, n, past)
            write(dxs, 0, head, 0, before, (s_before, numbers))
            if is_kept:
                e, done = done, e
        write(dxs, head, n, past, before, (s_before, numbers))

    return write_rows


def _plain_gradient(operator: str) -> Callable[..., None]:
    return gradient_body(GradientForm(operator, "rows"), OF_PLAIN_ROW, is_kept=False)


def gradient_rows(operator: str) -> Kernel:
    write = combine.combining(_plain_gradient(operator))

    @kernel
    def by_rows(rows: Units, n, dy: Rows, y: Rows, dx: Rows, buffer: Private, stream, ahead):
        arguments = dy.data, (dy, y), dx.step, ahead, dy.data, dy.data, dy.data, 0
        write(rows.start, rows.stop, n, dx, buffer, stream, arguments)

    return by_rows


def gradient_in_place(operator: str) -> Kernel:
    body = _plain_gradient(operator)

    @kernel
    def by_rows_in_place(block: Block):
        dy, n = block.values, block.n
        body(0, block.rows, n, dy, 0, (dy, (Rows(dy, n), Rows(block.other, n)), n, 0, dy, dy, dy, 0))

    return by_rows_in_place


def gradient_with_attributes(form: GradientForm) -> Kernel:
    write_rows, count, floats = combine.combining(gradient_body(form, OF_ROW, is_kept=True)), form.sources, form.numbers

    @kernel
    def fused_gradient_rows(
        rows: Units, n, sources: (Source,) * count, dx: Rows, numbers: (Float,) * floats, memory: RowMemory,
        dropout: DropoutState, stream,
    ):  # fmt: skip
        e, done, dropped, buffer = memory
        arguments = e, sources, dx.step, numbers, e, done, dropped, dropout
        write_rows(rows.start, rows.stop, n, dx, buffer, stream, arguments)

    return fused_gradient_rows
