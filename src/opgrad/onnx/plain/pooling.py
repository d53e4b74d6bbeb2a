"""Gradients of pooling. The shape of X comes from an optional input, from the forward node, or from the graph."""

import math

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.plain.convolution import Window
from opgrad.onnx.plain.registry import Call, NoForm, in_float32, lowers

LARGEST_WINDOW = 2**22  # elements that are counted one by one, when the form is written


@lowers("MaxPoolGrad", domain="")
@in_float32(0)
def max_pool_grad(call: Call) -> Value:
    """dx.flat[indices] += dy."""
    dy, indices = call.operands(2)
    given = call.input(2)
    if call.get("storage_order", 0):
        raise NoForm("storage_order is 1, for which the indices count in another order than the elements lie")
    body = call.body
    shape = given or (call.forward.shape() if call.forward is not None else body.ints(_known(call)))
    zeros = body.full(shape.product(), 0, dy)
    flat = indices.reshape([-1]), dy.reshape([-1])
    return body.node("ScatterElements", zeros, *flat, axis=0, reduction="add").reshape(shape)


def _known(call: Call) -> list[int]:
    """The shape of dX, all of it."""
    sizes = call.output_shapes[0]
    known = [each for each in sizes or () if each is not None]
    if sizes is None or len(known) < len(sizes):
        raise NoForm("the graph tells neither the shape of its output nor the forward node")
    return known


@lowers("AveragePoolGrad", domain="")
@in_float32(0)
def average_pool_grad(call: Call) -> Value:
    """Each window's dy, divided by the number of its elements, added to them all."""
    (dy,), shape, body = call.operands(1), call.input(1), call.body
    kernel = list(call.get("kernel_shape") or ())
    spatial = [each for each in (call.output_shapes[0] or ())[2:] if each is not None]
    if math.prod(kernel) > LARGEST_WINDOW:
        raise NoForm(f"its windows {tuple(kernel)} have more than {LARGEST_WINDOW} elements")
    known = len(spatial) == len(kernel)
    if not kernel or not (known or shape is not None):
        raise NoForm("the graph does not tell the spatial sizes of its output, which its inputs do not tell either")
    window, sizes = Window(call, kernel), body.ints(spatial) if shape is None or known else shape.slice(2, LAST)
    padded = [size + sum(window.pads_for(axis, size)) for axis, size in enumerate(spatial if known else ())]
    known = known and all(size * width <= LARGEST_WINDOW for size, width in zip(padded, kernel, strict=True))
    share = dy
    for axis in range(window.axes):
        column = [-1 if other == axis else 1 for other in range(window.axes)]
        counts = _counts(call, window, axis, spatial[axis]) if known else _open_counts(call, window, axis, sizes, dy)
        share = share / counts.reshape(column).like(dy)
    # Every channel of every row is treated as a separate image.
    images = share.reshape(body.concat(body.ints([-1, 1]), dy.shape(2)))
    ones = body.constant(np.ones((1, 1, *kernel))).like(dy)
    dx = window.transposed(images, ones, sizes, group=1)
    return dx.reshape(body.concat(dy.shape(0, 2), sizes))


def _counts(call: Call, window: Window, axis: int, size: int) -> Value:
    """What the average of each window along an axis of X divides by: its elements in X, or in X and its padding.

    What a window has beyond the padding, with ceil_mode, does not count.
    """
    stride, width, step = window.strides[axis], window.widths[axis], window.dilations[axis]
    begin, end = window.pads_for(axis, size)
    steps = size + begin + end - width
    last = -(-steps // stride) if call.get("ceil_mode", 0) else steps // stride
    if last * stride >= size + begin:  # no window lies in the padding alone
        last -= 1
    first, limit = (-begin, size + end) if call.get("count_include_pad", 0) else (0, size)
    starts = range(-begin, last * stride - begin + 1, stride)
    counts = [sum(first <= place < limit for place in range(start, start + width, step)) for start in starts]
    return call.body.constant(np.array(counts, np.float64))


def _open_counts(call: Call, window: Window, axis: int, sizes: Value, dy: Value) -> Value:
    """The counts of `_counts` for sizes that are only known when the graph runs."""
    body, here = call.body, (axis, axis + 1)
    begin = window.pads_before(sizes, dy.shape(2)).slice(*here)
    starts = body.range(dy.shape(2 + axis, 3 + axis).squeeze(0)) * window.strides[axis] - begin
    places = starts.unsqueeze(1) + body.ints(range(0, window.widths[axis], window.dilations[axis]))
    size = sizes.slice(*here)
    if not call.get("count_include_pad", 0):
        inside = (places < size) & ~(places < 0)
    elif window.end is None:  # the padding ends with the last window
        inside = places < places + 1
    else:
        inside = places < size + window.end[axis]
    return inside.cast(TensorProto.FLOAT).sum([1], keepdims=False)
