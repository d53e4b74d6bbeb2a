"""Softmax and log-softmax, forward and backward, over rows, columns, short rows and split rows.

rows     vectors run along the reduced axis, which is contiguous
columns  vectors run along the axes behind the reduced one
tiles    rows too short for vectors: as many rows as a vector has lanes are turned into columns
split    few long rows: blocks of a row are reduced apart, combined, and written apart

Which of them runs depends on the shape alone, so results do not depend on the number of threads.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from opgrad.cpu import parts, rows
from opgrad.cpu.execute import STATUS_WORDS, Operand, Problem, Program, Scratch, Step
from opgrad.cpu.math import exp, exp_up_to_zero, log, log_one
from opgrad.cpu.native import Kernel, inline, kernel, vector_lanes
from opgrad.cpu.rows import BLOCK, map_one, map_two, release_slot, take_slot
from opgrad.cpu.simd import (
    Pointer,
    Vector,
    first,
    fma,
    full,
    lanes,
    load,
    load_masked,
    load_one,
    maximum,
    number,
    prefetch,
    reduce_add,
    reduce_max,
    select,
    store,
    store_masked,
    store_one,
    store_streaming,
    to_line,
)

MINUS_INFINITY: Final = float("-inf")
LOWEST: Final = -3.4e38
CHUNK: Final = 64  # terms that are added to each other before they join the total: the error grows with n/64 + 64
SHORT_ROW = 48  # up to here a tile beats rows one by one
KEEP = 1 << 17  # numbers of working space for exponentials, 512 KiB; beyond, they are computed twice


# --- reductions of one row -------------------------------------------------------------------------------------


@inline
def row_max(x: Any, begin: int, end: int) -> Any:
    """The largest of x[begin:end]; NaN may be passed over."""
    w = lanes(x)
    m = full(x, MINUS_INFINITY)
    i = begin
    while i + w <= end:
        m = maximum(load(x, i), m)
        i += w
    if i < end:
        m = maximum(load_masked(x, i, first(x, end - i), MINUS_INFINITY), m)
    return reduce_max(m)


@inline
def row_sum_exp(x: Any, begin: int, end: int, m: Any, e: Any, keep: int, ahead: Any) -> Any:
    """The sum of exp(x - m) over x[begin:end], which go to `e` if `keep`; asks for row `ahead` meanwhile."""
    w = lanes(x)
    total = full(x, 0.0)
    i = begin
    while i + w <= end:
        s = full(x, 0.0)
        stop = min(i + CHUNK * w, end)
        while i + w <= stop:
            v = exp_up_to_zero(load(x, i) - m)
            prefetch(ahead, i)
            s = s + v
            if keep:
                store(e, i, v)
            i += w
        total = total + s
    if i < end:
        mask = first(x, end - i)
        v = select(mask, exp_up_to_zero(load_masked(x, i, mask, 0.0) - m), 0.0)
        total = total + v
        if keep:
            store(e, i, v)
    return reduce_add(total)


@inline
def _times(e: Vector, r: Any, unused: Any, i: Vector) -> Vector:
    return e * r


@inline
def _exp_times(x: Vector, m: Any, r: Any, i: Vector) -> Vector:
    return exp_up_to_zero(x - m) * r


@inline
def _minus_both(x: Vector, m: Any, log_s: Any, i: Vector) -> Vector:
    return (x - m) - log_s


write_scaled, write_exp_scaled, write_log = map_one(_times), map_one(_exp_times), map_one(_minus_both)


# --- forward, rows ----------------------------------------------------------------------------------------------


@kernel
def softmax_rows(
    part, per_part, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer, space_size, keep, stream
):
    slot = take_slot(scratch, slots)
    e = space + slot * space_size
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs = x + row * x_row
        m = row_max(xs, 0, n)
        r = number(x, 1.0) / row_sum_exp(xs, 0, n, m, e, keep, xs + x_row)
        if keep:
            write_scaled(y + row * y_row, 0, n, stream, e, r, 0.0)
        else:
            write_exp_scaled(y + row * y_row, 0, n, stream, xs, m, r)
    release_slot(scratch, slot)


@kernel
def log_softmax_rows(part, per_part, count, n, x: Pointer, x_row, y: Pointer, y_row, stream):
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs = x + row * x_row
        m = row_max(xs, 0, n)
        log_s = log_one(x, row_sum_exp(xs, 0, n, m, xs, 0, xs + x_row))
        write_log(y + row * y_row, 0, n, stream, xs, m, log_s)


# --- backward, rows ----------------------------------------------------------------------------------------------


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


def row_sum(term: Callable[..., Vector]) -> Callable[..., Any]:
    """The sum of term(dy[i], y[i]) over [begin, end)."""

    @inline
    def add_up(dy: Any, y: Any, begin: int, end: int) -> Any:
        w = lanes(dy)
        total = full(dy, 0.0)
        i = begin
        while i + w <= end:
            s = full(dy, 0.0)
            stop = min(i + CHUNK * w, end)
            while i + w <= stop:
                s = s + term(load(dy, i), load(y, i))
                i += w
            total = total + s
        if i < end:
            mask = first(dy, end - i)
            total = total + term(load_masked(dy, i, mask, 0.0), load_masked(y, i, mask, 0.0))
        return reduce_add(total)

    return add_up


def gradient_rows(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    """dx = formula(dy, y, sum(term(dy, y))) along contiguous rows."""
    add_up, write = row_sum(term), map_two(formula)

    @kernel
    def by_rows(part, per_part, count, n, dy: Pointer, dy_row, y: Pointer, y_row, dx: Pointer, dx_row, stream):
        for row in range(part * per_part, min((part + 1) * per_part, count)):
            dys, ys = dy + row * dy_row, y + row * y_row
            s = add_up(dys, ys, 0, n)
            write(dx + row * dx_row, 0, n, stream, dys, ys, s, 0.0)

    return by_rows


softmax_grad_rows = gradient_rows(_softmax_grad_term, _softmax_grad)
log_softmax_grad_rows = gradient_rows(_log_softmax_grad_term, _log_softmax_grad)


# --- columns: vectors across the inner axes ---------------------------------------------------------------------


@inline
def get(p: Any, i: int, whole: bool, mask: Any) -> Vector:
    """A vector at i; zeros outside the mask unless it is whole."""
    return load(p, i) if whole else load_masked(p, i, mask, 0.0)


@inline
def put(p: Any, i: int, v: Vector, whole: bool, mask: Any, stream: int) -> None:
    if not whole:
        store_masked(p, i, v, mask)
    elif stream:
        store_streaming(p, i, v)
    else:
        store(p, i, v)


@inline
def streams_columns(p: Any, p_n: int, stream: int) -> int:
    """Whether to write past the cache: if asked, and every vector of the strip starts a cache line."""
    return stream and to_line(p, 0) == 0 and to_line(p, p_n) == 0


@inline
def column_max(x: Any, x_n: int, n: int, whole: bool, mask: Any) -> Vector:
    m = full(x, MINUS_INFINITY)
    for i in range(n):
        m = maximum(get(x, i * x_n, whole, mask), m)
    return m


@inline
def column_sum_exp(
    x: Any, x_n: int, n: int, whole: bool, mask: Any, m: Vector, e: Any, keep: int
) -> Vector:
    """The sums of exp(x - m), which go to `e` if `keep`; asks for the next strip meanwhile."""
    w = lanes(x)
    total = full(x, 0.0)
    for chunk in range(0, n, CHUNK):
        s = full(x, 0.0)
        for i in range(chunk, min(chunk + CHUNK, n)):
            v = exp_up_to_zero(get(x, i * x_n, whole, mask) - m)
            prefetch(x, i * x_n + w)
            s = s + v
            if keep:
                store(e, i * w, v)
        total = total + s
    return total


@kernel
def softmax_columns(
    part, per_part, units, strips, n, inner, x: Pointer, x_outer, x_n, y: Pointer, y_outer, y_n,
    scratch, slots, space: Pointer, space_size, keep, stream,
):  # fmt: skip
    w = lanes(x)
    slot = take_slot(scratch, slots)
    e = space + slot * space_size
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        j = unit % strips * w
        xs, ys = x + (unit // strips * x_outer + j), y + (unit // strips * y_outer + j)
        whole, mask, past = j + w <= inner, first(x, inner - j), streams_columns(ys, y_n, stream)
        m = column_max(xs, x_n, n, whole, mask)
        r = 1.0 / column_sum_exp(xs, x_n, n, whole, mask, m, e, keep)
        for i in range(n):
            v = load(e, i * w) if keep else exp_up_to_zero(get(xs, i * x_n, whole, mask) - m)
            put(ys, i * y_n, v * r, whole, mask, past)
    release_slot(scratch, slot)


@kernel
def log_softmax_columns(
    part, per_part, units, strips, n, inner, x: Pointer, x_outer, x_n, y: Pointer, y_outer, y_n, stream
):
    w = lanes(x)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        j = unit % strips * w
        xs, ys = x + (unit // strips * x_outer + j), y + (unit // strips * y_outer + j)
        whole, mask, past = j + w <= inner, first(x, inner - j), streams_columns(ys, y_n, stream)
        m = column_max(xs, x_n, n, whole, mask)
        log_s = log(column_sum_exp(xs, x_n, n, whole, mask, m, xs, 0))
        for i in range(n):
            put(ys, i * y_n, (get(xs, i * x_n, whole, mask) - m) - log_s, whole, mask, past)


def gradient_columns(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    """dx = formula(dy, y, sum(term(dy, y))) along axes that are not the last in memory."""

    @kernel
    def by_columns(
        part, per_part, units, strips, n, inner,
        dy: Pointer, dy_outer, dy_n, y: Pointer, y_outer, y_n, dx: Pointer, dx_outer, dx_n, stream,
    ):  # fmt: skip
        w = lanes(dy)
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            o, j = unit // strips, unit % strips * w
            dys, ys, dxs = dy + (o * dy_outer + j), y + (o * y_outer + j), dx + (o * dx_outer + j)
            whole, mask, past = j + w <= inner, first(dy, inner - j), streams_columns(dxs, dx_n, stream)
            s = full(dy, 0.0)
            for chunk in range(0, n, CHUNK):
                t = full(dy, 0.0)
                for i in range(chunk, min(chunk + CHUNK, n)):
                    t = t + term(get(dys, i * dy_n, whole, mask), get(ys, i * y_n, whole, mask))
                s = s + t
            for i in range(n):
                v = formula(get(dys, i * dy_n, whole, mask), get(ys, i * y_n, whole, mask), s, 0.0, i)
                prefetch(dys, i * dy_n + w)
                prefetch(ys, i * y_n + w)
                put(dxs, i * dx_n, v, whole, mask, past)

    return by_columns


softmax_grad_columns = gradient_columns(_softmax_grad_term, _softmax_grad)
log_softmax_grad_columns = gradient_columns(_log_softmax_grad_term, _log_softmax_grad)


# --- tiles: as many short rows at once as a vector has lanes --------------------------------------------------------


@inline
def turn_in(tile: Any, x: Any, x_row: int, n: int, count: int) -> None:
    """tile[c, r] = x[r, c] for `count` rows; the other lanes are left as they are."""
    w = lanes(x)
    for r in range(count):
        for c in range(n):
            store_one(tile, c * w + r, load_one(x, r * x_row + c))


@inline
def turn_out(y: Any, y_row: int, tile: Any, n: int, count: int) -> None:
    w = lanes(y)
    for r in range(count):
        for c in range(n):
            store_one(y, r * y_row + c, load_one(tile, c * w + r))


@kernel
def softmax_tiles(
    part, per_part, units, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer, space_size
):
    w = lanes(x)
    slot = take_slot(scratch, slots)
    tile = space + slot * space_size
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, filled = unit * w, min(w, count - unit * w)
        mask = first(x, w)
        turn_in(tile, x + row * x_row, x_row, n, filled)
        m = column_max(tile, w, n, True, mask)
        r = 1.0 / column_sum_exp(tile, w, n, True, mask, m, tile, 1)
        for i in range(n):
            store(tile, i * w, load(tile, i * w) * r)
        turn_out(y + row * y_row, y_row, tile, n, filled)
    release_slot(scratch, slot)


@kernel
def log_softmax_tiles(
    part, per_part, units, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer, space_size
):
    w = lanes(x)
    slot = take_slot(scratch, slots)
    tile = space + slot * space_size
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, filled = unit * w, min(w, count - unit * w)
        mask = first(x, w)
        turn_in(tile, x + row * x_row, x_row, n, filled)
        m = column_max(tile, w, n, True, mask)
        log_s = log(column_sum_exp(tile, w, n, True, mask, m, tile, 0))
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
        y_tile = dy_tile + n * w
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


softmax_grad_tiles = gradient_tiles(_softmax_grad_term, _softmax_grad)
log_softmax_grad_tiles = gradient_tiles(_log_softmax_grad_term, _log_softmax_grad)


# --- split: few long rows, a block of one at a time ---------------------------------------------------------------


@kernel
def split_maxima(part, per_part, units, blocks, n, x: Pointer, x_row, stats: Pointer):
    """For each block its maximum, and the sum of exp(x - maximum)."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        xs, begin = x + unit // blocks * x_row, unit % blocks * BLOCK
        end = min(begin + BLOCK, n)
        m = row_max(xs, begin, end)
        # A block of -inf adds 0, not NaN: only the row as a whole decides.
        reference = max(m, number(x, LOWEST))
        store_one(stats, 2 * unit, m)
        store_one(stats, 2 * unit + 1, row_sum_exp(xs, begin, end, reference, xs, 0, xs))


