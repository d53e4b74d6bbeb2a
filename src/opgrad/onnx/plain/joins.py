"""Joining, splitting and summing arrays, and the axes over which a broadcast operand's gradient is summed."""

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.plain.registry import Call, NoForm, Results, lowers


@lowers("ConcatTraining")
def concat_training(call: Call) -> Results:
    """The inputs behind each other along an axis, and the length of each."""
    parts, axis = call.operands(len(call.inputs)), call.get("axis")
    if axis is None:
        raise NoForm("it has no attribute axis")
    lengths = [part.shape(axis, None if axis == -1 else axis + 1) for part in parts]
    return call.body.concat(*parts, axis=axis), call.body.concat(*lengths)


@lowers("SplitTraining")
def split_training(call: Call) -> Results:
    """Parts of these lengths along an axis."""
    x, lengths = call.operands(2)
    return call.body.nodes_of("Split", call.outputs, x, lengths, axis=call.get("axis", 0))


@lowers("ReduceSumTraining")
def reduce_sum_training(call: Call) -> Value:
    """The sum over the axes that are an input."""
    x, axes = call.operands(2)
    keepdims, noop = call.get("keepdims", 1), call.get("noop_with_empty_axes", 0)
    return call.body.node("ReduceSum", x, axes, keepdims=keepdims, noop_with_empty_axes=noop)


def _reduce_axes(a_shape: Value, b_shape: Value) -> Value:
    """The axes of the broadcast shape that a lacks, or along which it has size 1 and b another; the last one first."""
    body = a_shape.body
    a, b = (shape.slice(-1, -LAST, step=-1) for shape in (a_shape, b_shape))  # the last axis first
    rank = body.node("Max", a.shape(), b.shape())
    a, b = (_padded(sizes, rank) for sizes in (a, b))
    summed = a.equals(-1) | (a.equals(1) & ~(b.equals(1) | b.equals(-1)))
    return rank - 1 - summed.apply("NonZero").reshape([-1])


def _padded(sizes: Value, rank: Value) -> Value:
    """With -1 for every axis that is missing."""
    body = sizes.body
    return body.node("Pad", sizes, body.concat(body.ints([0]), rank - sizes.shape()), body.number(-1, sizes))


@lowers("BroadcastGradientArgs")
def broadcast_gradient_args(call: Call) -> Results:
    """For each of two shapes that are broadcast, the axes to sum over."""
    a_shape, b_shape = call.operands(2)
    return _reduce_axes(a_shape, b_shape), _reduce_axes(b_shape, a_shape)


def _summed_like(grad: Value, x: Value, other: Value) -> Value:
    """The gradient summed over what broadcasting x repeated."""
    return grad.sum(_reduce_axes(x.shape(), other.shape())).reshape(x.shape())


@lowers("DivGrad")
def div_grad(call: Call) -> Results:
    """da = dy / b and db = -dy * a / b², summed over the axes along which they were broadcast."""
    dy, a, b = call.operands(3)
    return _summed_like(dy / b, a, b), _summed_like(-dy * a / (b * b), b, a)
