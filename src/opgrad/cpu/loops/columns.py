"""What kernels share whose vectors run across the axes behind the reduced one."""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import (
    Vector,
    full,
    is_fine,
    lanes,
    load,
    load_masked,
    maximum,
    prefetch,
    select,
    store,
    store_masked,
    store_streaming,
    to_line,
)
from opgrad.cpu.loops.fold import CHUNK
from opgrad.cpu.loops.rows import MINUS_INFINITY, minus_both
from opgrad.cpu.numerics.logsumexp import (
    add_below,
    add_exact,
    add_pairs,
    scale_for,
    scaled,
    sum_end,
    sum_start,
)

PIECE: Final = 1024  # terms of a sum that starts anew, so that what it loses stays small beside it


@inline
def get(p: Any, i: int, whole: bool, mask: Any) -> Vector:
    """A vector at i; zeros outside the mask unless it is whole."""
    return get_or(p, i, whole, mask, 0.0)


@inline
def get_or(p: Any, i: int, whole: bool, mask: Any, fill: Any) -> Vector:
    """The same with `fill` outside the mask."""
    return load(p, i) if whole else load_masked(p, i, mask, fill)


@inline
def put(p: Any, i: int, v: Vector, whole: bool, mask: Any, stream: int) -> None:
    if not whole:
        store_masked(p, i, v, mask)
    elif stream:
        store_streaming(p, i, v)
    else:
        store(p, i, v)


@inline
def streams_columns(p: Any, p_n: int, stream: int) -> int:
    """Whether to write past the cache: if asked, and every vector of the strip starts a cache line."""
    return stream and to_line(p, 0) == 0 and to_line(p, p_n) == 0


@inline
def column_max(x: Any, x_n: int, n: int, whole: bool, mask: Any) -> Vector:
    m = full(x, MINUS_INFINITY)
    for i in range(n):
        m = maximum(get(x, i * x_n, whole, mask), m)
    return m


def column_sum_exp(formula: Callable[..., Vector], add: Callable[..., Any] = add_exact) -> Callable[..., Any]:
    """The sums of the exponentials as two vectors; asks for the next strip meanwhile.

    The exponentials go to `e`, `keep` numbers from one to the next; nowhere if it is 0.

    If `pending`, it also writes the strip before past the cache: out[i] = formula(a[i], *numbers). Writing apart
    from reading and computing leaves the memory idle meanwhile.
    """

    @inline
    def sum_exp(
        x: Any, x_n: int, n: int, whole: bool, mask: Any, m: Vector, e: Any, keep: int,
        out: Any, out_n: int, pending: int, a: Any, a_n: int, numbers: Any,
    ) -> Any:  # fmt: skip
        w, scale, zero, piece = lanes(x), scale_for(m), full(x, 0.0), PIECE if is_fine(x) else CHUNK
        sums = zero, zero
        for begin in range(0, n, piece):
            total, lost = sum_start(x)
            for i in range(begin, min(begin + piece, n)):
                v, total, lost = add(x, total, lost, get(x, i * x_n, whole, mask), scale)
                prefetch(x, i * x_n + w)
                if keep:
                    store(e, i * keep, v)
                if pending:
                    store_streaming(out, i * out_n, formula(load(a, i * a_n), *numbers))
            sums = add_pairs(sums, sum_end(x, total, lost))
        return sums

    return sum_exp


def column_rest(formula: Callable[..., Vector]) -> Callable[..., Any]:
    """The sums of the exponentials of the numbers that are not m, and how many are m; the rest as column_sum_exp."""

    @inline
    def add_rest(
        x: Any, x_n: int, n: int, whole: bool, mask: Any, m: Vector,
        out: Any, out_n: int, pending: int, a: Any, a_n: int, numbers: Any,
    ) -> Any:  # fmt: skip
        w, scale, zero, one = lanes(x), scale_for(m), full(x, 0.0), full(x, 1.0)
        piece = PIECE if is_fine(x) else CHUNK
        rest, count = (zero, zero), zero
        for begin in range(0, n, piece):
            added, lost = zero, zero
            for i in range(begin, min(begin + piece, n)):
                v = get(x, i * x_n, whole, mask)
                prefetch(x, i * x_n + w)
                added, lost = add_below(x, added, lost, v, m, scale)
                count = count + select(v == m, one, 0.0)
                if pending:
                    store_streaming(out, i * out_n, formula(load(a, i * a_n), *numbers))
            rest = add_pairs(rest, (added, lost))
        high, low = rest
        return high + low, count

    return add_rest


def write_column(formula: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = formula(a[i], *numbers) down a whole strip, past the cache."""

    @inline
    def write(out: Any, out_n: int, n: int, a: Any, a_n: int, numbers: Any) -> None:
        for i in range(n):
            store_streaming(out, i * out_n, formula(load(a, i * a_n), *numbers))

    return write


def column_sum(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Callable[..., Vector]:
    """The sums of term(dy, y); asks for the next strip and writes the one before, as column_sum_exp."""

    @inline
    def add_up(
        dy: Any, dy_n: int, y: Any, y_n: int, n: int, whole: bool, mask: Any,
        out: Any, out_n: int, pending: int, a: Any, b: Any, s: Vector,
    ) -> Vector:  # fmt: skip
        w = lanes(dy)
        total = full(dy, 0.0)
        for begin in range(0, n, CHUNK):
            chunk = full(dy, 0.0)
            for i in range(begin, min(begin + CHUNK, n)):
                chunk = chunk + term(get(dy, i * dy_n, whole, mask), get(y, i * y_n, whole, mask))
                prefetch(dy, i * dy_n + w)
                prefetch(y, i * y_n + w)
                if pending:
                    store_streaming(out, i * out_n, formula(load(a, i * dy_n), load(b, i * y_n), s))
            total = total + chunk
        return total

    return add_up


sum_exp_scaling_columns, add_rest_logging_columns = column_sum_exp(scaled), column_rest(minus_both)
write_scaled_column, write_log_column = write_column(scaled), write_column(minus_both)
