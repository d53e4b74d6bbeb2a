"""The forward pass of attention.

A unit is a block of queries of all heads that share keys and values. Their products with a block of keys are a tile of
scores, which become exponentials relative to the largest score so far; the sums with the values are rescaled when a
larger one is found.
"""

from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Units
from opgrad.cpu.kernels.attention.tiles import (
    LOG2_E,
    MINUS_INFINITY,
    Drop,
    Heads,
    Scores,
    Seen,
    TileSizes,
    bounded,
    first_span,
    keys_of,
    mask_of,
    pack_columns,
    pack_rows,
    place,
    put_kept,
    put_mask,
    queries_of,
    span_of,
    write_capped,
)
from opgrad.cpu.kernels.gemm import CHUNK, SPARE, multiply
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import clear, get_or, mapped, put, write_times, write_zeros
from opgrad.cpu.kernels.loops.rows import row_max
from opgrad.cpu.kernels.numerics.elementary import LN2_HIGH, LN2_LOW, exp2_up_to_one, log

KEYS = 4 * CHUNK  # of a tile
PITCH = KEYS + SPARE  # numbers from one row of scores to the next


class ForwardInputs(NamedTuple):
    q: Heads
    k: Heads
    v: Heads
    sink: Pointer
    has_sink: int


class ForwardResults(NamedTuple):
    """y and lse; wants: whether y is wanted, and lse."""

    y: Heads
    lse: Heads
    wants_y: int
    wants_lse: int


class ForwardMemory(NamedTuple):
    """Packed queries, keys and values of a tile, its scores, and a row of dropout's decisions."""

    q: Private
    k: Private
    v: Private
    k_panel: int
    v_panel: int
    scores: Private
    kept: Private


class Sums(NamedTuple):
    """Of each row: sums with the values, `pitch` numbers a row, the largest score, rounded, and the sum of powers."""

    y: Private
    pitch: int
    top: Private
    total: Private


class PartSums(NamedTuple):
    """The sums of all parts of all units, one behind the other."""

    y: Pointer
    pitch: int
    top: Pointer
    total: Pointer


class Parts(NamedTuple):
    """How many parts the keys are cut into, the keys of a part, and the rows of a unit."""

    count: int
    keys: int
    rows: int


@fold
def powers(total, arrays, i: int, whole: bool, mask, numbers):
    e = exp2_up_to_one(get_or(arrays[0], i, whole, mask, MINUS_INFINITY) - numbers[0])
    put(arrays[0], i, e, whole, mask, 0)
    return (total[0] + e,)


write_dropped = mapped(lambda e, kept, scale: e * (kept * scale))


@inline
def _soften(scores, begin: int, end: int, row: int, size: int, sums: Any) -> None:
    """Scores [begin, end) of a row become powers of two, relative to its largest score, whose sum joins the total."""
    top, largest = v.load_one(sums.top, row), row_max(scores, begin, end)
    largest = v.first_lane(v.round_even(v.full(scores, largest)))
    total = v.load_one(sums.total, row)
    if largest > top:
        shrink = v.first_lane(exp2_up_to_one(v.full(scores, top) - v.full(scores, largest)))
        y = sums.y + row * sums.pitch
        write_times(y, 0, size, 0, (y,), (shrink,))
        top, total = largest, total * shrink
        v.store_one(sums.top, row, top)
    base = 0.0 if top == MINUS_INFINITY else top
    added = powers((v.full(scores, 0.0),), begin, end, (scores,), (base,))[0]
    v.store_one(sums.total, row, total + v.reduce_add(added))


@inline
def _start(inputs: ForwardInputs, sizes: TileSizes, kv_head: int, rows: int, sums: Any, is_first: int) -> None:
    """No keys are summed up yet: a row's total is that of its sink, in the first part."""
    group = sizes.heads // sizes.kv_heads
    clear(sums.y, rows * sums.pitch)
    for row in range(rows):
        top, total = MINUS_INFINITY, 0.0
        if inputs.has_sink and is_first:
            sink = bounded(v.full(sums.y, v.load_one(inputs.sink, kv_head * group + row % group))) * LOG2_E
            rounded = v.round_even(sink)
            top = v.first_lane(rounded)
            total = 0.0 if top == MINUS_INFINITY else v.first_lane(exp2_up_to_one(sink - rounded))
        v.store_one(sums.top, row, top)
        v.store_one(sums.total, row, total)


