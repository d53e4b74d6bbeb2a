"""Few long rows with attributes: five steps, in which the blocks of a row are shared among threads.

The steps find the largest element of each block, then of each row; the sums of each block, then of each row; and then
y, for which the exponentials are computed again. Sums have the order and the scale of a row that one thread reduces, so
that results have the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_f64, store_f64
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.chain import joined
from opgrad.cpu.kernels.fused.form import Form, arrays_inwards, arrays_outwards, inwards, one_after_the_other, outwards
from opgrad.cpu.kernels.fused.operands import (
    DECIDE,
    IN_ROWS,
    OF_BLOCK,
    BlockMemory,
    Cut,
    Dropout,
    Results,
    Source,
    Switches,
)
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.map import get, row_writer, write_same
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.softmax import fused_rows, variants

PARTIAL = 2  # float64 numbers for each block, from which the sums of the row are computed
TOTAL = 3  # for each row: its largest, and the same of all blocks
MINUS_INFINITY = loops.MINUS_INFINITY
_subtracted = variants.ROWS_IN_PLACE[False].subtracted


class Split(NamedTuple):
    """The functions in which softmax and log-softmax differ, besides those of `fused_rows.Sums`.

    add_up: (e, count, m): the two numbers of a block. both: (first, second): the sums of rows. value: (x, scale): what
    the buffer of a row holds for an x.
    """

    of_rows: fused_rows.Sums
    add_up: Callable[..., Any]
    both: Callable[..., Any]
    value: Callable[..., Vector]


def _exponentials(adding: lse.Adding) -> Callable[..., Any]:
    sum_exp = loops.row_sum_exp(variants.no_step, adding)

    @inline
    def add_up(e, count: int, m):
        s, _ = sum_exp(e, 0, count, m, e, 0, e, e, count, count, (e,), ())
        return s, 0.0

    return add_up


def _rests(adding: lse.AddingBelow) -> Callable[..., Any]:
    add_rest = loops.row_rest(variants.no_step, adding)

    @inline
    def add_up(e, count: int, m):
        rest, equal, _ = add_rest(e, 0, count, m, e, e, count, count, (e,), ())
        return rest, equal

    return add_up


def _softmax_steps(exact: bool) -> Split:
    add_up = _exponentials(variants.ROWS_IN_PLACE[exact].sums)
    both, value = inline(lambda s, none: s), inline(lambda x, scale: lse.exp_scaled(x, scale))
    return Split(fused_rows.SOFTMAX[exact], add_up, both, value)


def _log_softmax_steps(exact: bool) -> Split:
    add_up = _rests(variants.ROWS_IN_PLACE[exact].rests)
    both, value = inline(lambda rest, equal: (rest, equal)), inline(lambda x, scale: x)
    return Split(fused_rows.LOG_SOFTMAX[exact], add_up, both, value)


@kernel
def fused_row_maxima(rows: Units, cut: Cut, maxima, total):
    for row in rows:
        largest = MINUS_INFINITY
        for block in range(cut.blocks * row, cut.blocks * (row + 1)):
            largest = max(largest, load_f64(maxima, block))
        store_f64(total, TOTAL * row, largest)


def reducing(form: Form, split: Split) -> tuple[Kernel, ...]:
    """The steps up to the sums of rows."""
    return _block_maxima(form), fused_row_maxima, _block_sums(form, split), _row_sums(form, split)


def _block_maxima(form: Form) -> Kernel:
    read, place, count, floats = fused_rows.row_reader(form), arrays_inwards(form, OF_BLOCK), form.sources, form.numbers

    @kernel
    def fused_block_maxima(
        units: Units, cut: Cut, sources: (Source,) * count, numbers: (Float,) * floats, e: Private, maxima
    ):
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            size = min(BLOCK, cut.n - begin)
            store_f64(maxima, unit, read(e, size, place(e, sources, (row, begin)), numbers))

    return fused_block_maxima


def _block_sums(form: Form, split: Split) -> Kernel:
    read, place, count, floats = fused_rows.row_reader(form), arrays_inwards(form, OF_BLOCK), form.sources, form.numbers
    add_up = split.add_up

    @kernel
    def fused_block_sums(
        units: Units, cut: Cut, sources: (Source,) * count, numbers: (Float,) * floats, e: Private, total, partial
    ):
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            size = min(BLOCK, cut.n - begin)
            read(e, size, place(e, sources, (row, begin)), numbers)
            first, second = add_up(e, size, _subtracted(e, v.number(e, load_f64(total, TOTAL * row))))
            store_f64(partial, PARTIAL * unit, first)
            store_f64(partial, PARTIAL * unit + 1, second)

    return fused_block_sums


def _row_sums(form: Form, split: Split) -> Kernel:
    both, keeps = split.both, _note_if("stats" in form.results, split.of_rows.note, split.of_rows.of_row)

    @kernel
    def fused_row_sums(rows: Units, cut: Cut, e: Private, results: Results, partial, total):
        for row in rows:
            first, second = 0.0, 0.0
            for block in range(cut.blocks * row, cut.blocks * (row + 1)):
                first += load_f64(partial, PARTIAL * block)
                second += load_f64(partial, PARTIAL * block + 1)
            store_f64(total, TOTAL * row + 1, first)
            store_f64(total, TOTAL * row + 2, second)
            keeps(results, row, e, both(first, second), v.number(e, load_f64(total, TOTAL * row)))

    return fused_row_sums


def _note_if(keeps: bool, note: Callable[..., None], of_row: Callable[..., Any]) -> Callable[..., None]:
    """(results, row, e, sums, largest): keep a row's log-sum-exp, if that is asked for."""
    if not keeps:
        return inline(lambda results, row, e, sums, largest: None)

    @inline
    def keep(results, row: int, e, sums, largest) -> None:
        m = _subtracted(e, largest)
        note(results.stats.data, row, e, sums, largest, m, of_row(e, sums, largest, m, 0))

    return keep


