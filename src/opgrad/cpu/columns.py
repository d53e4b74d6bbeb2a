"""What kernels share whose vectors run across the axes behind the reduced one."""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.math import exp_up_to_zero
from opgrad.cpu.native import inline
from opgrad.cpu.rows import CHUNK, MINUS_INFINITY, minus_both, scaled
from opgrad.cpu.simd import (
    Vector,
    full,
    lanes,
    load,
    load_masked,
    maximum,
    prefetch,
    store,
    store_masked,
    store_streaming,
    to_line,
)


@inline
def get(p: Any, i: int, whole: bool, mask: Any) -> Vector:
    """A vector at i; zeros outside the mask unless it is whole."""
    return load(p, i) if whole else load_masked(p, i, mask, 0.0)


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


def column_sum_exp(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    """The sums of exp(x - m), which go to `e` if `keep`; asks for the next strip meanwhile.

    If `pending`, it also writes the strip before past the cache: out[i] = formula(a[i], s, t, i). Writing apart
    from reading and computing leaves the memory idle meanwhile.
    """

    @inline
    def sum_exp(
        x: Any, x_n: int, n: int, whole: bool, mask: Any, m: Vector, e: Any, keep: int,
        out: Any, out_n: int, pending: int, a: Any, a_n: int, s: Vector, t: Vector,
    ) -> Vector:  # fmt: skip
        w = lanes(x)
        total = full(x, 0.0)
        for begin in range(0, n, CHUNK):
            chunk = full(x, 0.0)
            for i in range(begin, min(begin + CHUNK, n)):
                v = exp_up_to_zero(get(x, i * x_n, whole, mask) - m)
                prefetch(x, i * x_n + w)
                chunk = chunk + v
                if keep:
                    store(e, i * w, v)
                if pending:
                    store_streaming(out, i * out_n, formula(load(a, i * a_n), s, t, i))
            total = total + chunk
        return total

    return sum_exp


def write_column(formula: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = formula(a[i], s, t, i) down a whole strip, past the cache."""

    @inline
    def write(out: Any, out_n: int, n: int, a: Any, a_n: int, s: Vector, t: Vector) -> None:
        for i in range(n):
            store_streaming(out, i * out_n, formula(load(a, i * a_n), s, t, i))

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
                    store_streaming(out, i * out_n, formula(load(a, i * dy_n), load(b, i * y_n), s, 0.0, i))
            total = total + chunk
        return total

    return add_up


sum_exp_scaling_columns, sum_exp_logging_columns = column_sum_exp(scaled), column_sum_exp(minus_both)
write_scaled_column, write_log_column = write_column(scaled), write_column(minus_both)
