"""Softmax and log-softmax, forward and backward, in the four layouts of opgrad.cpu.loops."""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.columns import (
    column_max,
    column_sum,
    get,
    put,
    streams_columns,
    sum_exp_logging_columns,
    sum_exp_scaling_columns,
    write_log_column,
    write_scaled_column,
)
from opgrad.cpu.execute import STATUS_WORDS, Program, Scratch, Step
from opgrad.cpu.loops import cut, kept_numbers, layout_of, precision
from opgrad.cpu.math import exp, exp_up_to_zero, log, log_one
from opgrad.cpu.native import Kernel, inline, kernel, vector_lanes
from opgrad.cpu.rows import (
    behind_two,
    line_head,
    map_two,
    row_max,
    row_sum,
    sum_exp_logging,
    sum_exp_scaling,
    write_exp_scaled,
    write_log,
    write_scaled,
)
from opgrad.cpu.simd import Pointer, Vector, first, full, lanes, load, number, store, store_streaming
from opgrad.cpu.space import release_slot, take_slot, working_space
from opgrad.cpu.split import gradient_split, split_combine, split_maxima, split_write
from opgrad.cpu.tiles import tile_size, turn_in, turn_out
from opgrad.problem import Problem


@kernel
def softmax_rows(
    part, per_part, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer, space_size, stream
):
    slot = take_slot(scratch, slots)
    e = space + slot * space_size
    done = e + space_size // 2
    out, head, r = y, n, number(x, 0.0)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs = x + row * x_row
        m = row_max(xs, 0, n)
        # The row before is written while this one is computed; the first has none before it: head is n.
        s, j = sum_exp_scaling(xs, 0, n, m, e, 1, xs + x_row, out, head, n, done, r, 0.0)
        write_scaled(out, j, n, 0, done, r, 0.0)
        out, r = y + row * y_row, number(x, 1.0) / s
        e, done = done, e
        head = line_head(out, n, stream)
        write_scaled(out, 0, head, 0, done, r, 0.0)
    write_scaled(out, head, n, stream, done, r, 0.0)
    release_slot(scratch, slot)


@kernel
def log_softmax_rows(part, per_part, count, n, x: Pointer, x_row, y: Pointer, y_row, stream):
    out, head, before, m_before, log_before = y, n, x, number(x, 0.0), number(x, 0.0)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs = x + row * x_row
        m = row_max(xs, 0, n)
        s, j = sum_exp_logging(xs, 0, n, m, xs, 0, xs + x_row, out, head, n, before, m_before, log_before)
        write_log(out, j, n, 0, before, m_before, log_before)
        out, before, m_before, log_before = y + row * y_row, xs, m, log_one(x, s)
        head = line_head(out, n, stream)
        write_log(out, 0, head, 0, before, m_before, log_before)
    write_log(out, head, n, stream, before, m_before, log_before)


@inline
def _softmax_grad_term(dy: Vector, y: Vector) -> Vector:
    return dy * y


@inline
def _softmax_grad(dy: Vector, y: Vector, s: Any, unused: Any, i: Any) -> Vector:
    return y * (dy - s)


@inline
def _log_softmax_grad_term(dy: Vector, y: Vector) -> Vector:
    return dy


@inline
def _log_softmax_grad(dy: Vector, y: Vector, s: Any, unused: Any, i: Any) -> Vector:
    return dy - exp(y) * s


