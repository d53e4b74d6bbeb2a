"""Softmax and its gradients with any dtypes, strides and attributes, in one kernel for each call.

Forward    read x, logit_scale, where | softmax | stats, saved, result_scale, dropout, post-ops, out_scale, write y
Gradient   the same way back from dy, with the post-ops' inputs computed again from y | sums | logit_scale, write dx

A tile is ROWS rows of BLOCK elements, as in opgrad.cuda.softmax; rows that no tile holds are gone over twice.
A kernel is compiled for the operands' views (opgrad.cuda.views) and the names of the post-ops, so that features which
a call does not use have no code in it. Scales are arguments of the kernel, as float64; so are the post-ops' constants.
"""

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from opgrad.contract.signature import Problem
from opgrad.cuda.execute import Launch, Program
from opgrad.cuda.numbers import MINUS_INFINITY, divide, exp
from opgrad.cuda.post_ops import operand_slope, slope, value
from opgrad.cuda.random import word_of, words_of_neighbours
from opgrad.cuda.regimes import choose, power_of_2
from opgrad.cuda.rows import LOOP, TILE, fold, no_rows, shift_for, tiles
from opgrad.cuda.views import FORMAT, Views, offset_of, offset_of_rows, read, rows_of, tile, write
from opgrad.ops.reference.primitive import STATE, Applied, gradient_name
from opgrad.ops.reference.random import keep_threshold

# The slots of operands: those of both directions, those of one, then those of the post-ops.
# INPUT is x, or dy; RESULT y, or dx; OUTPUT, in gradients, y.
INPUT, RESULT, WHERE, DROPOUT, STATS, SAVED, MASK = map(tl.constexpr, range(7))
OUTPUT: tl.constexpr = STATS

# What a post-op has in the chain: the slots of its operand, its condition and its operand's gradient, -1 for none.
OPERAND, CONDITION, GRADIENT = map(tl.constexpr, range(3))

# What dropout drops: nothing, each element by a word of its own, or four neighbours by the words of one evaluation.
NOTHING, EACH, NEIGHBOURS = map(tl.constexpr, range(3))

# The scalars of a call, by their places in a tuple. Elements that dropout keeps are multiplied by RATE; at CONSTANTS
# stands the tuple of alpha and beta of each post-op.
LOGIT_SCALE, RESULT_SCALE, OUT_SCALE, RATE, THRESHOLD, CONSTANTS = map(tl.constexpr, range(6))


@triton.jit
def number(scalars, PLACE: tl.constexpr, NUMBER: tl.constexpr):
    """A scale or the rate, as [1, 1]."""
    return tl.full([1, 1], scalars[PLACE], NUMBER)


@triton.jit
def piece(scalars, PLACE: tl.constexpr):
    """A piece of a constant."""
    return tl.full([], scalars[CONSTANTS][PLACE], tl.float32).to(tl.int64)


@triton.jit
def constant(scalars, PLACE: tl.constexpr, NUMBER: tl.constexpr):
    """Alpha or beta of a post-op, as [1, 1]; in float64 it is put together from the pieces that `_pieces` makes."""
    if tl.float64 == NUMBER:
        high, middle, low = piece(scalars, 3 * PLACE), piece(scalars, 3 * PLACE + 1), piece(scalars, 3 * PLACE + 2)
        found = tl.full([1, 1], ((high << 48) | (middle << 24) | low).to(tl.float64, bitcast=True), NUMBER)
    else:
        found = tl.full([1, 1], scalars[CONSTANTS][PLACE], NUMBER)
    return found


