"""The gradient of resizing, a linear map along each axis; applying Resize to unit vectors gives its matrix."""

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.lowering import Call, NoForm, Results, lowers
from opgrad.ops.pooling import ATTRIBUTES, resized_axes

ROI, SCALES = 2, 3  # indices of inputs
FORM = [name for name in ATTRIBUTES if name not in ("axes", "keep_aspect_ratio_policy")]  # of one axis
IMAGES = 2  # axes of images and channels, which the original did not resize


@lowers("ResizeGrad")
def resize_grad(call: Call) -> Results:
    """dx = matrix @ dy along each axis."""
    dx, x = call.operands(2)
    rank = len(call.input_shapes[1] or call.input_shapes[0] or ())
    if not rank:
        raise NoForm("the graph does not tell the rank of its input X")
    axes = [axis % rank for axis in call.get("axes") or range(rank)]
    for axis in sorted(axes, reverse=True):
        if (matrix := _matrix(call, axes, axis, rank)) is not None:
            dx = _along(dx, matrix, x, axis, rank)
    return dx


def _matrix(call: Call, axes: list[int], axis: int, rank: int) -> Value | None:
    """What each element along an axis gives each one of y; None where y is x."""
    dy = call.operands(1)[0]
    attributes = {name: call.get(name, default) for name, default in ATTRIBUTES.items() if name != "axes"}
    new, size = (shape[axis] if shape else None for shape in call.input_shapes[:2])
    scales, roi = (_told(call, place) for place in (SCALES, ROI))
    if new is None or size is None or scales is None or roi is None:
        if attributes["keep_aspect_ratio_policy"] != "stretch":
            raise NoForm("with its keep_aspect_ratio_policy it needs sizes that the graph tells")
        return _at_run_time(call, axes, axis) if _may_change(call, axes, axis, rank) else None
    place, count = axes.index(axis), len(axes)
    given = {"scales": scales[place : place + 1], "roi": (*roi[place : place + 1], *roi[place + count :][:1])}
    found = resized_axes("ResizeGrad", (size,), (new,), {**attributes, **given, "axes": ()})
    return call.body.constant(found[0].matrix().T).like(dy) if found else None


def _told(call: Call, place: int) -> tuple[float, ...] | None:
    """The scales or the region; () if there are none or they are not read, None if they are computed at run time."""
    if call.input(place) is None or (place == ROI and not _crops(call)):
        return ()
    known = call.constant(place)
    return () if 0 in (call.input_shapes[place] or [1]) else None if known is None else tuple(known.tolist())


def _may_change(call: Call, axes: list[int], axis: int, rank: int) -> bool:
    """Whether y may differ from x along an axis, as far as is known before the graph runs."""
    if scales := _told(call, SCALES):
        return scales[axes.index(axis)] != 1
    return not (axis < IMAGES and rank > IMAGES and len(axes) == rank)


def _crops(call: Call) -> bool:
    """Whether the region of interest is read."""
    return bool(call.get("coordinate_transformation_mode", "") == "tf_crop_and_resize")


def _at_run_time(call: Call, axes: list[int], axis: int) -> Value:
    """The matrix for a size that is known when the graph runs: the operator there, applied to unit vectors."""
    dy, x = call.operands(2)
    body, place, count = call.body, axes.index(axis), len(axes)
    size, new = x.shape(axis, axis + 1), dy.shape(axis, axis + 1)
    region = body.constant(np.array([0, 0, 1, 1], np.float32))
    if (roi := call.input(ROI)) is not None and _crops(call):
        first, last = (roi.slice(each, each + 1).cast(TensorProto.FLOAT) for each in (place, place + count))
        low, high = (body.constant(np.array([each], np.float32)) for each in (0, 1))
        region = body.concat(low, first, high, last)
    targets: list[Value | None] = [None, body.concat(size, new)]
    if (scales := call.input(SCALES)) is not None and _told(call, SCALES) != ():
        targets = [body.concat(body.constant(np.ones(1, np.float32)), scales.slice(place, place + 1)), None]
    one = body.constant(np.ones((), np.float32))  # of a type in which every runtime has the operator
    unit = one.expand(body.concat(size, size)).apply("EyeLike")
    return body.node("Resize", unit, region, *targets, **call.given(*FORM)).like(dy)


def _along(value: Value, matrix: Value, x: Value, axis: int, rank: int) -> Value:
    """matrix @ value, along one axis; what lies behind it has the sizes of x already."""
    body = value.body
    if axis == rank - 1:
        return body.node("MatMul", value, matrix.transpose(1, 0))
    if axis == rank - 2:
        return body.node("MatMul", matrix, value)
    new = matrix.shape(1, 2)
    flat = value.reshape(body.concat(body.ints([-1]), new, x.shape(axis + 1).product()))
    before = [value.shape(0, axis)] if axis else []
    return body.node("MatMul", matrix, flat).reshape(body.concat(*before, x.shape(axis)))
