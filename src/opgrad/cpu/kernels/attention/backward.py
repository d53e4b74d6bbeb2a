"""The gradient of attention: tiles of probabilities, computed again from q, k and lse, and of their gradients.

A unit is a block of queries and a block of keys of all heads that share the keys. It adds its products to rows of dq,
and to rows of dk and dv. The blocks of a wave have neither queries nor keys in common, so that threads share them; and
each wave ends before the next one begins, so that all sums are formed in one order.
"""

from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import constant, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.attention.forward import (
    Attention,
    ForwardInputs,
    ForwardMemory,
    Heads,
    Sums,
    TileSizes,
    bounded,
    first_span,
    keys_in_tile,
    keys_of_queries,
    mask_of,
    pack_columns,
    pack_rows,
    place,
    put_kept,
    put_mask,
    queries_of,
    span_of,
    sum_up,
    unit_of,
)
from opgrad.cpu.kernels.gemm import CHUNK, VECTORS, multiply
from opgrad.cpu.kernels.loops.fold import folded, sum_products, sum_range
from opgrad.cpu.kernels.loops.map import clear, mapped, mapped_to_each, write_same, write_sum, write_times, write_zeros
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY
from opgrad.cpu.kernels.numerics.elementary import LOG2_E, exp2_up_to_one, log, tanh

ROWS = CHUNK  # of a tile


class BackwardInputs(NamedTuple):
    """q, k, v, dy; of each query lse * log2(e) = power + rest, and rowsum(dy * y) - dlse; the factor of q in scores."""

    q: Heads
    k: Heads
    v: Heads
    dy: Heads
    power: Pointer
    rest: Pointer
    delta: Pointer
    scale: Float


class BackwardResults(NamedTuple):
    """Where the gradients are summed up, and which are wanted."""

    dq: Heads
    dk: Heads
    dv: Heads
    wants_q: int
    wants_k: int
    wants_v: int


class Packed(NamedTuple):
    """Packed queries and gradients of a tile, as rows and as panels."""

    q: Private
    dy: Private
    q_panels: Private
    dy_panels: Private
    q_panel: int
    dy_panel: int


class PackedKeys(NamedTuple):
    """A block of keys k and values v, packed: `rows` has panels of k, `k` and `v` those of the transposes."""

    rows: Private
    k: Private
    v: Private
    row_panel: int
    k_panel: int
    v_panel: int


class Tile(NamedTuple):
    """Probabilities and their gradients, `pitch` numbers a row; slopes of softcap and dropout's decisions of a row."""

    p: Private
    ds: Private
    pitch: int
    slope: Private
    kept: Private


class BackwardMemory(NamedTuple):
    keys: PackedKeys
    tile: Tile


# --- where sums are formed ------------------------------------------------------------------------------------------


