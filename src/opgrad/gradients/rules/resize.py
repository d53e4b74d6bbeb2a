"""Resizing: along each axis a linear map, whose matrix the operator itself tells."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from opgrad.gradients.forward import evaluate
from opgrad.gradients.node import Node
from opgrad.gradients.registry import NoGradient, gradient
from opgrad.gradients.shaping import sizes_of
from opgrad.onnxruntime.bodies.build import Value

ROI, SCALES, SIZES = 1, 2, 3  # places of inputs
PROBE = 6  # elements along an axis whose size is not known


@gradient("Resize", constant=(ROI, SCALES, SIZES))
def resize(node: Node) -> Value:
    """dx = matrix @ dy along each axis, or the sums over the copies of each element."""
    factors = _axis_factors(node)
    copies = {axis: _copies(_matrix(node, axis, PROBE, factor)) for axis, factor in factors.items()}
    if all(copies.values()):
        return _summed(node, {axis: count for axis, count in copies.items() if count and count > 1})
    dx = node.dy
    for axis in sorted(factors, reverse=True):
        size = sizes_of(node.x)[axis]
        if not isinstance(size, int):
            raise NoGradient(f"the size of axis {axis} of its input is not known; declare a fixed one")
        matrix = _matrix(node, axis, size, factors[axis])
        dx = dx if np.array_equal(matrix, np.eye(size)) else _along(node, dx, matrix, axis)
    return dx


def _axes(node: Node) -> list[int]:
    """The axes that scales, sizes and the region of interest are about."""
    return [axis % node.rank() for axis in node.get("axes") or range(node.rank())]


def _axis_factors(node: Node) -> dict[int, float]:
    """By how much each axis grows. Raises NoGradient where the graph does not tell that."""
    for place, what in ((ROI, "region of interest"), (SCALES, "scales")):
        read = place != ROI or node.get("coordinate_transformation_mode") == "tf_crop_and_resize"
        if read and node.input(place) is not None and node.constant(place) is None:
            raise NoGradient(f"its {what} are computed at run time, expected a constant")
    axes, scales = _axes(node), node.constant(SCALES)
    if scales is not None and scales.size:
        return dict(zip(axes, scales.astype(float).tolist(), strict=True))
    sizes = node.constant(SIZES)
    given = sizes_of(node.x)
    if sizes is None or not all(isinstance(given[axis], int) for axis in axes):
        known = sizes_of(node.y)
        if not all(isinstance(each[axis], int) for each in (given, known) for axis in axes):
            raise NoGradient("its scales are not known; give it constant scales, or an input of fixed size")
        sizes = np.array([known[axis] for axis in axes])
    ratios = [float(new) / int(given[axis] or 1) for axis, new in zip(axes, sizes, strict=True)]
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        ratios = [min(ratios) if policy == "not_larger" else max(ratios)] * len(ratios)
    return dict(zip(axes, ratios, strict=True))


def _matrix(node: Node, axis: int, size: int, factor: float) -> np.ndarray:
    """What each element along an axis gives each one of the result: the operator, applied to unit vectors."""
    names = ("mode", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "nearest_mode", "antialias")
    attributes: dict[str, Any] = {name: node.get(name) for name in names if node.get(name) is not None}
    new = _new_size(node, axis, size, factor)
    roi = node.constant(ROI)
    place = _axes(node).index(axis)
    region = [0.0, 0.0, 1.0, 1.0]
    if roi is not None and roi.size:
        region = [0.0, float(roi[place]), 1.0, float(roi[place + len(roi) // 2])]
    exact = node.constant(SCALES) is not None or node.get("keep_aspect_ratio_policy", "stretch") != "stretch"
    by_scale = exact and int(np.floor(size * factor)) == new
    inputs = ["x", "roi", "scales", ""] if by_scale else ["x", "roi", "", "sizes"]
    target = np.array([1, factor], np.float32) if by_scale else np.array([size, new], np.int64)
    call = helper.make_node("Resize", inputs[: 4 if inputs[-1] else 3], ["y"], **attributes)
    unit = np.eye(size)
    return evaluate(call, [unit, np.array(region, np.float32), target], node.opset)[0].astype(np.float64)


def _new_size(node: Node, axis: int, size: int, factor: float) -> int:
    known = sizes_of(node.y)[axis]
    fits = isinstance(known, int) and sizes_of(node.x)[axis] == size
    return int(known or 0) if fits else int(np.floor(size * factor + 1e-6))


def _copies(matrix: np.ndarray) -> int:
    """How often each element is repeated, 0 if the map is another one."""
    size, new = matrix.shape
    count = new // size
    return count if new == count * size and np.array_equal(matrix, np.repeat(np.eye(size), count, 1)) else 0


def _summed(node: Node, copies: dict[int, int]) -> Value:
    """The sum over all copies of each element."""
    if not copies:
        return node.dy
    body, parts, summed = node.body, [], []
    for axis in range(node.rank()):
        parts.append(node.x.shape(axis, axis + 1))
        if axis in copies:
            summed.append(len(parts))
            parts.append(body.ints([copies[axis]]))
    return node.dy.reshape(body.concat(*parts)).sum(summed, keepdims=False)


def _along(node: Node, value: Value, matrix: np.ndarray, axis: int) -> Value:
    """matrix @ value, along one axis."""
    body, rank = node.body, node.rank()
    kind = node.x.element_type or TensorProto.FLOAT
    if axis == rank - 1:
        right = helper.make_tensor("", kind, matrix.T.shape, matrix.T.ravel().tolist())
        return body.node("MatMul", value, body.tensor(right))
    left = body.tensor(helper.make_tensor("", kind, matrix.shape, matrix.ravel().tolist()))
    if axis == rank - 2:
        return body.node("MatMul", left, value)
    # What lies behind the axis becomes one axis; there all has the sizes of x already.
    flat = value.reshape(body.concat(body.ints([-1, matrix.shape[1]]), node.x.shape(axis + 1).product()))
    return body.node("MatMul", left, flat).reshape(body.concat(node.dy.shape(0, axis), node.x.shape(axis)))
