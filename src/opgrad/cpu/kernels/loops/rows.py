"""Shared parts of kernels over contiguous rows: a row is reduced while the row before is written.

`write_behind` is the only place that knows how a row is written while the next one is reduced, `combining` how short
rows are collected so that whole cache lines are written, `transpose_in` how rows shorter than a vector become columns.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, many_registers
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.kernels.loops.fold import BLOCK, CHUNK, fold
from opgrad.cpu.kernels.loops.map import get_or, mapped, row_writer, write_same
from opgrad.cpu.kernels.numerics import logsumexp as lse

AHEAD: Final = 2048  # elements between a prefetch and its use; the hardware's own prefetches stop at each 4 KiB page
# Elements of a block of a row that is read twice: its 128 KiB of float32 stay in the second-level cache. Without
# blocks, rows of 262,144 took 1.29 times as long; blocks that fit the first-level cache took 1.18 times as long for
# 32,000.
READ_TWICE: Final = 1 << 15
# Whether two vectors of exponentials below the largest are computed at once. With 16 registers, ten constants and what
# is written meanwhile leave no room for a second: 19 values of two vectors were loaded from the stack, 8 of one.
TWO_AT_ONCE: Final = many_registers()

MINUS_INFINITY: Final = float("-inf")
LOWEST: Final = -3.4e38  # used in place of -inf where -inf would give NaN


# --- a row is written while the next one is reduced ------------------------------------------------------------------


class Waiting(NamedTuple):
    """A row that waits to be written.

    out: its place. begin: its first element that is not written. stop: where the steps of the loop end that reduces the
    next row. arrays, numbers: what its elements are made of.
    """

    out: Any
    begin: int
    stop: int
    arrays: Any
    numbers: Any


class WriteBehind(NamedTuple):
    """The functions that write a row while the next one is reduced."""

    step: Callable[..., int]  # (waiting, i): write the vector at i past the cache; the index behind what is written
    complete: Callable[..., None]  # (waiting, i, n): write the elements from i on
    begin: Callable[..., Waiting]  # (out, n, arrays, numbers, late, stream): the next row that waits
    finish: Callable[..., None]  # (waiting, n, stream): write the last row


def write_behind(value: Callable[..., Vector]) -> WriteBehind:
    """Rows of the elements value(arrays, i, whole, mask, numbers).

    Writing a row by itself leaves the memory idle while the next row is read and computed: softmax of 2048 x 32000 took
    18 ms that way, and 16 ms with steps. A row that is not written past the cache is written at once, or if `late`
    when the next one is reduced: a row's divisor is the result of a long chain of dependent operations, for which rows
    of 1,000 would otherwise wait.
    """
    write = row_writer(value)

    @inline
    def step(waiting, i: int) -> int:
        w = v.lanes(waiting.out)
        if i + w <= waiting.stop:
            every = v.first(waiting.out, w)
            v.store_streaming(waiting.out, i, value(waiting.arrays, i, True, every, waiting.numbers))
            return i + w
        return i

    @inline
    def complete(waiting, i: int, n: int) -> None:
        write(waiting.out, i, n, 0, waiting.arrays, waiting.numbers)

    @inline
    def begin(out, n: int, arrays, numbers, late, stream: int):
        head = 0 if late else line_head(out, n, stream)
        write(out, 0, head, 0, arrays, numbers)
        return Waiting(out, head, 0 if late else n, arrays, numbers)

    @inline
    def finish(waiting, n: int, stream: int) -> None:
        write(waiting.out, waiting.begin, n, stream, waiting.arrays, waiting.numbers)

    return WriteBehind(step, complete, begin, finish)


@inline
def no_row(out, n: int, arrays, numbers):
    """What waits before the first row: a row of which all is written."""
    return Waiting(out, n, n, arrays, numbers)


no_step = inline(lambda waiting, i: i)  # in place of `WriteBehind.step`: nothing is written meanwhile


@inline
def line_head(out, n: int, stream: int) -> int:
    """How many elements of a row lie before its first whole cache line; n if no non-temporal stores shall be used."""
    head = v.to_line(out, 0)
    return min(head, n) if stream and head >= 0 else n


# --- the largest element ---------------------------------------------------------------------------------------------


@fold
def _largest(total, arrays, i: int, whole: bool, mask, numbers):
    return (v.maximum(get_or(arrays[0], i, whole, mask, MINUS_INFINITY), total[0]),)


@inline
def row_top(x, begin: int, end: int) -> Vector:
    """The largest of x[begin:end], lane by lane; a NaN may be ignored.

    Every other vector has a maximum of its own, since each waits for the one before: log-softmax of rows of 1,000 took
    1.07 times as long with a single one.
    """
    w, i, even, odd = v.lanes(x), begin, v.full(x, MINUS_INFINITY), v.full(x, MINUS_INFINITY)
    while i + 2 * w <= end:
        even, odd = v.maximum(v.load(x, i), even), v.maximum(v.load(x, i + w), odd)
        i += 2 * w
    return v.maximum(_largest((even,), i, end, (x,), ())[0], odd)


@inline
def row_max(x, begin: int, end: int):
    """The largest of x[begin:end]; a NaN may be ignored."""
    return v.reduce_max(row_top(x, begin, end))


@inline
def first_place(x, n: int, value) -> int:
    """The first index at which x equals `value`, which must occur in x; whole vectors are compared until one has it."""
    w, i = v.lanes(x), 0
    while i + w <= n and v.reduce_max(v.select(v.load(x, i) == value, v.full(x, 1.0), 0.0)) == 0.0:
        i += w
    while i < n - 1 and v.load_one(x, i) != value:
        i += 1
    return i


@inline
def first_largest(x, n: int, largest, has_nan: bool) -> int:
    """The first index of a NaN in x, or of its largest value. has_nan: whether there may be one."""
    i = 0
    while has_nan and i < n and v.load_one(x, i) == v.load_one(x, i):
        i += 1
    return i if has_nan and i < n else first_place(x, n, largest)


def row_sum_exp(step: Callable[..., int], adding: lse.Adding) -> Callable[..., Any]:
    """The loop that sums the exponentials of x[0:n], and stores them in `e` if `keep`.

    In the same loop it prefetches the row `ahead`, and writes a part of the row that waits by `step`. It returns the
    sum, and the index behind what is written of that row.
    """
    add, add_two = adding

    @inline
    def sum_exp(x, n: int, m: float, e, keep: int, ahead, waiting):
        w, scale, sums = v.lanes(x), lse.scale_for(v.full(x, m)), lse.start(x)
        i, written = 0, waiting.begin
        while i + 2 * w <= n:
            chunk_end = min(i + CHUNK * w, n)
            while i + 2 * w <= chunk_end:
                first, second, sums = add_two(x, sums, v.load(x, i), v.load(x, i + w), scale)
                v.prefetch(ahead, i)
                v.prefetch(ahead, i + w)
                if keep:
                    v.store(e, i, first)
                    v.store(e, i + w, second)
                written = step(waiting, step(waiting, written))
                i += 2 * w
            sums = lse.next_chunk(x, sums)
        while i < n:
            mask = v.first(x, n - i)
            value, sums = add(x, sums, v.load_masked(x, i, mask, MINUS_INFINITY), scale)
            if keep:
                v.store_masked(e, i, value, mask)
            i += w
        return lse.sum_lanes(x, sums[0], sums), written

    return sum_exp


@inline
def number_equal(count: Vector, value: Vector, m: Vector) -> Vector:
    """The count in each lane of values equal to m, with one vector more."""
    return count + v.select(value == m, v.like(m, 1.0), 0.0)


def row_rest(step: Callable[..., int], adding: lse.AddingBelow) -> Callable[..., Any]:
    """The loop that sums the exponentials of the numbers in x[0:n] that differ from m, and counts those equal to m.

    It has the parameters of `row_sum_exp`. It stores nothing in `e`, but prefetches it if `keep`, since what is
    computed here hides the time that a result's lines take. It returns the sum with the count, and the index.
    """
    chunk, add, add_two = adding

    @inline
    def add_rest(x, n: int, m: float, e, keep: int, ahead, waiting):
        w, largest, zero = v.lanes(x), v.full(x, m), v.full(x, 0.0)
        scale, sums, count = lse.scale_for(largest), lse.no_sums(x), zero
        i, turn, written = 0, 2 * w if TWO_AT_ONCE else w, waiting.begin
        while i + turn <= n:
            chunk_end = min(i + 2 * chunk * w, n)
            while i + turn <= chunk_end:
                first = v.load(x, i)
                v.prefetch(ahead, i)
                if keep:
                    v.prefetch(e, i)
                if TWO_AT_ONCE:
                    second = v.load(x, i + w)
                    v.prefetch(ahead, i + w)
                    if keep:
                        v.prefetch(e, i + w)
                    sums = add_two(x, sums, first, second, largest, scale)
                    count = number_equal(number_equal(count, first, largest), second, largest)
                    written = step(waiting, written)
                else:
                    sums, count = add(x, sums, first, largest, scale), number_equal(count, first, largest)
                written = step(waiting, written)
                i += turn
            sums = lse.join_plain(x, sums)
        while i < n:
            mask = v.first(x, n - i)
            value = v.load_masked(x, i, mask, MINUS_INFINITY)
            sums, count = add(x, sums, value, largest, scale), number_equal(count, value, largest)
            i += w
        sums = lse.join_plain(x, sums)
        return (v.reduce_add_wide(sums[2], sums[3]), v.reduce_add_wide(count, zero)), written

    return add_rest


@inline
def minus_both(x: Vector, m, log_s) -> Vector:
    return (x - m) - log_s


write_log = mapped(minus_both)


# --- the sums of blocks of a row, each of which is scaled by its block's largest number


@inline
def rescale(p, m: float, new_m: float) -> float:
    """The factor that takes a sum of exponentials from the scale for m to the scale for new_m, which is larger."""
    top = max(m, v.number(p, LOWEST))
    return lse.exp_wide(p, m, new_m) / lse.exp_wide(p, top, top)


@inline
def _rest_below(p, m: float, rest: float, count: float, new_m: float) -> float:
    return rest * rescale(p, m, new_m) + count * lse.exp_wide(p, m, new_m)


@inline
def joined_rests(p, m: float, rest: float, count: float, other_m: float, other_rest: float, other_count: float):
    """For two blocks together: the largest number, the sum of the other exponentials, the count of the largest."""
    if m == other_m:
        return m, rest + other_rest, count + other_count
    if m > other_m:
        return m, rest + _rest_below(p, other_m, other_rest, other_count, m), count
    return other_m, other_rest + _rest_below(p, m, rest, count, other_m), other_count


_add_rest = row_rest(no_step, lse.PLAIN_BELOW)


@inline
def rest_of_block(x, n: int, m: float, ahead):
    """`row_rest` for a block of a row.

    For a block of -inf alone the sum is 0, not NaN, since other blocks may be finite.
    """
    return _add_rest(x, n, max(m, v.number(x, LOWEST)), x, 0, ahead, no_row(x, n, (), ()))[0]


@inline
def row_rests(x, n: int, ahead):
    """The largest of x[0:n], the scaled sum of the exponentials of all smaller numbers, and the count of the largest.

    Nothing is written; the row `ahead` is prefetched. It works block by block, so that a block is still in the cache
    when it is read the second time.
    """
    m, rest, count = v.number(x, MINUS_INFINITY), 0.0, 0.0
    for begin in range(0, n, READ_TWICE):
        block, size = x + begin, min(READ_TWICE, n - begin)
        coming = block + READ_TWICE if begin + READ_TWICE < n else ahead
        top = row_max(block, 0, size)
        added, equal = rest_of_block(block, size, top, coming)
        is_first = begin == 0
        if is_first:
            m, rest, count = top, added, equal
        else:
            m, rest, count = joined_rests(x, m, rest, count, top, added, equal)
    return m, rest, count


@inline
def row_log_sum(x, n: int, ahead):
    """The largest of x[0:n], and log(sum of exp(x - largest)). The row `ahead` is prefetched."""
    m, rest, count = row_rests(x, n, ahead)
    return m, v.first_lane(lse.row_log_of_sum(x, rest, count, m))


def row_sum_of(value: Callable[..., Vector], step: Callable[..., int]) -> Callable[..., Any]:
    """The loop that sums value(terms, i, whole, mask, factors) over [0, n), in vectors like those of `like`.

    In the same loop it writes a part of the row that waits by `step`.
    A row is summed in blocks, whose sums are added in float64. So a row whose blocks are shared among threads (the
    layout "split") has the same sum.
    """

    @inline
    def add_up(like, n: int, terms, factors, waiting):
        w, every, s, written = v.lanes(like), v.first(like, v.lanes(like)), 0.0, waiting.begin
        for block in range(0, n, BLOCK):
            block_end, total, i = min(block + BLOCK, n), v.full(like, 0.0), block
            while i + w <= block_end:
                even, odd = v.full(like, 0.0), v.full(like, 0.0)
                chunk_end = min(i + CHUNK * w, block_end)
                while i + 2 * w <= chunk_end:
                    even = even + value(terms, i, True, every, factors)
                    odd = odd + value(terms, i + w, True, every, factors)
                    written = step(waiting, step(waiting, written))
                    i += 2 * w
                if i + w <= chunk_end:
                    even = even + value(terms, i, True, every, factors)
                    written = step(waiting, written)
                    i += w
                total = total + (even + odd)
            if i < block_end:
                total = total + value(terms, i, False, v.first(like, block_end - i), factors)
            if n <= BLOCK:
                return v.reduce_add(total), written
            s += v.reduce_add(total)
        return v.number(like, s), written

    return add_up


# --- write combining: short rows are collected in a buffer, which is written past the cache in whole cache lines ------
#
# If a row starts or ends inside a cache line, two rows write a piece of that line each, and for each piece the line is
# first fetched from memory: rows of 128 that start 16 bytes behind a line took 1.3 to 1.8 times as long. `combining`
# writes the whole buffer when it is full, which suits kernels that wait for memory anyway.

LINES: Final = 256  # of the buffer: 16 KiB stay in the first-level cache beside a row
LONGEST: Final = 32  # lines; a longer row is written by itself, since its two incomplete lines cost little


@inline
def rows_at_once(y, n: int, stream: int) -> int:
    """How many rows are collected in the buffer at a time; 0 if rows are written directly."""
    line, head = v.line(y.data), v.to_line(y.data, 0)
    own_lines = head == 0 and n % v.lanes(y.data) == 0
    if not stream or y.step != n or n > LONGEST * line or head < 0 or own_lines:
        return 0
    return LINES * line // n


@inline
def buffer_like(y, buffer):
    """The buffer as a pointer to elements of the dtype of y."""
    return v.at_byte(y, v.address_of(buffer) - v.address_of(y))


@inline
def _target(y, buffer, combined: int):
    """Where rows of y are written: at y, or in the buffer at the same distance from the start of a cache line."""
    return v.at_byte(buffer_like(y, buffer), v.address_of(y) % CACHE_LINE) if combined else y


def combining(write: Callable[..., None]) -> Callable[..., None]:
    """The loop that calls write(first, stop, n, out, past, arguments) for the rows from `begin` to `end` of y.

    `write` stores the rows from `first` to `stop` at `out`, which is their place in y or in the buffer, and uses
    non-temporal stores if `past`.
    """
    inline(write)

    @inline
    def by_rows(begin: int, end: int, n: int, y, buffer, stream: int, arguments) -> None:
        combined = rows_at_once(y, n, stream)
        for first in range(begin, end, combined or max(end - begin, 1)):
            stop, ys = min(first + combined, end) if combined else end, y.data + first * y.step
            out = _target(ys, buffer, combined)
            write(first, stop, n, out, stream and not combined, arguments)
            if combined:
                write_same(ys, 0, (stop - first) * n, 1, (out,), ())

    return by_rows


def buffer_size(itemsize: int) -> int:
    """The numbers of working memory, of `itemsize` bytes each, that a buffer takes."""
    return (LINES + 1) * CACHE_LINE // itemsize


# --- groups of rows, for kernels that compute more: the buffer is written while the next group is computed -----------


@inline
def holds_lines(y, rows: int, n: int, group: int, stream: int) -> int:
    """Whether groups of rows are written past the cache from a buffer: they must be contiguous and fill a line."""
    line = v.line(y.data)
    return stream and y.step == n and v.to_line(y.data, 0) >= 0 and group * n >= line and rows > group


@inline
def write_waiting(i: int, waiting) -> None:
    """Write vector i of the lines that wait in a buffer, out[:ready] = held[:ready]; behind `ready` prefetch `out`."""
    out, ready, held = waiting
    at = i * v.lanes(out)
    if at < ready:
        v.store_streaming(out, at, v.load(held, at))
    else:
        v.prefetch(out, at)


@inline
def waiting_from(waiting, i: int):
    """What waits, from vector i on."""
    out, ready, held = waiting
    at = i * v.lanes(out)
    return out + at, ready - at, held + at


@inline
def first_line(after, held) -> int:
    """How many elements before `after` lie in the same cache line. They are copied to the start of the buffer."""
    line = v.line(after)
    count = (line - v.to_line(after, 0)) % line
    write_same(held, 0, count, 0, (after + -count,), ())
    return count


@inline
def next_lines(out, ready: int, n: int, held) -> None:
    """Write those of the `ready` lines that n calls of `write_waiting` have left; move the incomplete line to the
    front.

    The lines consist of whole vectors, since a group of rows does: it adds n vectors to less than one line.
    """
    line = v.line(out)
    write_same(out, min(n * v.lanes(out), ready), ready, 1, (held,), ())
    write_same(held, 0, line, 0, (held + ready,), ())


def group_size(elements: int, itemsize: int) -> int:
    """The numbers of working memory for a buffer of groups of so many elements, with a spare line at both ends."""
    return elements + 2 * CACHE_LINE // itemsize


# --- rows shorter than a vector: as many as it has lanes become columns of a tile ------------------------------------


@inline
def transpose_in(tile, x, x_row: int, n: int, count: int) -> None:
    """tile[c, r] = x[r, c] for `count` rows; the other lanes become 0. A tile has room for whole blocks."""
    w = v.lanes(x)
    block = w // 2
    for r in range(0, w, block):
        for c in range(0, n, block):
            v.transpose_block_in(tile + (c * w + r), w, x + (r * x_row + c), x_row, count - r, n - c)


@inline
def transpose_out(y, y_row: int, tile, n: int, count: int) -> None:
    """y[r, c] = tile[c, r] for `count` rows."""
    w = v.lanes(y)
    block = w // 2
    for r in range(0, w, block):
        for c in range(0, n, block):
            v.transpose_block_out(y + (r * y_row + c), y_row, tile + (c * w + r), w, count - r, n - c)


def tile_size(n: int, width: int) -> int:
    """The numbers that a tile for rows of length n takes, rounded up to whole blocks."""
    block = width // 2
    return -(-n // block) * block * width


# The memory of a group: TILES tiles of width x width, then VECTORS vectors with a number for each row; the exponentials
# of the rows follow where a kernel keeps them.
TILES: Final = 3
VECTORS: Final = 4


def group_tiles(width: int) -> int:
    """The numbers that a group of as many rows as a vector has lanes takes besides its rows."""
    return (TILES * width + VECTORS) * width
