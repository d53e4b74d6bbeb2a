"""Few long rows: threads reduce the blocks of a row, the results are combined, and threads write the blocks.

The plain kernels are those of a form without formulas; they read x where it lies. Kernels with attributes apply the
formulas before softmax to each block, put the results in a buffer, and sum their exponentials there. Both compute the
exponentials a second time when they write.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_f64, store_f64
from opgrad.cpu.kernels.fused.chain import joined
from opgrad.cpu.kernels.fused.form import Form, GradientForm, one_after_the_other
from opgrad.cpu.kernels.fused.operands import (
    IN_ROWS,
    OF_BLOCK,
    DropoutState,
    RowCut,
    RowResults,
    Source,
    Switches,
    keep_elements,
    start,
    without_dropout,
)
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.map import get, row_writer, write_same
from opgrad.cpu.kernels.softmax.reductions import SoftmaxReduction, gradient_result, of_rows
from opgrad.cpu.kernels.softmax.rows import (
    Block,
    gradient_loop,
    gradient_terms,
    no_step,
    nothing_kept,
    read_again,
    reader_to_buffer,
    result_in_buffer,
)

STATS: Final = 3  # float64 numbers of each block, and of each row: the largest element, and two that make the sums


# --- the sums of blocks, and of rows -------------------------------------------------------------------------------


@inline
def _store(stats: int, index: int, largest, two) -> None:
    store_f64(stats, STATS * index, largest)
    store_f64(stats, STATS * index + 1, two[0])
    store_f64(stats, STATS * index + 2, two[1])


@inline
def _exponentials_of_blocks(x, m, stats: int, begin: int, end: int):
    s = 0.0
    for block in range(begin, end):
        of_block = v.number(x, load_f64(stats, STATS * block))
        s += load_f64(stats, STATS * block + 1) * loops.rescale(x, of_block, m)
    return s


@inline
def _rests_of_blocks(x, m, stats: int, begin: int, end: int):
    largest, rest, count = v.number(x, loops.MINUS_INFINITY), 0.0, 0.0
    for block in range(begin, end):
        top, added = v.number(x, load_f64(stats, STATS * block)), load_f64(stats, STATS * block + 1)
        equal = load_f64(stats, STATS * block + 2)
        largest, rest, count = loops.joined_rests(x, largest, rest, count, top, added, equal)
    return rest, count


class BlockReduction(NamedTuple):
    """How the sums of a row are made of those of its blocks."""

    reduction: SoftmaxReduction
    two: Callable[..., Any]  # (sums): the two numbers that are stored of them
    sums: Callable[..., Any]  # (two numbers): the sums of a row again
    joined: Callable[..., Any]  # (x, m, stats, begin, end): the sums of the row of these blocks, on the scale for m


def _blocks(operator: str, exact: bool = False) -> BlockReduction:
    reduction = of_rows(operator, exact, recomputed=True)
    if operator == "log_softmax":
        same = inline(lambda sums: sums)
        return BlockReduction(reduction, same, same, _rests_of_blocks)
    two, sums = inline(lambda s: (s, 0.0)), inline(lambda numbers: numbers[0])
    return BlockReduction(reduction, two, sums, _exponentials_of_blocks)


def _block_noting(blocks: BlockReduction) -> Callable[..., None]:
    """(x, n, largest, stats, block): sum the exponentials of a block of n elements, and store what is found."""
    add_up, two = blocks.reduction.loop(no_step), blocks.two

    @inline
    def note(x, n: int, largest, stats: int, block: int) -> None:
        # so that the sum of a block of -inf is 0 and not NaN: other blocks may be finite
        top = max(largest, v.number(x, loops.LOWEST))
        sums, _ = add_up(x, 0, n, top, x, 0, x, x, n, n, (x,), ())
        _store(stats, block, largest, two(sums))

    return note


def _row_joining(blocks: BlockReduction) -> Callable[..., Any]:
    """(x, stats, begin, end): the largest element of the row of these blocks, what is subtracted, the row's sums."""
    subtracted, joined_sums = blocks.reduction.subtracted, blocks.joined

    @inline
    def join(x, stats: int, begin: int, end: int):
        largest = v.number(x, loops.MINUS_INFINITY)
        for block in range(begin, end):
            largest = max(largest, v.number(x, load_f64(stats, STATS * block)))
        m = subtracted(x, largest)
        return largest, m, joined_sums(x, m, stats, begin, end)

    return join


# --- forward -------------------------------------------------------------------------------------------------------