@kernel
def split_combine(part, blocks, stats: Pointer, total: Pointer, logarithm):
    """For row `part` its maximum, and 1 / sum (or log sum) of exp(x - maximum)."""
    block = stats + 2 * blocks * part
    m = number(stats, MINUS_INFINITY)
    for b in range(blocks):
        m = max(m, load_one(block, 2 * b))
    s = number(stats, 0.0)
    for b in range(blocks):
        s += load_one(block, 2 * b + 1) * reduce_max(exp_up_to_zero(full(stats, load_one(block, 2 * b) - m)))
    store_one(total, 2 * part, m)
    store_one(total, 2 * part + 1, log_one(stats, s) if logarithm else number(stats, 1.0) / s)


def split_write(write: Callable[..., None]) -> Kernel:
    """The last step: each block of y from x and the row's two numbers."""

    @kernel
    def by_blocks(part, per_part, units, blocks, n, x: Pointer, x_row, y: Pointer, y_row, total: Pointer, stream):
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            m, t = load_one(total, 2 * row), load_one(total, 2 * row + 1)
            write(y + row * y_row, begin, end, stream, x + row * x_row, m, t)

    return by_blocks


softmax_split, log_softmax_split = split_write(write_exp_scaled), split_write(write_log)


def gradient_split(term: Callable[..., Vector], formula: Callable[..., Vector]) -> tuple[Kernel, Kernel]:
    """The two steps of a split gradient: the blocks' sums, and the blocks of dx."""
    add_up, write = row_sum(term), map_two(formula)

    @kernel
    def sums(part, per_part, units, blocks, n, dy: Pointer, dy_row, y: Pointer, y_row, stats: Pointer):
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            store_one(stats, unit, add_up(dy + row * dy_row, y + row * y_row, begin, end))

    @kernel
    def by_blocks(
        part, per_part, units, blocks, n,
        dy: Pointer, dy_row, y: Pointer, y_row, dx: Pointer, dx_row, stats: Pointer, stream,
    ):  # fmt: skip
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            s = number(stats, 0.0)
            for block in range(blocks):
                s += load_one(stats, row * blocks + block)
            end = min(begin + BLOCK, n)
            write(dx + row * dx_row, begin, end, stream, dy + row * dy_row, y + row * y_row, s, 0.0)

    return sums, by_blocks


