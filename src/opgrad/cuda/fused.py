"""Softmax and its gradients with any dtypes, strides and attributes, in one kernel for each call.

Forward    read x, logit_scale, where | softmax | stats, saved, result_scale, dropout, post-ops, out_scale, write y
Gradient   the same way back from dy, with the post-ops' inputs computed again from y | sums | logit_scale, write dx

A tile is ROWS rows of BLOCK elements, as in opgrad.cuda.softmax; rows that no tile holds are gone over twice.
A kernel is compiled for the operands' views and the names of the post-ops, so that features which
a call does not use have no code in it. Scales are arguments of the kernel, as float64; so are the post-ops' constants.
"""

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import triton
import triton.language as tl

from opgrad.contract import Spec, arrangement
from opgrad.contract.signature import Operand, Problem
from opgrad.cuda import numbers as formats
from opgrad.cuda.execute import Launch, Program
from opgrad.cuda.numbers import MINUS_INFINITY, decoded, divide, encoded, exp
from opgrad.cuda.post_ops import operand_slope, slope, value
from opgrad.cuda.regimes import WIDE, choose, power_of_2
from opgrad.cuda.rows import LOOP, TILE, columns_from, fold, no_rows, samples_of, shift_for, tiles
from opgrad.ops.reference.dropout import keep_threshold
from opgrad.ops.reference.primitive import STATE, Applied, gradient_name

# --- dropout: Philox 4x32-10 of each element's index, as `opgrad.ops.reference.dropout` defines it -------------------

MULTIPLIER_A: tl.constexpr = tl.constexpr(0xD2511F53)
MULTIPLIER_C: tl.constexpr = tl.constexpr(0xCD9E8D57)
KEY_STEP_LOW: tl.constexpr = tl.constexpr(0x9E3779B9)
KEY_STEP_HIGH: tl.constexpr = tl.constexpr(0xBB67AE85)
ROUNDS: tl.constexpr = tl.constexpr(10)


@triton.jit
def lower(number):
    """The lower 32 bits of 64."""
    return number.to(tl.uint32)


@triton.jit
def upper(number):
    """The upper 32 bits of 64."""
    return (number.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)


@triton.jit
def philox(group, seed, offset):
    """The four words for the counter (offset, group) and the key `seed`, each 64 bits, lower half first."""
    low, high = lower(seed).to(tl.uint64), upper(seed).to(tl.uint64)
    a, b = tl.zeros_like(lower(group)) + lower(offset), tl.zeros_like(lower(group)) + upper(offset)
    c, d = lower(group), upper(group)
    for step in tl.static_range(ROUNDS):
        first, second = a.to(tl.uint64) * MULTIPLIER_A, c.to(tl.uint64) * MULTIPLIER_C
        # Keys are added up in 64 bits: the interpreter warns of sums that wrap around.
        a, b = upper(second) ^ b ^ lower(low + step * KEY_STEP_LOW), lower(second)
        c, d = upper(first) ^ d ^ lower(high + step * KEY_STEP_HIGH), lower(first)
    return a, b, c, d


@triton.jit
def word_of(place, seed, offset):
    """The random word of each place, an int64."""
    a, b, c, d = philox(place & -4, seed, offset)
    which = place & 3
    return tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))


@triton.jit
def words_of_neighbours(group, seed, offset):
    """The random words of rows of places, given those that begin groups of four neighbours: [rows, 4 * columns]."""
    a, b, c, d = philox(group, seed, offset)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(words, [group.shape[0], 4 * group.shape[1]])


# --- views: where the elements of a tile lie in operands of any strides ----------------------------------------------
#
# Rows lie anywhere: an operand has loops of its own for the axes before, on and behind the reduced ones, as few as its
# strides allow. A loop's size and stride are numbers that the kernel is given; how many there are it is compiled for.
# An operand that does not move along one of the three is read once for all elements that differ in that alone.
# Functions in kernels take the call, whose first items are the pointers and the numbers of its operands, the elements
# of a tile (`at`), an operand's slot, and the constants of the kernel (`Constants`).

