"""Gradients of operators that pick elements: they are scattered back into zeros, and added where they meet."""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.plain.registry import Call, in_float32, lowers


def scatter_rows(zeros: Value, indices: Value, rows: Value) -> Value:
    """zeros[i] += row, for every i of indices, whose last axis holds the index."""
    return zeros.body.node("ScatterND", zeros, indices, rows, reduction="add")


@lowers("GatherGrad")
@in_float32(2)
def gather_grad(call: Call) -> Value:
    """dx[pre, indices, post] += dy[pre, …, post]."""
    shape, indices, dy = call.operands(3)
    axis, body, shape = call.get("axis", 0), call.body, shape.cast(TensorProto.INT64)
    if axis == 0:
        return scatter_rows(body.full(shape, 0, dy), indices.cast(TensorProto.INT64).unsqueeze(-1), dy)
    # Three axes suffice, of which the middle one is moved to the front.
    before, behind = shape.slice(0, axis).product(), _behind(shape, axis)
    flat = indices.cast(TensorProto.INT64).reshape([-1])
    rows = dy.reshape(body.concat(before, flat.shape(), behind)).transpose(1, 0, 2)
    here = shape.slice(axis, axis + 1 if axis != -1 else LAST)
    dx = scatter_rows(body.full(body.concat(here, before, behind), 0, dy), flat.unsqueeze(-1), rows)
    return dx.transpose(1, 0, 2).reshape(shape)


def _behind(shape: Value, axis: int) -> Value:
    """The product of the sizes behind an axis."""
    return shape.body.ints([1]) if axis == -1 else shape.slice(axis + 1, LAST).product()


@lowers("GatherElementsGrad")
@in_float32(0)
def gather_elements_grad(call: Call) -> Value:
    """dx[…, indices, …] += dy, element by element."""
    dy, shape, indices = call.operands(3)
    zeros = call.body.full(shape, 0, dy)
    return call.body.node("ScatterElements", zeros, indices, dy, axis=call.get("axis", 0), reduction="add")


@lowers("GatherNDGrad")
@in_float32(2)
def gather_nd_grad(call: Call) -> Value:
    """dx[indices] += dy, each index being a row of the last axis."""
    shape, indices, dy = call.operands(3)
    body, batch_dims, indices = call.body, call.get("batch_dims", 0), indices.cast(TensorProto.INT64)
    if batch_dims == 0:
        return scatter_rows(body.full(shape, 0, dy), indices, dy)
    # The batch axes become one, whose number goes before each index.
    batch = shape.slice(0, batch_dims).product()
    rest, width = shape.slice(batch_dims, LAST), indices.shape(-1)
    count = indices.shape(batch_dims, -1).product()
    number = body.range(batch.squeeze(0)).reshape([-1, 1, 1]).expand(body.concat(batch, count, body.ints([1])))
    indices = body.concat(number, indices.reshape(body.concat(batch, count, width)), axis=2)
    tail = body.node("Slice", rest, width, body.ints([LAST]))
    rows = dy.reshape(body.concat(batch, count, tail))
    return scatter_rows(body.full(body.concat(batch, rest), 0, dy), indices, rows).reshape(shape)


@lowers("SliceGrad")
def slice_grad(call: Call) -> Value:
    """dx = 0 but for dx[starts:ends:steps] = dy.

    The same Slice, applied to the numbers of the elements, tells where dy belongs, whatever its steps and signs.
    """
    dy, shape = call.operands(2)
    body = call.body
    size = shape.product().scalar()
    numbers = body.node("Slice", body.range(size).reshape(shape), *call.inputs[2:])
    zeros = body.full(size.reshape([1]), 0, dy)
    return body.node("ScatterElements", zeros, numbers.reshape([-1]), dy.reshape([-1]), axis=0).reshape(shape)