def _reader(form: Form, is_plain: bool) -> Callable[..., Any]:
    """(sources, at, n, e, numbers): a block's values after the formulas before softmax, and the largest of them."""
    if is_plain:

        @inline
        def read_x(sources, at, n: int, e, numbers):
            x = start(sources[0], at[0]) + at[1]
            return x, loops.row_max(x, 0, n)

        return read_x
    read_all, operands = reader_to_buffer(form), form.arrays_inwards(OF_BLOCK)
    return inline(lambda sources, at, n, e, numbers: (e, read_all(e, n, operands(e, sources, at), numbers)))


def forward(form: Form, is_plain: bool = False) -> tuple[Kernel, ...]:
    """The three steps of a form. is_plain: whether x is read where it lies; then there is no private memory."""
    blocks = _blocks(form.operator, form.exact)
    return _block_sums(form, blocks, is_plain), _row_sums(form, blocks), _block_results(form, blocks, is_plain)


def _block_sums(form: Form, blocks: BlockReduction, is_plain: bool) -> Kernel:
    read, note, count, floats = _reader(form, is_plain), _block_noting(blocks), form.sources, form.numbers
    buffer = int if is_plain else Private

    @kernel
    def split_sums(units: Units, cut: RowCut, sources: (Source,) * count, numbers: (Float,) * floats, e: buffer, stats):
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            size = min(BLOCK, cut.n - begin)
            x, largest = read(sources, (row, begin), size, e, numbers)
            note(x, size, largest, stats, unit)

    return split_sums


def _row_sums(form: Form, blocks: BlockReduction) -> Kernel:
    join, two, count = _row_joining(blocks), blocks.two, form.sources
    keeps = _log_sum_exp_noting(form, blocks.reduction)

    @kernel
    def split_rows(rows: Units, cut: RowCut, sources: (Source,) * count, results: RowResults, stats, total):
        x = sources[0].data
        for row in rows:
            largest, m, sums = join(x, stats, cut.blocks * row, cut.blocks * (row + 1))
            _store(total, row, largest, two(sums))
            keeps(results, row, x, sums, largest, m)

    return split_rows


def _log_sum_exp_noting(form: Form, reduction: SoftmaxReduction) -> Callable[..., None]:
    """(results, row, x, sums, largest, m): store a row's log-sum-exp, if the form has that result."""
    if "stats" not in form.results:
        return inline(lambda results, row, x, sums, largest, m: None)
    log_sum_exp, numbers = reduction.log_sum_exp, reduction.numbers

    @inline
    def keep(results, row: int, x, sums, largest, m) -> None:
        found = log_sum_exp(x, sums, largest, m, numbers(x, sums, largest, m, 0))
        v.store_one(results.stats.data, row, found)

    return keep


def _softmax_of_block(form: Form, reduction: SoftmaxReduction) -> Callable[..., Vector]:
    """((arrays before softmax, …), i, whole, mask, (numbers of the row, fine, numbers)): an element of the softmax."""
    through, result = form.inwards(IN_ROWS), reduction.result

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        of_row, fine, of_formulas = numbers
        inner = arrays[0]
        x = through(get(inner[1], i, whole, mask), inner, i, whole, mask, of_formulas)
        return result(x, of_row, fine)

    return value


def _block_results(form: Form, blocks: BlockReduction, is_plain: bool) -> Kernel:
    inner, outer = form.arrays_inwards(OF_BLOCK), form.arrays_outwards(OF_BLOCK)
    of_softmax, behind = _softmax_of_block(form, blocks.reduction), form.outwards(IN_ROWS)
    reduction, sums_of = blocks.reduction, blocks.sums
    decide = keep_elements if form.drops else without_dropout
    subtracted, numbers_of = reduction.subtracted, reduction.numbers
    count, floats, others = form.sources, form.numbers, _other_results(form, of_softmax)
    is_fine = inline(v.is_fine) if is_plain else inline(lambda x: True)
    buffer = Private if form.drops else int

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s = of_softmax(arrays, i, whole, mask, numbers)
        return behind(s, arrays[1], i, whole, mask, numbers[2])

    write = row_writer(value)

    @kernel
    def split_results(
        units: Units, cut: RowCut, sources: (Source,) * count, y: Rows, numbers: (Float,) * floats, kept: buffer,
        results: RowResults, dropout: DropoutState, switches: Switches, total,
    ):  # fmt: skip
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            x, size, at = sources[0].data, min(BLOCK, cut.n - begin), (row, begin)
            largest = v.number(x, load_f64(total, STATS * row))
            sums = sums_of((load_f64(total, STATS * row + 1), load_f64(total, STATS * row + 2)))
            of_row = numbers_of(x, sums, largest, subtracted(x, largest), switches.inf_as_zero)
            decide(kept, size, row * cut.n + begin, dropout)
            before = joined((x,), inner(x, sources, at))
            arrays, found = (before, outer(x, kept, x, sources, at)), (of_row, is_fine(x), numbers)
            others(results, row, begin, size, arrays, kept, found)
            write(y.data + (row * y.step + begin), 0, size, switches.stream, arrays, found)

    return split_results


