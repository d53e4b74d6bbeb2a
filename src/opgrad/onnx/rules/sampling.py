"""Sampling: elements at places of a grid, in regions of images, and where a resized image or a moved window has them.

Places are computed in the type of the grid, or in float32 if that is float16 or bfloat16. Indices of elements are
int64, because float32 represents integers exactly only up to 2**24, and float16 up to 2,048.
"""

import itertools
from collections.abc import Sequence
from functools import reduce

import numpy as np
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import Value, widened
from opgrad.onnx.rules.node import (
    Node,
    NoGradient,
    decomposition,
    gradient,
    in_float32,
    numbers_of,
    recomputed,
    sizes_of,
)

CUBIC = -0.75  # the coefficient of the cubic convolution
MODES = {"bilinear": "linear", "bicubic": "cubic"}  # names of opset 16
Tap = tuple[Value, Value | None]  # an index as a float, and its weight


@decomposition("GridSample")
def grid_sample(node: Node) -> Value:
    """y = sum of x[tap] * weight over the taps around each place."""
    x, grid, body = widened(node.x), widened(node.required(1)), node.body
    axes = len(sizes_of(x)) - 2
    mode = MODES.get(node.get("mode", "linear"), node.get("mode", "linear"))
    if mode not in ("linear", "nearest", "cubic"):
        raise NoGradient(f"its mode is {mode!r}, expected linear, nearest or cubic")
    # Columns of the grid, one for each place; the first one names places along the last axis.
    points = grid.in_shape(body.concat(grid.shape(0, 1), grid.shape(1, axes + 1).product(), body.ints([axes])))
    places = [_place(node, points.slice(axes - 1 - axis, axes - axis, 2).squeeze(2), axis) for axis in range(axes)]
    taps = [_taps(node, place, axis, mode) for axis, place in enumerate(places)]
    images = x.in_shape(body.concat(x.shape(0, 2), x.shape(2).product())).transpose(0, 2, 1)
    total = reduce(Value.__add__, (tapped(node, images, each) for each in itertools.product(*taps)))
    out = grid.shape(1, axes + 1)
    return total.transpose(0, 2, 1).in_shape(body.concat(x.shape(0, 2), out)).like(node.x)


@gradient("AffineGrid", constant=(1,))
def affine_grid(node: Node) -> Value:
    """dtheta = dy.T @ g for its square part, g the grid of the identity; the sum of dy for its last column."""
    body, dy, (axes,) = node.body, widened(node.dy), numbers_of(node.x, 1)
    dtype = dy.element_type or TensorProto.FLOAT
    identity = body.constant(np.eye(axes, axes + 1, dtype=helper.tensor_dtype_to_np_dtype(dtype))[None])
    grid = node.same(identity, body.concat(body.ints([1]), node.required(1).slice(1, axes + 2)))
    rows = dy.reshape(body.concat(node.x.shape(0, 1), body.ints([-1, axes]))).transpose(0, 2, 1)
    return body.concat(body.node("MatMul", rows, grid.reshape([-1, axes])), rows.sum([2]), axis=2)


def _count(node: Node, axis: int) -> Value:
    """The size of a spatial axis, of shape ()."""
    return node.x.shape(axis + 2, axis + 3).reshape([])


def _size(node: Node, axis: int) -> Value:
    """The size of a spatial axis, in the type of places."""
    return _count(node, axis).cast(widened(node.required(1)).element_type or TensorProto.FLOAT)


def _place(node: Node, point: Value, axis: int) -> Value:
    """Where a number from -1 to 1 lies along an axis."""
    size = _size(node, axis)
    return (point + 1) * (size - 1) * 0.5 if node.get("align_corners", 0) else ((point + 1) * size - 1) * 0.5


def _taps(node: Node, place: Value, axis: int, mode: str) -> list[Tap]:
    """The elements along an axis from which a place is interpolated, with their weights."""
    size, padding = _size(node, axis), node.get("padding_mode", "zeros")
    if mode == "nearest":
        # The weight is 1 everywhere, and depends on the place, so that the grid has a gradient: 0, as in PyTorch.
        return [(_padded(node, place, size, padding).apply("Round"), node.where(place > place, place, 1))]
    if mode == "linear":
        return linear_taps(_padded(node, place, size, padding))
    first = place.apply("Floor")
    part = place - first
    weights = [_far(part + 1), _near(part), _near(1 - part), _far(2 - part)]
    return [
        (_padded(node, first + step, size, padding), each) for step, each in zip(range(-1, 3), weights, strict=True)
    ]


def linear_taps(place: Value) -> list[Tap]:
    """The elements on both sides of a place, with their weights."""
    first = place.apply("Floor")
    part = place - first
    return [(first, 1 - part), (first + 1, part)]


