"""Softmax, log-softmax and their gradients.

Each has three kernels: `tile` for rows that one program holds, `loop` for rows it goes over twice, and the pair
`share`, `finish` for rows that several programs share. opgrad.cuda.regimes says when each of them runs.
"""

from typing import Any

import triton
import triton.language as tl

from opgrad.contract.problem import Problem
from opgrad.cuda import fused
from opgrad.cuda.execute import Launch, Program, Space
from opgrad.cuda.numbers import MINUS_INFINITY, exp, only_if
from opgrad.cuda.regimes import choose
from opgrad.cuda.rows import (
    aligned,
    body_of,
    columns_from,
    ends,
    fold,
    frame,
    joined,
    no_rows,
    of_parts,
    read,
    row_of,
    samples_of,
    shared,
    store_share,
    strides,
    tiles,
    write,
)


@triton.jit
def probability(x, m, d):
    return exp(x - m[:, None]) * (1.0 / d)[:, None]


@triton.jit
def log_probability(x, m, d):
    return x - m[:, None] - tl.log(d)[:, None]


@triton.jit
def forward_tile(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, samples, n, inner,
    RESULT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    x_row, y_row = row_of(sample, inner, x_outer, x_inner), row_of(sample, inner, y_outer, y_inner)
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    x_body, y_body = body_of(x_row, head, VECTOR), body_of(y_row, head, VECTOR)
    k = columns_from(0, BLOCK, INDEX)
    inside = exists[:, None] & (k < body[:, None])

    value = read(x, x_body, k, x_n, inside, MINUS_INFINITY)
    m = tl.max(value, 1)
    if PEEL:
        k_end, inside_end = ends(head, body, n, exists, VECTOR)
        end = read(x, x_row, k_end, x_n, inside_end, MINUS_INFINITY)
        m = tl.maximum(m, tl.max(end, 1))
    d = tl.sum(exp(value - m[:, None]), 1)
    if PEEL:
        d += tl.sum(exp(end - m[:, None]), 1)
        write(y, y_row, k_end, y_n, inside_end, RESULT(end, m, d))
    write(y, y_body, k, y_n, inside, RESULT(value, m, d))


@triton.jit
def forward_loop(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, samples, n, inner,
    RESULT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    x_row, y_row = row_of(sample, inner, x_outer, x_inner), row_of(sample, inner, y_outer, y_inner)
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    x_body, y_body = body_of(x_row, head, VECTOR), body_of(y_row, head, VECTOR)

    m, d = no_rows(ROWS, NUMBER)
    if PEEL:
        k_end, inside_end = ends(head, body, n, exists, VECTOR)
        end = read(x, x_row, k_end, x_n, inside_end, MINUS_INFINITY)
        m, d = fold(m, d, end)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        k = columns_from(start, BLOCK, INDEX)
        m, d = fold(m, d, read(x, x_body, k, x_n, exists[:, None] & (k < body[:, None]), MINUS_INFINITY))
    if PEEL:
        write(y, y_row, k_end, y_n, inside_end, RESULT(end, m, d))
    last = (n - 1) // BLOCK * BLOCK
    for done in tl.range(0, n, BLOCK, num_stages=STAGES):
        k = columns_from(last - done, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        write(y, y_body, k, y_n, inside, RESULT(read(x, x_body, k, x_n, inside, MINUS_INFINITY), m, d))


@triton.jit
def forward_share(
    x, x_outer, x_n, x_inner, maxima, sums, samples, n, inner, parts, per_part,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    part = tl.program_id(1).to(INDEX)
    x_row = row_of(sample, inner, x_outer, x_inner)
    store_share(
        x, x_row, x_n, maxima, sums, sample, exists, part, n, parts, per_part,
        ROWS, BLOCK, VECTOR, PEEL, INDEX, NUMBER,
    )  # fmt: skip


@triton.jit
def forward_finish(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, maxima, sums, samples, n, inner, parts, per_part,
    RESULT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    part = tl.program_id(1).to(INDEX)
    m, d = joined(maxima, sums, sample, exists, parts, PARTS)
    x_row, y_row = row_of(sample, inner, x_outer, x_inner), row_of(sample, inner, y_outer, y_inner)
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    x_body, y_body = body_of(x_row, head, VECTOR), body_of(y_row, head, VECTOR)
    if PEEL:
        k_end, inside_end = ends(head, body, n, only_if(part == 0, exists), VECTOR)
        write(y, y_row, k_end, y_n, inside_end, RESULT(read(x, x_row, k_end, x_n, inside_end, MINUS_INFINITY), m, d))
    for step in range(0, per_part, BLOCK):
        k = columns_from(part * per_part + step, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        write(y, y_body, k, y_n, inside, RESULT(read(x, x_body, k, x_n, inside, MINUS_INFINITY), m, d))


def forward(problem: Problem, result: Any) -> Program:
    """The program of a forward operator whose elements are `result`(x, m, d)."""
    operands = (problem["x"], problem["y"])
    if not problem.outer * problem.n * problem.inner:
        return Program([])
    regime = choose(problem, operands, streams=1)
    common = frame(problem, regime, operands) | strides(x=problem["x"], y=problem["y"]) | {"RESULT": result}
    if regime.parts > 1:
        space = Space()
        launches = shared(forward_share, forward_finish, problem, regime, common, ("maxima", "sums"), space)
        return Program(launches, space.size, regime.name)
    kernel = forward_loop if regime.name.startswith("long") else forward_tile
    return Program([Launch(kernel, (tiles(problem, regime),), common, regime.warps, regime.ctas)], 0, regime.name)


def softmax(problem: Problem) -> Program:
    if problem.is_general:
        return fused.forward(problem, log=False)
    return forward(problem, probability)


def log_softmax(problem: Problem) -> Program:
    if problem.is_general:
        return fused.forward(problem, log=True)
    return forward(problem, log_probability)


# --- gradients -----------------------------------------------------------------------------------------------------


@triton.jit
def product(dy, y):
    return y * dy


@triton.jit
def probability_grad(dy, y, total):
    return y * (dy - total[:, None])


@triton.jit
def upstream(dy, y):
    return dy


@triton.jit
def log_probability_grad(dy, y, total):
    return dy - exp(y) * total[:, None]


@triton.jit
def gradient_tile(
    dy, dy_outer, dy_n, dy_inner, y, y_outer, y_n, y_inner, dx, dx_outer, dx_n, dx_inner, samples, n, inner,
    TERM: tl.constexpr, RESULT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    PEEL: tl.constexpr, INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    dy_row, y_row = row_of(sample, inner, dy_outer, dy_inner), row_of(sample, inner, y_outer, y_inner)
    dx_row = row_of(sample, inner, dx_outer, dx_inner)
    head, body = aligned(dy_row, n, VECTOR, PEEL, INDEX)
    dy_body, y_body = body_of(dy_row, head, VECTOR), body_of(y_row, head, VECTOR)
    dx_body = body_of(dx_row, head, VECTOR)
    k = columns_from(0, BLOCK, INDEX)
    inside = exists[:, None] & (k < body[:, None])

    dy_value, y_value = read(dy, dy_body, k, dy_n, inside, 0.0), read(y, y_body, k, y_n, inside, 0.0)
    total = tl.sum(TERM(dy_value, y_value), 1)
    if PEEL:
        k_end, inside_end = ends(head, body, n, exists, VECTOR)
        dy_end, y_end = read(dy, dy_row, k_end, dy_n, inside_end, 0.0), read(y, y_row, k_end, y_n, inside_end, 0.0)
        total += tl.sum(TERM(dy_end, y_end), 1)
        write(dx, dx_row, k_end, dx_n, inside_end, RESULT(dy_end, y_end, total))
    write(dx, dx_body, k, dx_n, inside, RESULT(dy_value, y_value, total))


@triton.jit
def gradient_loop(
    dy, dy_outer, dy_n, dy_inner, y, y_outer, y_n, y_inner, dx, dx_outer, dx_n, dx_inner, samples, n, inner,
    TERM: tl.constexpr, RESULT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    PEEL: tl.constexpr, INDEX: tl.constexpr, NUMBER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    dy_row, y_row = row_of(sample, inner, dy_outer, dy_inner), row_of(sample, inner, y_outer, y_inner)
    dx_row = row_of(sample, inner, dx_outer, dx_inner)
    head, body = aligned(dy_row, n, VECTOR, PEEL, INDEX)
    dy_body, y_body = body_of(dy_row, head, VECTOR), body_of(y_row, head, VECTOR)
    dx_body = body_of(dx_row, head, VECTOR)

    total = tl.zeros([ROWS], NUMBER)
    if PEEL:
        k_end, inside_end = ends(head, body, n, exists, VECTOR)
        dy_end, y_end = read(dy, dy_row, k_end, dy_n, inside_end, 0.0), read(y, y_row, k_end, y_n, inside_end, 0.0)
        total += tl.sum(TERM(dy_end, y_end), 1)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        k = columns_from(start, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        dy_value, y_value = read(dy, dy_body, k, dy_n, inside, 0.0), read(y, y_body, k, y_n, inside, 0.0)
        total += tl.sum(TERM(dy_value, y_value), 1)
    if PEEL:
        write(dx, dx_row, k_end, dx_n, inside_end, RESULT(dy_end, y_end, total))
    last = (n - 1) // BLOCK * BLOCK
    for done in tl.range(0, n, BLOCK, num_stages=STAGES):
        k = columns_from(last - done, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        dy_value, y_value = read(dy, dy_body, k, dy_n, inside, 0.0), read(y, y_body, k, y_n, inside, 0.0)
        write(dx, dx_body, k, dx_n, inside, RESULT(dy_value, y_value, total))


@triton.jit
def gradient_share(
    dy, dy_outer, dy_n, dy_inner, y, y_outer, y_n, y_inner, totals, samples, n, inner, parts, per_part,
    TERM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    part = tl.program_id(1).to(INDEX)
    dy_row, y_row = row_of(sample, inner, dy_outer, dy_inner), row_of(sample, inner, y_outer, y_inner)
    head, body = aligned(dy_row, n, VECTOR, PEEL, INDEX)
    dy_body, y_body = body_of(dy_row, head, VECTOR), body_of(y_row, head, VECTOR)

    total = tl.zeros([ROWS], NUMBER)
    if PEEL:
        k_end, inside_end = ends(head, body, n, only_if(part == 0, exists), VECTOR)
        dy_end, y_end = read(dy, dy_row, k_end, dy_n, inside_end, 0.0), read(y, y_row, k_end, y_n, inside_end, 0.0)
        total += tl.sum(TERM(dy_end, y_end), 1)
    for step in range(0, per_part, BLOCK):
        k = columns_from(part * per_part + step, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        total += tl.sum(TERM(read(dy, dy_body, k, dy_n, inside, 0.0), read(y, y_body, k, y_n, inside, 0.0)), 1)
    tl.store(totals + sample * parts + part, total, mask=exists)


@triton.jit
def gradient_finish(
    dy, dy_outer, dy_n, dy_inner, y, y_outer, y_n, y_inner, dx, dx_outer, dx_n, dx_inner, totals,
    samples, n, inner, parts, per_part,
    RESULT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    part = tl.program_id(1).to(INDEX)
    total = tl.sum(of_parts(totals, sample, exists, parts, 0.0, PARTS), 1)
    dy_row, y_row = row_of(sample, inner, dy_outer, dy_inner), row_of(sample, inner, y_outer, y_inner)
    dx_row = row_of(sample, inner, dx_outer, dx_inner)
    head, body = aligned(dy_row, n, VECTOR, PEEL, INDEX)
    dy_body, y_body = body_of(dy_row, head, VECTOR), body_of(y_row, head, VECTOR)
    dx_body = body_of(dx_row, head, VECTOR)
    if PEEL:
        k_end, inside_end = ends(head, body, n, only_if(part == 0, exists), VECTOR)
        dy_end, y_end = read(dy, dy_row, k_end, dy_n, inside_end, 0.0), read(y, y_row, k_end, y_n, inside_end, 0.0)
        write(dx, dx_row, k_end, dx_n, inside_end, RESULT(dy_end, y_end, total))
    for step in range(0, per_part, BLOCK):
        k = columns_from(part * per_part + step, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        dy_value, y_value = read(dy, dy_body, k, dy_n, inside, 0.0), read(y, y_body, k, y_n, inside, 0.0)
        write(dx, dx_body, k, dx_n, inside, RESULT(dy_value, y_value, total))


def gradient(problem: Problem, term: Any, result: Any) -> Program:
    """The program of a gradient whose elements are `result`(dy, y, the row's sum of `term`(dy, y))."""
    operands = (problem["dy"], problem["y"], problem["dx"])
    if not problem.outer * problem.n * problem.inner:
        return Program([])
    regime = choose(problem, operands, streams=2)
    common = frame(problem, regime, operands) | strides(dy=problem["dy"], y=problem["y"], dx=problem["dx"])
    common |= {"TERM": term, "RESULT": result}
    if regime.parts > 1:
        space = Space()
        launches = shared(gradient_share, gradient_finish, problem, regime, common, ("totals",), space)
        return Program(launches, space.size, regime.name)
    kernel = gradient_loop if regime.name.startswith("long") else gradient_tile
    return Program([Launch(kernel, (tiles(problem, regime),), common, regime.warps, regime.ctas)], 0, regime.name)


def softmax_grad(problem: Problem) -> Program:
    if problem.is_general:
        return fused.gradient(problem, log=False)
    return gradient(problem, product, probability_grad)


def log_softmax_grad(problem: Problem) -> Program:
    if problem.is_general:
        return fused.gradient(problem, log=True)
    return gradient(problem, upstream, log_probability_grad)
