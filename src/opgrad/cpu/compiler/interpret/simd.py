"""The operations of opgrad.cpu.compiler.simd in NumPy."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opgrad.cpu.compiler.interpret.values import INDICES, CheckedPointer, Vector, lanes_of, lifted
from opgrad.cpu.compiler.words import CACHE_LINE

MANTISSA = {32: 23, 64: 52}
SQRT_HALF = {32: 0x3F3504F3, 64: 0x3FE6A09E667F3BCD}


def _zeros(p: CheckedPointer) -> Vector:
    return Vector(np.zeros(p.lanes, p.element))


def _load_masked(p: CheckedPointer, i: int, mask: Vector, fill: float) -> Vector:
    lanes = lanes_of(fill, _zeros(p))
    for begin, end in _runs(mask.lanes):
        lanes[begin:end] = p.read(int(i) + begin, end - begin)
    return Vector(lanes)


def _store_masked(p: CheckedPointer, i: int, v: Vector, mask: Vector) -> None:
    for begin, end in _runs(mask.lanes):
        p.write(int(i) + begin, v.lanes[begin:end])


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """The neighbouring lanes for which a mask holds, as begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _store_streaming(p: CheckedPointer, i: int, v: Vector) -> None:
    address = p.address + int(i) * p.dtype.itemsize
    aligned = min(CACHE_LINE, p.lanes * p.dtype.itemsize)
    if address % aligned:
        raise IndexError(f"a kernel streams to address {address}, expected one aligned to {aligned} bytes")
    p.write(i, v.lanes)


def _to_line(p: CheckedPointer, i: int) -> int:
    left, size = -(p.address + int(i) * p.dtype.itemsize) % CACHE_LINE, p.dtype.itemsize
    return -1 if left % size else left // size


def _transpose_in(tile: CheckedPointer, stride: int, x: CheckedPointer, row: int, rows: int, columns: int) -> None:
    size = x.lanes // 2
    block = np.zeros((size, size), x.element)
    for r in range(min(size, rows)):
        block[r, : min(size, columns)] = x.read(r * row, min(size, columns))
    for c in range(size):
        tile.write(c * stride, block[:, c])


def _transpose_out(y: CheckedPointer, row: int, tile: CheckedPointer, stride: int, rows: int, columns: int) -> None:
    size = y.lanes // 2
    block = np.stack([tile.read(c * stride, size) for c in range(size)], axis=1)
    for r in range(min(size, rows)):
        y.write(r * row, block[r, : min(size, columns)])


def _fma(a: Any, b: Any, c: Any) -> Vector:
    like = next(each for each in (a, b, c) if isinstance(each, Vector))
    x, y, z = (lanes_of(each, like) for each in (a, b, c))
    if like.bits == 32:
        return Vector((x.astype(np.float64) * y + z).astype(np.float32))
    product = x * y
    with np.errstate(all="ignore"):
        lost = _lost_by_product(x, y, product)
        total = product + z
        back = total - product
        correction = lost + ((product - (total - back)) + (z - back))
        return Vector(np.where(np.isfinite(total + correction), total + correction, total))


def _lost_by_product(x: np.ndarray, y: np.ndarray, product: np.ndarray) -> np.ndarray:
    """What the product of float64 was rounded by: Dekker's splitting (1971)."""

    def split(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        high = v * 134217729.0
        high = high - (high - v)
        return high, v - high

    (a, b), (c, d) = split(x), split(y)
    return ((a * c - product) + a * d + b * c) + b * d


def _polynomial(v: Vector, coefficients: Sequence[float]) -> Vector:
    result = Vector(lanes_of(coefficients[0], v))
    for each in coefficients[1:]:
        result = _fma(result, v, each)
    return result


def _maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a > b, a, b)


def _select(mask: Vector, a: Any, b: Any) -> Vector:
    like = a if isinstance(a, Vector) else b
    return Vector(np.where(mask.lanes, lanes_of(a, like), lanes_of(b, like)))


def _scale_by_power(v: Vector, n: Vector) -> Vector:
    finite = np.clip(np.nan_to_num(n.lanes, nan=0.0), -5000, 5000).astype(np.int32)
    return Vector(np.where(np.isnan(n.lanes), n.lanes, np.ldexp(v.lanes, finite)))


def _split(v: Vector) -> tuple[np.ndarray, np.ndarray]:
    """Exponents, and mantissas in [sqrt(1/2), sqrt(2))."""
    word = np.dtype(f"i{v.bits // 8}")
    bits = v.lanes.view(word)
    exponent = (bits - word.type(SQRT_HALF[v.bits])) >> MANTISSA[v.bits]
    return exponent, (bits - (exponent << MANTISSA[v.bits])).view(v.lanes.dtype)


def _power_of(v: Vector) -> Vector:
    return Vector((v.lanes.view(f"i{v.bits // 8}") << MANTISSA[v.bits]).view(v.lanes.dtype))


