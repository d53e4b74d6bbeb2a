"""Slices and elements picked by index or by range, and the gradients that put them back where they came from."""

from functools import partial
from typing import Annotated, Any

import numpy as np

from opgrad.contract import IN_GRAPHS, Axis, OnnxName, Sizes, Tensor, operator, shaped_like
from opgrad.contract.arrangement import room_for, slice_ranges
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes


def _gathered(shape: Shape, shapes: Shapes, attributes: Attributes) -> Shape:
    axis: range = attributes["axis"]
    return shape[: axis.start] + shapes["indices"] + shape[axis.stop :]


X = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]
Indices = Annotated[Array, Tensor(INTEGERS)]
GRADIENT = {"dx": Tensor(FLOATS, lambda _, attributes: attributes["shape"], "the argument shape", dtype_of="dy")}
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

    Returns y of shape x.shape[:axis] + indices.shape + x.shape[axis+1:], of the dtype of x.

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
    results=GRADIENT,
    onnx=OnnxName("GatherGrad", ("shape", "indices", "dy"), ("dx",), {"axis": 0}),
    instead={"sparse": _rows_and_values},
)
def gather_grad(
    shape: Sizes, indices: Indices, dy: Gathered, axis: Axis = 0, *, check: bool = False, sparse: bool = False,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of gather: every slice of dy is added to the slice of dx that it came from.

    shape: the shape of gather's x; a tuple of ints or an integer array.
    indices: as given to gather; int32 or int64.
    dy: gradient with respect to gather's output, of shape shape[:axis] + indices.shape + shape[axis+1:];
        float32, float64, float16 or bfloat16.
    axis: the axis of x that indices picked from.
    sparse: return the rows of dx that indices name, int64 and rising, and these rows alone, as a tuple; for NumPy's
        arrays and axis 0, without out. What they take depends on indices, not on the size of the table.

    Returns dx of the given shape and dy's dtype. The slices are added in float32 (float64 for float64), in an order
    that depends on nothing but the arguments.

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


# --- checks --------------------------------------------------------------------------------------------------------


def _elements_like(name: str, model: str, shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of indices that name elements along an axis: the model's, or any."""
    shape, indices = attributes.get("shape", shapes.get("x", ())), shapes["indices"]
    expected = shapes.get(model, indices)
    if indices == expected:  # they have as many axes as x, and all but `axis` are no longer than x's
        if len(indices) != len(shape):
            raise ValueError(f"{name}: indices has shape {indices}, expected {len(shape)} dimensions, as many as x")
        for place, (size, most) in enumerate(zip(indices, shape, strict=True)):
            if size > most and place != attributes["axis"].start:
                expected_here = f"expected at most {most} on axis {place}, as x has"
                raise ValueError(f"{name}: indices has shape {indices}, {expected_here}")
    return expected


def _named_by_tuples(name: str, shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of what tuples of indices name; ValueError if they do not fit x, of this shape."""
    shape, indices = attributes.get("shape", shapes.get("x", ())), shapes["indices"]
    batch_dims = attributes["batch_dims"]
    most = min(len(shape), len(indices)) - 1
    if not 0 <= batch_dims <= most:
        raise ValueError(
            f"{name}: batch_dims is {batch_dims}, expected 0 to {most} for {len(shape)} and {len(indices)} dimensions"
        )
    if indices[:batch_dims] != shape[:batch_dims]:
        raise ValueError(
            f"{name}: indices has shape {indices}, expected it to start with {shape[:batch_dims]}, as x does"
        )
    named, rest = indices[-1], len(shape) - batch_dims
    if not 1 <= named <= rest:
        raise ValueError(f"{name}: indices has shape {indices}, expected 1 to {rest} on the last axis, one for an axis")
    return indices[:-1] + shape[batch_dims + named :]


def _sliced(shapes: Shapes, attributes: Attributes) -> Shape:
    return tuple(len(taken) for taken in slice_ranges(attributes))


# --- elements along an axis ----------------------------------------------------------------------------------------


def _grid(shape: Shape) -> list[Array]:
    """For each axis its places, with as many dimensions as the shape."""
    return list(np.meshgrid(*map(np.arange, shape), indexing="ij", sparse=True))


def _elements(indices: Array, axis: int) -> tuple[Array, ...]:
    """The places that indices along an axis name."""
    places = _grid(indices.shape)
    places[axis] = indices
    return tuple(places)


@operator(support=IN_GRAPHS, results={"y": shaped_like("indices", dtype_of="x")})
def gather_elements(
    x: X, indices: Annotated[Array, Tensor(INTEGERS, partial(_elements_like, "gather_elements", ""))], axis: Axis = 0,
    *, out: Array | None = None,
) -> Array:  # fmt: skip
    """The elements of x that indices name along one axis, one for each index.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16.
    indices: as many dimensions as x, any size on axis and at most x's on the others; int32 or int64 in [-s, s)
        where s is the size of x on axis; negative ones count from the end.
    axis: the axis of x along which indices pick.

    Returns y of the shape of indices and the dtype of x.

    Formula: y[.., j, ..] = x[.., indices[.., j, ..], ..]. Source: ONNX GatherElements.

    Example:
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    >>> opgrad.gather_elements(x, np.array([[2, 0]]))
    array([[5., 2.]], dtype=float32)
    """
    return np.asarray(x[_elements(indices, axis)])


LikeDy = Annotated[Array, Tensor(INTEGERS, partial(_elements_like, "gather_elements_grad", "dy"), "the shape of dy")]


@operator(
    forward="gather_elements",
    support=IN_GRAPHS,
    results=GRADIENT,
    onnx=OnnxName(
        "GatherElementsGrad",
        ("dy", "shape", "indices"),
        ("dx",),
        {"axis": 0},
        types={"indices": "Tind", "shape": ("int64",)},
    ),
)
def gather_elements_grad(dy: X, shape: Sizes, indices: LikeDy, axis: Axis = 0, *, out: Array | None = None) -> Array:
    """Gradient of gather_elements: every element of dy is added to the element of dx that it came from.

    dy: gradient with respect to gather_elements' output, of the shape of indices; float32, float64, float16 or
        bfloat16.
    shape: the shape of gather_elements' x; a tuple of ints or an integer array.
    indices: as given to gather_elements; int32 or int64.
    axis: the axis of x along which indices picked.

    Returns dx of the given shape and dy's dtype. The elements are added in float32 (float64 for float64), in an order
    that depends on nothing but the arguments.

    Formula: dx = 0; dx[.., indices[.., j, ..], ..] += dy[.., j, ..]. Source: com.microsoft GatherElementsGrad.

    Example:
    >>> dy = np.array([[1.0, 2.0], [10.0, 20.0]], np.float32)
    >>> opgrad.gather_elements_grad(dy, (3, 2), np.array([[2, 0], [2, 1]]))
    array([[ 0.,  2.],
           [ 0., 20.],
           [11.,  0.]], dtype=float32)
    """
    dx = np.zeros(shape, dy.dtype)
    np.add.at(dx, _elements(indices, axis), dy)
    return dx


# --- slices named by tuples of indices -----------------------------------------------------------------------------


def _tuples(indices: Array, batch_dims: int) -> tuple[Array, ...]:
    """The places that tuples of indices name."""
    return (*_grid(indices.shape[:-1])[:batch_dims], *np.moveaxis(indices, -1, 0))


Tuples = Annotated[Array, Tensor(INTEGERS, ranks=range(1, 65))]


@operator(
    support=IN_GRAPHS,
    results={
        "y": Tensor(
            FLOATS, partial(_named_by_tuples, "gather_nd"), "indices.shape[:-1] and x's axes behind", dtype_of="x"
        )
    },
)
def gather_nd(x: X, indices: Tuples, batch_dims: int = 0, *, out: Array | None = None) -> Array:
    """The slices of x that tuples of indices name.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16.
    indices: int32 or int64; the last axis holds tuples of k indices, one for each of the k axes of x behind the
        first batch_dims, in [-s, s) where s is that axis's size; negative ones count from the end. The first
        batch_dims axes are as long as x's.
    batch_dims: how many leading axes of x and indices are walked together; 0 to below the dimensions of both.

    Returns y of shape indices.shape[:-1] + x.shape[batch_dims+k:], of the dtype of x.

    Formula: y[b.., j..] = x[b.., *indices[b.., j..]]. Source: ONNX GatherND.

    Example:
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    >>> opgrad.gather_nd(x, np.array([[0, 1], [2, 0]]))
    array([2., 5.], dtype=float32)
    """
    return np.asarray(x[_tuples(indices, batch_dims)])


OfTuples = Annotated[
    Array, Tensor(FLOATS, partial(_named_by_tuples, "gather_nd_grad"), "indices.shape[:-1] and shape's axes behind")
]


@operator(
    forward="gather_nd",
    support=IN_GRAPHS,
    results=GRADIENT,
    onnx=OnnxName(
        "GatherNDGrad",
        ("shape", "indices", "dy"),
        ("dx",),
        {"batch_dims": 0},
        types={"indices": "Tind", "shape": ("int64",)},
    ),
)
def gather_nd_grad(
    shape: Sizes, indices: Tuples, dy: OfTuples, batch_dims: int = 0, *, out: Array | None = None
) -> Array:
    """Gradient of gather_nd: every slice of dy is added to the slice of dx that it came from.

    shape: the shape of gather_nd's x; a tuple of ints or an integer array.
    indices: as given to gather_nd; int32 or int64.
    dy: gradient with respect to gather_nd's output, of its shape; float32, float64, float16 or bfloat16.
    batch_dims: as given to gather_nd.

    Returns dx of the given shape and dy's dtype. The slices are added in float32 (float64 for float64), in an order
    that depends on nothing but the arguments.

    Formula: dx = 0; dx[b.., *indices[b.., j..]] += dy[b.., j..]. Source: com.microsoft GatherNDGrad.

    Example:
    >>> dy = np.array([1.0, 2.0], np.float32)
    >>> opgrad.gather_nd_grad((3, 2), np.array([[0, 1], [2, 0]]), dy)
    array([[0., 1.],
           [0., 0.],
           [2., 0.]], dtype=float32)
    """
    dx = np.zeros(shape, dy.dtype)
    np.add.at(dx, _tuples(indices, batch_dims), dy)
    return dx


# --- slices named by ranges ----------------------------------------------------------------------------------------


@operator(
    support=IN_GRAPHS,
    results=GRADIENT,
    onnx=OnnxName(
        "SliceGrad",
        ("dy", "shape", "starts", "ends", "axes?", "steps?"),
        ("dx",),
        types={"shape": ("int64",), **dict.fromkeys(("starts", "ends", "axes", "steps"), "Tind")},
    ),
)
def slice_grad(
    dy: Annotated[Array, Tensor(FLOATS, _sliced, "the shape of the slice")], shape: Sizes, starts: tuple[int, ...],
    ends: tuple[int, ...], axes: tuple[int, ...] | None = None, steps: tuple[int, ...] | None = None, *,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of a slice: dy stands where it came from, zeros elsewhere.

    dy: gradient with respect to the slice, of its shape; float32, float64, float16 or bfloat16.
    shape: the shape of the array that was sliced; a tuple of ints or an integer array.
    starts: where the slice starts on each of the axes; a tuple of ints or an integer array, as are those below.
        Negative places count from the end, places beyond the array are moved to its edge.
    ends: where it ends, this place excluded; likewise.
    axes: the axes that are sliced, all different, negative ones counted from the end; the first ones if None.
    steps: from one place to the next, negative ones backwards, none 0; all 1 if None.

    Returns dx of the given shape and dy's dtype.

    Formula: dx = 0; dx[start:end:step, ..] = dy. Source: com.microsoft SliceGrad.

    Example:
    >>> dy = np.array([1.0, 2.0], np.float32)
    >>> opgrad.slice_grad(dy, (5,), starts=(1,), ends=(5,), steps=(2,))
    array([0., 1., 0., 2., 0.], dtype=float32)
    """
    dx = np.zeros(shape, dy.dtype)
    taken = [slice(None)] * dx.ndim
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        taken[axis] = slice(start, end, step)
    dx[tuple(taken)] = dy
    return dx
