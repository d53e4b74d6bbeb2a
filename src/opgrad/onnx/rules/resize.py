"""Resizing: a linear map along each axis."""

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import gradient
from opgrad.onnx.rules.shaping import sizes_of

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