@inline
def _finish(
    results: ForwardResults, sizes: TileSizes, batch: int, kv_head: int, first: int, rows: int, sums: Any
) -> None:
    """Write y and lse of a unit's rows, whose first query is `first`."""
    group = sizes.heads // sizes.kv_heads
    for row in range(rows):
        head, query = kv_head * group + row % group, first + row // group
        total = v.load_one(sums.total, row)
        if results.wants_y:
            share = 0.0 if total == 0.0 else 1.0 / total
            write_times(
                place(results.y, batch, head, query), 0, sizes.v_size, 0, (sums.y + row * sums.pitch,), (share,)
            )
        if results.wants_lse:
            top = v.full(sums.y, v.load_one(sums.top, row))
            lse = v.fma(top, LN2_HIGH(top), log(v.full(sums.y, total)) + top * LN2_LOW(top))
            value = MINUS_INFINITY if total == 0.0 else v.first_lane(lse)
            v.store_one(place(results.lse, batch, head, query), 0, value)


@inline
def _tile(
    inputs: ForwardInputs, sizes: TileSizes, seen: Seen, scores: Scores, drop: Drop, memory: ForwardMemory,
    sums: Any, at: Any, span: Any,
) -> None:  # fmt: skip
    """Sum up a block of keys for the rows of a unit.

    at: the batch entry, the head of keys, the unit's first query and the keys [first, stop). span: the unit's queries
    of a span, the span's keys, and their shift.
    """
    batch, kv_head, unit_first, first, stop = at
    q, q_end, k, k_end, shift = span
    group, count = sizes.heads // sizes.kv_heads, stop - first
    low, high = queries_of(seen, first, stop, shift)
    low, high = max(low, q), min(high, q_end)
    rows = range((low - unit_first) * group, (high - unit_first) * group)
    pack_columns(memory.k, memory.k_panel, place(inputs.k, batch, kv_head, first), inputs.k.row, count, sizes.size)
    multiply(memory.scores, PITCH, memory.q, sizes.size, 1, memory.k, memory.k_panel, sizes.size, count, rows, 0)
    for row in rows:
        query, head, line = unit_first + row // group, kv_head * group + row % group, memory.scores + row * PITCH
        begin, end = keys_of(seen, query, k, k_end, shift)
        begin = min(max(begin - first, 0), count)
        end = min(max(end - first, begin), count)
        if begin < end:
            if scores.cap != 0.0:
                write_capped(line, begin, end, 0, (line,), (scores.cap,))
            put_mask(line, begin, end, scores.mask.kind, mask_of(scores.mask, batch, head, query), first)
            _soften(line, begin, end, row, sizes.v_size, sums)
            if drop.threshold:
                put_kept(memory.kept, count, sizes, (batch * sizes.heads + head) * sizes.queries + query, first, drop)
                write_dropped(line, begin, end, 0, (line, memory.kept), (drop.scale,))
        write_zeros(line, 0, begin, 0)
        write_zeros(line, end, count, 0)
    pack_rows(memory.v, memory.v_panel, place(inputs.v, batch, kv_head, first), inputs.v.row, count, sizes.v_size)
    multiply(sums.y, sums.pitch, memory.scores, PITCH, 1, memory.v, memory.v_panel, count, sizes.v_size, rows, 1)


