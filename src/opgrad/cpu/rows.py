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
    prefetch,
    reduce_add,
    reduce_max,
    select,
    store,
    store_masked,
    store_streaming,
    to_line,
)

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


@inline
def row_sum_exp(x: Any, begin: int, end: int, m: Any, e: Any, keep: int, ahead: Any) -> Any:
    """The sum of exp(x - m) over x[begin:end], which go to `e` if `keep`; asks for row `ahead` meanwhile."""
    w = lanes(x)
    total = full(x, 0.0)
    i = begin
    while i + w <= end:
        s = full(x, 0.0)
        stop = min(i + CHUNK * w, end)
        while i + w <= stop:
            v = exp_up_to_zero(load(x, i) - m)
            prefetch(ahead, i)
            s = s + v
            if keep:
                store(e, i, v)
            i += w
        total = total + s
    if i < end:
        mask = first(x, end - i)
        v = select(mask, exp_up_to_zero(load_masked(x, i, mask, 0.0) - m), 0.0)
        total = total + v
        if keep:
            store(e, i, v)
    return reduce_add(total)


@inline
def _times(e: Vector, r: Any, unused: Any, i: Vector) -> Vector:
    return e * r


@inline
def _exp_times(x: Vector, m: Any, r: Any, i: Vector) -> Vector:
    return exp_up_to_zero(x - m) * r


@inline
def _minus_both(x: Vector, m: Any, log_s: Any, i: Vector) -> Vector:
    return (x - m) - log_s


write_scaled, write_exp_scaled, write_log = map_one(_times), map_one(_exp_times), map_one(_minus_both)


def row_sum(term: Callable[..., Vector]) -> Callable[..., Any]:
    """The sum of term(dy[i], y[i]) over [begin, end)."""

    @inline
    def add_up(dy: Any, y: Any, begin: int, end: int) -> Any:
        w = lanes(dy)
        total = full(dy, 0.0)
        i = begin
        while i + w <= end:
            s = full(dy, 0.0)
            stop = min(i + CHUNK * w, end)
            while i + w <= stop:
                s = s + term(load(dy, i), load(y, i))
                i += w
            total = total + s
        if i < end:
            mask = first(dy, end - i)
            total = total + term(load_masked(dy, i, mask, 0.0), load_masked(y, i, mask, 0.0))
        return reduce_add(total)

    return add_up
