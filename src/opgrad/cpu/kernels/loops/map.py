"""The vector loops that write a row, out[i] = formula(a[i], b[i], …, numbers), for any number of arrays."""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector


@inline
def get(p, i: int, whole: bool, mask) -> Vector:
    """The vector p[i:i + lanes]; if not `whole`, only the lanes of the mask are read, and the others are 0."""
    return get_or(p, i, whole, mask, 0.0)


@inline
def get_or(p, i: int, whole: bool, mask, fill) -> Vector:
    """The same as `get`, with `fill` in the lanes outside the mask."""
    return v.load(p, i) if whole else v.load_masked(p, i, mask, fill)


@inline
def put(p, i: int, value: Vector, whole: bool, mask, stream: int) -> None:
    if not whole:
        v.store_masked(p, i, value, mask)
    elif stream:
        v.store_streaming(p, i, value)
    else:
        v.store(p, i, value)


def of_each(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    """value(arrays, i, whole, mask, numbers) = formula(a[i], b[i], …, *numbers)."""
    inline(formula)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        if whole:
            return formula(*(v.load_each(arrays, i) + numbers))
        return formula(*(v.load_each_masked(arrays, i, mask, 0.0) + numbers))

    return value


def mapped(formula: Callable[..., Vector]) -> Callable[..., None]:
    """The row writer of out[i] = formula(a[i], b[i], …, *numbers)."""
    return row_writer(of_each(formula))


def mapped_by_index(formula: Callable[..., Vector]) -> Callable[..., None]:
    """The row writer of out[i] = formula(i, a[i], b[i], …, *numbers)."""
    inline(formula)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        if whole:
            return formula(v.index(arrays[0], i), *(v.load_each(arrays, i) + numbers))
        return formula(v.index(arrays[0], i), *(v.load_each_masked(arrays, i, mask, 0.0) + numbers))

    return row_writer(value)


def mapped_to_each(formula: Callable[..., tuple[Vector, ...]]) -> Callable[..., None]:
    """The loop outs[k][i] = result k of formula(a[i], b[i], …, *numbers), for any number of results.

    Results may be written to the arrays: a vector of each is read before any result is written.
    """
    inline(formula)

    @inline
    def write(outs, begin: int, end: int, arrays, numbers) -> None:
        w, i = v.lanes(arrays[0]), begin
        while i + w <= end:
            v.store_each(outs, i, formula(*(v.load_each(arrays, i) + numbers)))
            i += w
        if i < end:
            mask = v.first(arrays[0], end - i)
            v.store_each_masked(outs, i, formula(*(v.load_each_masked(arrays, i, mask, 0.0) + numbers)), mask)

    return write


def row_writer(value: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = value(arrays, i, whole, mask, numbers) for i in [begin, end); with non-temporal stores if `stream`.

    `value` reads its arrays itself: a whole vector, or the lanes of the mask.
    """
    inline(value)

    @inline
    def write(out, begin: int, end: int, stream: int, arrays, numbers) -> None:
        w, i = v.lanes(out), begin
        every = v.full(out, 0.0) == v.full(out, 0.0)
        if stream:
            head = min(v.to_line(out, i), end - i)
            if head >= 0:
                body = i + head
                while i < body:  # two turns if a cache line holds more elements than a vector
                    mask = v.first(out, body - i)
                    v.store_masked(out, i, value(arrays, i, False, mask, numbers), mask)
                    i = min(i + w, body)
                while i + w <= end:
                    v.store_streaming(out, i, value(arrays, i, True, every, numbers))
                    i += w
        while i + w <= end:
            v.store(out, i, value(arrays, i, True, every, numbers))
            i += w
        if i < end:
            mask = v.first(out, end - i)
            v.store_masked(out, i, value(arrays, i, False, mask, numbers), mask)

    return write


@inline
def times(x: Vector, factor) -> Vector:
    return x * factor


write_same, write_sum, write_times = mapped(lambda x: x), mapped(lambda a, b: a + b), mapped(times)
