"""What kernels over contiguous rows share: reducing a row, and writing one."""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.math import exp_up_to_zero
from opgrad.cpu.native import inline
from opgrad.cpu.simd import (
    Vector,
    first,
    full,
    index,
    lanes,
    load,
    load_masked,
    maximum,
    number,
    prefetch,
    reduce_add,
    reduce_max,
    select,
    store,
    store_masked,
    store_streaming,
    to_line,
)

AHEAD: Final = 2048  # elements between a prefetch and its use: the hardware's own stop at every page of 4 KiB
# Elements of a row that are read twice in turn: 128 KiB of float32 stay in the second-level cache. Rows of 262,144 took
# 1.29 times as long in one go; blocks for the first-level cache 1.18 times as long at 32,000.
READ_TWICE: Final = 1 << 15
CHUNK: Final = 64  # terms that are added to each other before they join the total: the error grows with n/64 + 64


MINUS_INFINITY: Final = float("-inf")


def map_one(formula: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = formula(a[i], s, t, i) for i in [begin, end); past the cache if `stream`."""

    @inline
    def masked(out: Any, i: int, count: int, a: Any, s: Any, t: Any) -> None:
        mask = first(out, count)
        store_masked(out, i, formula(load_masked(a, i, mask, 0.0), s, t, index(out, i)), mask)

    @inline
    def write(out: Any, begin: int, end: int, stream: int, a: Any, s: Any, t: Any) -> None:
        w, i = lanes(out), begin
        if stream:
            head = min(to_line(out, i), end - i)
            if head > 0:
                masked(out, i, head, a, s, t)
                i += head
            if head >= 0:
                while i + w <= end:
                    store_streaming(out, i, formula(load(a, i), s, t, index(out, i)))
                    i += w
        while i + w <= end:
            store(out, i, formula(load(a, i), s, t, index(out, i)))
            i += w
        if i < end:
            masked(out, i, end - i, a, s, t)

    return write


def map_two(formula: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = formula(a[i], b[i], s, t, i) for i in [begin, end); past the cache if `stream`."""

    @inline
    def masked(out: Any, i: int, count: int, a: Any, b: Any, s: Any, t: Any) -> None:
        mask = first(out, count)
        value = formula(load_masked(a, i, mask, 0.0), load_masked(b, i, mask, 0.0), s, t, index(out, i))
        store_masked(out, i, value, mask)

    @inline
    def write(out: Any, begin: int, end: int, stream: int, a: Any, b: Any, s: Any, t: Any) -> None:
        w, i = lanes(out), begin
        if stream:
            head = min(to_line(out, i), end - i)
            if head > 0:
                masked(out, i, head, a, b, s, t)
                i += head
            if head >= 0:
                while i + w <= end:
                    store_streaming(out, i, formula(load(a, i), load(b, i), s, t, index(out, i)))
                    i += w
        while i + w <= end:
            store(out, i, formula(load(a, i), load(b, i), s, t, index(out, i)))
            i += w
        if i < end:
            masked(out, i, end - i, a, b, s, t)

    return write


@inline
def row_max(x: Any, begin: int, end: int) -> Any:
    """The largest of x[begin:end]; NaN may be passed over."""
    w = lanes(x)
    m = full(x, MINUS_INFINITY)
    i = begin
    while i + w <= end:
        m = maximum(load(x, i), m)
        i += w
    if i < end:
        m = maximum(load_masked(x, i, first(x, end - i), MINUS_INFINITY), m)
    return reduce_max(m)


def behind_one(formula: Callable[..., Vector]) -> Callable[..., int]:
    """One vector of map_one, past the cache, for a row that is written while the next one is read.

    Writing apart from reading and computing leaves the memory idle meanwhile: 18 ms against 16 for 2048 x 32000.
    """

    @inline
    def step(out: Any, j: int, stop: int, a: Any, s: Any, t: Any) -> int:
        w = lanes(out)
        if j + w <= stop:
            store_streaming(out, j, formula(load(a, j), s, t, index(out, j)))
            return j + w
        return j

    return step


def row_sum_exp(step: Callable[..., int]) -> Callable[..., Any]:
    """The sum of exp(x - m) over x[begin:end], which go to `e` if `keep`.

    Meanwhile it asks for the row `ahead` and writes out[j:stop] with `step`; it returns how far that came, too.
    """

    @inline
    def sum_exp(
        x: Any, begin: int, end: int, m: Any, e: Any, keep: int, ahead: Any,
        out: Any, j: int, stop: int, a: Any, s: Any, t: Any,
    ) -> Any:  # fmt: skip
        w = lanes(x)
        total = full(x, 0.0)
        i = begin
        while i + w <= end:
            chunk = full(x, 0.0)
            chunk_end = min(i + CHUNK * w, end)
            while i + w <= chunk_end:
                v = exp_up_to_zero(load(x, i) - m)
                prefetch(ahead, i)
                chunk = chunk + v
                if keep:
                    store(e, i, v)
                j = step(out, j, stop, a, s, t)
                i += w
            total = total + chunk
        if i < end:
            mask = first(x, end - i)
            v = select(mask, exp_up_to_zero(load_masked(x, i, mask, 0.0) - m), 0.0)
            total = total + v
            if keep:
                store(e, i, v)
        return reduce_add(total), j

    return sum_exp


@inline
def line_head(out: Any, n: int, stream: int) -> int:
    """How many elements of a row stand before its first cache line; n if it is not to be written past the cache."""
    head = to_line(out, 0)
    return min(head, n) if stream and head >= 0 else n


@inline
def scaled(e: Vector, r: Any, unused: Any, i: Vector) -> Vector:
    return e * r


@inline
def _exp_times(x: Vector, m: Any, r: Any, i: Vector) -> Vector:
    return exp_up_to_zero(x - m) * r


@inline
def minus_both(x: Vector, m: Any, log_s: Any, i: Vector) -> Vector:
    return (x - m) - log_s


write_scaled, write_exp_scaled, write_log = map_one(scaled), map_one(_exp_times), map_one(minus_both)


step_scaled, step_log = behind_one(scaled), behind_one(minus_both)
sum_exp_scaling, sum_exp_logging = row_sum_exp(step_scaled), row_sum_exp(step_log)


@inline
def row_max_sum_exp(x: Any, n: int, ahead: Any) -> Any:
    """The largest of x[0:n] and the sum of exp(x - largest), where nothing is written; asks for the row `ahead`.

    A block at a time, so that x is in the cache when it is read again. Blocks of -inf add 0, not NaN.
    """
    m, s = number(x, MINUS_INFINITY), number(x, 0.0)
    for begin in range(0, n, READ_TWICE):
        block, size = x + begin, min(READ_TWICE, n - begin)
        top = max(m, row_max(block, 0, size))
        shift = top if top > MINUS_INFINITY else number(x, 0.0)
        coming = x + (begin + READ_TWICE) if begin + READ_TWICE < n else ahead
        added, _ = sum_exp_scaling(block, 0, size, shift, x, 0, coming, x, 0, 0, x, shift, 0.0)
        if begin:
            s *= reduce_max(exp_up_to_zero(full(x, m - shift)))
        s += added
        m = top
    return m, s


def behind_two(formula: Callable[..., Vector]) -> Callable[..., int]:
    """As behind_one, for map_two."""

    @inline
    def step(out: Any, j: int, stop: int, a: Any, b: Any, s: Any) -> int:
        w = lanes(out)
        if j + w <= stop:
            store_streaming(out, j, formula(load(a, j), load(b, j), s, 0.0, index(out, j)))
            return j + w
        return j

    return step


def row_sum(term: Callable[..., Vector], step: Callable[..., int]) -> Callable[..., Any]:
    """The sum of term(dy[i], y[i]) over [begin, end); meanwhile it writes out[j:stop] with `step`, as row_sum_exp."""

    @inline
    def add_up(dy: Any, y: Any, begin: int, end: int, out: Any, j: int, stop: int, a: Any, b: Any, s: Any) -> Any:
        w = lanes(dy)
        total = full(dy, 0.0)
        i = begin
        while i + w <= end:
            chunk = full(dy, 0.0)
            chunk_end = min(i + CHUNK * w, end)
            while i + w <= chunk_end:
                prefetch(dy, i + AHEAD)
                prefetch(y, i + AHEAD)
                chunk = chunk + term(load(dy, i), load(y, i))
                j = step(out, j, stop, a, b, s)
                i += w
            total = total + chunk
        if i < end:
            mask = first(dy, end - i)
            total = total + term(load_masked(dy, i, mask, 0.0), load_masked(y, i, mask, 0.0))
        return reduce_add(total), j

    return add_up
