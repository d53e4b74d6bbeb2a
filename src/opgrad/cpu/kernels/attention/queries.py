"""What the gradient of attention needs of each query: its sum of exponentials, rowsum(dy * y), and that of its sink.

lse * log2(e) is kept as a sum of two numbers, power + rest. An lse of a large score, or of a low number that a mask
adds to all of a query's scores, has no digits left for the sum of exponentials beside the largest score: its query's
sum is formed again, of the keys that are given.
"""

from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import constant, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.attention.backward import (
    ROWS,
    BackwardInputs,
    BackwardMemory,
    Packed,
    Tile,
    pack_queries,
)
from opgrad.cpu.kernels.attention.forward import powers
from opgrad.cpu.kernels.attention.tiles import (
    LOG2_E,
    MINUS_INFINITY,
    Heads,
    Scores,
    Seen,
    TileSizes,
    bounded,
    first_span,
    keys_of,
    mask_of,
    pack_columns,
    place,
    put_mask,
    span_of,
    write_capped,
)
from opgrad.cpu.kernels.gemm import multiply
from opgrad.cpu.kernels.loops.fold import folded, sum_products
from opgrad.cpu.kernels.loops.rows import row_max
from opgrad.cpu.kernels.numerics.elementary import exp2_up_to_one, log

FAR = constant(2.0**20, 2.0**49)  # from here on the rounding of a power is an error of more than 1/25 of all its sums


class Sinks(NamedTuple):
    """The sinks, if there are any, and the keys of a block."""

    data: Pointer
    is_given: int
    keys: int


@kernel
def prepare_rows(
    units: Units, sizes: TileSizes, dy: Heads, y: Heads, lse: Heads, dlse: Heads, has_dlse,
    power: Pointer, rest: Pointer, delta: Pointer,
):  # fmt: skip
    """Write lse * log2(e), 0 for queries that see no key, and rowsum(dy * y) - dlse; a unit is a query of a head."""
    heads, queries, size = sizes.heads, sizes.queries, sizes.v_size
    for unit in units:
        query, head, batch = unit % queries, unit // queries % heads, unit // queries // heads
        both = place(dy, batch, head, query), place(y, batch, head, query)
        total = v.reduce_add(sum_products(0, size, both, ()))
        value = v.load_one(place(lse, batch, head, query), 0)
        if has_dlse:
            total = total - v.load_one(place(dlse, batch, head, query), 0)
        in_powers = v.first_lane(bounded(v.full(power, value)) * LOG2_E)
        v.store_one(delta, unit, total)
        v.store_one(power, unit, 0.0 if value == MINUS_INFINITY else in_powers)
        v.store_one(rest, unit, 0.0)


sum_of_sink = folded(lambda total, power, rest, delta, sink: v.fma(exp2_up_to_one((sink - power) - rest), delta, total))


@kernel
def sum_sinks(
    units: Units, batches, heads, queries, sink: Pointer, power: Pointer, rest: Pointer, delta: Pointer, dsink: Pointer
):
    """A unit is a head."""
    for head in units:
        total, value = 0.0, v.first_lane(bounded(v.full(power, v.load_one(sink, head))) * LOG2_E)
        for batch in range(batches):
            first = (batch * heads + head) * queries
            of_rows = power + first, rest + first, delta + first
            total -= v.reduce_add(sum_of_sink(0, queries, of_rows, (value,)))
        v.store_one(dsink, head, total)


# --- sums that lse has no digits for ---------------------------------------------------------------------------------


@inline
def _is_far(power, row: int) -> bool:
    size = v.absolute(v.full(power, v.load_one(power, row)))
    far = v.select(size < -MINUS_INFINITY, size, 0.0)
    return v.first_lane(far) >= v.first_lane(FAR(far) + v.full(power, 0.0))


@inline
def _start(inputs: BackwardInputs, sinks: Sinks, head: int, at: int, count: int, far: Any) -> int:
    """No keys are summed up yet: the sum is that of the sink. Returns how many rows are far, which `far` marks."""
    found = 0
    for row in range(count):
        is_far = _is_far(inputs.power, at + row)
        v.store_one(far, row, 1.0 if is_far else 0.0)
        if is_far:
            found += 1
            top, total = MINUS_INFINITY, 0.0
            if sinks.is_given:
                top = v.first_lane(bounded(v.full(far, v.load_one(sinks.data, head))) * LOG2_E)
                total = 0.0 if top == MINUS_INFINITY else 1.0
            v.store_one(inputs.power, at + row, top)
            v.store_one(inputs.rest, at + row, total)
    return found


