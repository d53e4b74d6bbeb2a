"""Softmax and log-softmax, forward and backward, in the four layouts of opgrad.cpu.loops.layout."""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler.native import Kernel, kernel, vector_lanes
from opgrad.cpu.compiler.simd import Pointer, Vector, first, full, is_fine, lanes, load, number, store, store_streaming
from opgrad.cpu.fused import program as fused
from opgrad.cpu.loops.columns import (
    add_rest_logging_columns,
    column_max,
    column_sum,
    get,
    put,
    streams_columns,
    sum_exp_scaling_columns,
    write_log_column,
    write_scaled_column,
)
from opgrad.cpu.loops.layout import cut, kept_numbers, layout_of, precision
from opgrad.cpu.loops.map import mapped, next_vector
from opgrad.cpu.loops.rows import (
    add_rest_logging,
    line_head,
    row_max,
    row_sum,
    sum_exp_scaling,
    write_log,
    write_scaled,
)
from opgrad.cpu.loops.transpose import tile_size, turn_in, turn_out
from opgrad.cpu.numerics.logsumexp import (
    column_divisor,
    column_log_of_sum,
    exp_scaled,
    row_divisor,
    row_log_of_sum,
    scale_for,
    scaled,
)
from opgrad.cpu.runtime.execute import STATUS_WORDS, Program, Scratch, Step
from opgrad.cpu.runtime.workspace import release_slot, take_slot, working_space
from opgrad.cpu.softmax import in_place
from opgrad.cpu.softmax.groups import log_softmax_groups, softmax_groups
from opgrad.cpu.softmax.split import LOG_SOFTMAX_SPLIT, SOFTMAX_SPLIT, STATS, TOTAL, gradient_split
from opgrad.problem import Problem

# Shorter rows are written after the next one's exponentials even if not past the cache: the divisor comes at the end of
# a long chain, which rows of 1,000 waited for (1.31 times as long as before it was exact; now 1.2).
LATE: Final = 2048


@kernel
def softmax_rows(
    part, per_part, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer, space_size, stream
):
    slot = take_slot(scratch, slots)
    e = space + slot * space_size
    done = e + space_size // 2
    zero = full(x, 0.0)
    late = n <= LATE and not stream
    stop = 0 if late else n
    out, head, divisor = y, n, (zero, zero, zero, zero)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs = x + row * x_row
        m = row_max(xs, 0, n)
        # The row before is written while this one is computed; the first has none before it: head is n.
        s, j = sum_exp_scaling(xs, 0, n, m, e, 1, xs + x_row, out, head, stop, (done,), (divisor, is_fine(x)))
        write_scaled(out, j, n, 0, (done,), (divisor, is_fine(x)))
        out, divisor = y + row * y_row, row_divisor(x, s, m)
        e, done = done, e
        head = 0 if late else line_head(out, n, stream)
        write_scaled(out, 0, head, 0, (done,), (divisor, is_fine(x)))
    write_scaled(out, head, n, stream, (done,), (divisor, is_fine(x)))
    release_slot(scratch, slot)


@kernel
def log_softmax_rows(part, per_part, count, n, x: Pointer, x_row, y: Pointer, y_row, stream):
    late = n <= LATE and not stream
    stop = 0 if late else n
    out, head, before, m_before, log_before = y, n, x, full(x, 0.0), full(x, 0.0)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs = x + row * x_row
        m = row_max(xs, 0, n)
        rest, equal, j = add_rest_logging(xs, 0, n, m, xs + x_row, out, head, stop, (before,), (m_before, log_before))
        write_log(out, j, n, 0, (before,), (m_before, log_before))
        out, before = y + row * y_row, xs
        m_before, log_before = full(x, m), row_log_of_sum(x, rest, equal, m)
        head = 0 if late else line_head(out, n, stream)
        write_log(out, 0, head, 0, (before,), (m_before, log_before))
    write_log(out, head, n, stream, (before,), (m_before, log_before))


