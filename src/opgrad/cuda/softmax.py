"""Softmax, log-softmax and their gradients, by the skeleton of opgrad.cuda.rows."""

from functools import partial
from typing import Any

import triton
import triton.language as tl

from opgrad.contract.signature import Problem
from opgrad.cuda import fused
from opgrad.cuda.execute import Program, Space
from opgrad.cuda.numbers import MINUS_INFINITY, exp
from opgrad.cuda.regimes import choose
from opgrad.cuda.rows import (
    FINISH,
    SHARE,
    array_of,
    exponential,
    frame,
    of_parts,
    reduce_rows,
    row_launches,
    rows_of,
    statistics,
    store_part,
    strides,
    write_rows,
)


@triton.jit
def probability(x, other, found, column, inside, EXP: tl.constexpr):
    m, d = found
    return EXP(x - m[:, None]) * (1.0 / d)[:, None]


@triton.jit
def log_probability(x, other, found, column, inside, given):
    m, d = found
    return x - m[:, None] - tl.log(d)[:, None]


@triton.jit
def forward_rows(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, maxima, sums, samples, n, inner, parts, per_part,
    RESULT: tl.constexpr, EXP: tl.constexpr, MODE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    rows = rows_of(samples, n, inner, x_outer, x_inner, parts, MODE, T)
    a = array_of(x, rows, inner, x_outer, x_n, x_inner)
    found, kept = statistics(a, maxima, sums, rows, n, parts, per_part, EXP, MODE, T)
    if MODE != SHARE:
        y_rows = array_of(y, rows, inner, y_outer, y_n, y_inner)
        write_rows(y_rows, a, None, kept, rows, n, per_part, found, EXP, RESULT, MINUS_INFINITY, MODE, T)


def forward(problem: Problem, result: Any, log: bool) -> Program:
    """The program of a forward operator whose elements are `result`; log: whether it is log-softmax."""
    if problem.is_general:
        return fused.forward(problem, log=log)
    operands = (problem["x"], problem["y"])
    if not problem.outer * problem.n * problem.inner:
        return Program([])
    regime, space = choose(problem, operands, streams=1), Space()
    given = frame(problem, regime, operands) | strides(x=problem["x"], y=problem["y"])
    given |= {"RESULT": result, "EXP": exponential(problem["y"])}
    found = row_launches(forward_rows, problem, regime, given, ("maxima", "sums"), space)
    return Program(found, space.size, regime.name)


softmax = partial(forward, result=probability, log=False)
log_softmax = partial(forward, result=log_probability, log=True)

# --- gradients -----------------------------------------------------------------------------------------------------


@triton.jit
def product(dy, y):
    return y * dy


@triton.jit
def probability_grad(dy, y, total, column, inside, given):
    return y * (dy - total[:, None])


@triton.jit
def upstream(dy, y):
    return dy


@triton.jit
def log_probability_grad(dy, y, total, column, inside, given):
    return dy - exp(y) * total[:, None]


@triton.jit
def total_of(dy, y, ends, TERM, PEEL: tl.constexpr):
    """The sum of the terms of whole rows."""
    total = tl.sum(TERM(dy, y), 1)
    if PEEL:
        total += tl.sum(TERM(ends[0], ends[1]), 1)
    return total


@triton.jit
def add_terms(total, dy, y, column, inside, TERM):
    return total + tl.sum(TERM(dy, y), 1)


@triton.jit
def gradient_rows(
    dy, dy_outer, dy_n, dy_inner, y, y_outer, y_n, y_inner, dx, dx_outer, dx_n, dx_inner, totals,
    samples, n, inner, parts, per_part,
    TERM: tl.constexpr, RESULT: tl.constexpr, MODE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    rows = rows_of(samples, n, inner, dy_outer, dy_inner, parts, MODE, T)
    a, b = array_of(dy, rows, inner, dy_outer, dy_n, dy_inner), array_of(y, rows, inner, y_outer, y_n, y_inner)
    if MODE == FINISH:
        total = tl.sum(of_parts(totals, rows, parts, 0.0, T.parts), 1)
        kept = total
    else:
        zero = tl.zeros([T.rows], T.number)
        total, kept = reduce_rows(zero, a, b, rows, n, per_part, TERM, total_of, add_terms, 0.0, MODE, T)
    if MODE == SHARE:
        store_part(totals, rows, parts, total)
    else:
        dx_rows = array_of(dx, rows, inner, dx_outer, dx_n, dx_inner)
        write_rows(dx_rows, a, b, kept, rows, n, per_part, total, None, RESULT, 0.0, MODE, T)


def gradient(problem: Problem, term: Any, result: Any, log: bool) -> Program:
    """The program of a gradient whose elements are `result`, given the row's sum of `term`(dy, y)."""
    if problem.is_general:
        return fused.gradient(problem, log=log)
    operands = (problem["dy"], problem["y"], problem["dx"])
    if not problem.outer * problem.n * problem.inner:
        return Program([])
    regime, space = choose(problem, operands, streams=2), Space()
    given = frame(problem, regime, operands) | strides(dy=problem["dy"], y=problem["y"], dx=problem["dx"])
    given |= {"TERM": term, "RESULT": result}
    found = row_launches(gradient_rows, problem, regime, given, ("totals",), space)
    return Program(found, space.size, regime.name)


softmax_grad = partial(gradient, term=product, result=probability_grad, log=False)
log_softmax_grad = partial(gradient, term=upstream, result=log_probability_grad, log=True)
