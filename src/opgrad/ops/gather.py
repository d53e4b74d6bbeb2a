"""Rows picked by index, and the gradient that adds them up again."""

from typing import Annotated, Any

import numpy as np

from opgrad.contract import Axis, OnnxName, Sizes, Tensor, operator
from opgrad.contract.arrangement import room_for
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes


def _gathered(shape: Shape, shapes: Shapes, attributes: Attributes) -> Shape:
    axis: range = attributes["axis"]
    return shape[: axis.start] + shapes["indices"] + shape[axis.stop :]


X = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]
Indices = Annotated[Array, Tensor(INTEGERS)]
Gathered = Annotated[
    Array,
    Tensor(
        FLOATS,
        lambda shapes, attributes: _gathered(attributes["shape"], shapes, attributes),
        "shape with indices' shape in the place of axis",
    ),
]


@operator(
    kind="slices",
    results={
        "y": Tensor(
            FLOATS,
            lambda shapes, attributes: _gathered(shapes["x"], shapes, attributes),
            "the shape of x with indices' shape in the place of axis",
            dtype_of="x",
        )
    },
)
def gather(x: X, indices: Indices, axis: Axis = 0, *, check: bool = False, out: Array | None = None) -> Array:
    """The slices of x along one axis that indices name.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16.
    indices: any shape; int32 or int64 in [-s, s) where s is the size of axis; negative ones count from the end.
    axis: the axis of x that indices pick from.
    check: on CUDA, wait for the device and raise for indices out of range instead of giving NaN; the CPU always
        checks.
    out: where to write; must not overlap x.

    Returns y of shape x.shape[:axis] + indices.shape + x.shape[axis+1:], of the dtype of x.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or an index outside [-s, s), naming the
    first one, before anything is written.

    Formula: y[.., j, ..] = x[.., indices[j], ..]. Source: ONNX Gather.

    Example:
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    >>> opgrad.gather(x, np.array([2, 0, -1]))
    array([[5., 6.],
           [1., 2.],
           [5., 6.]], dtype=float32)
    """
    return np.take(x, indices, axis)


def _rows_and_values(
    name: str, public: Any, shape: Any, indices: Any, dy: Any, axis: int = 0, *, check: bool = False, out: None = None
) -> tuple[Array, Array]:
    """The rows of the table that indices name, rising, and what is added up for each of them by `public`."""
    sizes = tuple(np.asarray(shape).tolist())
    if type(indices) is not np.ndarray or type(dy) is not np.ndarray:
        raise TypeError(f"{name}: sparse is True, expected NumPy arrays; opgrad.torch.embedding has it for tensors")
    if not sizes or axis % len(sizes) or out is not None:
        raise ValueError(f"{name}: sparse is True, expected axis 0 of at least one dimension, and no out")
    if indices.dtype.name not in INTEGERS:
        raise TypeError(f"{name}: indices has dtype {indices.dtype}, expected int32 or int64")
    wrong = np.flatnonzero((indices < -sizes[0]) | (indices >= sizes[0]))
    if wrong.size:
        place = tuple(map(int, np.unravel_index(wrong[0], indices.shape)))
        found = f"indices{list(place)} is {indices[place]}"
        raise ValueError(f"{name}: {found}, expected {-sizes[0]} to {sizes[0] - 1}")
    rows, places = np.unique(np.where(indices < 0, indices + sizes[0], indices), return_inverse=True)
    values = public((room_for(len(rows)), *sizes[1:]), places.reshape(indices.shape), dy)
    return rows.astype(np.int64), values[: len(rows)]


@operator(
    forward="gather",
    kind="slices",
    results={"dx": Tensor(FLOATS, lambda _, attributes: attributes["shape"], "the argument shape", dtype_of="dy")},
    onnx=OnnxName("GatherGrad", ("shape", "indices", "dy"), ("dx",), {"axis": 0}),
    instead={"sparse": _rows_and_values},
)
def gather_grad(
    shape: Sizes,
    indices: Indices,
    dy: Gathered,
    axis: Axis = 0,
    *,
    check: bool = False,
    sparse: bool = False,
    out: Array | None = None,
) -> Array:
    """Gradient of gather: every slice of dy is added to the slice of dx that it came from.

    shape: the shape of gather's x; a tuple of ints or an integer array.
    indices: as given to gather; int32 or int64.
    dy: gradient with respect to gather's output, of shape shape[:axis] + indices.shape + shape[axis+1:];
        float32, float64, float16 or bfloat16.
    axis: the axis of x that indices picked from.
    check: on CUDA, wait for the device and raise for indices out of range instead of leaving them out; the CPU
        always checks.
    sparse: return the rows of dx that indices name, int64 and rising, and these rows alone, as a tuple; for NumPy's
        arrays and axis 0, without out. What they take depends on indices, not on the size of the table.
    out: where to write; must not overlap dy or indices.

    Returns dx of the given shape and dy's dtype. The slices are added in float32 (float64 for float64), in
    an order that depends on nothing but the arguments. Raises TypeError for a wrong dtype, ValueError for a wrong
    shape or axis or an index outside [-s, s), naming the first one, before anything is written.

    Formula: dx = 0; dx[.., indices[j], ..] += dy[.., j, ..]. Source: com.microsoft GatherGrad.

    Example:
    >>> dy = np.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], np.float32)
    >>> opgrad.gather_grad((3, 2), np.array([2, 0, -1]), dy)
    array([[ 10.,  20.],
           [  0.,   0.],
           [101., 202.]], dtype=float32)
    """
    axis %= len(shape)
    dx = np.zeros(shape, dy.dtype)
    slices = dy.reshape(*shape[:axis], indices.size, *shape[axis + 1 :])
    np.add.at(np.moveaxis(dx, axis, 0), indices.ravel(), np.moveaxis(slices, axis, 0))
    return dx