def gradient_rows(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    """dx = formula(dy, y, sum(term(dy, y))) along contiguous rows."""
    add_up, write = row_sum(term, next_vector(formula)), mapped(formula)

    @kernel
    def by_rows(part, per_part, count, n, dy: Pointer, dy_row, y: Pointer, y_row, dx: Pointer, dx_row, stream):
        out, head, dy_before, y_before, s_before = dx, n, dy, y, number(dy, 0.0)
        for row in range(part * per_part, min((part + 1) * per_part, count)):
            dys, ys = dy + row * dy_row, y + row * y_row
            s, j = add_up(dys, ys, 0, n, out, head, n, (dy_before, y_before), (s_before,))
            write(out, j, n, 0, (dy_before, y_before), (s_before,))
            out, dy_before, y_before, s_before = dx + row * dx_row, dys, ys, s
            head = line_head(out, n, stream)
            write(out, 0, head, 0, (dy_before, y_before), (s_before,))
        write(out, head, n, stream, (dy_before, y_before), (s_before,))

    return by_rows


@kernel
def softmax_columns(
    part, per_part, units, strips, n, inner, x: Pointer, x_outer, x_n, y: Pointer, y_outer, y_n,
    scratch, slots, space: Pointer, space_size, keep, stream,
):  # fmt: skip
    w = lanes(x)
    slot = take_slot(scratch, slots)
    e = space + slot * space_size
    done = e + n * w * keep
    zero = full(x, 0.0)
    out, pending, divisor = y, 0, (zero, zero, zero, zero)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        j = unit % strips * w
        xs, ys = x + (unit // strips * x_outer + j), y + (unit // strips * y_outer + j)
        whole, mask = j + w <= inner, first(x, inner - j)
        m = column_max(xs, x_n, n, whole, mask)
        s = sum_exp_scaling_columns(
            xs, x_n, n, whole, mask, m, e, keep * w, out, y_n, pending, done, w, (divisor, is_fine(x))
        )
        out, divisor = ys, column_divisor(s, m)
        e, done = done, e
        past = streams_columns(ys, y_n, stream)
        pending = past if whole and keep else 0
        if not pending:
            for i in range(n):
                v = load(done, i * w) if keep else exp_scaled(get(xs, i * x_n, whole, mask), scale_for(m))
                put(ys, i * y_n, scaled(v, divisor, is_fine(x)), whole, mask, past)
    if pending:
        write_scaled_column(out, y_n, n, done, w, (divisor, is_fine(x)))
    release_slot(scratch, slot)


@kernel
def log_softmax_columns(
    part, per_part, units, strips, n, inner, x: Pointer, x_outer, x_n, y: Pointer, y_outer, y_n, stream
):
    w = lanes(x)
    out, pending, before, m_before, log_before = y, 0, x, full(x, 0.0), full(x, 0.0)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        j = unit % strips * w
        xs, ys = x + (unit // strips * x_outer + j), y + (unit // strips * y_outer + j)
        whole, mask = j + w <= inner, first(x, inner - j)
        m = column_max(xs, x_n, n, whole, mask)
        rest, count = add_rest_logging_columns(
            xs, x_n, n, whole, mask, m, out, y_n, pending, before, x_n, (m_before, log_before)
        )
        out, before, m_before, log_before = ys, xs, m, column_log_of_sum(rest, count, m)
        pending = streams_columns(ys, y_n, stream) if whole else 0
        if not pending:
            for i in range(n):
                put(ys, i * y_n, (get(xs, i * x_n, whole, mask) - m) - log_before, whole, mask, 0)
    if pending:
        write_log_column(out, y_n, n, before, x_n, (m_before, log_before))


def gradient_columns(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    """dx = formula(dy, y, sum(term(dy, y))) along axes that are not the last in memory."""
    add_up = column_sum(term, formula)

    @kernel
    def by_columns(
        part, per_part, units, strips, n, inner,
        dy: Pointer, dy_outer, dy_n, y: Pointer, y_outer, y_n, dx: Pointer, dx_outer, dx_n, stream,
    ):  # fmt: skip
        w = lanes(dy)
        out, pending, dy_before, y_before, s_before = dx, 0, dy, y, full(dy, 0.0)
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            o, j = unit // strips, unit % strips * w
            dys, ys, dxs = dy + (o * dy_outer + j), y + (o * y_outer + j), dx + (o * dx_outer + j)
            whole, mask = j + w <= inner, first(dy, inner - j)
            s = add_up(dys, dy_n, ys, y_n, n, whole, mask, out, dx_n, pending, dy_before, y_before, s_before)
            out, dy_before, y_before, s_before = dxs, dys, ys, s
            pending = streams_columns(dxs, dx_n, stream) if whole else 0
            if not pending:
                for i in range(n):
                    v = formula(get(dys, i * dy_n, whole, mask), get(ys, i * y_n, whole, mask), s)
                    put(dxs, i * dx_n, v, whole, mask, 0)
        if pending:
            for i in range(n):
                v = formula(load(dy_before, i * dy_n), load(y_before, i * y_n), s_before)
                store_streaming(out, i * dx_n, v)

    return by_columns


@kernel
def softmax_tiles(
    part, per_part, units, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer,
    space_size,
):  # fmt: skip
    w = lanes(x)
    slot = take_slot(scratch, slots)
    tile = space + slot * space_size
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, filled = unit * w, min(w, count - unit * w)
        mask = first(x, w)
        turn_in(tile, x + row * x_row, x_row, n, filled)
        m = column_max(tile, w, n, True, mask)
        s = sum_exp_scaling_columns(tile, w, n, True, mask, m, tile, w, tile, w, 0, tile, w, ((m, m, m, m), 0))
        divisor = column_divisor(s, m)
        for i in range(n):
            store(tile, i * w, scaled(load(tile, i * w), divisor, is_fine(x)))
        turn_out(y + row * y_row, y_row, tile, n, filled)
    release_slot(scratch, slot)


@kernel
def log_softmax_tiles(
    part, per_part, units, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer,
    space_size,
):  # fmt: skip
    w = lanes(x)
    slot = take_slot(scratch, slots)
    tile = space + slot * space_size
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, filled = unit * w, min(w, count - unit * w)
        mask = first(x, w)
        turn_in(tile, x + row * x_row, x_row, n, filled)
        m = column_max(tile, w, n, True, mask)
        rest, equal = add_rest_logging_columns(tile, w, n, True, mask, m, tile, w, 0, tile, w, (m, m))
        log_s = column_log_of_sum(rest, equal, m)
        for i in range(n):
            store(tile, i * w, (load(tile, i * w) - m) - log_s)
        turn_out(y + row * y_row, y_row, tile, n, filled)
    release_slot(scratch, slot)


def gradient_tiles(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    """dx = formula(dy, y, sum(term(dy, y))) along rows shorter than a vector."""

    @kernel
    def by_tiles(
        part, per_part, units, count, n, dy: Pointer, dy_row, y: Pointer, y_row, dx: Pointer, dx_row,
        scratch, slots, space: Pointer, space_size,
    ):  # fmt: skip
        w = lanes(dy)
        slot = take_slot(scratch, slots)
        dy_tile = space + slot * space_size
        y_tile = dy_tile + space_size // 2
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, filled = unit * w, min(w, count - unit * w)
            turn_in(dy_tile, dy + row * dy_row, dy_row, n, filled)
            turn_in(y_tile, y + row * y_row, y_row, n, filled)
            s = full(dy, 0.0)
            for i in range(n):
                s = s + term(load(dy_tile, i * w), load(y_tile, i * w))
            for i in range(n):
                store(dy_tile, i * w, formula(load(dy_tile, i * w), load(y_tile, i * w), s))
            turn_out(dx + row * dx_row, dx_row, dy_tile, n, filled)
        release_slot(scratch, slot)

    return by_tiles


# Row lengths, in vectors, up to which tiles beat groups, and groups beat rows: the arithmetic of 16-bit rows is short,
# so that what each row takes counts for more. A gradient's row takes little.
TILED, GROUPED = 0.75, 2
TILED_16, GROUPED_16 = 1.5, 16
SHORT_GRAD = 16

SOFTMAX = {
    "rows": softmax_rows,
    "columns": softmax_columns,
    "tiles": softmax_tiles,
    "groups": softmax_groups,
    "split": SOFTMAX_SPLIT,
}
LOG_SOFTMAX = {
    "rows": log_softmax_rows,
    "columns": log_softmax_columns,
    "tiles": log_softmax_tiles,
    "groups": log_softmax_groups,
    "split": LOG_SOFTMAX_SPLIT,
}


def _gradients(term: Callable[..., Vector], formula: Callable[..., Vector]) -> dict[str, Any]:
    layouts = {
        "rows": gradient_rows,
        "columns": gradient_columns,
        "tiles": gradient_tiles,
        "split": gradient_split,
    }
    return {layout: made(term, formula) for layout, made in layouts.items()}


SOFTMAX_GRAD = _gradients(in_place.softmax_term, in_place.softmax_slope)
LOG_SOFTMAX_GRAD = _gradients(in_place.log_softmax_term, in_place.log_softmax_slope)


def softmax(problem: Problem) -> Program:
    if problem.is_general:
        return fused.forward(problem, in_place.SOFTMAX)
    return _forward(problem, SOFTMAX)


def log_softmax(problem: Problem) -> Program:
    if problem.is_general:
        return fused.forward(problem, in_place.LOG_SOFTMAX)
    return _forward(problem, LOG_SOFTMAX)


def softmax_grad(problem: Problem) -> Program:
    if problem.is_general:
        return fused.gradient(problem, in_place.SOFTMAX_GRAD)
    return _gradient(problem, SOFTMAX_GRAD)


def log_softmax_grad(problem: Problem) -> Program:
    if problem.is_general:
        return fused.gradient(problem, in_place.LOG_SOFTMAX_GRAD)
    return _gradient(problem, LOG_SOFTMAX_GRAD)


def _forward(problem: Problem, kernels: dict[str, Any]) -> Program:
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    dtype = precision(problem)
    width, coarse = vector_lanes(dtype), problem["x"].dtype in ("float16", "bfloat16")
    tiled, grouped = (TILED_16, GROUPED_16) if coarse else (TILED, GROUPED)
    layout = layout_of(problem, kernels, int(tiled * width), int(grouped * width))
    arguments, made = cut(problem, layout, x=problem["x"], y=problem["y"])
    if layout == "split":
        return _split_forward(problem, kernels[layout], arguments, made)
    if "space" not in kernels[layout].parameters:
        return Program((Step(kernels[layout], made, arguments),))
    size, keep = kept_numbers(problem.n, layout, width)
    space, end = working_space(size, dtype, made)
    return Program((Step(kernels[layout], made, arguments | space | {"keep": keep}),), end)


def _split_forward(problem: Problem, kernels: Any, arguments: dict[str, Any], made: int) -> Program:
    stats = Scratch(8 * STATUS_WORDS)
    total = Scratch(stats.offset + 8 * STATS * arguments["units"])
    given = arguments | {"stats": stats, "total": total}
    sums, combine, write = kernels
    steps = (Step(sums, made, given), Step(combine, problem.outer, given), Step(write, made, given))
    return Program(steps, total.offset + 8 * TOTAL * problem.outer)


def _gradient(problem: Problem, kernels: dict[str, Any]) -> Program:
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    layout, dtype = layout_of(problem, kernels, SHORT_GRAD), precision(problem)
    arguments, made = cut(problem, layout, dy=problem["dy"], y=problem["y"], dx=problem["dx"])
    if layout == "split":
        stats = Scratch(8 * STATUS_WORDS, dtype)
        given = arguments | {"stats": stats}
        sums, write = kernels[layout]
        return Program((Step(sums, made, given), Step(write, made, given)), stats.offset + 8 * arguments["units"])
    space, size = ({}, 0)
    if layout == "tiles":
        space, size = working_space(2 * tile_size(problem.n, vector_lanes(dtype)), dtype, made)
    return Program((Step(kernels[layout], made, arguments | space),), size)