softmax_grad_split = gradient_split(_softmax_grad_term, _softmax_grad)
log_softmax_grad_split = gradient_split(_log_softmax_grad_term, _log_softmax_grad)


# --- which kernels run --------------------------------------------------------------------------------------------


def layout_of(problem: Problem, kernels: Mapping[str, Any]) -> str:
    """The layout that the shape asks for, among those that there are kernels for."""
    if problem.inner > 1:
        return "columns"
    if "split" in kernels and rows.few(problem.outer, problem.n):
        return "split"
    return "tiles" if "tiles" in kernels and problem.n <= SHORT_ROW and problem.outer >= 8 else "rows"


def _operands(problem: Problem, layout: str, **operands: Operand) -> dict[str, Any]:
    """The operands with their strides, as the kernels of a layout name them."""
    arguments: dict[str, Any] = {}
    for name, operand in operands.items():
        strides = (
            {f"{name}_outer": operand.outer, f"{name}_n": operand.n}
            if layout == "columns"
            else {f"{name}_row": operand.outer}
        )
        arguments |= {name: operand} | strides
    return arguments


def _units(problem: Problem, layout: str, width: int) -> dict[str, int]:
    """The loop sizes of a layout whose vectors have `width` lanes."""
    stream = parts.streams(problem.bytes)
    if layout == "columns":
        strips = parts.count(problem.inner, width)
        return {"units": problem.outer * strips, "strips": strips, "inner": problem.inner, "stream": stream}
    if layout == "split":
        blocks = rows.blocks(problem.n)
        return {"units": problem.outer * blocks, "blocks": blocks, "stream": stream}
    if layout == "tiles":
        return {"units": parts.count(problem.outer, width), "count": problem.outer}
    return {"units": problem.outer, "count": problem.outer, "stream": stream}