def _folded(lanes: np.ndarray, combine: Callable[[Any, Any], Any]) -> Any:
    """The lower half combined with the upper until one lane is left."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = combine(lanes[:half], lanes[half:])
    return lanes[0]


def _reduce_add_wide(v: Vector, w: Vector) -> Any:
    return _folded(v.lanes.astype(np.float64) + w.lanes, operator.add)


def _progression(p: CheckedPointer, start: int, step: int) -> Vector:
    with np.errstate(over="ignore"):
        return Vector(np.int64(start) + np.arange(p.lanes // 4, dtype=np.int64) * np.int64(step))


def _word_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    low = np.uint64(0xFFFFFFFF)
    return ((a.view(np.uint64) & low) * (b.view(np.uint64) & low)).view(np.int64)


def _interleave_words(*vectors: Vector) -> Vector:
    return Vector(np.stack([v.lanes.astype(np.int32) for v in vectors], axis=1).reshape(-1))


def _stores_each(store: Callable[..., None]) -> Callable[..., None]:
    """The operation on a tuple of pointers and one of values that applies `store` to each pair."""

    def each(pointers: Sequence[CheckedPointer], i: int, values: Sequence[Any], *mask: Vector) -> None:
        for p, value in zip(pointers, values, strict=True):
            store(p, i, value, *mask)

    return each


def _nothing(*_: Any) -> None:
    """What only asks the processor for something."""


OPERATIONS: dict[str, Callable[..., Any]] = {
    "lanes": lambda p: p.lanes,
    "line": lambda p: CACHE_LINE // p.dtype.itemsize,
    "is_fine": lambda p: p.dtype.itemsize * 8 >= p.bits,
    "at_byte": CheckedPointer.at_byte,
    "address_of": lambda p: p.address,
    "to_line": _to_line,
    "prefetch": _nothing,
    "prefetch_line": _nothing,
    "each_row": lambda operands, row: tuple(data + row * step for data, step in operands),
    "load": lambda p, i: Vector(p.read(i, p.lanes)),
    "load_masked": _load_masked,
    "load_each": lambda pointers, i: tuple(Vector(p.read(i, p.lanes)) for p in pointers),
    "load_each_masked": lambda pointers, i, mask, fill: tuple(_load_masked(p, i, mask, fill) for p in pointers),
    "load_one": lambda p, i: _one(p, i),
    "load_one_each": lambda pointers, i: tuple(_one(p, i) for p in pointers),
    "store": lambda p, i, v: p.write(i, v.lanes),
    "store_masked": _store_masked,
    "store_each": _stores_each(lambda p, i, v: p.write(i, v.lanes)),
    "store_each_masked": _stores_each(_store_masked),
    "store_streaming": _store_streaming,
    "store_one": lambda p, i, x: _store_one(p, i, x),
    "store_one_each": _stores_each(lambda p, i, x: _store_one(p, i, x)),
    "transpose_block_in": _transpose_in,
    "transpose_block_out": _transpose_out,
    "full": lambda p, value: Vector(lanes_of(value, _zeros(p))),
    "full_each": lambda pointers, value: tuple(Vector(lanes_of(value, _zeros(p))) for p in pointers),
    "like": lambda v, value: Vector(lanes_of(value, v)),
    "number": lambda p, value: p.element.type(value),
    "first": lambda p, count: Vector(np.arange(p.lanes) < int(count)),
    "index": lambda p, i: Vector((int(i) + np.arange(p.lanes)).astype(f"i{p.bits // 8}")),
    "select": _select,
    "maximum": lifted(_maximum),
    "fma": _fma,
    "polynomial": _polynomial,
    "round_even": lambda v: Vector(np.rint(v.lanes)),
    "absolute": lambda v: Vector(np.abs(v.lanes)),
    "sqrt": lambda v: Vector(np.sqrt(v.lanes)),
    "copy_sign": lambda v, sign: Vector(np.copysign(v.lanes, sign.lanes)),
    "interleave": lambda a, b: tuple(map(Vector, np.split(np.stack([a.lanes, b.lanes], axis=1).reshape(-1), 2))),
    "add_each": lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
    "add_products": lambda sums, factors, v: tuple(_fma(x, v, s) for x, s in zip(factors, sums, strict=True)),
    "scale_by_power": _scale_by_power,
    "scales_at_once": lambda v: False,
    "exponent_of": lambda v: Vector(_split(v)[0].astype(v.lanes.dtype)),
    "mantissa_of": lambda v: Vector(_split(v)[1]),
    "power_of": _power_of,
    "first_lane": lambda v: v.lanes[0],
    "reduce_add": lambda v: _folded(v.lanes, operator.add),
    "reduce_add_each": lambda vectors: tuple(_folded(v.lanes, operator.add) for v in vectors),
    "reduce_add_wide": _reduce_add_wide,
    "reduce_max": lambda v: _folded(v.lanes, _maximum),
    "progression": _progression,
    "word_product": lifted(_word_product),
    "interleave_words": _interleave_words,
}


def _one(p: CheckedPointer, i: int) -> Any:
    """An element as a number; an integer has all its bits, whatever the precision of the kernel's vectors."""
    return int(p.stored(i, 1)[0]) if p.storage in INDICES else p.read(i, 1)[0]


def _store_one(p: CheckedPointer, i: int, x: Any) -> None:
    if p.storage in INDICES:
        p.stored(i, 1)[0] = int(x)
    else:
        p.write(i, np.array([x]).astype(p.element))
