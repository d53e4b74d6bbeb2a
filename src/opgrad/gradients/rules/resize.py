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
NOT_BY_REFERENCE = ("tf_half_pixel_for_nn",)  # which computes the other matrices
FORM = ("mode", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "nearest_mode", "antialias")


@gradient("Resize", constant=(ROI, SCALES, SIZES))
def resize(node: Node) -> Value:
    """dx = matrix @ dy along each axis, or the sums over the copies of each element."""
    factors = _axis_factors(node)
    copies = {axis: _copies(node, axis, factor) for axis, factor in factors.items()}
    if all(copies.values()):
        return _summed(node, {axis: count for axis, count in copies.items() if count > 1})
    dx = node.dy
    for axis in sorted(factors, reverse=True):
        size, factor = sizes_of(node.x)[axis], factors[axis]
        if copies[axis] == 1:
            continue
        if factor is None or not isinstance(size, int):
            dx = _along(node, dx, _matrix_at_run_time(node, axis), axis)
            continue
        matrix = _matrix(node, axis, size, factor)
        dx = dx if np.array_equal(matrix, np.eye(size)) else _along(node, dx, _constant(node, matrix), axis)
    return dx


def _axes(node: Node) -> list[int]:
    """The axes that scales, sizes and the region of interest are about."""
    return [axis % node.rank() for axis in node.get("axes") or range(node.rank())]


def _crops(node: Node) -> bool:
    """Whether the region of interest is read."""
    return bool(node.get("coordinate_transformation_mode", "") == "tf_crop_and_resize")


def _axis_factors(node: Node) -> dict[int, float | None]:
    """By how much each axis grows, None where the graph does not tell that; axes that stay are left out."""
    axes, scales, sizes = _axes(node), node.constant(SCALES), node.constant(SIZES)
    old, new = (dict(enumerate(each.sizes or [None] * node.rank())) for each in (node.x, node.y))
    if (_crops(node) and node.constant(ROI) is None) or node.get("coordinate_transformation_mode") in NOT_BY_REFERENCE:
        return dict.fromkeys(axes)
    if scales is not None and scales.size:
        return dict(zip(axes, scales.astype(float).tolist(), strict=True))
    if sizes is not None:
        new |= dict(zip(axes, sizes.tolist(), strict=True))
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    ratios = {
        axis: float(after) / before if isinstance(before, int) and isinstance(after, int) else None
        for axis, before, after in ((axis, old[axis], new[axis]) for axis in axes)
        if before is None or before != after or policy != "stretch" or _crops(node)
    }
    if policy != "stretch":
        known = [each for each in ratios.values() if each is not None]
        if len(known) < len(ratios):
            raise NoGradient(f"with keep_aspect_ratio_policy {policy!r} it needs sizes that the graph tells")
        ratios = dict.fromkeys(ratios, min(known) if policy == "not_larger" else max(known))
    return ratios


