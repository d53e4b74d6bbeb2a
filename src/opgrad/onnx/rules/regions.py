"""Regions of images, resampled to one size, and convolutions whose windows are moved."""

import functools

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import NoGradient, in_float32, recomputed
from opgrad.onnx.rules.sampling import linear_taps, tapped
from opgrad.onnx.rules.shaping import numbers_of

FIRST_HALF_PIXEL = 16  # opset of RoiAlign whose corners are moved by half an element


@recomputed("RoiAlign", constant=(1, 2))
@in_float32
def roi_align(node: Node) -> Value:
    """y = rows @ x[image] @ columns.T of each region, the weights of the elements around what is sampled."""
    mode = node.get("mode", "avg")
    if mode != "avg":
        raise NoGradient(f"its mode is {mode!r}, expected avg")
    ratio = node.get("sampling_ratio", 0)
    half = node.get("coordinate_transformation_mode", "half_pixel") == "half_pixel" and node.opset >= FIRST_HALF_PIXEL
    corners = node.required(1) * node.get("spatial_scale", 1.0)
    corners = corners - 0.5 if half else corners
    samples = []
    for index, name in ((1, "output_height"), (0, "output_width")):
        start, end = (corners.slice(each, each + 1, 1) for each in (index, index + 2))
        length = end - start
        length = length if half else node.body.node("Max", length, node.body.number(1, length))
        samples.append(_samples(node, start, length, node.get(name, 1), ratio, 3 - index))
    images = node.body.node("Gather", node.x, node.required(2))
    rows, columns = (
        (weights / several.unsqueeze(3)).sum([2], keepdims=False).unsqueeze(1) for weights, several in samples
    )
    return node.body.node("MatMul", node.body.node("MatMul", rows, images), columns.transpose(0, 1, 3, 2))


def _samples(node: Node, start: Value, length: Value, count: int, ratio: int, axis: int) -> tuple[Value, Value]:
    """The samples of windows along an axis.

    Their weights of every element, [regions, windows, samples, size], and how many there are, at least 1.

    start, length: of the regions, each of which has so many windows. ratio: the samples of a window, 0 for one for each
    element that a region's windows are long, rounded up. Samples more than one beyond the axis are 0.
    """
    body, size = node.body, node.x.shape(axis, axis + 1).squeeze(0)
    window = (length / count).unsqueeze(2)  # [regions, 1, 1], as all that follows has an axis of windows and of samples
    own = (
        body.full(window.shape(), ratio, window)
        if ratio
        else body.node("Max", window.apply("Ceil"), body.number(0, window))
    )
    most = body.concat(own.reshape([-1]), body.number(1, window).reshape([1])).apply("ReduceMax", keepdims=0)
    steps = body.range(most.cast(TensorProto.INT64)).like(start)
    several = body.node("Max", own, body.number(1, own))
    at = start.unsqueeze(2) + window * ((steps + 0.5) / several + body.ints(range(count)).unsqueeze(1).like(start))
    last = (size - 1).like(start)
    clipped = body.node("Min", body.node("Max", at, body.number(0, at)), last)
    taken = ~(at < -1) & ~(at > last + 1) & (steps < own)
    distance = (clipped.unsqueeze(3) - body.range(size).like(start)).apply("Abs")
    share = body.node("Max", 1 - distance, body.number(0, distance))
    return node.where(taken.unsqueeze(3), share, 0), several


@recomputed("DeformConv")
@in_float32
def deform_conv(node: Node) -> Value:
    """y[n, o] = bias[o] + the sum of w[o, c, k] * x[n, c, place of k + offset[n, k]] * mask[n, k]."""
    body, weights, offset, mask = node.body, node.required(1), node.required(2), node.input(4)
    rows, columns = kernel = numbers_of(weights, 2, 3)
    groups, parts, taps = node.get("group", 1), node.get("offset_group", 1), rows * columns
    space = offset.shape(2, 4)
    moved = offset.reshape(body.concat(body.ints([-1, taps, 2]), space))  # [batch * parts, taps, 2, rows, columns]
    places = []
    for axis, order in enumerate(np.indices(kernel).reshape(2, taps)):
        stride, dilation = ((node.get(name) or [1, 1])[axis] for name in ("strides", "dilations"))
        first = order * dilation - (node.get("pads") or [0, 0, 0, 0])[axis]
        steps = body.range(space.slice(axis, axis + 1).squeeze(0)) * stride
        base = steps.unsqueeze(1 - axis) + body.constant(first.reshape(taps, 1, 1))
        places.append((moved.slice(axis, axis + 1, 2).squeeze(2) + base.like(moved)).flatten(1))
    images = node.x.reshape(body.concat(node.x.shape(0, 1) * parts, body.ints([-1]), node.x.shape(2, 4).product()))
    near = [linear_taps(each) for each in places]
    picked = [tapped(node, images.transpose(0, 2, 1), (top, left)) for top in near[0] for left in near[1]]
    sampled = functools.reduce(Value.__add__, picked)  # [batch * parts, taps * places, channels of a part]
    if mask is not None:
        sampled = sampled * mask.reshape(sampled.shape(0, 2)).unsqueeze(2)
    blocks = sampled.transpose(0, 2, 1).reshape(
        body.concat(node.x.shape(0, 1), body.ints([groups, -1]), space.product())
    )
    filters = weights.reshape(body.concat(body.ints([groups, -1]), weights.shape(1, 4).product()))
    y = body.node("MatMul", filters, blocks).reshape(body.concat(node.x.shape(0, 1), weights.shape(0, 1), space))
    bias = node.input(3)
    return y if bias is None else y + bias.unsqueeze(1, 2)
