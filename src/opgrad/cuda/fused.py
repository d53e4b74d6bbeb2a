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
from typing import Any

import triton
import triton.language as tl

from opgrad.contract.problem import Problem
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
def kept(pointers, numbers, scalars, at, VIEWS: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements dropout keeps."""
    seed, offset = tl.load(pointers[DROPOUT]), tl.load(pointers[DROPOUT] + 1)
    if DROPS == NEIGHBOURS:
        groups = (4 * tl.arange(0, BLOCK // 4))[None, :]
        word = words_of_neighbours(offset_of_rows(numbers, at, VIEWS, DROPOUT) + at[5] + groups, seed, offset)
    else:
        word = word_of(offset_of(numbers, at, VIEWS, DROPOUT), seed, offset)
    return word > tl.cast(scalars[THRESHOLD], tl.int64).to(tl.uint32)


@triton.jit
def dropped(v, keeps, scalars):
    """v without what dropout drops."""
    return tl.where(keeps, v * number(scalars, RATE, v.dtype), 0.0)


@triton.jit
def operand(s, pointers, numbers, at, VIEWS: tl.constexpr, SLOT: tl.constexpr, VECTOR: tl.constexpr):
    """An operand of a post-op, or s in the place of one that it does not have."""
    if SLOT >= 0:
        found = read(pointers, numbers, at, VIEWS, SLOT, VECTOR, s.dtype)
    else:
        found = s
    return found


# --- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def logits(pointers, numbers, scalars, at, VIEWS: tl.constexpr, VECTOR: tl.constexpr, NUMBER: tl.constexpr):
    """The logits of a tile as they count; -inf where none exist."""
    x = read(pointers, numbers, at, VIEWS, INPUT, VECTOR, NUMBER)
    counts = at[3] & at[4]
    if VIEWS[WHERE][FORMAT] >= 0:
        counts = counts & (read(pointers, numbers, at, VIEWS, WHERE, VECTOR, NUMBER) != 0)
    return tl.where(counts, x * number(scalars, LOGIT_SCALE, NUMBER), MINUS_INFINITY)


@triton.jit
def normalised(x, m, d, LOG: tl.constexpr, INF_AS_ZERO: tl.constexpr):
    """(Log-)probabilities, given their rows' maximum m and sum d of exponentials, which is 0 for -inf alone."""
    shift = shift_for(m)[:, None]
    if LOG:
        p = x - shift - tl.log(d)[:, None]
    else:
        p = exp(x - shift) * divide(tl.full(d.shape, 1.0, d.dtype), d)[:, None]
        if INF_AS_ZERO:
            p = tl.where(d[:, None] == 0, 0.0, p)
    return p


@triton.jit
def finish(
    p, pointers, numbers, scalars, at, VIEWS: tl.constexpr, NAMES: tl.constexpr, CHAIN: tl.constexpr,
    COUNT: tl.constexpr, DROPS: tl.constexpr, DIVIDES: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """All that is made of a tile's (log-)probabilities p."""
    if VIEWS[SAVED][FORMAT] >= 0:
        write(p, pointers, numbers, at, VIEWS, SAVED, VECTOR)
    v = p * number(scalars, RESULT_SCALE, p.dtype)
    if DROPS != NOTHING:
        keeps = kept(pointers, numbers, scalars, at, VIEWS, DROPS, BLOCK)
        v = dropped(v, keeps, scalars)
        if VIEWS[MASK][FORMAT] >= 0:
            write(keeps, pointers, numbers, at, VIEWS, MASK, VECTOR)
    elif VIEWS[MASK][FORMAT] >= 0:
        write(tl.full([1, 1], 1, tl.int1), pointers, numbers, at, VIEWS, MASK, VECTOR)
    for i in tl.static_range(COUNT):
        t = operand(v, pointers, numbers, at, VIEWS, CHAIN[i][OPERAND], VECTOR)
        condition = operand(v, pointers, numbers, at, VIEWS, CHAIN[i][CONDITION], VECTOR)
        a, b = constant(scalars, 2 * i, v.dtype), constant(scalars, 2 * i + 1, v.dtype)
        v = value(tl.constexpr(NAMES[i]), v, t, condition, a, b)
    if DIVIDES:
        v = divide(v, number(scalars, OUT_SCALE, v.dtype))
    write(v, pointers, numbers, at, VIEWS, RESULT, VECTOR)


@triton.jit
def write_stats(m, d, pointers, numbers, at, VIEWS: tl.constexpr, VECTOR: tl.constexpr):
    """The logarithm of each row's sum of exponentials, if it is asked for."""
    if VIEWS[STATS][FORMAT] >= 0:
        write((m + tl.log(d))[:, None], pointers, numbers, at, VIEWS, STATS, VECTOR)


@triton.jit
def forward_rows(
    pointers, numbers, logit_scale: tl.float64, result_scale: tl.float64, out_scale: tl.float64, rate: tl.float64,
    threshold, constants, samples, n, inner, VIEWS: tl.constexpr, NAMES: tl.constexpr, CHAIN: tl.constexpr,
    COUNT: tl.constexpr, LOG: tl.constexpr, INF_AS_ZERO: tl.constexpr, DROPS: tl.constexpr,
    DIVIDES: tl.constexpr, MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    scalars = (logit_scale, result_scale, out_scale, rate, threshold, constants)
    rows = rows_of(tl.program_id(0), samples, inner, ROWS)
    first = tile(rows, 0, n, VECTOR, BLOCK, INDEX)
    if MODE == TILE:
        x = logits(pointers, numbers, scalars, first, VIEWS, VECTOR, NUMBER)
        m = tl.max(x, 1)
        d = tl.sum(exp(x - shift_for(m)[:, None]), 1)
        write_stats(m, d, pointers, numbers, first, VIEWS, VECTOR)
        p = normalised(x, m, d, LOG, INF_AS_ZERO)
        finish(
            p, pointers, numbers, scalars, first, VIEWS, NAMES, CHAIN, COUNT, DROPS, DIVIDES, VECTOR, BLOCK
        )  # fmt: skip
    else:
        m, d = no_rows(ROWS, NUMBER)
        for start in range(0, n, BLOCK):
            at = tile(rows, start, n, VECTOR, BLOCK, INDEX)
            m, d = fold(m, d, logits(pointers, numbers, scalars, at, VIEWS, VECTOR, NUMBER), exp)
        write_stats(m, d, pointers, numbers, first, VIEWS, VECTOR)
        last = (n - 1) // BLOCK * BLOCK
        for done in range(0, n, BLOCK):
            at = tile(rows, last - done, n, VECTOR, BLOCK, INDEX)
            p = normalised(logits(pointers, numbers, scalars, at, VIEWS, VECTOR, NUMBER), m, d, LOG, INF_AS_ZERO)
            finish(
                p, pointers, numbers, scalars, at, VIEWS, NAMES, CHAIN, COUNT, DROPS, DIVIDES, VECTOR, BLOCK
            )  # fmt: skip


def forward(problem: Problem, log: bool) -> Program:
    """softmax, or log_softmax."""
    rows = problem.outer * problem.inner
    if not rows or not (problem.n or "stats" in problem.specs):
        return Program([])
    attributes = problem.attributes
    constants = {"LOG": log, "INF_AS_ZERO": attributes["inf_as_zero"]}
    held = 2 if attributes["post_ops"] or attributes["dropout"] else 1
    return _program(problem, "x", ("y", "where", STATE, "stats", "saved", "mask"), forward_rows, constants, held)


# --- gradients -------------------------------------------------------------------------------------------------------


@triton.jit
def upstream(
    y, pointers, numbers, scalars, at, VIEWS: tl.constexpr, NAMES: tl.constexpr, CHAIN: tl.constexpr,
    COUNT: tl.constexpr, DROPS: tl.constexpr, DIVIDES: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to a tile's (log-)probabilities y; 0 where none exist.

    WRITES: leave the gradients of the post-ops' operands, too.
    """
    v = y * number(scalars, RESULT_SCALE, y.dtype)
    if DROPS != NOTHING:
        keeps = kept(pointers, numbers, scalars, at, VIEWS, DROPS, BLOCK)
        v = dropped(v, keeps, scalars)
    inputs, operands, conditions = (), (), ()
    for i in tl.static_range(COUNT):
        t = operand(v, pointers, numbers, at, VIEWS, CHAIN[i][OPERAND], VECTOR)
        condition = operand(v, pointers, numbers, at, VIEWS, CHAIN[i][CONDITION], VECTOR)
        a, b = constant(scalars, 2 * i, v.dtype), constant(scalars, 2 * i + 1, v.dtype)
        inputs, operands, conditions = inputs + (v,), operands + (t,), conditions + (condition,)  # noqa: RUF005
        v = value(tl.constexpr(NAMES[i]), v, t, condition, a, b)
    g = read(pointers, numbers, at, VIEWS, INPUT, VECTOR, y.dtype)
    if DIVIDES:
        g = divide(g, number(scalars, OUT_SCALE, g.dtype))
    for i in tl.static_range(COUNT - 1, -1, -1):
        if WRITES and CHAIN[i][GRADIENT] >= 0:
            t = g * operand_slope(tl.constexpr(NAMES[i]), inputs[i], operands[i], conditions[i])
            write(t, pointers, numbers, at, VIEWS, CHAIN[i][GRADIENT], VECTOR)
        a, b = constant(scalars, 2 * i, v.dtype), constant(scalars, 2 * i + 1, v.dtype)
        g = g * slope(tl.constexpr(NAMES[i]), inputs[i], operands[i], conditions[i], a, b)
    if DROPS != NOTHING:
        g = dropped(g, keeps, scalars)
    g = g * number(scalars, RESULT_SCALE, g.dtype)
    counts = at[3] & at[4]
    if VIEWS[WHERE][FORMAT] >= 0:
        counts = counts & (read(pointers, numbers, at, VIEWS, WHERE, VECTOR, y.dtype) != 0)
    return tl.where(counts, g, 0.0)


@triton.jit
def term(g, y, LOG: tl.constexpr):
    """What a row's sum is made of."""
    return g if LOG else y * g


@triton.jit
def write_result(
    g, y, total, pointers, numbers, scalars, at, VIEWS: tl.constexpr, LOG: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """dx, given a row's total."""
    if LOG:
        dx = g - exp(y) * total[:, None]
    else:
        dx = y * (g - total[:, None])
    write(dx * number(scalars, LOGIT_SCALE, g.dtype), pointers, numbers, at, VIEWS, RESULT, VECTOR)


@triton.jit
def gradient_rows(
    pointers, numbers, logit_scale: tl.float64, result_scale: tl.float64, out_scale: tl.float64, rate: tl.float64,
    threshold, constants, samples, n, inner, VIEWS: tl.constexpr, NAMES: tl.constexpr, CHAIN: tl.constexpr,
    COUNT: tl.constexpr, LOG: tl.constexpr, DROPS: tl.constexpr, DIVIDES: tl.constexpr,
    MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, INDEX: tl.constexpr,
    NUMBER: tl.constexpr,
):  # fmt: skip
    scalars = (logit_scale, result_scale, out_scale, rate, threshold, constants)
    rows = rows_of(tl.program_id(0), samples, inner, ROWS)
    if MODE == TILE:
        at = tile(rows, 0, n, VECTOR, BLOCK, INDEX)
        y = read(pointers, numbers, at, VIEWS, OUTPUT, VECTOR, NUMBER)
        g = upstream(
            y, pointers, numbers, scalars, at, VIEWS, NAMES, CHAIN, COUNT, DROPS, DIVIDES, VECTOR, BLOCK, True
        )  # fmt: skip
        write_result(g, y, tl.sum(term(g, y, LOG), 1), pointers, numbers, scalars, at, VIEWS, LOG, VECTOR)
    else:
        total = tl.zeros([ROWS], NUMBER)
        for start in range(0, n, BLOCK):
            at = tile(rows, start, n, VECTOR, BLOCK, INDEX)
            y = read(pointers, numbers, at, VIEWS, OUTPUT, VECTOR, NUMBER)
            g = upstream(
                y, pointers, numbers, scalars, at, VIEWS, NAMES, CHAIN, COUNT, DROPS, DIVIDES, VECTOR, BLOCK,
                False,
            )  # fmt: skip
            total += tl.sum(term(g, y, LOG), 1)
        last = (n - 1) // BLOCK * BLOCK
        for done in range(0, n, BLOCK):
            at = tile(rows, last - done, n, VECTOR, BLOCK, INDEX)
            y = read(pointers, numbers, at, VIEWS, OUTPUT, VECTOR, NUMBER)
            g = upstream(
                y, pointers, numbers, scalars, at, VIEWS, NAMES, CHAIN, COUNT, DROPS, DIVIDES, VECTOR, BLOCK,
                True,
            )  # fmt: skip
            write_result(g, y, total, pointers, numbers, scalars, at, VIEWS, LOG, VECTOR)


def gradient(problem: Problem, log: bool) -> Program:
    """softmax_grad, or log_softmax_grad."""
    if not problem.outer * problem.n * problem.inner:
        return Program([])
    held = power_of_2(2 + len(problem.attributes["post_ops"]))  # the input of each post-op is needed on the way back
    return _program(problem, "dy", ("dx", "where", STATE, "y"), gradient_rows, {"LOG": log}, held)


# --- both ------------------------------------------------------------------------------------------------------------


def _program(
    problem: Problem,
    first: str,
    names: Sequence[str],
    kernel: Any,
    constants: Mapping[str, Any],
    held: int,
) -> Program:
    """The one launch; `names`: the operands in the slots behind the first. held: arrays of a tile in registers."""
    attributes = problem.attributes
    views = Views(problem, first)
    for name in (first, *names):
        if name == STATE and problem.operands.get(name) is not None:
            views.add_offsets(name)
        else:
            views.add(name)
    chain = [_slots(views, each) for each in attributes["post_ops"]]
    elements = [each for name, each in problem.operands.items() if each and name not in (STATE, "stats")]
    if problem.inner == 1 < problem.n:
        elements = [each for each in elements if each.n]  # of the others a row has one number
    functions = bool(attributes["dropout"]) or any(not each.operands for each in attributes["post_ops"])
    regime = choose(problem, elements, held, alone=True, functions=functions)
    number = _precision(problem, first, names[0])
    arguments = {
        "pointers": tuple(views.pointers), "numbers": tuple(views.numbers), "VIEWS": tuple(views.views),
        "samples": problem.outer * problem.inner, "n": problem.n, "inner": problem.inner,
        "NAMES": tuple(each.name for each in attributes["post_ops"]), "CHAIN": tuple(chain), "COUNT": len(chain),
        **_scalars(attributes, number),
        "DROPS": _drops(views, regime.block), "DIVIDES": attributes["out_scale"] != 1.0,
        "MODE": (LOOP if regime.name.startswith("long") else TILE).value,
        "ROWS": regime.rows, "BLOCK": regime.block, "VECTOR": views.aligned,
        "INDEX": tl.int64 if views.wide else tl.int32, "NUMBER": number, **constants,
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