@kernel
def clear_rows(units: Units, first, heads, length, size, x: Heads):
    """Write zeros to rows of heads from `first` on, counted through the batch; a unit is a row."""
    for unit in units:
        head = first + unit // length
        write_zeros(place(x, head // heads, head % heads, unit % length), 0, size, 0)


@kernel
def round_rows(units: Units, first, heads, length, size, x: Heads, y: Heads):
    """Write sums to the result, rounded; units as in `clear_rows`."""
    for unit in units:
        head = first + unit // length
        batch, head, row = head // heads, head % heads, unit % length
        write_same(place(y, batch, head, row), 0, size, 0, (place(x, batch, head, row),), ())


# --- a tile ---------------------------------------------------------------------------------------------------------


@inline
def _probability(s: Vector, power, rest) -> Vector:
    """At most 1: the rounding of an lse that others give would make it infinite."""
    return exp2_up_to_one(-v.maximum(0.0, (power - s) + rest))


@mapped_to_each
def write_gradients(s: Vector, dp: Vector, power, rest, delta, scale) -> tuple[Vector, Vector]:
    """A probability, and the gradient of its score."""
    p = _probability(s, power, rest)
    return p, p * (dp - delta) * scale


@mapped_to_each
def write_gradients_with_options(
    s: Vector, dp: Vector, slope: Vector, kept: Vector, power, rest, delta, scale, kept_scale
) -> tuple[Vector, Vector]:
    p, factor = _probability(s, power, rest), kept * kept_scale
    return p * factor, p * v.fma(dp, factor, -delta) * (slope * scale)


@mapped_to_each
def write_capped_slopes(s: Vector, cap) -> tuple[Vector, Vector]:
    """A capped score, and its derivative by the product that it is made of."""
    t = tanh(s)
    return t * cap, v.fma(-t, t, 1.0)


write_ones = mapped(lambda x: v.like(x, 1.0))


@inline
def _row_back(call: Attention, tile: Tile, row: int, part: Any, at: Any, numbers: Any) -> None:
    """Products [begin, end) of a row become probabilities and gradients: of scores, or of products if `of_products`.

    part: begin, end, the key of the row's first product, of_products. at: batch entry, head and query. numbers: the
    row's power, rest and delta, and the factor of gradients.
    """
    (begin, end, key, of_products), (batch, head, query) = part, at
    sizes, _, scores, drop = call
    s, ds, kept_scale = tile.p + row * tile.pitch, tile.ds + row * tile.pitch, 1.0
    has_options = scores.cap != 0.0 or drop.threshold != 0
    if scores.cap != 0.0:
        write_capped_slopes((s, tile.slope), begin, end, (s,), (scores.cap,))
    if has_options and (scores.cap == 0.0 or not of_products):
        write_ones(tile.slope, begin, end, 0, (tile.slope,), ())
    if has_options and not drop.threshold:
        write_ones(tile.kept, begin, end, 0, (tile.kept,), ())
    put_mask(s, begin, end, scores.mask.kind, mask_of(scores.mask, batch, head, query), key)
    if drop.threshold:
        kept_scale = drop.scale
        put_kept(tile.kept, end, sizes, (batch * sizes.heads + head) * sizes.queries + query, key, drop)
    if has_options:
        given = s, ds, tile.slope, tile.kept
        write_gradients_with_options((s, ds), begin, end, given, (*numbers, kept_scale))
    else:
        write_gradients((s, ds), begin, end, (s, ds), numbers)


@inline
def pack_queries(call: Attention, inputs: BackwardInputs, packed: Packed, at: Any, first: int, count: int) -> None:
    """Rows of q, multiplied by the factor of scores, and of dy."""
    sizes, (batch, head) = call.sizes, at
    for row in range(count):
        q, dy = place(inputs.q, batch, head, first + row), place(inputs.dy, batch, head, first + row)
        write_times(packed.q + row * sizes.size, 0, sizes.size, 0, (q,), (call.scores.factor,))
        write_same(packed.dy + row * sizes.v_size, 0, sizes.v_size, 0, (dy,), ())


@inline
def pack_values(inputs: BackwardInputs, sizes: TileSizes, keys: PackedKeys, at: Any, first: int, stop: int) -> None:
    """Panels of the transposes of k and v."""
    batch, kv_head = at
    k, v_ = place(inputs.k, batch, kv_head, first), place(inputs.v, batch, kv_head, first)
    pack_columns(keys.k, keys.k_panel, k, inputs.k.row, stop - first, sizes.size)
    pack_columns(keys.v, keys.v_panel, v_, inputs.v.row, stop - first, sizes.v_size)


@inline
def fill_tile(
    call: Attention, inputs: BackwardInputs, packed: Packed, memory: BackwardMemory, at: Any, keys: tuple[int, int, int]
) -> None:
    """Probabilities and gradients of packed queries and keys, 0 where a query does not see a key.

    at: batch entry, head, queries [low, high), the panel of the first key, that key, the number of keys, and whether
    the gradients are those of products of q and k, and not of the scores that a mask is added to. keys: of the span.
    """
    batch, head, low, high, panel, key, columns, of_products = at
    sizes, (right, tile) = call.sizes, memory
    count, size, v_size, pitch = high - low, sizes.size, sizes.v_size, tile.pitch
    right_k, right_v = right.k + panel * right.k_panel, right.v + panel * right.v_panel
    multiply(tile.p, pitch, packed.q, size, 1, right_k, right.k_panel, size, columns, range(count), 0)
    multiply(tile.ds, pitch, packed.dy, v_size, 1, right_v, right.v_panel, v_size, columns, range(count), 0)
    factor = inputs.scale if of_products else 1.0
    for row in range(count):
        begin, end = keys_in_tile(call.seen, low + row, keys, key, columns)
        at_row = (batch * sizes.heads + head) * sizes.queries + low + row
        powers = v.load_one(inputs.power, at_row), v.load_one(inputs.rest, at_row)
        numbers = (*powers, v.load_one(inputs.delta, at_row), factor)
        part = begin, end, key, of_products
        _row_back(call, tile, row, part, (batch, head, low + row), numbers)
        for values in (tile.p, tile.ds):
            write_zeros(values + row * pitch, 0, begin, 0)
            write_zeros(values + row * pitch, end, columns, 0)


@inline
def _tile_back(
    call: Attention, inputs: BackwardInputs, results: BackwardResults, packed: Packed, memory: BackwardMemory, at: Any,
    keys: tuple[int, int, int],
) -> None:  # fmt: skip
    """Add what a tile gives the gradients.

    at: batch entry, head of keys, head, queries [low, high), and the packed keys [first, stop). keys: of the span.
    """
    batch, kv_head, head, low, high, first, stop = at
    sizes, (right, tile) = call.sizes, memory
    count, width = high - low, VECTORS * v.lanes(tile.p)
    begin, end = keys_of_queries(call.seen, low, high, keys)
    panel = max(begin - first, 0) // width
    key = first + panel * width
    columns = min(end, stop) - key
    if columns <= 0:
        return
    pack_queries(call, inputs, packed, (batch, head), low, count)
    fill_tile(call, inputs, packed, memory, (batch, head, low, high, panel, key, columns, 1), keys)
    size, v_size, pitch, every = sizes.size, sizes.v_size, tile.pitch, range(columns)
    if results.wants_v:
        pack_rows(packed.dy_panels, packed.dy_panel, place(inputs.dy, batch, head, low), inputs.dy.row, count, v_size)
        dv = place(results.dv, batch, kv_head, key)
        multiply(dv, results.dv.row, tile.p, 1, pitch, packed.dy_panels, packed.dy_panel, count, v_size, every, 1)
    if results.wants_k:
        pack_rows(packed.q_panels, packed.q_panel, place(inputs.q, batch, head, low), inputs.q.row, count, size)
        dk = place(results.dk, batch, kv_head, key)
        multiply(dk, results.dk.row, tile.ds, 1, pitch, packed.q_panels, packed.q_panel, count, size, every, 1)
    if results.wants_q:
        dq, rows = place(results.dq, batch, head, low), right.rows + panel * width * width
        multiply(dq, results.dq.row, tile.ds, pitch, 1, rows, right.row_panel, columns, size, range(count), 1)


@kernel
def attend_back(
    units: Units, wave, waves, blocks, block_keys, first_head, call: Attention, inputs: BackwardInputs,
    results: BackwardResults, packed: Packed, memory: BackwardMemory,
):  # fmt: skip
    """The units of a wave: its heads of keys from `first_head` on, and of each so many blocks of queries."""
    sizes, seen = call.sizes, call.seen
    group = sizes.heads // sizes.kv_heads
    for unit in units:
        kv_head, block = first_head + unit // blocks, unit % blocks
        batch, kv_head = kv_head // sizes.kv_heads, kv_head % sizes.kv_heads
        first_q, first_k = block * sizes.block, (block + wave) % waves * block_keys
        stop_q, stop_k = min(first_q + sizes.block, sizes.queries), min(first_k + block_keys, sizes.keys)
        for number in range(first_span(seen, batch, first_q), (batch + 1) * seen.count if first_k < stop_k else 0):
            q, q_end, keys = span_of(seen, number)
            if q >= stop_q:
                break
            q, q_end = max(q, first_q), min(q_end, stop_q)
            begin, end = keys_of_queries(seen, q, q_end, keys)
            first, stop = max(begin, first_k), min(end, stop_k)
            if first >= stop or q >= q_end:
                continue
            low, high = queries_of(seen, first, stop, keys[2])
            low, high = max(low, q), min(high, q_end)
            right, at_k = memory.keys, place(inputs.k, batch, kv_head, first)
            pack_values(inputs, sizes, right, (batch, kv_head), first, stop)
            if results.wants_q:
                pack_rows(right.rows, right.row_panel, at_k, inputs.k.row, stop - first, sizes.size)
            for head in range(kv_head * group, (kv_head + 1) * group):
                for query in range(low, high, ROWS):
                    at = batch, kv_head, head, query, min(query + ROWS, high), first, stop
                    _tile_back(call, inputs, results, packed, memory, at, keys)


# --- an additive mask: the sum of the gradients of scores over the axes along which it is broadcast ------------------


class MaskGradient(NamedTuple):
    """dmask with its strides, its sizes, and the keys of a block."""

    data: Pointer
    batch: int
    head: int
    row: int
    batches: int
    heads: int
    rows: int
    keys: int
    block: int


@inline
def _axis(size: int, length: int, place: int, block: int) -> tuple[int, int]:
    """The places of an axis that are summed up for this place of the mask: a block of them, or all."""
    return (place * block, min((place + 1) * block, length)) if size == length else (0, length)


@inline
def _add_tiles(
    call: Attention, inputs: BackwardInputs, packed: Packed, memory: BackwardMemory, sums: Private, at: Any
) -> None:
    """Add the gradients of a block of scores of one head, for its queries [low, high) and keys from `first` on."""
    batch, head, low, high, first, stop = at
    sizes, tile = call.sizes, memory.tile
    kv_head, (_, _, keys) = head // (sizes.heads // sizes.kv_heads), span_of(call.seen, batch)
    begin, end = keys_of_queries(call.seen, low, high, keys)
    key, columns = max(begin, first), min(end, stop) - max(begin, first)
    if columns > 0:
        pack_queries(call, inputs, packed, (batch, head), low, high - low)
        pack_values(inputs, sizes, memory.keys, (batch, kv_head), key, key + columns)
        fill_tile(call, inputs, packed, memory, (batch, head, low, high, 0, key, columns, 0), keys)
        for row in range(high - low):
            total = sums + (row * tile.pitch + key - first)
            write_sum(total, 0, columns, 0, (total, tile.ds + row * tile.pitch), ())


@inline
def _write(dmask: MaskGradient, sizes: TileSizes, sums: Private, pitch: int, target, count: int, columns: int) -> None:
    """Write the sums of a block, over its rows or columns if the mask has one of them."""
    if dmask.rows != sizes.queries:
        for row in range(1, count):
            write_sum(sums, 0, columns, 0, (sums, sums + row * pitch), ())
    for row in range(count if dmask.rows == sizes.queries else 1):
        line, out = sums + row * pitch, target + row * dmask.row
        if dmask.keys == sizes.keys:
            write_same(out, 0, columns, 0, (line,), ())
        else:
            v.store_one(out, 0, v.reduce_add(sum_range(0, columns, (line,), ())))


@kernel
def sum_mask(
    units: Units, dmask: MaskGradient, call: Attention, inputs: BackwardInputs, packed: Packed, memory: BackwardMemory,
    sums: Private,
):  # fmt: skip
    """A unit is a block of rows and keys of the mask, of one of its batch entries and heads."""
    sizes, across, down = call.sizes, -(-dmask.keys // dmask.block), -(-dmask.rows // ROWS)
    for unit in units:
        column, row, head, batch = unit % across, unit // across % down, unit // across // down, 0
        batch, head = head // dmask.heads, head % dmask.heads
        first_batch, stop_batch = _axis(dmask.batches, sizes.batch, batch, 1)
        first_head, stop_head = _axis(dmask.heads, sizes.heads, head, 1)
        low, high = _axis(dmask.rows, sizes.queries, row, ROWS)
        first, stop = _axis(dmask.keys, sizes.keys, column, dmask.block)
        clear(sums, ROWS * memory.tile.pitch)
        for b in range(first_batch, stop_batch):
            for h in range(first_head, stop_head):
                for query in range(low, high, ROWS):
                    for block in range(-(-(stop - first) // dmask.block)):
                        key = first + block * dmask.block
                        at = b, h, query, min(query + ROWS, high), key, min(key + dmask.block, stop)
                        _add_tiles(call, inputs, packed, memory, sums, at)
        target = dmask.data + (batch * dmask.batch + head * dmask.head + row * ROWS * dmask.row + column * dmask.block)
        columns = min(dmask.block, stop - first)
        _write(dmask, sizes, sums, memory.tile.pitch, target, min(ROWS, high - low), columns)


# --- queries: their sums of exponentials, rowsum(dy * y), and the gradients of sinks ---------------------------------
#
# lse * log2(e) is kept as a sum of two numbers, power + rest. An lse of a large score, or of a low number that a mask
# adds to all of a query's scores, has no digits left for the sum of exponentials beside the largest score: its query's
# sum is formed again, of the keys that are given.

FAR = constant(2.0**20, 2.0**49)  # from here on the rounding of a power is an error of more than 1/25 of all its sums


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


@kernel
def sum_far_rows(
    units: Units, call: Attention, inputs: ForwardInputs, memory: ForwardMemory, sums: Sums, power: Pointer,
    rest: Pointer,
):  # fmt: skip
    """Replace powers that are far by the largest score, rounded, and the logarithm of the sum.

    Units are those of `attend`, whose sums are formed again for all rows of a unit that has such a power.
    """
    sizes = call.sizes
    group = sizes.heads // sizes.kv_heads
    for unit in units:
        batch, kv_head, first, rows = unit_of(sizes, unit)
        begin, found = (batch * sizes.heads + kv_head * group) * sizes.queries + first, 0
        for row in range(rows):
            found += _is_far(power, begin + row % group * sizes.queries + row // group)
        if found:
            sum_up(call, inputs, memory, sums, unit, 0, sizes.keys)
            for row in range(rows):
                at = begin + row % group * sizes.queries + row // group
                if _is_far(power, at):
                    total = v.load_one(sums.total, row)
                    more = v.first_lane(log(v.full(rest, total))) * LOG2_E
                    v.store_one(power, at, 0.0 if total == 0.0 else v.load_one(sums.top, row))
                    v.store_one(rest, at, 0.0 if total == 0.0 else more)
