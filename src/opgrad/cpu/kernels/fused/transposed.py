"""Softmax and log-softmax with attributes of short rows: as many as a vector has lanes are transposed into columns.

The formulas are applied row by row, before the rows are transposed and after they are transposed back.
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Rows, Units
from opgrad.cpu.kernels.fused.chain import ALONG, arrays_of
from opgrad.cpu.kernels.fused.form import Form, softmax_input, softmax_result
from opgrad.cpu.kernels.fused.operands import (
    ROWS,
    DropoutState,
    Memory,
    RowResults,
    do_nothing,
    keep_elements,
)
from opgrad.cpu.kernels.loops.columns import Line, nothing
from opgrad.cpu.kernels.loops.map import row_writer, write_same
from opgrad.cpu.kernels.loops.transpose import transpose_in, transpose_out
from opgrad.cpu.kernels.softmax.columns import forward_lines
from opgrad.cpu.kernels.softmax.reductions import of_columns


def _storing_stats(log_sum_exp: Callable[..., Any]) -> Callable[..., None]:
    """(stats, first, rows, buffer, what `forward_lines` returns): store the rows' log-sum-exps."""

    @inline
    def store(stats, first: int, rows: int, buffer, found) -> None:
        v.store(buffer, 0, log_sum_exp(buffer, found[0], found[1], found[2], found[3]))
        for r in range(rows):
            v.store_one(stats.data, (first + r) * stats.step, v.load_one(buffer, r))

    return store


def forward(form: Form) -> Kernel:
    reduction, find = of_columns(form.operator, form.exact), ROWS.find[ALONG]
    lines, write_input = forward_lines(reduction, nothing), row_writer(softmax_input(form, ROWS))
    write = row_writer(softmax_result(form, ROWS, inline(lambda s, of_row, fine: s)))
    before, behind = arrays_of(form.before, ROWS), arrays_of(form.after, ROWS)
    decide = keep_elements if form.drops else do_nothing
    store_stats = _storing_stats(reduction.log_sum_exp) if "stats" in form.results else do_nothing
    write_saved = write_same if "saved" in form.results else do_nothing
    write_mask = write_same if "mask" in form.results else do_nothing

    @kernel
    def fused_transposed_rows(
        units: Units, count, n, sources: form.sources, y: Rows, numbers: form.numbers, memory: Memory,
        results: RowResults, dropout: DropoutState, inf_as_zero,
    ):  # fmt: skip
        e, tile, kept, _ = memory
        w = v.lanes(e)
        for first in range(units.start * w, min(units.stop * w, count), w):
            rows = min(w, count - first)
            for r in range(rows):
                at = (first + r, 0)
                write_input(e + r * n, 0, n, 0, (find(sources[0], at), before(kept, sources[1], at)), numbers)
            transpose_in(tile, e, n, n, rows)
            found = lines(tile, n, True, inf_as_zero, Line(tile, w), 0)
            transpose_out(e, n, tile, n, rows)
            decide(kept, rows * n, first * n, dropout)
            store_stats(results.stats, first, rows, tile, found)
            for r in range(rows):
                row, s, decisions = first + r, e + r * n, kept + r * n
                write_saved(results.saved.data + row * results.saved.step, 0, n, 0, (s,), ())
                write_mask(results.mask.data + row * results.mask.step, 0, n, 0, (decisions,), ())
                arrays = s, behind(decisions, sources[2], (row, 0))
                write(y.data + row * y.step, 0, n, 0, arrays, ((), numbers))

    return fused_transposed_rows