def _matrix(node: Node, axis: int, size: int, factor: float) -> np.ndarray:
    """What each element along an axis gives each one of the result: the operator, applied to unit vectors."""
    attributes: dict[str, Any] = {name: node.get(name) for name in FORM if node.get(name) is not None}
    if node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return _matrix_of_all(node, axis, size, attributes)
    new = _new_size(node, axis, size, factor)
    roi = node.constant(ROI)
    place = _axes(node).index(axis)
    region = [0.0, 0.0, 1.0, 1.0]
    if roi is not None and roi.size:
        region = [0.0, float(roi[place]), 1.0, float(roi[place + len(roi) // 2])]
    by_scale = node.constant(SCALES) is not None and int(np.floor(size * factor)) == new
    inputs = ["x", "roi", "scales", ""] if by_scale else ["x", "roi", "", "sizes"]
    target = np.array([1, factor], np.float32) if by_scale else np.array([size, new], np.int64)
    call = helper.make_node("Resize", inputs[: 4 if inputs[-1] else 3], ["y"], **attributes)
    unit = np.eye(size)
    return evaluate(call, [unit, np.array(region, np.float32), target], node.opset)[0].astype(np.float64)


def _matrix_of_all(node: Node, axis: int, size: int, attributes: dict[str, Any]) -> np.ndarray:
    """The same where the scale of an axis depends on all of them: unit vectors along one, constant along the others."""
    axes, sizes = _axes(node), node.required_constant(SIZES, "sizes")
    place, shape = axes.index(axis), [int(sizes_of(node.x)[each] or 0) for each in axes]
    policy = node.get("keep_aspect_ratio_policy")
    given = {**attributes, "keep_aspect_ratio_policy": policy, "axes": list(range(1, len(axes) + 1))}
    call = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **given)
    column = [size if index == place else 1 for index in range(len(axes))]
    units = np.broadcast_to(np.eye(size).reshape(size, *column), (size, *shape))
    result = evaluate(call, [units, sizes], node.opset)[0]
    return np.moveaxis(result, place + 1, 1).reshape(size, result.shape[place + 1], -1)[..., 0].astype(np.float64)


def _new_size(node: Node, axis: int, size: int, factor: float) -> int:
    known = sizes_of(node.y)[axis]
    fits = isinstance(known, int) and sizes_of(node.x)[axis] == size
    return int(known or 0) if fits else int(np.floor(size * factor + 1e-6))


def _copies(node: Node, axis: int, factor: float | None) -> int:
    """How often each element is repeated, 0 if the map is another one."""
    exact = node.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    if factor is None or not exact or factor != (count := int(factor)):
        return 0
    return count if np.array_equal(_matrix(node, axis, PROBE, factor), np.repeat(np.eye(PROBE), count, 1)) else 0


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


def _matrix_at_run_time(node: Node, axis: int) -> Value:
    """The same for a size that is known when the graph runs: the operator there, applied to unit vectors."""
    names = (*FORM, "keep_aspect_ratio_policy")
    attributes: dict[str, Any] = {name: node.get(name) for name in names if node.get(name) is not None}
    if attributes.pop("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise NoGradient("with its keep_aspect_ratio_policy it needs sizes that the graph tells")
    body, place, count = node.body, _axes(node).index(axis), len(_axes(node))
    size, new = node.x.shape(axis, axis + 1), node.y.shape(axis, axis + 1)
    roi, scales = node.input(ROI) if _crops(node) else None, node.input(SCALES)
    region = body.constant(np.array([0, 0, 1, 1], np.float32))
    if roi is not None:
        ends = (roi.slice(each, each + 1).cast(TensorProto.FLOAT) for each in (place, place + count))
        low, high = (body.constant(np.array([each], np.float32)) for each in (0, 1))
        first, last = ends
        region = body.concat(low, first, high, last)
    targets: list[Value | None] = [None, body.concat(size, new)]
    if scales is not None and node.constant(SIZES) is None and scales.sizes != [0]:
        targets = [body.concat(body.constant(np.ones(1, np.float32)), scales.slice(place, place + 1)), None]
    one = body.constant(np.ones((), np.float32))  # of a type in which every runtime has the operator
    unit = one.expand(body.concat(size, size)).apply("EyeLike")
    return body.node("Resize", unit, region, *targets, **attributes).cast(node.x.element_type or TensorProto.FLOAT)


def _constant(node: Node, matrix: np.ndarray) -> Value:
    kind = node.x.element_type or TensorProto.FLOAT
    return node.body.tensor(helper.make_tensor("", kind, matrix.shape, matrix.ravel().tolist()))


def _along(node: Node, value: Value, matrix: Value, axis: int) -> Value:
    """matrix @ value, along one axis."""
    body, rank = node.body, node.rank()
    if axis == rank - 1:
        return body.node("MatMul", value, matrix.transpose(1, 0))
    if axis == rank - 2:
        return body.node("MatMul", matrix, value)
    # What lies behind the axis becomes one axis; there all has the sizes of x already.
    new = node.y.shape(axis, axis + 1)
    flat = value.reshape(body.concat(body.ints([-1]), new, node.x.shape(axis + 1).product()))
    return body.node("MatMul", matrix, flat).reshape(body.concat(node.dy.shape(0, axis), node.x.shape(axis)))