@inline
def _sum_up(line, begin: int, end: int, inputs: BackwardInputs, at: int) -> None:
    """Scores [begin, end) of a query join its sum."""
    top, total, largest = v.load_one(inputs.power, at), v.load_one(inputs.rest, at), row_max(line, begin, end)
    if largest > top:
        total = total * v.first_lane(exp2_up_to_one(v.full(line, top) - v.full(line, largest)))
        top = largest
    base = 0.0 if top == MINUS_INFINITY else top
    added = powers((v.full(line, 0.0),), begin, end, (line,), (base,))[0]
    v.store_one(inputs.power, at, top)
    v.store_one(inputs.rest, at, total + v.reduce_add(added))


@inline
def _sum_tile(
    inputs: BackwardInputs, sizes: TileSizes, seen: Seen, scores: Scores, packed: Packed, memory: BackwardMemory,
    at: Any, span: Any,
) -> None:  # fmt: skip
    """Sum up the keys [key, stop) for packed queries [first, …) of a head.

    span: the queries of a span among them, its keys, and their shift.
    """
    batch, head, first, key, stop = at
    low, high, k, k_end, shift = span
    keys, tile, columns, size = memory.keys, memory.tile, stop - key, sizes.size
    source = place(inputs.k, batch, head // (sizes.heads // sizes.kv_heads), key)
    pack_columns(keys.k, keys.k_panel, source, inputs.k.row, columns, size)
    rows = range(low - first, high - first)
    multiply(tile.p, tile.pitch, packed.q, size, 1, keys.k, keys.k_panel, size, columns, rows, 0)
    for row in rows:
        query, line = first + row, tile.p + row * tile.pitch
        begin, end = keys_of(seen, query, k, k_end, shift)
        begin = min(max(begin - key, 0), columns)
        end = min(max(end - key, begin), columns)
        if v.load_one(tile.kept, row) != 0.0 and begin < end:
            if scores.cap != 0.0:
                write_capped(line, begin, end, 0, (line,), (scores.cap,))
            put_mask(line, begin, end, scores.mask.kind, mask_of(scores.mask, batch, head, query), key)
            _sum_up(line, begin, end, inputs, (batch * sizes.heads + head) * sizes.queries + query)


@inline
def _finish(inputs: BackwardInputs, tile: Tile, at: int, count: int) -> None:
    """Sums become the rests of powers."""
    for row in range(count):
        if v.load_one(tile.kept, row) != 0.0:
            total = v.load_one(inputs.rest, at + row)
            rest = v.first_lane(log(v.full(tile.kept, total))) * LOG2_E
            v.store_one(inputs.rest, at + row, 0.0 if total == 0.0 else rest)
            v.store_one(inputs.power, at + row, 0.0 if total == 0.0 else v.load_one(inputs.power, at + row))


@kernel
def sum_far_rows(
    units: Units, sizes: TileSizes, seen: Seen, scores: Scores, inputs: BackwardInputs, packed: Packed,
    memory: BackwardMemory, sinks: Sinks,
):  # fmt: skip
    """Replace powers that are far by the largest score and the logarithm of the sum; a unit is ROWS queries."""
    blocks = -(-sizes.queries // ROWS)
    for unit in units:
        first, head, batch = unit % blocks * ROWS, unit // blocks % sizes.heads, unit // blocks // sizes.heads
        count, at = min(ROWS, sizes.queries - first), (batch * sizes.heads + head) * sizes.queries + first
        if not _start(inputs, sinks, head, at, count, memory.tile.kept):
            continue
        pack_queries(inputs, sizes, scores.factor, packed, (batch, head), first, count)
        for number in range(first_span(seen, batch, first), (batch + 1) * seen.count):
            q, q_end, k, k_end, shift = span_of(seen, number)
            if q >= first + count:
                break
            low, high = max(q, first), min(q_end, first + count)
            begin, _ = keys_of(seen, low, k, k_end, shift)
            _, end = keys_of(seen, high - 1, k, k_end, shift)
            key = begin
            while low < high and key < end:
                part = batch, head, first, key, min(key + sinks.keys, end)
                _sum_tile(inputs, sizes, seen, scores, packed, memory, part, (low, high, k, k_end, shift))
                key += sinks.keys
        _finish(inputs, memory.tile, at, count)