@triton.jit
def kept(call, at, C: tl.constexpr):
    """Which elements dropout keeps."""
    seed, offset = tl.load(call[0][DROPOUT]), tl.load(call[0][DROPOUT] + 1)
    if C.drops == NEIGHBOURS:
        groups = (4 * tl.arange(0, C.block // 4))[None, :]
        word = words_of_neighbours(offset_of_rows(call, at, DROPOUT, C) + at[5] + groups, seed, offset)
    else:
        word = word_of(offset_of(call, at, DROPOUT, C), seed, offset)
    return word > tl.cast(call[2][THRESHOLD], tl.int64).to(tl.uint32)


@triton.jit
def dropped(v, keeps, scalars):
    """v without what dropout drops."""
    return tl.where(keeps, v * number(scalars, RATE, v.dtype), 0.0)


@triton.jit
def operand(s, call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """An operand of a post-op, or s in the place of one that it does not have."""
    if SLOT >= 0:
        found = read(call, at, SLOT, C)
    else:
        found = s
    return found


@triton.jit
def counting(call, at, C: tl.constexpr):
    """Which elements of a tile exist and are not masked."""
    counts = at[3] & at[4]
    if C.views[WHERE][FORMAT] >= 0:
        counts = counts & (read(call, at, WHERE, C) != 0)
    return counts


# --- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def logits(call, at, C: tl.constexpr):
    """The logits of a tile as they count; -inf where none exist."""
    x = read(call, at, INPUT, C)
    return tl.where(counting(call, at, C), x * number(call[2], LOGIT_SCALE, C.number), MINUS_INFINITY)


@triton.jit
def normalised(x, m, d, C: tl.constexpr):
    """(Log-)probabilities, given their rows' maximum m and sum d of exponentials, which is 0 for -inf alone."""
    shift = shift_for(m)[:, None]
    if C.log:
        p = x - shift - tl.log(d)[:, None]
    else:
        p = exp(x - shift) * divide(tl.full(d.shape, 1.0, d.dtype), d)[:, None]
        if C.inf_as_zero:
            p = tl.where(d[:, None] == 0, 0.0, p)
    return p


@triton.jit
def finish(p, call, at, C: tl.constexpr):
    """All that is made of a tile's (log-)probabilities p."""
    scalars = call[2]
    if C.views[SAVED][FORMAT] >= 0:
        write(p, call, at, SAVED, C)
    v = p * number(scalars, RESULT_SCALE, p.dtype)
    if C.drops != NOTHING:
        keeps = kept(call, at, C)
        v = dropped(v, keeps, scalars)
        if C.views[MASK][FORMAT] >= 0:
            write(keeps, call, at, MASK, C)
    elif C.views[MASK][FORMAT] >= 0:
        write(tl.full([1, 1], 1, tl.int1), call, at, MASK, C)
    for i in tl.static_range(C.count):
        t = operand(v, call, at, C.slots[i][OPERAND], C)
        condition = operand(v, call, at, C.slots[i][CONDITION], C)
        a, b = constant(scalars, 2 * i, v.dtype), constant(scalars, 2 * i + 1, v.dtype)
        v = value(tl.constexpr(C.names[i]), v, t, condition, a, b)
    if C.divides:
        v = divide(v, number(scalars, OUT_SCALE, v.dtype))
    write(v, call, at, RESULT, C)


@triton.jit
def write_stats(m, d, call, at, C: tl.constexpr):
    """The logarithm of each row's sum of exponentials, if it is asked for."""
    if C.views[STATS][FORMAT] >= 0:
        write((m + tl.log(d))[:, None], call, at, STATS, C)


@triton.jit
def forward_rows(
    pointers, numbers, logit_scale: tl.float64, result_scale: tl.float64, out_scale: tl.float64, rate: tl.float64,
    threshold, constants, samples, n, inner, MODE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    call = (pointers, numbers, (logit_scale, result_scale, out_scale, rate, threshold, constants))
    rows = rows_of(tl.program_id(0), samples, inner, C)
    first = tile(rows, 0, n, C)
    if MODE == TILE:
        x = logits(call, first, C)
        m = tl.max(x, 1)
        d = tl.sum(exp(x - shift_for(m)[:, None]), 1)
        write_stats(m, d, call, first, C)
        finish(normalised(x, m, d, C), call, first, C)
    else:
        m, d = no_rows(C.rows, C.number)
        for start in range(0, n, C.block):
            m, d = fold(m, d, logits(call, tile(rows, start, n, C), C), exp)
        write_stats(m, d, call, first, C)
        last = (n - 1) // C.block * C.block
        for done in range(0, n, C.block):
            at = tile(rows, last - done, n, C)
            finish(normalised(logits(call, at, C), m, d, C), call, at, C)


def forward(problem: Problem, log: bool) -> Program:
    """softmax, or log_softmax."""
    rows = problem.outer * problem.inner
    if not rows or not (problem.n or "stats" in problem.specs):
        return Program([])
    held = 2 if problem.attributes["post_ops"] or problem.attributes["dropout"] else 1
    return _program(problem, "x", ("y", "where", STATE, "stats", "saved", "mask"), forward_rows, log, held)


# --- gradients -------------------------------------------------------------------------------------------------------


@triton.jit
def upstream(y, call, at, WRITES: tl.constexpr, C: tl.constexpr):
    """The gradient with respect to a tile's (log-)probabilities y; 0 where none exist.

    WRITES: leave the gradients of the post-ops' operands, too.
    """
    scalars = call[2]
    v = y * number(scalars, RESULT_SCALE, y.dtype)
    if C.drops != NOTHING:
        keeps = kept(call, at, C)
        v = dropped(v, keeps, scalars)
    inputs, operands, conditions = (), (), ()
    for i in tl.static_range(C.count):
        t = operand(v, call, at, C.slots[i][OPERAND], C)
        condition = operand(v, call, at, C.slots[i][CONDITION], C)
        a, b = constant(scalars, 2 * i, v.dtype), constant(scalars, 2 * i + 1, v.dtype)
        inputs, operands, conditions = inputs + (v,), operands + (t,), conditions + (condition,)  # noqa: RUF005
        v = value(tl.constexpr(C.names[i]), v, t, condition, a, b)
    g = read(call, at, INPUT, C)
    if C.divides:
        g = divide(g, number(scalars, OUT_SCALE, g.dtype))
    for i in tl.static_range(C.count - 1, -1, -1):
        if WRITES and C.slots[i][GRADIENT] >= 0:
            t = g * operand_slope(tl.constexpr(C.names[i]), inputs[i], operands[i], conditions[i])
            write(t, call, at, C.slots[i][GRADIENT], C)
        a, b = constant(scalars, 2 * i, v.dtype), constant(scalars, 2 * i + 1, v.dtype)
        g = g * slope(tl.constexpr(C.names[i]), inputs[i], operands[i], conditions[i], a, b)
    if C.drops != NOTHING:
        g = dropped(g, keeps, scalars)
    return tl.where(counting(call, at, C), g * number(scalars, RESULT_SCALE, g.dtype), 0.0)


@triton.jit
def term(g, y, C: tl.constexpr):
    """What a row's sum is made of."""
    return g if C.log else y * g


@triton.jit
def write_result(g, y, total, call, at, C: tl.constexpr):
    """dx, given a row's total."""
    if C.log:
        dx = g - exp(y) * total[:, None]
    else:
        dx = y * (g - total[:, None])
    write(dx * number(call[2], LOGIT_SCALE, g.dtype), call, at, RESULT, C)


@triton.jit
def gradient_rows(
    pointers, numbers, logit_scale: tl.float64, result_scale: tl.float64, out_scale: tl.float64, rate: tl.float64,
    threshold, constants, samples, n, inner, MODE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    call = (pointers, numbers, (logit_scale, result_scale, out_scale, rate, threshold, constants))
    rows = rows_of(tl.program_id(0), samples, inner, C)
    if MODE == TILE:
        at = tile(rows, 0, n, C)
        y = read(call, at, OUTPUT, C)
        g = upstream(y, call, at, True, C)
        write_result(g, y, tl.sum(term(g, y, C), 1), call, at, C)
    else:
        total = tl.zeros([C.rows], C.number)
        for start in range(0, n, C.block):
            at = tile(rows, start, n, C)
            y = read(call, at, OUTPUT, C)
            total += tl.sum(term(upstream(y, call, at, False, C), y, C), 1)
        last = (n - 1) // C.block * C.block
        for done in range(0, n, C.block):
            at = tile(rows, last - done, n, C)
            y = read(call, at, OUTPUT, C)
            write_result(upstream(y, call, at, True, C), y, total, call, at, C)


def gradient(problem: Problem, log: bool) -> Program:
    """softmax_grad, or log_softmax_grad."""
    if not problem.outer * problem.n * problem.inner:
        return Program([])
    held = power_of_2(2 + len(problem.attributes["post_ops"]))  # the input of each post-op is needed on the way back
    return _program(problem, "dy", ("dx", "where", STATE, "y"), gradient_rows, log, held)


# --- both ------------------------------------------------------------------------------------------------------------


class Constants(NamedTuple):
    """What a kernel is compiled for, as `tl.constexpr` (see `rows.Tiling`).

    views: of the operands. names, slots, count: of the post-ops. drops: what dropout does. divides: by out_scale. rows,
    block: of a tile. vector: rows of the operands begin at multiples of it. index: the dtype of columns. number: that
    of the computation.
    """

    views: Any
    names: Any
    slots: Any
    count: Any
    drops: Any
    divides: Any
    log: Any
    inf_as_zero: Any
    rows: Any
    block: Any
    vector: Any
    index: Any
    number: Any


def _program(problem: Problem, first: str, names: Sequence[str], kernel: Any, log: bool, held: int) -> Program:
    """The one launch; `names`: the operands in the slots behind the first. held: arrays of a tile in registers."""
    attributes = problem.attributes
    views = Views(problem, first)
    for name in (first, *names):
        if name == STATE and problem.operands.get(name) is not None:
            views.add_offsets(name)
        else:
            views.add(name)
    post_ops = attributes["post_ops"]
    slots = tuple(_slots(views, each) for each in post_ops)
    elements = [each for name, each in problem.operands.items() if each and name not in (STATE, "stats")]
    if problem.inner == 1 < problem.n:
        elements = [each for each in elements if each.n]  # of the others a row has one number
    functions = bool(attributes["dropout"]) or any(not each.operands for each in attributes["post_ops"])
    regime = choose(problem, elements, held, alone=True, functions=functions)
    number = _precision(problem, first, names[0])
    constants = Constants(
        views=tuple(views.views), names=tuple(each.name for each in post_ops), slots=slots, count=len(slots),
        drops=_drops(views, regime.block), divides=attributes["out_scale"] != 1.0, log=log,
        inf_as_zero=attributes.get("inf_as_zero", False),
        rows=regime.rows, block=regime.block, vector=views.aligned,
        index=tl.int64 if views.wide else tl.int32, number=number,
    )  # fmt: skip
    arguments = {
        "pointers": tuple(views.pointers), "numbers": tuple(views.numbers), **_scalars(attributes, number),
        "samples": problem.outer * problem.inner, "n": problem.n, "inner": problem.inner,
        "MODE": (LOOP if regime.name.startswith("long") else TILE).value,
        "C": Constants(*map(tl.constexpr, constants)),
    }  # fmt: skip
    return Program([Launch(kernel, (tiles(problem, regime),), arguments, regime.warps)], 0, regime.name)


def _drops(views: Views, block: int) -> int:
    """What dropout drops."""
    if not views.problem.attributes["dropout"]:
        return NOTHING.value
    return NEIGHBOURS.value if block >= 4 and views.are_neighbours(DROPOUT.value) else EACH.value


def _precision(problem: Problem, first: str, result: str) -> Any:
    """float64 if the argument, the result, or y of a gradient is."""
    dtypes = {problem[name].dtype for name in (first, "y", result) if problem.operands.get(name)}
    return tl.float64 if "float64" in dtypes else tl.float32


def _scalars(attributes: Mapping[str, Any], number: Any) -> dict[str, Any]:
    """The arguments with a call's scales and constants. number: the precision of the computation."""
    probability = attributes["dropout"] or 0.0
    constants = tuple(each for op in attributes["post_ops"] for each in (op.alpha, op.beta))
    return {
        **{name: attributes[name] for name in ("logit_scale", "result_scale", "out_scale")},
        "rate": 1.0 / (1.0 - probability) if probability < 1.0 else 0.0,
        "threshold": keep_threshold(probability),
        "constants": tuple(itertools.chain(*map(_pieces, constants))) if number == tl.float64 else constants,
    }


def _pieces(constant: float) -> tuple[float, float, float]:
    """The bits of a float64 as three whole numbers below 2**24, the first with its sign.

    Triton passes numbers in a tuple as float32, which holds these exactly, and compiles a kernel for none of them.
    """
    (bits,) = struct.unpack("<q", struct.pack("<d", constant))
    return float(bits >> 48), float(bits >> 24 & 0xFFFFFF), float(bits & 0xFFFFFF)


def _slots(views: Views, op: Applied) -> tuple[int, int, int]:
    """The slots of a post-op's operand, condition and operand's gradient."""
    if not op.operands:
        return -1, -1, -1
    condition = op.operands[0] if op.name == "select" else ""
    operand, gradient = op.operands[-1], gradient_name(op.operands[-1])
    slots = [views.add(name) if name in views.problem.specs else -1 for name in (operand, condition, gradient)]
    return slots[0], slots[1], slots[2]
