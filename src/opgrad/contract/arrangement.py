"""Arranges arrays for kernels as outer x n x inner, each operand with one stride for each of the three.

Axes are taken in the order in which the first operand lies in memory, so Fortran order needs no copy.
An operand that has no single stride for one of the three, or whose vectors would not be contiguous, does not
fit, and the front end copies it. On a GPU each thread reads single elements, so any stride fits (`any_stride`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]

# For each operand its strides in bytes, None for one that will be made in the order of the loops, and its item size.
# The first one has strides.
Layouts = Mapping[str, tuple[Shape | None, int]]
MANY_PLACES = 1 << 20  # elements whose places are compared one by one, which takes a fraction of a second


@dataclass(frozen=True)
class Strides:
    """The strides of one operand in elements, and whether the operand can be used where it lies."""

    outer: int
    n: int
    inner: int
    fits: bool


@dataclass(frozen=True)
class Arrangement:
    """Sizes of the loops; `order` is the memory order of the axes for operands that must be copied or made.

    Vectors run along `inner` where it is larger than 1, else along `n`.
    """

    outer: int
    n: int
    inner: int
    order: tuple[int, ...]
    strides: Mapping[str, Strides]


def rows(shape: Shape, reduced: range, operands: Layouts, any_stride: bool = False) -> Arrangement:
    """The arrangement for operators that reduce the axes `reduced`."""
    order = memory_order(shape, next(iter(operands.values()))[0] or ())
    places = [place for place, axis in enumerate(order) if axis in reduced]
    if places != list(range(places[0], places[0] + len(places))):
        order = tuple(range(len(shape)))
        places = list(reduced)
    return _arrange(shape, order, places[0], places[-1] + 1, operands, any_stride)


def elements(shape: Shape, operands: Layouts, any_stride: bool = False) -> Arrangement:
    """The arrangement for operators on single elements: outer x n, with n as long as most operands allow."""
    order = memory_order(shape, next(iter(operands.values()))[0] or ())
    layouts = [_arrange(shape, order, split, len(order), operands, any_stride) for split in range(len(order) + 1)]
    return max(layouts, key=lambda layout: sum(strides.fits for strides in layout.strides.values()))


def memory_order(shape: Shape, strides: Shape) -> tuple[int, ...]:
    """The axes from the largest stride to the smallest; repeated and single elements count as largest."""
    axes = range(len(shape))
    order = sorted(axes, key=lambda a: -abs(strides[a]) if shape[a] > 1 and strides[a] else -math.inf)
    moving = [a for a in order if shape[a] > 1]
    return tuple(axes) if moving == sorted(moving) else tuple(order)


def _arrange(
    shape: Shape,
    order: tuple[int, ...],
    start: int,
    stop: int,
    operands: Layouts,
    any_stride: bool,
) -> Arrangement:
    groups = [order[:start], order[start:stop], order[stop:]]
    outer, n, inner = (math.prod(shape[axis] for axis in group) for group in groups)
    strides = {}
    for name, (byte_strides, size) in operands.items():
        lies = contiguous(shape, order, size) if byte_strides is None else byte_strides
        found = [_one_stride(shape, lies, size, group) for group in groups]
        along = found[2] if inner > 1 else found[1]
        unit = along == 1 or (n == 1 and inner == 1)
        if None in found or not (unit or any_stride):
            strides[name] = Strides(n * inner, inner, 1, fits=False)
        else:
            strides[name] = Strides(found[0] or 0, found[1] or 0, found[2] or 0, fits=True)
    return Arrangement(outer, n, inner, order, strides)


def _one_stride(shape: Shape, strides: Shape, size: int, axes: Sequence[int]) -> int | None:
    """The stride in elements that steps through these axes as if they were one; None if there is none."""
    moving = [axis for axis in axes if shape[axis] > 1]
    if not moving:
        return 0
    for before, after in pairwise(moving):
        if strides[before] != strides[after] * shape[after]:
            return None
    stride, rest = divmod(strides[moving[-1]], size)
    return None if rest else stride


def contiguous(shape: Shape, order: Sequence[int], size: int) -> Shape:
    """The strides in bytes of a new array whose axes lie in memory in this order."""
    strides = [0] * len(shape)
    for axis in reversed(order):
        strides[axis] = size
        size *= max(shape[axis], 1)
    return tuple(strides)


def steps(shape: Shape, order: Sequence[int], *strides: Shape) -> list[tuple[int, ...]]:
    """The fewest loops that visit the elements of arrays of this shape together, axes in this order; at least one.

    A loop is its size, and its stride in each of the arrays. Neighbouring axes are one loop where all strides allow it.
    """
    found: list[tuple[int, ...]] = []
    for axis in order:
        size, own = shape[axis], [each[axis] for each in strides]
        if size == 1:
            continue
        if found and list(found[-1][1:]) == [size * stride for stride in own]:
            found[-1] = (found[-1][0] * size, *own)
        else:
            found.append((size, *own))
    return found or [(1, *(0 for _ in strides))]


def broadcast_strides(shape: Shape, full: Shape) -> Shape:
    """The strides in elements of a contiguous array of one shape that is broadcast to another; 0 where it repeats."""
    own = (1,) * (len(full) - len(shape)) + shape
    each = zip(own, contiguous(own, range(len(own)), 1), strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in each)


def is_injective(shape: Shape, strides: Shape, size: int) -> bool:
    """Whether no two elements, of `size` bytes each, share a byte."""
    if 0 in shape:
        return True
    loops = sorted((abs(stride), length) for length, stride in zip(shape, strides, strict=True) if length > 1)
    covered = size
    for stride, length in loops:
        if stride < covered:
            return covered > size and _is_injective_by_places(loops, size)
        covered += (length - 1) * stride
    return True


def _is_injective_by_places(loops: Sequence[tuple[int, int]], size: int) -> bool:
    """The same for axes that interleave, as only as_strided makes them: it compares all places unless they are many."""
    if math.prod(length for _, length in loops) > MANY_PLACES:
        return False
    places = [0]
    for stride, length in loops:
        places = [place + step * stride for place in places for step in range(length)]
    places.sort()
    return all(after - before >= size for before, after in pairwise(places))