def gradient_rows(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    """dx = formula(dy, y, sum(term(dy, y))) along contiguous rows."""
    add_up, write = row_sum(term, behind_two(formula)), map_two(formula)

    @kernel
    def by_rows(part, per_part, count, n, dy: Pointer, dy_row, y: Pointer, y_row, dx: Pointer, dx_row, stream):
        out, head, dy_before, y_before, s_before = dx, n, dy, y, number(dy, 0.0)
        for row in range(part * per_part, min((part + 1) * per_part, count)):
            dys, ys = dy + row * dy_row, y + row * y_row
            s, j = add_up(dys, ys, 0, n, out, head, n, dy_before, y_before, s_before)
            write(out, j, n, 0, dy_before, y_before, s_before, 0.0)
            out, dy_before, y_before, s_before = dx + row * dx_row, dys, ys, s
            head = line_head(out, n, stream)
            write(out, 0, head, 0, dy_before, y_before, s_before, 0.0)
        write(out, head, n, stream, dy_before, y_before, s_before, 0.0)

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
    out, pending, r = y, 0, full(x, 0.0)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        j = unit % strips * w
        xs, ys = x + (unit // strips * x_outer + j), y + (unit // strips * y_outer + j)
        whole, mask = j + w <= inner, first(x, inner - j)
        m = column_max(xs, x_n, n, whole, mask)
        s = sum_exp_scaling_columns(xs, x_n, n, whole, mask, m, e, keep, out, y_n, pending, done, w, r, r)
        out, r = ys, 1.0 / s
        e, done = done, e
        past = streams_columns(ys, y_n, stream)
        pending = past if whole and keep else 0
        if not pending:
            for i in range(n):
                v = load(done, i * w) if keep else exp_up_to_zero(get(xs, i * x_n, whole, mask) - m)
                put(ys, i * y_n, v * r, whole, mask, past)
    if pending:
        write_scaled_column(out, y_n, n, done, w, r, r)
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
        s = sum_exp_logging_columns(
            xs, x_n, n, whole, mask, m, xs, 0, out, y_n, pending, before, x_n, m_before, log_before
        )
        out, before, m_before, log_before = ys, xs, m, log(s)
        pending = streams_columns(ys, y_n, stream) if whole else 0
        if not pending:
            for i in range(n):
                put(ys, i * y_n, (get(xs, i * x_n, whole, mask) - m) - log_before, whole, mask, 0)
    if pending:
        write_log_column(out, y_n, n, before, x_n, m_before, log_before)


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
                    v = formula(get(dys, i * dy_n, whole, mask), get(ys, i * y_n, whole, mask), s, 0.0, i)
                    put(dxs, i * dx_n, v, whole, mask, 0)
        if pending:
            for i in range(n):
                v = formula(load(dy_before, i * dy_n), load(y_before, i * y_n), s_before, 0.0, i)
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
        r = 1.0 / sum_exp_scaling_columns(tile, w, n, True, mask, m, tile, 1, tile, w, 0, tile, w, m, m)
        for i in range(n):
            store(tile, i * w, load(tile, i * w) * r)
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
        log_s = log(sum_exp_logging_columns(tile, w, n, True, mask, m, tile, 0, tile, w, 0, tile, w, m, m))
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
                store(dy_tile, i * w, formula(load(dy_tile, i * w), load(y_tile, i * w), s, 0.0, i))
            turn_out(dx + row * dx_row, dx_row, dy_tile, n, filled)
        release_slot(scratch, slot)

    return by_tiles


# Row lengths from which rows beat tiles (float32, AVX-512): a gradient's row is cheap, a row's logarithm is not.
SHORT, SHORT_LOG, SHORT_GRAD = 48, 96, 16

SOFTMAX = {
    "rows": softmax_rows,
    "columns": softmax_columns,
    "tiles": softmax_tiles,
    "split": split_write(write_exp_scaled),
}
LOG_SOFTMAX = {
    "rows": log_softmax_rows,
    "columns": log_softmax_columns,
    "tiles": log_softmax_tiles,
    "split": split_write(write_log),
}


def _gradients(term: Callable[..., Vector], formula: Callable[..., Vector]) -> dict[str, Any]:
    layouts = {
        "rows": gradient_rows,
        "columns": gradient_columns,
        "tiles": gradient_tiles,
        "split": gradient_split,
    }
    return {layout: made(term, formula) for layout, made in layouts.items()}


SOFTMAX_GRAD = _gradients(_softmax_grad_term, _softmax_grad)
LOG_SOFTMAX_GRAD = _gradients(_log_softmax_grad_term, _log_softmax_grad)


def softmax(problem: Problem) -> Program:
    return _forward(problem, SOFTMAX, logarithm=False)


def log_softmax(problem: Problem) -> Program:
    return _forward(problem, LOG_SOFTMAX, logarithm=True)


def softmax_grad(problem: Problem) -> Program:
    return _gradient(problem, SOFTMAX_GRAD)


def log_softmax_grad(problem: Problem) -> Program:
    return _gradient(problem, LOG_SOFTMAX_GRAD)


def _forward(problem: Problem, kernels: dict[str, Kernel], logarithm: bool) -> Program:
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    short = SHORT_LOG if logarithm else SHORT
    layout, dtype = layout_of(problem, kernels, short), precision(problem)
    arguments, made = cut(problem, layout, x=problem["x"], y=problem["y"])
    if layout == "split":
        return _split_forward(problem, kernels[layout], arguments, made, dtype, logarithm)
    if "space" not in kernels[layout].parameters:
        return Program((Step(kernels[layout], made, arguments),))
    size, keep = kept_numbers(problem.n, layout, vector_lanes(dtype))
    space, end = working_space(size, dtype, made)
    return Program((Step(kernels[layout], made, arguments | space | {"keep": keep}),), end)


def _split_forward(
    problem: Problem, write: Kernel, arguments: dict[str, Any], made: int, dtype: str, logarithm: bool
) -> Program:
    item = 8 if dtype == "float64" else 4
    stats = Scratch(8 * STATUS_WORDS, dtype)
    total = Scratch(stats.offset + 2 * arguments["units"] * item, dtype)
    given = arguments | {"stats": stats, "total": total, "logarithm": logarithm}
    steps = (
        Step(split_maxima, made, given),
        Step(split_combine, problem.outer, given),
        Step(write, made, given),
    )
    return Program(steps, total.offset + 2 * problem.outer * item)


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