def writing(form: Form, split: Split) -> Kernel:
    """The last step."""
    inner, outer = arrays_inwards(form, OF_BLOCK), arrays_outwards(form, OF_BLOCK)
    through, behind = inwards(form, IN_ROWS), outwards(form, IN_ROWS)
    result, exponential, of_row, both = split.of_rows.result, split.value, split.of_rows.of_row, split.both
    decide, count, floats = DECIDE[form.drops], form.sources, form.numbers

    @inline
    def divided(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        """A block's result in its buffer: x through the links before softmax, and the softmax of that."""
        of_row, scale, of_links = numbers
        s = through(get(arrays[1], i, whole, mask), arrays, i, whole, mask, of_links)
        return result(exponential(s, scale), of_row)

    @inline
    def y_value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        return behind(get(arrays[0], i, whole, mask), arrays, i, whole, mask, numbers)

    write, write_y, others = row_writer(divided), row_writer(y_value), _others(form)

    @kernel
    def fused_block_results(
        units: Units, cut: Cut, sources: (Source,) * count, y: Rows, numbers: (Float,) * floats, memory: BlockMemory,
        results: Results, dropout: Dropout, switches: Switches, total,
    ):  # fmt: skip
        e, kept = memory.e, memory.kept
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            size, largest = min(BLOCK, cut.n - begin), v.number(e, load_f64(total, TOTAL * row))
            m = _subtracted(e, largest)
            sums = both(load_f64(total, TOTAL * row + 1), load_f64(total, TOTAL * row + 2))
            found = of_row(e, sums, largest, m, switches.inf_as_zero)
            scale = lse.scale_for(v.full(e, m))
            write(e, 0, size, 0, joined((e,), inner(e, sources, (row, begin))), (found, scale, numbers))
            decide(kept, size, row * cut.n + begin, dropout)
            others(results, row, begin, size, e, kept)
            arrays, ys = outer(e, kept, e, sources, (row, begin)), y.data + (row * y.step + begin)
            write_y(ys, 0, size, switches.stream, arrays, numbers)

    return fused_block_results


def _others(form: Form) -> Callable[..., None]:
    """(results, row, begin, size, e, kept): write a block of the results besides y that the form has."""

    @inline
    def saved(results, row: int, begin: int, size: int, e, kept) -> None:
        write_same(results.saved.data + (row * results.saved.step + begin), 0, size, 0, (e,), ())

    @inline
    def mask(results, row: int, begin: int, size: int, e, kept) -> None:
        write_same(results.mask.data + (row * results.mask.step + begin), 0, size, 0, (kept,), ())

    every = {"saved": saved, "mask": mask}
    return one_after_the_other([every[name] for name in form.results if name in every])


def softmax(form: Form) -> tuple[Kernel, ...]:
    steps = _softmax_steps(form.exact)
    return (*reducing(form, steps), writing(form, steps))


def log_softmax(form: Form) -> tuple[Kernel, ...]:
    steps = _log_softmax_steps(form.exact)
    return (*reducing(form, steps), writing(form, steps))
