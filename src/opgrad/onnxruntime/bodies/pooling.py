"""Gradients of pooling. Their nodes do not tell the shape of X: the forward node or the graph must."""

import numpy as np

from opgrad.onnxruntime.bodies.build import Value
from opgrad.onnxruntime.bodies.convolution import Window
from opgrad.onnxruntime.bodies.forms import Call, NoForm, lowers
from opgrad.onnxruntime.bodies.gather import added_in_float32


@lowers("MaxPoolGrad", domain="", forward="MaxPool")
@added_in_float32(dy=0)
def max_pool_grad(call: Call) -> Value:
    """dx.flat[indices] += dy."""
    dy, indices = call.required(2)
    if call.get("storage_order", 0):
        raise NoForm("storage_order is 1, for which the indices count in another order than the elements lie")
    body = call.body
    shape = call.forward.shape() if call.forward is not None else body.ints(_known(call))
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
def average_pool_grad(call: Call) -> Value:
    """Each window's dy, divided by the number of its elements, added to them all."""
    (dy,) = call.required(1)
    sizes = call.output_shapes[0]
    kernel = list(call.get("kernel_shape") or ())
    spatial = [each for each in (sizes or ())[2:] if each is not None]
    if sizes is None or not kernel or len(spatial) < len(kernel):
        raise NoForm("the graph does not tell the spatial sizes of its output, which its inputs do not tell either")
    body, window = call.body, Window(call, kernel)
    share = dy
    for axis, size in enumerate(spatial):
        counts = _counts(window, axis, size, bool(call.get("count_include_pad", 0)), bool(call.get("ceil_mode", 0)))
        column = [len(counts) if other == axis else 1 for other in range(window.axes)]
        share = share / body.constant(np.array(counts, np.float64).reshape(column)).like(dy)
    # Every channel of every row is an image of its own.
    images = share.reshape(body.concat(body.ints([-1, 1]), dy.shape(2)))
    ones = body.constant(np.ones((1, 1, *kernel))).like(dy)
    dx = window.transposed(images, ones, body.ints(spatial), group=1)
    return dx.reshape(body.concat(dy.shape(0, 2), body.ints(spatial)))


def _counts(window: Window, axis: int, size: int, include_pad: bool, ceil_mode: bool) -> list[int]:
    """What the average of each window along an axis of X divides by: its elements in X, or in X and its padding.

    What a window has beyond the padding, with ceil_mode, does not count.
    """
    stride, width, step = window.strides[axis], window.widths[axis], window.dilations[axis]
    begin, end = window.pads_for(axis, size)
    steps = size + begin + end - width
    last = -(-steps // stride) if ceil_mode else steps // stride
    if last * stride >= size + begin:  # no window lies in the padding alone
        last -= 1
    first, limit = (-begin, size + end) if include_pad else (0, size)
    starts = range(-begin, last * stride - begin + 1, stride)
    return [sum(first <= place < limit for place in range(start, start + width, step)) for start in starts]
