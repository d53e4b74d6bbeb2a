"""The gradient of resizing."""

from typing import Annotated, Any

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, finite, one_of, operator, shaped_like
from opgrad.contract.attributes import FLOATS, Array, Attributes, Shape, Shapes, dimensions
from opgrad.ops.reference.resizing import ATTRIBUTES, COORDINATES, MODES, NEAREST_MODES, POLICIES, resized_axes

NAME = "resize_grad"


def _resized(shapes: Shapes, attributes: Attributes) -> Shape:
    """Checks dy against x and the attributes, which tell its sizes only where scales are given."""
    dy, x = shapes["dy"], shapes["x"]
    if len(dy) != len(x):
        raise ValueError(f"{NAME}: dy has {dimensions(len(dy))}, expected {len(x)}, as x has")
    resized_axes(NAME, x, dy, attributes)
    return dy


Output = Annotated[Array, Tensor(FLOATS, _resized, "what the attributes make of x", ranks=range(1, 65))]
Input = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65), dtype_of="dy")]
Mode = Annotated[str, one_of(*MODES)]
Coordinates = Annotated[str, one_of(*COORDINATES)]
NearestMode = Annotated[str, one_of(*NEAREST_MODES)]
Policy = Annotated[str, one_of(*POLICIES)]


@operator(
    "dx[i] = sum of (the weight of x[i] in y[o]) * dy[o]",
    support=IN_GRAPHS,
    results={"dx": shaped_like("x", dtype_of="dy")},
    onnx=OnnxName(
        "ResizeGrad",
        ("dy", "x", "roi?", "scales?"),
        ("dx",),
        ATTRIBUTES,
        types={"roi": ("float32",), "scales": ("float32",)},
    ),
)
def resize_grad(
    dy: Output, x: Input, roi: tuple[float, ...] = (), scales: tuple[float, ...] = (), mode: Mode = "nearest",
    coordinate_transformation_mode: Coordinates = "half_pixel", nearest_mode: NearestMode = "round_prefer_floor",
    cubic_coeff_a: Annotated[float, finite] = -0.75, exclude_outside: bool = False, antialias: bool = False,
    axes: tuple[int, ...] = (), keep_aspect_ratio_policy: Policy = "stretch", *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of resizing, in every form that ONNX's Resize has: nearest, linear and cubic, along any axes.

    dy: gradient with respect to Resize's output, of as many axes as x; float32, float64, float16 or bfloat16.
    x: Resize's input, of which only the shape counts; of the dtype of dy.
    roi: the region that coordinate_transformation_mode tf_crop_and_resize takes, all beginnings, then all ends.
    scales: as given to Resize, one for each axis; empty where it was given sizes: then they are those of dy to those
        of x.
    mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, exclude_outside, antialias, axes,
    keep_aspect_ratio_policy: as given to Resize. A policy other than stretch needs the scales that came of it.
    out: where to write; must not overlap dy or x.

    Returns dx, of the shape of x and the dtype of dy. Sums are formed in float32 (float64 for float64). Coordinates
    are those of onnxruntime, which has them in float32: the gradient is that of the neighbours that it took. What lies
    outside of the region of tf_crop_and_resize came from no element of x. The original knew four axes and mode linear.
    Raises TypeError for a wrong dtype, ValueError for shapes and attributes that do not go together.

    Formula: y[o] = sum of w[o, i] * x[i] over all i; dx[i] = sum of w[o, i] * dy[o] over all o; along several axes the
    weights are products. Source: com.microsoft ResizeGrad.

    Example:
    >>> x = np.zeros((1, 1, 2), np.float32)
    >>> dy = np.array([[[1.0, 2.0, 3.0, 4.0]]], np.float32)
    >>> opgrad.resize_grad(dy, x, scales=(1.0, 1.0, 2.0), mode="linear")
    array([[[3.25, 6.75]]], dtype=float32)
    """
    given: dict[str, Any] = {"roi": roi, "scales": scales, "axes": axes, "mode": mode, "nearest_mode": nearest_mode}
    given |= {"coordinate_transformation_mode": coordinate_transformation_mode, "cubic_coeff_a": cubic_coeff_a}
    given |= {"exclude_outside": exclude_outside, "antialias": antialias}
    given |= {"keep_aspect_ratio_policy": keep_aspect_ratio_policy}
    dx: Any = dy
    for axis, resized in resized_axes(NAME, x.shape, dy.shape, given).items():
        dx = np.moveaxis(np.tensordot(resized.matrix(), dx, (0, axis)), 0, axis)
    return np.array(dx) if dx.shape == x.shape else np.zeros(x.shape, dy.dtype)
