"""Regions of images, resampled to one size."""

import numpy as np

from opgrad.graph.formulas import Value
from opgrad.rules.node import Node
from opgrad.rules.registry import NoGradient, in_float32, recomputed

FIRST_HALF_PIXEL = 16  # opset of RoiAlign whose corners are moved by half an element


@recomputed("RoiAlign", constant=(1, 2))
@in_float32
def roi_align(node: Node) -> Value:
    """y = rows @ x[image] @ columns.T of each region, the weights of the elements around what is sampled."""
    ratio = node.get("sampling_ratio", 0)
    if node.get("mode", "avg") != "avg" or ratio == 0:
        raise NoGradient("it takes maxima, or as many samples as fit, expected mode 'avg' and a sampling_ratio")
    half = node.get("coordinate_transformation_mode", "half_pixel") == "half_pixel" and node.opset >= FIRST_HALF_PIXEL
    corners = node.required(1) * node.get("spatial_scale", 1.0)
    corners = corners - 0.5 if half else corners
    weights = []
    for place, name in ((1, "output_height"), (0, "output_width")):
        start, end = (corners.slice(each, each + 1, 1) for each in (place, place + 2))
        length = end - start
        length = length if half else node.body.node("Max", length, node.body.number(1, length))
        weights.append(_shares(node, start, length, node.get(name, 1), ratio, 3 - place))
    images, (rows, columns) = node.body.node("Gather", node.x, node.required(2)), weights
    return node.body.node("MatMul", node.body.node("MatMul", rows, images), columns.transpose(0, 1, 3, 2))


def _shares(node: Node, start: Value, length: Value, count: int, ratio: int, axis: int) -> Value:
    """The weight of every element along an axis in the mean of each window's samples, [regions, 1, windows, size]."""
    body, size = node.body, node.x.shape(axis, axis + 1).squeeze(0)
    samples = body.constant((np.arange(count * ratio) + 0.5) / (count * ratio)).like(start)
    at, last = start + length * samples, (size - 1).like(start)
    inside = ~(at < -1) & ~(at > last + 1)
    clipped = body.node("Min", body.node("Max", at, body.number(0, at)), last)
    near = 1 - (clipped.unsqueeze(2) - body.range(size).like(start)).apply("Abs")
    share = node.where(inside.unsqueeze(2), body.node("Max", near, body.number(0, near)), 0)
    windows = share.reshape(body.concat(body.ints([-1, count, ratio]), size.reshape([1])))
    return windows.mean(2).transpose(0, 2, 1, 3)
