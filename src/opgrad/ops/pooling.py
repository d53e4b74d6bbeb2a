"""The gradients of pooling and of resizing."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Sizes, Tensor, finite, one_of, operator, shaped_like
from opgrad.contract.attributes import FLOATS, Array, Attributes, Shape, Shapes, dimensions
from opgrad.ops.reference.windows import MOST_AXES, average_pool_axes, axes

ONNX_ATTRIBUTES = {
    "kernel_shape": (),
    "strides": (),
    "pads": (),
    "dilations": (),
    "auto_pad": "NOTSET",
    "ceil_mode": 0,
    "count_include_pad": 0,
}
RANKS = range(3, 3 + MOST_AXES)


def _checked_shape(operator: str, attributes: Mapping[str, Any]) -> Shape:
    """The attribute `shape`: batch, channels and one to three axes."""
    shape: Shape = attributes["shape"]
    if len(shape) not in RANKS:
        raise ValueError(f"{operator}: shape is {shape}, expected {RANKS[0]} to {RANKS[-1]} sizes")
    return shape


def _averaged(_: Shapes, attributes: Attributes) -> Shape:
    shape = _checked_shape("average_pool_grad", attributes)
    return shape[:2] + tuple(axis.count for axis in average_pool_axes(attributes))


def _of_indices(shapes: Shapes, attributes: Attributes) -> Shape:
    shape, dy = _checked_shape("max_pool_grad", attributes), shapes["dy"]
    if attributes["storage_order"] not in (0, 1):
        raise ValueError(f"max_pool_grad: storage_order is {attributes['storage_order']}, expected 0 or 1")
    if len(dy) != len(shape) or dy[:2] != shape[:2]:
        expected = f"({', '.join(map(str, shape[:2]))}, …) of {len(shape)} dimensions"
        raise ValueError(f"max_pool_grad: dy has shape {dy}, expected {expected}, images and channels of shape")
    return dy


Pooled = Annotated[Array, Tensor(FLOATS, ranks=RANKS)]
Averaged = Annotated[Array, Tensor(FLOATS, _averaged, "what the attributes make of shape", ranks=RANKS)]
Indices = Annotated[Array, Tensor(("int64",), _of_indices, "the shape of dy")]
DX = Tensor(FLOATS, lambda _, attributes: attributes["shape"], "the argument shape", dtype_of="dy")


@operator(
    support=IN_GRAPHS,
    results={"dx": DX},
    onnx=OnnxName(
            "MaxPoolGrad", ("dy", "indices", "shape?"), ("dx",), {"storage_order": 0}, origin="", shape_of="dx",
        ),
)  # fmt: skip
def max_pool_grad(
    dy: Pooled, indices: Indices, shape: Sizes, storage_order: int = 0, *, out: Array | None = None
) -> Array:
    """Gradient of max pooling: each window's gradient goes to the element that was its largest.

    dy: gradient with respect to MaxPool's output, N x C x one to three axes; float32, float64, float16 or bfloat16.
    indices: MaxPool's output Indices, of the shape of dy; int64, the place of each window's largest element when
        all of x lies in one row. Each must lie in its own image and channel.
    shape: the shape of MaxPool's input x, with the images and channels of dy.
    storage_order: as given to MaxPool; 1: each channel's elements are counted with the first axis fastest.

    Returns dx of the given shape and dy's dtype. What several windows give one element is added in float32 (float64 for
    float64) in the order of dy.

    Formula: dx = 0; dx[indices[j]] += dy[j]. Source: ai.onnx MaxPoolGrad.

    Example:
    >>> dy = np.array([[[1.0, 2.0]]], np.float32)
    >>> indices = np.array([[[1, 2]]])  # where MaxPool found its two maxima
    >>> opgrad.max_pool_grad(dy, indices, (1, 1, 4))
    array([[[0., 1., 2., 0.]]], dtype=float32)
    """
    dx = np.zeros(shape, dy.dtype)
    places = indices.ravel()
    if storage_order:
        plane = math.prod(shape[2:])
        places = places // plane * plane + np.arange(plane).reshape(shape[2:]).ravel("F")[places % plane]
    np.add.at(dx.reshape(-1), places, dy.ravel())
    return dx


@operator(
    support=IN_GRAPHS,
    results={"dx": DX},
    onnx=OnnxName("AveragePoolGrad", ("dy", "shape?"), ("dx",), ONNX_ATTRIBUTES, origin="", shape_of="dx"),
)
def average_pool_grad(
    dy: Averaged, shape: Sizes, kernel_shape: tuple[int, ...], strides: tuple[int, ...] = (),
    pads: tuple[int, ...] = (), auto_pad: str = "NOTSET", ceil_mode: bool = False, count_include_pad: bool = False,
    dilations: tuple[int, ...] = (), *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of average pooling: each window's gradient is shared out evenly among its elements.

    dy: gradient with respect to AveragePool's output, N x C x one to three axes, as many windows as the attributes
        make of shape; float32, float64, float16 or bfloat16.
    shape: the shape of AveragePool's input x.
    kernel_shape, strides, pads, auto_pad, ceil_mode, count_include_pad, dilations: as given to AveragePool: one
        number for each axis, two for pads (all beginnings, then all ends); empty: strides and dilations of 1, no pads.
        pads count with auto_pad NOTSET alone.

    Returns dx of the given shape and dy's dtype, 0 where there is no window; sums are formed in float32 (float64 for
    float64). With count_include_pad a window's elements on the padding count, those beyond it do not, as in
    onnxruntime's AveragePool; its original gradient divides by the whole window there.

    Formula: dx[i] = sum of dy[o] / (elements of window o) over the windows o that i is in.
    Source: ai.onnx AveragePoolGrad.

    Example:
    >>> dy = np.array([[[1.0, 2.0]]], np.float32)
    >>> opgrad.average_pool_grad(dy, (1, 1, 4), (2,), strides=(2,))
    array([[[0.5, 0.5, 1. , 1. ]]], dtype=float32)
    """
    dx = np.zeros(shape, dy.dtype)
    along = axes("average_pool_grad", shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    for window in itertools.product(*(range(axis.count) for axis in along)):
        pairs = list(zip(along, window, strict=True))
        inside = [axis.elements(o) for axis, o in pairs]
        count = math.prod(axis.padded(o) for axis, o in pairs) if count_include_pad else math.prod(map(len, inside))
        if count:
            places = np.ix_(*(np.arange(size) for size in dx.shape[:2]), *map(np.array, inside))
            share: Array = np.moveaxis(dy, (0, 1), (-2, -1))[window] / count
            dx[places] += share.reshape(*dy.shape[:2], *(1 for _ in along))
    return dx


MODES = ("nearest", "linear", "cubic")
CROP = "tf_crop_and_resize"
COORDINATES = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
    *("tf_half_pixel_for_nn", CROP),
)
NEAREST_MODES = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
POLICIES = ("stretch", "not_larger", "not_smaller")
# The attributes of ONNX's Resize with their defaults.
ATTRIBUTES: Mapping[str, Any] = {
    "mode": "nearest",
    "coordinate_transformation_mode": "half_pixel",
    "nearest_mode": "round_prefer_floor",
    "cubic_coeff_a": -0.75,
    "exclude_outside": 0,
    "antialias": 0,
    "axes": (),
    "keep_aspect_ratio_policy": "stretch",
}
HALF, ONE = np.float32(0.5), np.float32(1)