def cut(problem: Problem, layout: str, **operands: Operand) -> tuple[dict[str, Any], int]:
    """All arguments but working space, and the number of parts."""
    width = vector_lanes(rows.precision(problem))
    sizes = _units(problem, layout, width)
    per = parts.per_part(sizes["units"], problem.bytes / max(sizes["units"], 1))
    arguments = {"per_part": per, "n": problem.n, **sizes, **_operands(problem, layout, **operands)}
    return arguments, parts.count(sizes["units"], per)


def _forward(problem: Problem, kernels: dict[str, Kernel], logarithm: bool) -> Program:
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    layout, dtype = layout_of(problem, kernels), rows.precision(problem)
    arguments, made = cut(problem, layout, x=problem["x"], y=problem["y"])
    if layout == "split":
        return _split_forward(problem, kernels[layout], arguments, made, dtype, logarithm)
    width = 1 if layout == "rows" else vector_lanes(dtype)
    keep = problem.n * width <= KEEP and not (logarithm and layout != "tiles")
    space, size = rows.working_space(problem.n * width if keep else width, dtype, made)
    return Program((Step(kernels[layout], made, arguments | space | {"keep": keep}),), size)


def _split_forward(
    problem: Problem, write: Kernel, arguments: dict[str, Any], made: int, dtype: str, logarithm: bool
) -> Program:
    item = 8 if dtype == "float64" else 4
    stats = Scratch(8 * STATUS_WORDS, dtype)
    total = Scratch(stats.offset + 2 * arguments["units"] * item, dtype)
    given = arguments | {"stats": stats, "total": total, "logarithm": logarithm}
    steps = (Step(split_maxima, made, given), Step(split_combine, problem.outer, given), Step(write, made, given))
    return Program(steps, total.offset + 2 * problem.outer * item)


