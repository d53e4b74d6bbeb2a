"""Functions of shapes that operators and their kernels share: which axes are summed, broadcast, sliced.

Messages begin with the name of the operator that was called.
"""

from collections.abc import Sequence
from itertools import zip_longest

from opgrad.contract.dtypes import Array, Attributes, Shape


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
