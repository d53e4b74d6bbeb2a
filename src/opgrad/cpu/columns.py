"""What kernels share whose vectors run across the axes behind the reduced one."""

from typing import Any

from opgrad.cpu.math import exp_up_to_zero
from opgrad.cpu.native import inline
from opgrad.cpu.rows import CHUNK, MINUS_INFINITY
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


@inline
def column_sum_exp(x: Any, x_n: int, n: int, whole: bool, mask: Any, m: Vector, e: Any, keep: int) -> Vector:
    """The sums of exp(x - m), which go to `e` if `keep`; asks for the next strip meanwhile."""
    w = lanes(x)
    total = full(x, 0.0)
    for chunk in range(0, n, CHUNK):
        s = full(x, 0.0)
        for i in range(chunk, min(chunk + CHUNK, n)):
            v = exp_up_to_zero(get(x, i * x_n, whole, mask) - m)
            prefetch(x, i * x_n + w)
            s = s + v
            if keep:
                store(e, i * w, v)
        total = total + s
    return total
