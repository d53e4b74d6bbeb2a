"""Shapes of gradients: what was broadcast is summed, what was reshaped gets its shape back.

Shapes that are known from the graph become constants; Reshape itself finds one unknown size, so that a single unknown
size needs no arithmetic at run time either.
"""

from collections.abc import Sequence

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.graph.sizes import Sizes, are_equal, constant_target, terms
from opgrad.onnx.rules.errors import NoGradient

ZERO_AS_SIZE = 14  # the first opset whose Reshape can be told that 0 means a size of 0, and not a size to copy


def sizes_of(value: Value) -> Sizes:
    """The sizes of a value. Raises NoGradient if not even its rank is known."""
    if value.sizes is None:
        raise NoGradient(f"the rank of {value.name!r} is not known; declare its shape in the graph's value_info")
    return value.sizes


def numbers_of(value: Value, *axes: int) -> list[int]:
    """The sizes along some axes. Raises NoGradient where the graph does not tell one as a number."""
    sizes = sizes_of(value)
    found = [size for axis in axes if isinstance(size := sizes[axis], int)]
    if len(found) < len(axes):
        raise NoGradient(f"the sizes of {value.name!r} are {list(sizes)}, expected numbers along axes {list(axes)}")
    return found


def reshape_like(value: Value, like: Value) -> Value:
    """The elements in the shape of another value."""
    if are_equal(value.sizes, like.sizes):
        return value
    wanted = terms(like.sizes)
    target = None if wanted is None else constant_target(wanted, ())
    if target is not None:
        return value.reshape(target)
    return reshape_to(value, like.shape())


def reshape_to(value: Value, shape: Value) -> Value:
    """The elements in a shape in which 0 is a size of 0, so that values without elements are reshaped, too."""
    zeros = {"allowzero": 1} if value.body.opset >= ZERO_AS_SIZE else {}
    return value.body.node("Reshape", value, shape, **zeros)


def transposed(value: Value, rank: int | None = None) -> Value:
    """The value with its last two axes exchanged. rank: if the value does not tell its own."""
    rank = len(sizes_of(value)) if rank is None else rank
    return value.transpose(*range(rank - 2), rank - 1, rank - 2)


def broadcast_to(value: Value, like: Value) -> Value:
    """Broadcast to the shape of another value."""
    return value.expand(like.shape())


def unbroadcast(value: Value, whole: Value, target: Value) -> Value:
    """Sum a gradient in the shape of `whole` to the shape of `target`, which had been broadcast to that shape."""
    if target.name == whole.name:
        return value
    axes = _summed(whole.sizes, target.sizes)
    if axes is None:
        return _unbroadcast_at_run_time(value, whole, target)
    if not axes:
        return value
    lead = len(whole.sizes or ()) - len(target.sizes or ())
    if lead == 0:
        return value.sum(axes)
    if axes == list(range(lead)):
        return value.sum(axes, keepdims=False)
    return reshape_like(value.sum(axes, keepdims=False), target)


def _summed(whole: Sizes | None, target: Sizes | None) -> list[int] | None:
    """The axes along which a value was broadcast; None if the sizes do not tell."""
    if whole is None or target is None or len(whole) < len(target):
        return None
    lead = len(whole) - len(target)
    axes = list(range(lead))
    for axis, (size, own) in enumerate(zip(whole[lead:], target, strict=True), lead):
        if own == 1 and size != 1:
            axes.append(axis)
        elif own != size or own is None:
            if isinstance(own, int):
                continue
            return None
    return axes


def _unbroadcast_at_run_time(value: Value, whole: Value, target: Value) -> Value:
    body = value.body
    axes = body.nodes_of("BroadcastGradientArgs", 2, target.shape(), whole.shape(), domain=MICROSOFT)[0]
    attributes = {"keepdims": 1, "noop_with_empty_axes": 1}
    if body.axes_are_inputs("ReduceSum"):
        total = body.node("ReduceSum", value, axes, **attributes)
    else:
        total = body.node("ReduceSumTraining", value, axes, domain=MICROSOFT, **attributes)
    return total.reshape(target.shape())


def normalized(axes: Sequence[int], rank: int) -> list[int]:
    """Axes counted from the first."""
    return sorted(axis % rank if rank else 0 for axis in axes)


def ones_like(value: Value) -> Value:
    """Ones in the shape and type of a value."""
    return filled_like(value, 1)


def filled_like(value: Value, number: float, like: Value | None = None) -> Value:
    """One number in the shape of a value, and in the type of it or of another one."""
    return value.body.number(number, like or value).expand(value.shape())


def element_count(value: Value, axes: Sequence[int] | None) -> int | None:
    """The number of elements along axes, along all if there are none given; None if it is not known."""
    if value.sizes is None:
        return None
    count = 1
    for axis in range(len(value.sizes)) if axes is None else axes:
        if not -len(value.sizes) <= axis < len(value.sizes):
            raise ValueError(f"an axis is {axis}, expected one of a tensor with {len(value.sizes)} axes")
        size = value.sizes[axis]
        if not isinstance(size, int):
            return None
        count *= size
    return count


def ratio(part: Value, whole: Value, like: Value) -> Value:
    """The size of `part` divided by that of `whole`, at run time, in the type of `like`.

    The division is in float64, which represents all sizes exactly and does not fail if a value is empty.
    """
    return (part.size().cast(TensorProto.DOUBLE) / whole.size().cast(TensorProto.DOUBLE)).like(like)