def _near(t: Value) -> Value:
    """The weight of an element less than one away."""
    return ((CUBIC + 2) * t - (CUBIC + 3)) * t * t + 1


def _far(t: Value) -> Value:
    """The weight of an element one to two away."""
    return ((t - 5) * t + 8) * t * CUBIC - 4 * CUBIC


def _padded(node: Node, place: Value, size: Value, padding: str) -> Value:
    """A place that padding moves into the axis."""
    if padding == "zeros":
        return place
    if padding == "reflection":
        # A place reflected at both ends of the axis, as often as needed.
        align = node.get("align_corners", 0)
        low = 0.0 if align else -0.5
        span = size - 1 if align else size
        away = (place - low).apply("Abs")
        times = (away / span).apply("Floor")
        rest = away - times * span
        odd = (times - (times * 0.5).apply("Floor") * 2) > 0.5
        place = node.where(odd, span - rest, rest) + low
    return node.body.node("Min", node.body.node("Max", place, node.body.number(0, place)), size - 1)


def tapped(node: Node, images: Value, taps: Sequence[Tap]) -> Value:
    """The elements at one tap of every axis, times their weight; 0 for a tap outside of the image.

    node: its first input is the image, the second has the type of places. images: [N, all places, C].
    """
    flat: Value | None = None
    inside: Value | None = None
    weight: Value | None = None
    for axis, (index, part) in enumerate(taps):
        here = (index > -0.5) & (index < _size(node, axis))  # a whole number
        inside = here if inside is None else inside & here
        place = node.where(here, index, 0).cast(TensorProto.INT64)
        flat = place if flat is None else flat * _count(node, axis) + place
        weight = part if weight is None or part is None else weight * part
    assert flat is not None
    assert inside is not None
    picked = node.body.node("GatherND", images, flat.unsqueeze(2), batch_dims=1)
    if weight is not None:
        picked = picked * weight.like(images).unsqueeze(2)
    return node.where(inside.unsqueeze(2), picked, 0)


ROI, SCALES, SIZES = 1, 2, 3  # indices of inputs
FORM = (
    "mode", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "nearest_mode", "antialias", "axes",
    "keep_aspect_ratio_policy",
)  # fmt: skip


@gradient("Resize", constant=(ROI, SCALES, SIZES), integers=True)
def resize(node: Node) -> Value:
    """dx[i] = the sum of dy[o], times the weight of x[i] in y[o]."""
    crops = node.get("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    roi = node.input(ROI) if crops else None
    region = None if roi is None else roi.cast(TensorProto.FLOAT)
    return node.microsoft("ResizeGrad", node.dy, node.x.like(node.dy), region, _scales(node), **node.given(*FORM))


def _scales(node: Node) -> Value | None:
    """The scales; None where sizes are given and tell them."""
    scales, sizes = node.input(SCALES), node.input(SIZES)
    if sizes is None:
        return scales
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return None
    # One scale for all axes: the smallest, or the largest, of those that the sizes ask for.
    body, smallest = node.body, policy == "not_larger"
    axes, known = [axis % node.rank() for axis in node.get("axes") or range(node.rank())], node.constant(SIZES)
    before = [sizes_of(node.x)[axis] for axis in axes]
    if known is not None and all(isinstance(each, int) for each in before):
        found = known.astype(np.float32) / np.array(before, np.float32)
        return body.constant(np.full(len(axes), found.min() if smallest else found.max(), np.float32))
    x = body.node("Gather", node.x.shape(), body.ints(axes))
    ratios = sizes.cast(TensorProto.FLOAT) / x.cast(TensorProto.FLOAT)
    one = ratios.apply("ReduceMin" if smallest else "ReduceMax", keepdims=1)
    return one.expand(sizes.shape())


# --- regions of images, and convolutions whose windows are moved ---


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
    own = window.filled(ratio) if ratio else body.node("Max", window.apply("Ceil"), body.number(0, window))
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
    sampled = reduce(Value.__add__, picked)  # [batch * parts, taps * places, channels of a part]
    if mask is not None:
        sampled = sampled * mask.reshape(sampled.shape(0, 2)).unsqueeze(2)
    blocks = sampled.transpose(0, 2, 1).reshape(
        body.concat(node.x.shape(0, 1), body.ints([groups, -1]), space.product())
    )
    filters = weights.reshape(body.concat(body.ints([groups, -1]), weights.shape(1, 4).product()))
    y = body.node("MatMul", filters, blocks).reshape(body.concat(node.x.shape(0, 1), weights.shape(0, 1), space))
    bias = node.input(3)
    return y if bias is None else y + bias.unsqueeze(1, 2)
