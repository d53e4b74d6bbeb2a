"""How arrays lie: loops outer x n x inner, strides, and the shapes that broadcasts, sums and slices give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from opgrad.contract.attributes import Array, Attributes, Shape

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


def arranged_rows(shape: Shape, reduced: range, operands: Layouts, any_stride: bool = False) -> Arrangement:
    """The arrangement for operators that reduce the axes `reduced`."""
    order = memory_order(shape, next(iter(operands.values()))[0] or ())
    places = [place for place, axis in enumerate(order) if axis in reduced]
    if places != list(range(places[0], places[0] + len(places))):
        order = tuple(range(len(shape)))
        places = list(reduced)
    return _arrange(shape, order, places[0], places[-1] + 1, operands, any_stride)


def arranged_elements(shape: Shape, operands: Layouts, any_stride: bool = False) -> Arrangement:
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
    shape: Shape, order: tuple[int, ...], start: int, stop: int, operands: Layouts, any_stride: bool,
) -> Arrangement:  # fmt: skip
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


def reduced_axes(shape: Shape, axes: Sequence[int], noop_with_empty_axes: bool) -> frozenset[int]:
    """The axes that a sum takes away, as places from 0 on; ValueError if one is out of range."""
    rank = len(shape)
    for axis in axes:
        if not -rank <= axis < rank:
            bounds = f"{-rank} to {rank - 1}" if rank else "no axes"
            dimensions = f"{rank} dimension{'' if rank == 1 else 's'}"
            raise ValueError(
                f"reduce_sum_training: axes is {tuple(axes)}, expected {bounds} for an array of {dimensions}"
            )
    if not axes:
        return frozenset() if noop_with_empty_axes else frozenset(range(rank))
    return frozenset(axis % rank for axis in axes)


def broadcast_shape(a: Shape, b: Shape) -> Shape | None:
    """What two shapes are broadcast to, None if they are not; NumPy's function takes 32 dimensions at most."""
    pairs = list(zip_longest(reversed(a), reversed(b), fillvalue=1))
    if any(one != other and 1 not in (one, other) for one, other in pairs):
        return None
    return tuple(other if one == 1 else one for one, other in reversed(pairs))


def broadcast_axes(a_shape: Shape, b_shape: Shape) -> tuple[list[int], list[int]]:
    """The axes along which each of two shapes is broadcast to the other, from the last to the first."""
    if any(size < 0 for size in (*a_shape, *b_shape)):
        name, shape = ("a_shape", a_shape) if any(size < 0 for size in a_shape) else ("b_shape", b_shape)
        raise ValueError(f"broadcast_gradient_args: {name} is {shape}, expected sizes of at least 0")
    a_axes, b_axes = [], []
    rank = max(len(a_shape), len(b_shape))
    for i, (a, b) in enumerate(zip_longest(reversed(a_shape), reversed(b_shape))):
        axis = rank - 1 - i
        if a is None or (a == 1 and b is not None and b != 1):
            a_axes.append(axis)
        elif b is None or (b == 1 and a != 1):
            b_axes.append(axis)
        elif a != b:
            expected = f"one that is broadcast with {a_shape}, a_shape"
            raise ValueError(f"broadcast_gradient_args: b_shape is {b_shape}, expected {expected}")
    return a_axes, b_axes


def repeated_axes(shape: Shape, full: Shape) -> tuple[int, ...]:
    """The axes of `full` along which an array of this shape is repeated when it is broadcast to `full`."""
    lead = len(full) - len(shape)
    return tuple(a for a, size in enumerate(full) if a < lead or (shape[a - lead] == 1 and size != 1))


def sum_to(x: Array, shape: Shape) -> Array:
    """The sum over the axes along which an array of this shape was repeated."""
    return x.sum(repeated_axes(shape, x.shape)).reshape(shape)


def slice_ranges(attributes: Attributes) -> list[range]:
    """For each axis of `shape` the places that a slice takes, clamped as ONNX Slice does.

    Raises the ValueError of slice_grad.
    """
    shape, starts, ends = (attributes[name] for name in ("shape", "starts", "ends"))
    axes, steps = attributes["axes"], attributes["steps"]
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    for name, values in (("ends", ends), ("axes", axes), ("steps", steps)):
        if len(values) != len(starts):
            raise ValueError(f"slice_grad: {name} has {len(values)} entries, expected {len(starts)}, as many as starts")
    found = [range(size) for size in shape]
    seen = set()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        rank = len(shape)
        if not -rank <= axis < rank:
            bounds = f"{-rank} to {rank - 1}" if rank else "no axis, as shape has none"
            raise ValueError(f"slice_grad: axes has {axis}, expected {bounds}")
        if axis % rank in seen:
            raise ValueError(f"slice_grad: axes is {axes}, expected different axes")
        if not step:
            raise ValueError(f"slice_grad: steps is {steps}, expected no 0")
        seen.add(axis % rank)
        found[axis] = range(*slice(start, end, step).indices(shape[axis]))
    return found


def room_for(count: int) -> int:
    """The rows to make room for if `count` are needed: up to an eighth more, so that similar counts share a plan."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step
