"""Gradients of operators that pick elements: they are scattered back into zeros, and added where they meet."""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.plain.lowering import Call, NoForm, Results, in_float32, lowers


def scatter_rows(zeros: Value, indices: Value, rows: Value) -> Value:
    """zeros[i] += row, for every i of indices, whose last axis holds the index."""
    return zeros.body.node("ScatterND", zeros, indices, rows, reduction="add")


@lowers("GatherGrad")
@in_float32(2)
def gather_grad(call: Call, shape: Value, indices: Value, dy: Value) -> Value:
    """dx[pre, indices, post] += dy[pre, …, post]."""
    axis, body, shape = call.get("axis", 0), call.body, shape.cast(TensorProto.INT64)
    if axis == 0:
        return scatter_rows(body.full(shape, 0, dy), indices.cast(TensorProto.INT64).unsqueeze(-1), dy)
    # Three axes suffice, of which the middle one is moved to the front.
    before = shape.slice(0, axis).product()
    behind = body.ints([1]) if axis == -1 else shape.slice(axis + 1, LAST).product()
    flat = indices.cast(TensorProto.INT64).reshape([-1])
    rows = dy.in_shape(body.concat(before, flat.shape(), behind)).transpose(1, 0, 2)
    here = shape.slice(axis, axis + 1 if axis != -1 else LAST)
    dx = scatter_rows(body.full(body.concat(here, before, behind), 0, dy), flat.unsqueeze(-1), rows)
    return dx.transpose(1, 0, 2).in_shape(shape)


@lowers("GatherElementsGrad")
@in_float32(0)
def gather_elements_grad(call: Call, dy: Value, shape: Value, indices: Value) -> Value:
    """dx[…, indices, …] += dy, element by element."""
    zeros = call.body.full(shape, 0, dy)
    return call.body.node("ScatterElements", zeros, indices, dy, axis=call.get("axis", 0), reduction="add")


@lowers("GatherNDGrad")
@in_float32(2)
def gather_nd_grad(call: Call, shape: Value, indices: Value, dy: Value) -> Value:
    """dx[indices] += dy, each index being a row of the last axis."""
    body, batch_dims, indices = call.body, call.get("batch_dims", 0), indices.cast(TensorProto.INT64)
    if batch_dims == 0:
        return scatter_rows(body.full(shape, 0, dy), indices, dy)
    # The batch axes become one, whose number goes before each index.
    batch = shape.slice(0, batch_dims).product()
    rest, width = shape.slice(batch_dims, LAST), indices.shape(-1)
    count = indices.shape(batch_dims, -1).product()
    number = body.range(batch.squeeze(0)).reshape([-1, 1, 1]).expand(body.concat(batch, count, body.ints([1])))
    indices = body.concat(number, indices.in_shape(body.concat(batch, count, width)), axis=2)
    tail = body.node("Slice", rest, width, body.ints([LAST]))
    rows = dy.in_shape(body.concat(batch, count, tail))
    return scatter_rows(body.full(body.concat(batch, rest), 0, dy), indices, rows).in_shape(shape)


@lowers("SliceGrad")
def slice_grad(call: Call, dy: Value, shape: Value) -> Value:
    """dx = 0 but for dx[starts:ends:steps] = dy.

    The same Slice, applied to the numbers of the elements, tells where dy belongs, whatever its steps and signs.
    """
    body = call.body
    size = shape.product().scalar()
    numbers = body.node("Slice", body.range(size).in_shape(shape), *call.inputs[2:])
    zeros = body.full(size.reshape([1]), 0, dy)
    return body.node("ScatterElements", zeros, numbers.reshape([-1]), dy.reshape([-1]), axis=0).in_shape(shape)


@lowers("ConcatTraining")
def concat_training(call: Call) -> Results:
    """The inputs behind each other along an axis, and the length of each."""
    parts, axis = call.operands(len(call.inputs)), call.get("axis")
    if axis is None:
        raise NoForm("it has no attribute axis")
    lengths = [part.shape(axis, None if axis == -1 else axis + 1) for part in parts]
    return call.body.concat(*parts, axis=axis), call.body.concat(*lengths)


lowers("SplitTraining")(
    lambda call, x, lengths: call.body.nodes_of("Split", call.outputs, x, lengths, axis=call.get("axis", 0))
)


@lowers("ReduceSumTraining")
def reduce_sum_training(call: Call, x: Value, axes: Value) -> Value:
    """The sum over the axes that are an input."""
    keepdims, noop = call.get("keepdims", 1), call.get("noop_with_empty_axes", 0)
    return call.body.node("ReduceSum", x, axes, keepdims=keepdims, noop_with_empty_axes=noop)


def _reduce_axes(a_shape: Value, b_shape: Value) -> Value:
    """The axes of the broadcast shape that a lacks, or along which it has size 1 and b another; the last one first."""
    body = a_shape.body
    a, b = (shape.slice(-1, -LAST, step=-1) for shape in (a_shape, b_shape))  # the last axis first
    rank = body.node("Max", a.shape(), b.shape())
    # -1 stands for an axis that is missing.
    a, b = (body.node("Pad", x, body.concat(body.ints([0]), rank - x.shape()), body.number(-1, x)) for x in (a, b))
    summed = a.equals(-1) | (a.equals(1) & ~(b.equals(1) | b.equals(-1)))
    return rank - 1 - summed.apply("NonZero").reshape([-1])


lowers("BroadcastGradientArgs")(
    lambda call, a_shape, b_shape: [_reduce_axes(a_shape, b_shape), _reduce_axes(b_shape, a_shape)]
)


def _summed_like(grad: Value, x: Value, other: Value) -> Value:
    """The gradient summed over what broadcasting x repeated."""
    return grad.sum(_reduce_axes(x.shape(), other.shape())).reshape(x.shape())


lowers("DivGrad")(lambda call, dy, a, b: [_summed_like(dy / b, a, b), _summed_like(-dy * a / (b * b), b, a)])
