"""The forward pass of attention, and what it shares with the gradient: which keys a query sees, packing, masks of rows.

A unit is a block of queries of all heads that share keys and values. Their products with a block of keys are a tile of
scores, which become exponentials relative to the largest score so far; the sums with the values are rescaled when a
larger one is found. Scores are kept in powers of two, s * log2(e): the whole part of such a number is an exact factor,
so that what was summed up relative to one largest score is rescaled to the next one without rounding.
"""

from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import constant, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_word, store_word
from opgrad.cpu.kernels.dropout import keep_run
from opgrad.cpu.kernels.gemm import CHUNK, SPARE, VECTORS, multiply, pack_panel, pack_panel_transposed
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import clear, get_or, mapped, put, write_times, write_zeros
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, row_max
from opgrad.cpu.kernels.numerics.elementary import LN2_HIGH, LN2_LOW, LOG2_E, exp2_up_to_one, log, tanh

LIMIT = constant(2.35e38, 1.24e308)  # times log2(e) it is finite, with scores of usual sizes added, too
SPAN: Final = 4  # words of a span: its first query, the one behind its last, its first key, the one behind its last
NO_MASK, ADDED, ADDED_TO_ROW, SELECTED, ROW_SELECTED = range(5)  # what a mask is: numbers or bool, of keys or of rows


class Heads(NamedTuple):
    """An array of queries, keys or values, and the elements from one batch entry, head and place to the next."""

    data: Pointer
    batch: int
    head: int
    row: int


class TileSizes(NamedTuple):
    """Batch, heads of queries and of keys, lengths, numbers of a head of q and k, and of v; the queries of a block."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    v_size: int
    block: int


class Seen(NamedTuple):
    """The table of spans, how many each batch entry has, and which of its span's keys a query sees.

    bottom: whether the last query is aligned with the last key, and not the first with the first. left, right: how many
    keys it sees besides the one that it is aligned with.
    """

    spans: int
    count: int
    bottom: int
    left: int
    right: int


class Mask(NamedTuple):
    """A mask, what it is, and the elements from one batch entry, head and query to the next."""

    data: Pointer
    kind: int
    batch: int
    head: int
    row: int


class Drop(NamedTuple):
    """Dropout: its seed and offset, the largest word that is dropped, and the factor of the others; 0: none is."""

    seed: Pointer
    offset: Pointer
    threshold: int
    scale: Float


class Scores(NamedTuple):
    """How products become scores: their factor, what tanh of them is multiplied with unless it is 0, and the mask."""

    factor: Float
    cap: Float
    mask: Mask


class Attention(NamedTuple):
    """What a call's kernels share: the sizes, which keys queries see, how products become scores, and dropout."""

    sizes: TileSizes
    seen: Seen
    scores: Scores
    drop: Drop


@inline
def place(x: Heads, batch: int, head: int, row: int):
    """Where a row begins."""
    return x.data + (batch * x.batch + head * x.head + row * x.row)


# --- spans: queries that see some keys ------------------------------------------------------------------------------


@inline
def first_span(seen: Seen, batch: int, query: int) -> int:
    """The first span of a batch entry that ends behind this query."""
    low, high = batch * seen.count, (batch + 1) * seen.count
    while low < high:
        middle = (low + high) // 2
        if load_word(seen.spans, SPAN * middle + 1) > query:
            high = middle
        else:
            low = middle + 1
    return low


@inline
def span_of(seen: Seen, number: int) -> tuple[int, int, tuple[int, int, int]]:
    """A span's first query, the one behind its last, and its keys: the same two, and the key that query 0 is aligned
    with."""
    at = SPAN * number
    q, q_end = load_word(seen.spans, at), load_word(seen.spans, at + 1)
    k, k_end = load_word(seen.spans, at + 2), load_word(seen.spans, at + 3)
    return q, q_end, (k, k_end, k - q + ((k_end - k) - (q_end - q) if seen.bottom else 0))


