"""Softmax, log-softmax and their gradients with attributes, of few long rows: the steps of `softmax.split`.

The formulas before softmax are applied to a block in each of the two steps that read it.
"""

from collections.abc import Callable

from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import store_f64
from opgrad.cpu.kernels.fused.chain import ALONG, arrays_of, chain
from opgrad.cpu.kernels.fused.form import (
    Form,
    GradientForm,
    behind_gradient,
    gradient_arrays,
    softmax_gradient,
    softmax_input,
)
from opgrad.cpu.kernels.fused.operands import (
    ROWS,
    DropoutState,
    Memory,
    RowResults,
    do_nothing,
    keep_elements,
)
from opgrad.cpu.kernels.fused.rows import gradient_sum, reader, storing_stats
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.map import row_writer, write_same
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS
from opgrad.cpu.kernels.softmax.split import BlockReduction, block_of, block_reduction, sum_of_blocks


def forward(form: Form) -> tuple[Kernel, Kernel, Kernel]:
    """The three steps: the sums of blocks, those of rows, and the results."""
    of_blocks = block_reduction(form.operator, form.exact)
    return _block_sums(form, of_blocks), _row_sums(form, of_blocks), _block_results(form, of_blocks)


def _block_sums(form: Form, of_blocks: BlockReduction) -> Kernel:
    read, reduce = reader(form), of_blocks.reduce

    @kernel
    def split_sums(units: Units, blocks, n, sources: form.sources, numbers: form.numbers, memory: Memory, stats):
        for unit in units:
            row, begin, size = block_of(unit, blocks, n)
            largest = read(memory.e, size, sources, (row, begin), numbers)
            reduce(memory.e, size, largest, stats, unit)

    return split_sums


def _row_sums(form: Form, of_blocks: BlockReduction) -> Kernel:
    join, numbers_of = of_blocks.join, of_blocks.reduction.numbers
    store_stats = storing_stats(of_blocks.reduction.log_sum_exp) if "stats" in form.results else do_nothing

    @kernel
    def split_rows(rows: Units, blocks, sources: form.sources, results: RowResults, stats, total):
        x = sources[0].data
        for row in rows:
            largest, m, sums = join(x, stats, total, row, blocks)
            store_stats(results.stats, row, x, sums, largest, m, numbers_of(x, sums, largest, m, 0))

    return split_rows


def _element_of_softmax(form: Form, result: Callable[..., Vector]) -> Callable[..., Vector]:
    """((x, operands before, operands behind), i, whole, mask, (numbers of the row, numbers)): before formulas behind"""
    through = softmax_input(form, ROWS)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        x, operands, _ = arrays
        of_row, of_formulas = numbers
        return result(through((x, operands), i, whole, mask, of_formulas), of_row, True)

    return value


def _block_results(form: Form, of_blocks: BlockReduction) -> Kernel:
    of_softmax, behind = _element_of_softmax(form, of_blocks.reduction.result), chain(form.after, ROWS)
    find, arrays_before, arrays_behind = ROWS.find[ALONG], arrays_of(form.before, ROWS), arrays_of(form.after, ROWS)
    numbers_of, decide = of_blocks.numbers, keep_elements if form.drops else do_nothing

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        s = of_softmax(arrays, i, whole, mask, numbers)
        return behind(s, arrays[2], i, whole, mask, numbers[1][1])

    write = row_writer(value)
    write_saved = row_writer(of_softmax) if "saved" in form.results else do_nothing
    write_mask = write_same if "mask" in form.results else do_nothing

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

    return split_results


def gradient(form: GradientForm) -> tuple[Kernel, Kernel]:
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
