"""Operators on single elements: one kernel, given the formula of one element.

Arrays are outer x n. Rows are cut into vectors of up to 16 bytes, the widest access that the hardware has; a
program takes a run of vectors, across the ends of rows too, so that short rows keep it as busy as long ones.

    flat   every operand has one stride for all its elements: a single row
    rows   the rows of some operand lie apart: each vector's row is found by a division
"""

import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from opgrad.contract import DTYPES
from opgrad.contract.signature import Operand, Problem
from opgrad.cuda import ALIGNMENT
from opgrad.cuda.execute import Launch, Program
from opgrad.cuda.numbers import narrow, widen

WARPS = 4
VECTORS = 2 * 32 * WARPS  # of a program: two accesses in flight for each thread and operand
MOST = 4 * VECTORS  # of those that are shorter than 16 bytes
LONG = 4  # whole vectors: shorter rows are cut so that none is broken
REACH = (1 << 31) - MOST  # positions and offsets below this fit into 32 bits


@triton.jit
def _load(pointers, whole, rest, REST: tl.constexpr):
    values = tl.load(pointers, mask=whole, other=0.0)
    if REST:
        values = tl.where(rest, tl.load(pointers, mask=rest, other=0.0), values)
    return widen(values)


@triton.jit
def _store(pointers, values, whole, rest, REST: tl.constexpr):
    values = narrow(values, pointers.dtype.element_ty)
    tl.store(pointers, values, mask=whole)
    if REST:
        tl.store(pointers, values, mask=rest)


@triton.jit
def _number(pointer, x):
    """The number in memory, as wide as x."""
    number = tl.load(pointer)
    if number.dtype.is_floating():
        number = widen(number)
    return number.to(x.dtype)


@triton.jit(repr=lambda made: made.constants["FORMULA"].__name__.strip("_"))
def _elements(
    a, a_row, a_step, A_ROW: tl.constexpr, b, b_row, b_step, B_ROW: tl.constexpr,
    y, y_row, y_step, Y_ROW: tl.constexpr, number, vectors, per_row, whole_per_row,
    FORMULA: tl.constexpr, ALPHA: tl.constexpr, ROWS: tl.constexpr, REST: tl.constexpr,
    INDEX: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """y = FORMULA(a, alpha), or FORMULA(a, b, alpha) if there is a b; alpha is ALPHA, or the number in memory.

    Rows of a are a_row * A_ROW elements apart: from the power of two A_ROW the compiler knows what is aligned.
    """
    vector = tl.program_id(0).to(INDEX) * VECTORS + tl.arange(0, VECTORS)
    row, place = tl.zeros_like(vector), vector
    if ROWS:
        row = vector // per_row
        place = vector - row * per_row
    # A mask that is the same for all of a vector leaves the access whole; the rest of a row goes one by one.
    lane = tl.arange(0, VECTOR)[None, :]
    inside = vector < vectors
    whole = (inside & (place < whole_per_row))[:, None]
    rest = (inside & (place == whole_per_row))[:, None] & (lane < REST)
    row, element = row[:, None], place[:, None] * VECTOR + lane

    x = _load(a + (row * a_row * A_ROW + element * a_step), whole, rest, REST)
    # A number that is assigned becomes a float32: ALPHA is passed on as it is.
    if b is not None:
        other = _load(b + (row * b_row * B_ROW + element * b_step), whole, rest, REST)
        result = FORMULA(x, other, ALPHA)
    elif number is not None:
        result = FORMULA(x, _number(number, x))
    else:
        result = FORMULA(x, ALPHA)
    _store(y + (row * y_row * Y_ROW + element * y_step), result, whole, rest, REST)


def operator(formula: Any, result: str, a: str, b: str = "") -> Callable[[Problem], Program]:
    """The function from problem to program of an elementwise operator; a, b: the formula's inputs."""

    def of_problem(problem: Problem) -> Program:
        alpha, second = problem.attributes.get("alpha", 0.0), problem[b] if b else None
        return program(problem, formula, result, alpha, a=problem[a], b=second)

    return of_problem


def program(
    problem: Problem,
    formula: Any,
    result: str,
    alpha: float = 0.0,
    *,
    a: Operand,
    b: Operand | None = None,
    number: Operand | None = None,
) -> Program:
    """The one launch of an elementwise operator; `number` is an alpha that stands in the device's memory."""
    outer, n = problem.outer, problem.n
    if not outer * n:
        return Program(())
    y = problem[result]
    operands = [each for each in (a, b, y) if each]
    widest = ALIGNMENT // max(DTYPES[each.dtype].itemsize for each in operands)
    # Elements of a vector: up to 16 bytes' worth; fewer if rows are short, or aligned in no operand.
    contiguous, length = [each for each in operands if each.n == 1], 1
    if contiguous:
        length = widest if outer == 1 else max(math.gcd(each.outer, widest) for each in contiguous)
        length = length if n >= LONG * length else math.gcd(n, length)
    per_row = triton.cdiv(n, length)
    vectors = outer * per_row
    reach = max(vectors, *(abs(each.outer) * outer + abs(each.n) * n for each in operands))
    block = min(VECTORS * widest // length, MOST)
    if reach >= REACH and outer > 1:
        block //= 4  # a vector's row and place take twice the registers, and so does each address
    arguments = {
        **_pointer("a", a, length), **_pointer("b", b, length), **_pointer("y", y, length), "number": number,
        "vectors": vectors, "per_row": per_row, "whole_per_row": n // length,
        "FORMULA": formula, "ALPHA": alpha, "ROWS": outer > 1, "REST": n % length,
        "INDEX": tl.int32 if reach < REACH else tl.int64, "VECTOR": length, "VECTORS": block,
    }  # fmt: skip
    launch = Launch(_elements, (triton.cdiv(vectors, block),), arguments, warps=WARPS, flush=True)
    return Program((launch,), regime="rows" if outer > 1 else "flat")


def _pointer(name: str, operand: Operand | None, length: int) -> dict[str, Any]:
    """The kernel's parameters for an operand: where it lies, and its strides."""
    outer, n = (operand.outer, operand.n) if operand else (0, 0)
    power = math.gcd(outer, length)
    return {name: operand, f"{name}_row": outer // power, f"{name.upper()}_ROW": power, f"{name}_step": n}