@inline
def keys_of(seen: Seen, query: int, keys: tuple[int, int, int]) -> tuple[int, int]:
    """The first of a span's keys that a query sees, and the one behind the last."""
    k, k_end, shift = keys
    first = min(max(k, query + shift - seen.left), k_end)
    return first, max(min(k_end, query + shift + seen.right + 1), first)


@inline
def keys_of_queries(seen: Seen, low: int, high: int, keys: tuple[int, int, int]) -> tuple[int, int]:
    """The first of a span's keys that queries [low, high) see, and the one behind the last."""
    return keys_of(seen, low, keys)[0], keys_of(seen, high - 1, keys)[1]


@inline
def keys_in_tile(seen: Seen, query: int, keys: tuple[int, int, int], first: int, count: int) -> tuple[int, int]:
    """Which of the `count` keys of a tile, which begin with key `first`, a query sees: the first, the one behind."""
    begin, end = keys_of(seen, query, keys)
    begin = min(max(begin - first, 0), count)
    return begin, min(max(end - first, begin), count)


@inline
def queries_of(seen: Seen, first: int, stop: int, shift: int) -> tuple[int, int]:
    """The first query that may see a key of [first, stop), and the one behind the last."""
    return first - shift - seen.right, stop - shift + seen.left


# --- packing --------------------------------------------------------------------------------------------------------