def _gradient(problem: Problem, kernels: dict[str, Any]) -> Program:
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    layout, dtype = layout_of(problem, kernels), rows.precision(problem)
    arguments, made = cut(problem, layout, dy=problem["dy"], y=problem["y"], dx=problem["dx"])
    if layout == "split":
        stats = Scratch(8 * STATUS_WORDS, dtype)
        given = arguments | {"stats": stats}
        sums, write = kernels[layout]
        return Program((Step(sums, made, given), Step(write, made, given)), stats.offset + 8 * arguments["units"])
    space, size = ({}, 0)
    if layout == "tiles":
        space, size = rows.working_space(2 * problem.n * vector_lanes(dtype), dtype, made)
    return Program((Step(kernels[layout], made, arguments | space),), size)


SOFTMAX = {"rows": softmax_rows, "columns": softmax_columns, "tiles": softmax_tiles, "split": softmax_split}
LOG_SOFTMAX = {
    "rows": log_softmax_rows,
    "columns": log_softmax_columns,
    "tiles": log_softmax_tiles,
    "split": log_softmax_split,
}
SOFTMAX_GRAD = {
    "rows": softmax_grad_rows,
    "columns": softmax_grad_columns,
    "tiles": softmax_grad_tiles,
    "split": softmax_grad_split,
}
LOG_SOFTMAX_GRAD = {
    "rows": log_softmax_grad_rows,
    "columns": log_softmax_grad_columns,
    "tiles": log_softmax_grad_tiles,
    "split": log_softmax_grad_split,
}


def softmax(problem: Problem) -> Program:
    return _forward(problem, SOFTMAX, logarithm=False)


def log_softmax(problem: Problem) -> Program:
    return _forward(problem, LOG_SOFTMAX, logarithm=True)


def softmax_grad(problem: Problem) -> Program:
    return _gradient(problem, SOFTMAX_GRAD)


def log_softmax_grad(problem: Problem) -> Program:
    return _gradient(problem, LOG_SOFTMAX_GRAD)