@dataclass(frozen=True)
class Resized:
    """An axis: y[o] = the sum of weights[o, j] * x[places[o, j]]."""

    size: int
    places: Array
    weights: Array

    @property
    def count(self) -> int:
        """The elements of y."""
        return len(self.places)

    def matrix(self) -> Array:
        """The weights as a matrix: y = matrix @ x along the axis."""
        found = np.zeros((self.count, self.size))
        np.add.at(found, (np.arange(self.count)[:, None], self.places), self.weights)
        return found


def resized_axes(
    operator: str, x: tuple[int, ...], y: tuple[int, ...], attributes: Mapping[str, Any]
) -> dict[int, Resized]:
    """The axes along which y is not x; the operator's ValueError for shapes and attributes that do not go together."""
    rank, given, scales, roi = len(x), attributes["axes"], attributes["scales"], attributes["roi"]
    axes = [axis % rank for axis in given if -rank <= axis < rank]
    if len(set(axes)) < len(given):
        raise ValueError(f"{operator}: axes is {given}, expected different ones from {-rank} to {rank - 1}")
    axes = axes or list(range(rank))
    for name, values, wanted in (("scales", scales, len(axes)), ("roi", roi, 2 * len(axes))):
        if values and len(values) != wanted:
            raise ValueError(f"{operator}: {name} has {len(values)} numbers, expected {wanted}")
        if not all(math.isfinite(each) and (each > 0 or name == "roi") for each in values):
            expected = "finite ones above 0" if name == "scales" else "finite ones"
            raise ValueError(f"{operator}: {name} is {values}, expected {expected}")
    if attributes["coordinate_transformation_mode"] == CROP and not roi:
        raise ValueError(f"{operator}: roi is empty, expected the region that {CROP} takes")
    if attributes["antialias"] and attributes["mode"] == "nearest":
        raise ValueError(f"{operator}: antialias is True, expected mode linear or cubic with it, not nearest")
    policy = attributes["keep_aspect_ratio_policy"]
    if policy != "stretch" and not scales:
        raise ValueError(f"{operator}: keep_aspect_ratio_policy is {policy}, expected scales with it: sizes lack them")
    for axis, (size, count) in enumerate(zip(x, y, strict=True)):
        scale = scales[axes.index(axis)] if scales and axis in axes else None
        if (axis not in axes and size != count) or (scale is not None and abs(size * scale - count) > 1):
            expected = f"{size} * {scale:.6g} elements" if scale else f"{size} elements, as axes leaves it out"
            raise ValueError(f"{operator}: dy has {count} elements along axis {axis}, expected {expected}")
    found = {}
    for place, axis in enumerate(axes):
        size, count = x[axis], y[axis]
        factor = np.float32(scales[place]) if scales else np.float32(count) / np.float32(max(size, 1))
        region = (roi[place], roi[place + len(axes)]) if roi else (0.0, 1.0)
        if size and count and (factor != 1 or size != count):
            found[axis] = _resized(size, count, factor, region, attributes)
    return found