@inline
def _unit(sizes: TileSizes, unit: int) -> tuple[int, int, int, int]:
    """A unit's batch entry, head of keys, first query, and number of rows."""
    blocks = -(-sizes.queries // sizes.block)
    head, first = unit // blocks, unit % blocks * sizes.block
    rows = (min(first + sizes.block, sizes.queries) - first) * (sizes.heads // sizes.kv_heads)
    return head // sizes.kv_heads, head % sizes.kv_heads, first, rows


@inline
def _sum_up(
    inputs: ForwardInputs, sizes: TileSizes, seen: Seen, scores: Scores, drop: Drop, memory: ForwardMemory,
    sums: Any, unit: int, low: int, high: int,
) -> None:  # fmt: skip
    """Sum up the keys [low, high) for the rows of a unit."""
    batch, kv_head, first, rows = _unit(sizes, unit)
    group, stop = sizes.heads // sizes.kv_heads, min(first + sizes.block, sizes.queries)
    _start(inputs, sizes, kv_head, rows, sums, low == 0)
    for row in range(rows):
        source = place(inputs.q, batch, kv_head * group + row % group, first + row // group)
        write_times(memory.q + row * sizes.size, 0, sizes.size, 0, (source,), (scores.factor,))
    for number in range(first_span(seen, batch, first), (batch + 1) * seen.count):
        q, q_end, k, k_end, shift = span_of(seen, number)
        if q >= stop:
            break
        q, q_end = max(q, first), min(q_end, stop)
        if q >= q_end:
            continue
        begin, _ = keys_of(seen, q, k, k_end, shift)
        _, end = keys_of(seen, q_end - 1, k, k_end, shift)
        end = min(end, high)
        for key in range(max(begin, low), end, KEYS):
            at = batch, kv_head, first, key, min(key + KEYS, end)
            _tile(inputs, sizes, seen, scores, drop, memory, sums, at, (q, q_end, k, k_end, shift))


@kernel
def attend(
    units: Units, sizes: TileSizes, seen: Seen, scores: Scores, drop: Drop, inputs: ForwardInputs,
    results: ForwardResults, memory: ForwardMemory, sums: Sums,
):  # fmt: skip
    """A unit is a block of queries of a head of keys."""
    for unit in units:
        _sum_up(inputs, sizes, seen, scores, drop, memory, sums, unit, 0, sizes.keys)
        batch, kv_head, first, rows = _unit(sizes, unit)
        _finish(results, sizes, batch, kv_head, first, rows, sums)


@inline
def _of_part(parts: Parts, sums: PartSums, number: int) -> PartSums:
    rows = number * parts.rows
    return PartSums(sums.y + rows * sums.pitch, sums.pitch, sums.top + rows, sums.total + rows)


@kernel
def attend_parts(
    units: Units, sizes: TileSizes, seen: Seen, scores: Scores, drop: Drop, inputs: ForwardInputs, parts: Parts,
    memory: ForwardMemory, sums: PartSums,
):  # fmt: skip
    """A unit is a part of the keys, for a block of queries of a head of keys: for few queries and many keys."""
    for unit in units:
        low = unit % parts.count * parts.keys
        own, high = _of_part(parts, sums, unit), min(low + parts.keys, sizes.keys)
        _sum_up(inputs, sizes, seen, scores, drop, memory, own, unit // parts.count, low, high)


write_joined = mapped(lambda a, b, of_a, of_b: a * of_a + b * of_b)


@kernel
def join_parts(units: Units, sizes: TileSizes, parts: Parts, results: ForwardResults, sums: PartSums):
    """Add the sums of a block's parts to those of the first one, in their order; each is relative to its own top."""
    for unit in units:
        batch, kv_head, first, rows = _unit(sizes, unit)
        total = _of_part(parts, sums, unit * parts.count)
        for part in range(1, parts.count):
            other = _of_part(parts, sums, unit * parts.count + part)
            for row in range(rows):
                a, b = v.load_one(total.top, row), v.load_one(other.top, row)
                top = max(a, b)
                if top != MINUS_INFINITY:
                    of_a = v.first_lane(exp2_up_to_one(v.full(sums.y, a) - v.full(sums.y, top)))
                    of_b = v.first_lane(exp2_up_to_one(v.full(sums.y, b) - v.full(sums.y, top)))
                    y, more = total.y + row * sums.pitch, other.y + row * sums.pitch
                    write_joined(y, 0, sizes.v_size, 0, (y, more), (of_a, of_b))
                    added = v.load_one(total.total, row) * of_a + v.load_one(other.total, row) * of_b
                    v.store_one(total.total, row, added)
                    v.store_one(total.top, row, top)
        _finish(results, sizes, batch, kv_head, first, rows, total)
