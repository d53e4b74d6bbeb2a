"""The gradients of pooling."""

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Sizes, Tensor, operator
from opgrad.contract.attributes import FLOATS, Array, Attributes, Shape, Shapes
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
    out: where to write; must not overlap dy or indices.

    Returns dx of the given shape and dy's dtype. What several windows give one element is added in float32 (float64
    for float64) in the order of dy. Raises TypeError for a wrong dtype, ValueError for a wrong shape or an index
    outside its image and channel, naming the first one, before anything is written.

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
    out: where to write; must not overlap dy.

    Returns dx of the given shape and dy's dtype, 0 where there is no window; sums are formed in float32 (float64 for
    float64). With count_include_pad a window's elements on the padding count, those beyond it do not, as in
    onnxruntime's AveragePool; its original gradient divides by the whole window there. Raises TypeError for a wrong
    dtype, ValueError for a wrong shape or attribute.

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
