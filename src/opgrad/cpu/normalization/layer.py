"""Kernels of layer normalization, with a mean and without.

Arrays are rows x n, contiguous. The mean is taken off before squares are summed, so nothing cancels.
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.simd import (
    Float,
    Pointer,
    Vector,
    first,
    first_lane,
    fma,
    full,
    lanes,
    load,
    load_masked,
    number,
    reduce_add,
    sqrt,
    store_one,
)
from opgrad.cpu.loops.columns import get
from opgrad.cpu.loops.map import row_writer

CHUNK: Final = 64  # terms that are added to each other before they join the total


# --- what layer normalization has and its simplified form lacks ----------------------------------------------------


@inline
def put_number(p: Any, row: int, value: Any) -> None:
    store_one(p, row, value)


@inline
def put_nothing(p: Any, row: int, value: Any) -> None:
    pass


@inline
def kept(v: Any, zero: Any) -> Any:
    return v


@inline
def dropped(v: Any, zero: Any) -> Any:
    return zero


def row_total(term: Callable[..., Vector]) -> Callable[..., Any]:
    """The sum of term(x[i], mean, total) over a row, whose terms for x = mean are 0."""

    @inline
    def add_up(x: Any, n: int, mean: Any) -> Any:
        w, i = lanes(x), 0
        total = full(x, 0.0)
        while i + w <= n:
            end, chunk = min(i + CHUNK * w, n), full(x, 0.0)
            while i + w <= end:
                chunk = term(load(x, i), mean, chunk)
                i += w
            total = total + chunk
        if i < n:
            total = term(load_masked(x, i, first(x, n - i), mean), mean, total)
        return reduce_add(total)

    return add_up


@inline
def _plus(x: Vector, mean: Any, total: Vector) -> Vector:
    return total + x


@inline
def _plus_square(x: Vector, mean: Any, total: Vector) -> Vector:
    return fma(x - mean, x - mean, total)


@inline
def _with_bias(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
    x, scale, bias = arrays
    mean, inv_std = numbers
    return fma((get(x, i, whole, mask) - mean) * inv_std, get(scale, i, whole, mask), get(bias, i, whole, mask))


@inline
def _without_bias(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
    x, scale, _ = arrays
    mean, inv_std = numbers
    return (get(x, i, whole, mask) - mean) * inv_std * get(scale, i, whole, mask)


row_sum, row_squares = row_total(_plus), row_total(_plus_square)


def forward_kernel(value: Callable[..., Vector], keep: Callable[..., Any], put_mean: Callable[..., None]) -> Kernel:
    """y and the statistics of rows; `keep` makes the mean 0 where there is none."""
    write = row_writer(value)

    @kernel
    def normalize_rows(
        part, per_part, units, n, inverse: Float, epsilon: Float,
        x: Pointer, scale: Pointer, bias: Pointer, y: Pointer, mean: Pointer, inv_std: Pointer, stream,
    ):  # fmt: skip
        each, zero = number(x, inverse), number(x, 0.0)
        for row in range(part * per_part, min((part + 1) * per_part, units)):
            source = x + row * n
            m = keep(row_sum(source, n, zero) * each, zero)
            variance = full(x, row_squares(source, n, m) * each + number(x, epsilon))
            s = first_lane(1.0 / sqrt(variance))
            put_mean(mean, row, m)
            store_one(inv_std, row, s)
            write(y + row * n, 0, n, stream, (source, scale, bias), (m, s))

    return normalize_rows


LAYER = forward_kernel(_with_bias, kept, put_number)
LAYER_NO_BIAS = forward_kernel(_without_bias, kept, put_number)
SIMPLIFIED = forward_kernel(_without_bias, dropped, put_nothing)