def _other_results(form: Form, of_softmax: Callable[..., Vector]) -> Callable[..., None]:
    """(results, row, begin, n, arrays, kept, found): write a block of the results besides y that the form has."""
    write_saved = row_writer(of_softmax)

    @inline
    def saved(results, row: int, begin: int, n: int, arrays, kept, found) -> None:
        write_saved(results.saved.data + (row * results.saved.step + begin), 0, n, 0, arrays, found)

    @inline
    def mask(results, row: int, begin: int, n: int, arrays, kept, found) -> None:
        write_same(results.mask.data + (row * results.mask.step + begin), 0, n, 0, (kept,), ())

    every = {"saved": saved, "mask": mask}
    return one_after_the_other([every[name] for name in form.results if name in every])


def forward_in_place(operator: str, exact: bool) -> Kernel:
    """A stage's kernel, whose results have the bits of the three steps; the tile holds the sums of blocks meanwhile."""
    blocks = _blocks(operator, exact)
    note, join, numbers_of = _block_noting(blocks), _row_joining(blocks), blocks.reduction.numbers
    keeps = _log_sum_exp_noting(Form(operator, "split", results=("stats",) if exact else ()), blocks.reduction)
    write = row_writer(result_in_buffer(blocks.reduction.result))

    @kernel
    def forward_split_in_place(block: Block):
        n, stats, results = block.n, v.address_of(block.tile), RowResults(0, 0, Rows(block.stats, 1))
        count = (n + BLOCK - 1) // BLOCK
        for row in range(block.rows):
            x = block.values + row * n
            for each in range(count):
                begin, size = each * BLOCK, min(BLOCK, n - each * BLOCK)
                note(x + begin, size, loops.row_max(x + begin, 0, size), stats, each)
            largest, m, sums = join(x, stats, 0, count)
            keeps(results, row, x, sums, largest, m)
            write(x, 0, n, 0, (x,), numbers_of(x, sums, largest, m, block.inf_as_zero))

    return forward_split_in_place


# --- gradients -----------------------------------------------------------------------------------------------------


def gradient(form: GradientForm) -> tuple[Kernel, Kernel]:
    """The two steps of a form: the sums of blocks, and the blocks of dx, for which the sum of each row is added up."""
    return _gradient_sums(form), _gradient_results(form)


def _gradient_sums(form: GradientForm) -> Kernel:
    place, count, floats = form.arrays_backwards(OF_BLOCK), form.sources, form.numbers
    decide = keep_elements if form.drops else without_dropout
    add_up, buffer = gradient_loop(form, no_step, nothing_kept), Private if form.drops else int

    @kernel
    def split_gradient_sums(
        units: Units, cut: RowCut, sources: (Source,) * count, numbers: (Float,) * floats, kept: buffer,
        dropout: DropoutState, partial,
    ):  # fmt: skip
        dy = sources[0].data
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            size = min(BLOCK, cut.n - begin)
            decide(kept, size, row * cut.n + begin, dropout)
            arrays = place(dy, kept, dy, sources, (row, begin))
            s, _ = add_up(dy, 0, size, arrays, numbers, dy, size, size, arrays, numbers)
            store_f64(partial, unit, s)

    return split_gradient_sums


def _gradient_results(form: GradientForm) -> Kernel:
    place, count, floats = form.arrays_backwards(OF_BLOCK), form.sources, form.numbers
    decide = keep_elements if form.drops else without_dropout
    buffer, write = (
        Private if form.drops else int,
        row_writer(gradient_result(form, gradient_terms(form, read_again), IN_ROWS)),
    )

    @kernel
    def split_gradient_results(
        units: Units, cut: RowCut, sources: (Source,) * count, dx: Rows, numbers: (Float,) * floats, kept: buffer,
        dropout: DropoutState, partial, stream,
    ):  # fmt: skip
        dy = sources[0].data
        for unit in units:
            row, begin = unit // cut.blocks, unit % cut.blocks * BLOCK
            size, s = min(BLOCK, cut.n - begin), 0.0
            for block in range(cut.blocks * row, cut.blocks * (row + 1)):
                s += load_f64(partial, block)
            decide(kept, size, row * cut.n + begin, dropout)
            arrays = place(dy, kept, dy, sources, (row, begin))
            write(dx.data + (row * dx.step + begin), 0, size, stream, arrays, (v.number(dy, s), numbers))

    return split_gradient_results
