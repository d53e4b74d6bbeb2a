"""Gradients of pooling. Their nodes do not tell the shape of X: the forward node or the graph must."""

import math

import numpy as np

from opgrad.onnxruntime.bodies.build import Value
from opgrad.onnxruntime.bodies.convolution import Window
from opgrad.onnxruntime.bodies.forms import Call, NoForm, lowers


@lowers("MaxPoolGrad", domain="", forward="MaxPool")
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
    ones = body.constant(np.ones((1, 1, *kernel))).like(dy)
    share = dy / math.prod(kernel)
    if not call.get("count_include_pad", 0):
        # The average of ones over a window that counts its padding as 0 is the part of it that lies in X.
        inside = body.constant(np.ones((1, 1, *spatial))).like(dy)
        pads = {key: call.attributes[key] for key in ("auto_pad", "pads", "ceil_mode") if call.get(key)}
        share = share / body.node(
            "AveragePool", inside, kernel_shape=kernel, strides=window.strides, count_include_pad=1, **pads
        )
    # Every channel of every row is an image of its own.
    images = share.reshape(body.concat(body.ints([-1, 1]), dy.shape(2)))
    dx = window.transposed(images, ones, body.ints(spatial), group=1)
    return dx.reshape(body.concat(dy.shape(0, 2), body.ints(spatial)))
