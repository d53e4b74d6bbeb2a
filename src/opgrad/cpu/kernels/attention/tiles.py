"""What the kernels of attention share: where arrays lie, which keys a query sees, packing, and scores of a row.

Scores are kept in powers of two, s * log2(e): the whole part of such a number is an exact factor, so that what was
summed up relative to one largest score is rescaled to the next one without rounding.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import constant, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_word, store_word
from opgrad.cpu.kernels.dropout import keep_run
from opgrad.cpu.kernels.gemm import VECTORS, pack_panel, pack_panel_transposed
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.numerics.elementary import LOG2_E, tanh

MINUS_INFINITY: Final = -float("inf")
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
def span_of(seen: Seen, number: int) -> tuple[int, int, int, int, int]:
    """A span's first query, the one behind its last, its keys likewise, and the key that query 0 is aligned with."""
    at = SPAN * number
    q, q_end = load_word(seen.spans, at), load_word(seen.spans, at + 1)
    k, k_end = load_word(seen.spans, at + 2), load_word(seen.spans, at + 3)
    return q, q_end, k, k_end, k - q + ((k_end - k) - (q_end - q) if seen.bottom else 0)


@inline
def keys_of(seen: Seen, query: int, k: int, k_end: int, shift: int) -> tuple[int, int]:
    """The first key of a span that a query sees, and the one behind the last."""
    first = min(max(k, query + shift - seen.left), k_end)
    return first, max(min(k_end, query + shift + seen.right + 1), first)


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