# An operand's view: its format, then where its loops are among the numbers, and how many.
FORMAT, OUTER, OUTER_LOOPS, ALONG, ALONG_LOOPS, INNER, INNER_LOOPS = map(tl.constexpr, range(7))
ABSENT = (-1, 0, 0, 0, 0, 0, 0)

FORMATS = {
    "bool": formats.BOOL.value,
    "float8_e5m2": formats.FLOAT8_E5M2.value,
    "float8_e4m3fn": formats.FLOAT8_E4M3FN.value,
}


@triton.jit
def rows_of(first, samples, inner, C: tl.constexpr):
    """The rows of a tile, each [rows, 1]: their indices before and behind the reduced axes, and whether they exist."""
    sample, exists = samples_of(first, samples, C.rows)
    return (sample // inner)[:, None], (sample % inner)[:, None], exists[:, None]


@triton.jit
def tile(rows, start, n, C: tl.constexpr):
    """The elements of a tile: its rows' indices, its columns, which of both exist, and the first column, `start`."""
    k = columns_from(start, C.block, C.index)
    return rows[0], rows[1], k, rows[2], k < n // C.vector * C.vector, tl.full([1, 1], start, C.index)


@triton.jit
def strided(index, numbers, FIRST: tl.constexpr, LOOPS: tl.constexpr):
    """How far from the first element one lies whose index in these loops this is."""
    distance = tl.zeros_like(index)
    for loop in tl.static_range(LOOPS - 1, -1, -1):
        if loop > 0:
            size = numbers[FIRST + 2 * loop]
            rest = index // size
            distance += (index - rest * size) * numbers[FIRST + 2 * loop + 1]
            index = rest
        else:
            distance += index * numbers[FIRST + 1]
    return distance


@triton.jit
def offset_of_rows(call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """Where an operand's rows of a tile begin, in elements; [1, 1] if that is the same for all."""
    offset = tl.zeros([1, 1], tl.int64)
    if C.views[SLOT][OUTER_LOOPS] > 0:
        offset = offset + strided(at[0], call[1], C.views[SLOT][OUTER], C.views[SLOT][OUTER_LOOPS])
    if C.views[SLOT][INNER_LOOPS] > 0:
        offset = offset + strided(at[1], call[1], C.views[SLOT][INNER], C.views[SLOT][INNER_LOOPS])
    return offset


@triton.jit
def offset_of(call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """Where an operand's elements of a tile lie."""
    offset = offset_of_rows(call, at, SLOT, C)
    if C.views[SLOT][ALONG_LOOPS] > 0:
        offset = offset + strided(at[2], call[1], C.views[SLOT][ALONG], C.views[SLOT][ALONG_LOOPS])
    return offset


@triton.jit
def pointers_of(call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """Pointers to an operand's elements of a tile, and which of them exist."""
    row = offset_of_rows(call, at, SLOT, C)
    exists = tl.full([1, 1], 1, tl.int1)
    if C.views[SLOT][OUTER_LOOPS] + C.views[SLOT][INNER_LOOPS] > 0:
        exists = exists & at[3]
    if C.views[SLOT][ALONG_LOOPS] > 0:
        # By this division the compiler sees that rows begin at whole vectors.
        column = strided(at[2], call[1], C.views[SLOT][ALONG], C.views[SLOT][ALONG_LOOPS])
        found = call[0][SLOT] + row // C.vector * C.vector + column
        exists = exists & at[4]
    else:
        found = call[0][SLOT] + row
    return found, exists


@triton.jit
def read(call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """An operand's elements of a tile as float32 or float64, 0 where none exist."""
    found, exists = pointers_of(call, at, SLOT, C)
    return decoded(tl.load(found, mask=exists, other=0), C.views[SLOT][FORMAT], C.number)


@triton.jit
def write(values, call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """Store a result's elements of a tile, rounded to its dtype."""
    found, exists = pointers_of(call, at, SLOT, C)
    tl.store(found, encoded(values, C.views[SLOT][FORMAT], found.dtype.element_ty), mask=exists)


@dataclass
class Views:
    """The operands of a kernel by slot: pointers, the numbers of their loops, their views.

    The loops follow the memory order of the operand `first`.
    """

    problem: Problem
    first: str
    numbers: list[int] = field(default_factory=list)
    pointers: list[Operand] = field(default_factory=list)
    views: list[tuple[int, ...]] = field(default_factory=list)
    aligned: int = 16  # elements; rows of all operands that move along them begin at multiples of it
    wide: bool = False  # whether offsets inside a row need 64 bits

    def __post_init__(self) -> None:
        if self.problem.inner > 1:
            self.aligned = 1
        self.aligned = math.gcd(self.aligned, self.problem.n)

    def add(self, name: str) -> int:
        """The slot of an operand, which may not have been given."""
        spec = self.problem.specs.get(name)
        if spec is None:
            self.pointers.append(self.pointers[0])  # as it is added: older devices know no float8, not even by name
            self.views.append(ABSENT)
        else:
            self._add(name, spec.shape, _strides(spec, self.problem.orders[name]))
        return len(self.views) - 1

    def add_offsets(self, name: str) -> int:
        """The slot of an operand that is itself not read; its offsets are the elements' in C order."""
        shape = self.problem.specs[self.first].shape
        self._add(name, shape, arrangement.contiguous(shape, tuple(range(len(shape))), 1))
        return len(self.views) - 1

    def _add(self, name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
        operand = self.problem[name]
        number = FORMATS.get(operand.dtype, formats.PLAIN.value)
        self.pointers.append(replace(operand, dtype="uint8") if number else operand)
        loops = [_moving(arrangement.steps(shape, axes, strides)) for axes in self._groups()]
        view = [number]
        for group in loops:
            view += [len(self.numbers), len(group)]
            self.numbers += [each for loop in group for each in loop]
        self.views.append(tuple(view))
        outer, along, _ = loops
        if along:
            self.aligned = math.gcd(self.aligned, *(stride for _, stride in outer))
            self.wide |= sum(abs(size * stride) for size, stride in along) >= WIDE

    def are_neighbours(self, slot: int) -> bool:
        """Whether rows lie in steps of 1, and begin at multiples of 4 and have as many elements."""
        _, outer, outers, along, alongs, _, inners = self.views[slot]
        strides = self.numbers[outer + 1 : outer + 2 * outers : 2]
        in_steps = alongs == 1 and self.numbers[along + 1] == 1 and not inners
        return in_steps and not any(each % 4 for each in (self.problem.n, *strides))

    def _groups(self) -> list[tuple[int, ...]]:
        """The axes before, on and behind the reduced ones."""
        order, reduced = self.problem.orders[self.first], self.problem.attributes["axis"]
        start = min(place for place, axis in enumerate(order) if axis in reduced)
        stop = start + len(reduced)
        return [order[:start], order[start:stop], order[stop:]]


def _moving(loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The loops, or none if no loop moves (all strides are 0) and there is an element."""
    return loops if any(stride or not size for size, stride in loops) else []


def _strides(spec: Spec, order: tuple[int, ...]) -> tuple[int, ...]:
    """In elements; of the copy that is made of an operand whose elements do not lie whole elements apart."""
    size, strides = spec.dtype.itemsize, spec.strides
    assert strides is not None
    if any(stride % size for length, stride in zip(spec.shape, strides, strict=True) if length > 1):
        return arrangement.contiguous(spec.shape, order, 1)
    return tuple(stride // size for stride in strides)


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
    dtypes = {problem[name].dtype for name in (first, "y", names[0]) if problem.operands.get(name)}
    number = tl.float64 if "float64" in dtypes else tl.float32
    drops = NOTHING.value
    if attributes["dropout"]:
        together = regime.block >= 4 and views.are_neighbours(DROPOUT.value)
        drops = NEIGHBOURS.value if together else EACH.value
    constants = Constants(
        views=tuple(views.views), names=tuple(each.name for each in post_ops), slots=slots, count=len(slots),
        drops=drops, divides=attributes["out_scale"] != 1.0, log=log,
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