def _resized(
    size: int, count: int, scale: np.float32, region: tuple[float, float], attributes: Mapping[str, Any]
) -> Resized:
    at = _coordinates(size, count, scale, region, attributes["coordinate_transformation_mode"])
    mode = attributes["mode"]
    outside = (at < 0) | (at > size - 1)
    if mode == "nearest":
        places, weights = _nearest(at, attributes["nearest_mode"])[:, None], np.ones((count, 1))
    else:
        if mode == "linear":
            at = np.clip(at, 0, size - 1)
        spread = max(1.0, 1.0 / float(scale)) if attributes["antialias"] else 1.0
        places, weights = _around(at, spread, mode, attributes["cubic_coeff_a"])
    if attributes["exclude_outside"]:
        weights = np.where((places < 0) | (places >= size), 0.0, weights)
    weights = weights / weights.sum(1, keepdims=True)
    if attributes["coordinate_transformation_mode"] == CROP:
        weights[outside] = 0.0
    return Resized(size, np.clip(places, 0, size - 1), weights)


def _coordinates(size: int, count: int, scale: np.float32, region: tuple[float, float], mode: str) -> Array:
    """The coordinates on x of y's elements, in float32 as in onnxruntime, so that both round to the same neighbours."""
    o, n = np.arange(count, dtype=np.float32), np.float32(size)
    if mode in ("align_corners", CROP) and count == 1:
        middle = HALF * np.float32(sum(region)) * (n - ONE) if mode == CROP else np.float32(0)
        return np.full(1, middle)
    if mode == "align_corners":
        return o * (n - ONE) / np.float32(count - 1)
    if mode == CROP:
        first, last = map(np.float32, region)
        return first * (n - ONE) + o * (last - first) * (n - ONE) / np.float32(count - 1)
    if mode == "asymmetric":
        return o / scale
    if mode == "tf_half_pixel_for_nn":
        return (o + HALF) / scale
    if mode == "pytorch_half_pixel" and count == 1:
        return np.zeros(1, np.float32)
    offset = np.float32(0)
    if mode == "half_pixel_symmetric":
        offset = n / np.float32(2) * (ONE - np.float32(count) / (scale * n))
    return offset + (o + HALF) / scale - HALF


def _nearest(at: Array, mode: str) -> Array:
    """The nearest elements, by the rounding `mode`."""
    if mode == "floor":
        found = np.floor(at)
    elif mode == "ceil":
        found = np.ceil(at)
    else:  # halves go to one side, whatever their sign
        found = np.floor(at + HALF) if mode == "round_prefer_ceil" else np.ceil(at - HALF)
    return found.astype(np.int64)


def _around(at: Array, spread: float, mode: str, a: float) -> tuple[Array, Array]:
    """The neighbours within reach, and how much each counts: by distance, in units of `spread`."""
    reach = math.ceil((2 if mode == "cubic" else 1) * spread)
    at = at.astype(np.float64)
    places = np.floor(at).astype(np.int64)[:, None] + np.arange(1 - reach, 1 + reach)
    d = np.abs(places - at[:, None]) / spread
    if mode == "linear":
        return places, np.maximum(1.0 - d, 0.0)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return places, np.where(d <= 1, near, np.where(d < 2, far, 0.0))


NAME = "resize_grad"


def _output_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    """Checks dy against x and the attributes, which tell its sizes only where scales are given."""
    dy, x = shapes["dy"], shapes["x"]
    if len(dy) != len(x):
        raise ValueError(f"{NAME}: dy has {dimensions(len(dy))}, expected {len(x)}, as x has")
    resized_axes(NAME, x, dy, attributes)
    return dy


Output = Annotated[Array, Tensor(FLOATS, _output_shape, "what the attributes make of x", ranks=range(1, 65))]
Input = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65), dtype_of="dy")]
Mode = Annotated[str, one_of(*MODES)]
Coordinates = Annotated[str, one_of(*COORDINATES)]
NearestMode = Annotated[str, one_of(*NEAREST_MODES)]
Policy = Annotated[str, one_of(*POLICIES)]


@operator(
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

    Returns dx, of the shape of x and the dtype of dy. Sums are formed in float32 (float64 for float64). Coordinates are
    those of onnxruntime, which has them in float32: the gradient is that of the neighbours that it took. What lies
    outside of the region of tf_crop_and_resize came from no element of x. The original knew four axes and mode linear.

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