@inline
def pack_columns(packed, panel: int, x, row: int, count: int, size: int) -> None:
    """Panels of the transpose of x: each of its rows is a column."""
    width = VECTORS * v.lanes(packed)
    for j in range(0, count, width):
        pack_panel_transposed(packed + j // width * panel, x + j * row, row, size, count - j)


@inline
def pack_rows(packed, panel: int, x, row: int, count: int, size: int) -> None:
    """Panels of x, which has `count` rows of `size` numbers."""
    width = VECTORS * v.lanes(packed)
    for j in range(0, size, width):
        pack_panel(packed + j // width * panel, x + j, row, count, size - j)


# --- scores of a row ------------------------------------------------------------------------------------------------


@inline
def bounded(x: Vector) -> Vector:
    """Numbers whose products with log2(e) are finite where x is: the least number of a dtype hides less than -inf."""
    most = LIMIT(x)
    near = v.maximum(-most, v.select(x > most, most, x))
    return v.select(v.absolute(x) < -MINUS_INFINITY, near, x)


write_capped = mapped(lambda x, cap: tanh(x) * cap)
write_added = mapped(lambda x, mask: v.fma(bounded(mask), LOG2_E, x))
write_plus = mapped(lambda x, number: x + number)
write_seen = mapped(lambda x, mask: v.select(mask != 0.0, x, MINUS_INFINITY))
write_hidden = mapped(lambda x: v.like(x, MINUS_INFINITY))


@inline
def mask_of(mask: Mask, batch: int, head: int, query: int):
    """Where a mask's row begins."""
    return mask.data + (batch * mask.batch + head * mask.head + query * mask.row)


@inline
def put_mask(values, begin: int, end: int, kind: int, mask, first: int) -> None:
    """Add a row of a mask to the scores of keys from `first` on, or hide those where it is False."""
    if kind == ADDED:
        write_added(values, begin, end, 0, (values, mask + first), ())
    elif kind == SELECTED:
        write_seen(values, begin, end, 0, (values, mask + first), ())
    elif kind != NO_MASK:
        number = v.load_masked(mask, 0, v.first(values, 1), 0.0)
        if kind == ADDED_TO_ROW:
            write_plus(values, begin, end, 0, (values,), (v.first_lane(bounded(number) * LOG2_E),))
        elif v.first_lane(number) == 0.0:
            write_hidden(values, begin, end, 0, (values,), ())


@inline
def put_kept(kept, count: int, sizes: TileSizes, row: int, key: int, drop: Drop) -> None:
    """kept[i] = 1 if dropout keeps the probability of key + i in a row of all scores, else 0."""
    seed, offset = v.load_one(drop.seed, 0), v.load_one(drop.offset, 0)
    keep_run(kept, count, row * sizes.keys + key, seed, offset, drop.threshold)


# --- the table of spans, from lengths or from where sequences start --------------------------------------------------


@inline
def _report(status, position: int, number: int) -> None:
    store_word(status, 0, 1)
    store_word(status, 1, position)
    store_word(status, 2, number)


@kernel
def spans_of_lengths(batch, queries, keys, lengths: Pointer, spans, status):
    """A span for each batch entry: all queries see so many keys. Reports the first length outside of [0, keys]."""
    for entry in range(batch):
        length = v.load_one(lengths, entry)
        if length < 0 or length > keys:
            _report(status, entry, length)
            break
        store_word(spans, SPAN * entry, 0)
        store_word(spans, SPAN * entry + 1, queries)
        store_word(spans, SPAN * entry + 2, 0)
        store_word(spans, SPAN * entry + 3, length)


@inline
def _starts(starts, count: int, length: int, spans, word: int) -> int:
    """Write where sequences start and end, from a word of each span on; the first wrong position, or -1."""
    before = 0
    for place in range(count + 1):
        start = v.load_one(starts, place)
        if start < before or start > length:
            return place
        if place < count:
            store_word(spans, SPAN * place + word, start)
        if place:
            store_word(spans, SPAN * (place - 1) + word + 1, start)
        before = start
    return -1


@kernel
def spans_of_sequences(count, queries, keys, q: Pointer, k: Pointer, spans, status):
    """A span for each sequence.

    Reports the first start that is smaller than the one before it or larger than the length, those of keys behind all
    those of queries.
    """
    wrong = _starts(q, count, queries, spans, 0)
    if wrong >= 0:
        _report(status, wrong, v.load_one(q, wrong))
    else:
        wrong = _starts(k, count, keys, spans, 2)
        if wrong >= 0:
            _report(status, count + 1 + wrong, v.load_one(k, wrong))


# --- forward --------------------------------------------------------------------------------------------------------

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
def unit_of(sizes: TileSizes, unit: int) -> tuple[int, int, int, int]:
    """A unit's batch entry, head of keys, first query, and number of rows."""
    blocks = -(-sizes.queries // sizes.block)
    head, first = unit // blocks, unit % blocks * sizes.block
    rows = (min(first + sizes.block, sizes.queries) - first) * (sizes.heads // sizes.kv_heads)
    return head // sizes.kv_heads, head % sizes.kv_heads, first, rows


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
def _finish(results: ForwardResults, sizes: TileSizes, unit: int, sums: Any) -> None:
    """Write y and lse of a unit's rows."""
    batch, kv_head, first, rows = unit_of(sizes, unit)
    group = sizes.heads // sizes.kv_heads
    for row in range(rows):
        head, query = kv_head * group + row % group, first + row // group
        total = v.load_one(sums.total, row)
        if results.wants_y:
            y, share = place(results.y, batch, head, query), 0.0 if total == 0.0 else 1.0 / total
            write_times(y, 0, sizes.v_size, 0, (sums.y + row * sums.pitch,), (share,))
        if results.wants_lse:
            top = v.full(sums.y, v.load_one(sums.top, row))
            lse = v.fma(top, LN2_HIGH(top), log(v.full(sums.y, total)) + top * LN2_LOW(top))
            value = MINUS_INFINITY if total == 0.0 else v.first_lane(lse)
            v.store_one(place(results.lse, batch, head, query), 0, value)


@inline
def _tile(call: Attention, inputs: ForwardInputs, memory: ForwardMemory, sums: Any, at: Any, span: Any) -> None:
    """Sum up a block of keys for the rows of a unit.

    at: the batch entry, the head of keys, the unit's first query and the keys [first, stop). span: the unit's queries
    of a span, and the span's keys.
    """
    sizes, seen, scores, drop = call
    batch, kv_head, unit_first, first, stop = at
    q, q_end, keys = span
    group, count = sizes.heads // sizes.kv_heads, stop - first
    low, high = queries_of(seen, first, stop, keys[2])
    low, high = max(low, q), min(high, q_end)
    rows = range((low - unit_first) * group, (high - unit_first) * group)
    pack_columns(memory.k, memory.k_panel, place(inputs.k, batch, kv_head, first), inputs.k.row, count, sizes.size)
    multiply(memory.scores, PITCH, memory.q, sizes.size, 1, memory.k, memory.k_panel, sizes.size, count, rows, 0)
    for row in rows:
        query, head, line = unit_first + row // group, kv_head * group + row % group, memory.scores + row * PITCH
        begin, end = keys_in_tile(seen, query, keys, first, count)
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
def sum_up(
    call: Attention, inputs: ForwardInputs, memory: ForwardMemory, sums: Any, unit: int, low: int, high: int
) -> None:
    """Sum up the keys [low, high) for the rows of a unit."""
    sizes, seen = call.sizes, call.seen
    batch, kv_head, first, rows = unit_of(sizes, unit)
    group, stop = sizes.heads // sizes.kv_heads, min(first + sizes.block, sizes.queries)
    _start(inputs, sizes, kv_head, rows, sums, low == 0)
    for row in range(rows):
        source = place(inputs.q, batch, kv_head * group + row % group, first + row // group)
        write_times(memory.q + row * sizes.size, 0, sizes.size, 0, (source,), (call.scores.factor,))
    for number in range(first_span(seen, batch, first), (batch + 1) * seen.count):
        q, q_end, keys = span_of(seen, number)
        if q >= stop:
            break
        q, q_end = max(q, first), min(q_end, stop)
        if q >= q_end:
            continue
        begin, end = keys_of_queries(seen, q, q_end, keys)
        end = min(end, high)
        for key in range(max(begin, low), end, KEYS):
            _tile(call, inputs, memory, sums, (batch, kv_head, first, key, min(key + KEYS, end)), (q, q_end, keys))


@kernel
def attend(
    units: Units, call: Attention, inputs: ForwardInputs, results: ForwardResults, memory: ForwardMemory, sums: Sums
):
    """A unit is a block of queries of a head of keys."""
    for unit in units:
        sum_up(call, inputs, memory, sums, unit, 0, call.sizes.keys)
        _finish(results, call.sizes, unit, sums)


@inline
def _of_part(parts: Parts, sums: PartSums, number: int) -> PartSums:
    rows = number * parts.rows
    return PartSums(sums.y + rows * sums.pitch, sums.pitch, sums.top + rows, sums.total + rows)


@kernel
def attend_parts(
    units: Units, call: Attention, inputs: ForwardInputs, parts: Parts, memory: ForwardMemory, sums: PartSums
):
    """A unit is a part of the keys, for a block of queries of a head of keys: for few queries and many keys."""
    for unit in units:
        low = unit % parts.count * parts.keys
        own, high = _of_part(parts, sums, unit), min(low + parts.keys, call.sizes.keys)
        sum_up(call, inputs, memory, own, unit // parts.count, low, high)


write_joined = mapped(lambda a, b, of_a, of_b: a * of_a + b * of_b)


@kernel
def join_parts(units: Units, call: Attention, parts: Parts, results: ForwardResults, sums: PartSums):
    """Add the sums of a block's parts to those of the first one, in their order; each is relative to its own top."""
    for unit in units:
        _, _, _, rows = unit_of(call.sizes, unit)
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
                    write_joined(y, 0, call.sizes.v_size, 0, (y, more), (of_a, of_b))
                    added = v.load_one(total.total, row) * of_a + v.load_one(other.total, row) * of_b
                    v.store_one(total.total, row, added)
                    v.store_one(total.top, row, top)
        _finish(results, call.sizes, unit, total)
