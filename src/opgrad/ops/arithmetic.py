"""Sums, quotients and shapes of arrays that are broadcast against each other, accumulation and scaling."""

from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, elements, like, one_number, operator, shaped_like
from opgrad.contract.arrangement import broadcast_axes, broadcast_shape, reduced_axes, sum_to
from opgrad.contract.attributes import BYTES, FLOATS, INTEGERS, Array, Attributes, Shape, Shapes

INT64 = ("int64",)


# --- sums ----------------------------------------------------------------------------------------------------------


def _sum_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    shape = shapes["x"]
    gone = reduced_axes(shape, attributes["axes"], attributes["noop_with_empty_axes"])
    if attributes["keepdims"]:
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


@operator(
    support=IN_GRAPHS,
    results={"y": Tensor(FLOATS + INTEGERS, _sum_shape, "the shape of x without the axes of the sum", dtype_of="x")},
    onnx=OnnxName(
        "ReduceSumTraining", ("x", "axes"), ("y",), {"keepdims": 1, "noop_with_empty_axes": 0}, types={"axes": INT64}
    ),
)
def reduce_sum_training(
    x: Annotated[Array, Tensor(FLOATS + INTEGERS)], axes: tuple[int, ...] = (), keepdims: bool = True,
    noop_with_empty_axes: bool = False, *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Sum over some axes.

    x: any shape; float32, float64, float16, bfloat16, int32 or int64.
    axes: the axes to sum over, in any order, -rank to rank - 1; one that is named twice counts once. Without any,
        all axes are summed over.
    keepdims: keep those axes, with size 1.
    noop_with_empty_axes: without axes, copy x.

    Returns y of the dtype of x. Floats are added in float32 (float64 for float64) in an order that depends on the shape
    alone, and rounded once; integers wrap around.

    Formula: y = sum(x) over axes. Source: com.microsoft ReduceSumTraining.

    Example:
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    >>> opgrad.reduce_sum_training(x, [0], keepdims=False)
    array([ 9., 12.], dtype=float32)
    """
    gone = tuple(sorted(reduced_axes(x.shape, axes, noop_with_empty_axes)))
    return np.asarray(x.sum(gone, keepdims=keepdims, dtype=x.dtype))


# --- division ------------------------------------------------------------------------------------------------------


def _divisor_shape(shapes: Shapes, _: Attributes) -> Shape:
    """The shape of b, if that of dy is what a and b are broadcast to; ValueError otherwise."""
    dy, a, b = shapes["dy"], shapes["a"], shapes["b"]
    quotient = broadcast_shape(a, b)
    if quotient is None:
        raise ValueError(f"div_grad: b has shape {b}, expected one that is broadcast with {a}, the shape of a")
    if dy != quotient:
        raise ValueError(f"div_grad: dy has shape {dy}, expected {quotient}, what a and b are broadcast to")
    return b


@operator(
    support=IN_GRAPHS,
    results={"da": like("a"), "db": shaped_like("b", dtype_of="a")},
    onnx=OnnxName("DivGrad", outputs=("da?", "db?")),
)
def div_grad(
    dy: Annotated[Array, Tensor(FLOATS)], a: Annotated[Array, Tensor(FLOATS, dtype_of="dy")],
    b: Annotated[Array, Tensor(FLOATS, _divisor_shape, dtype_of="dy")], *, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Gradients of a / b with respect to both.

    dy: gradient with respect to the quotient, of the shape that a and b are broadcast to; float32, float64, float16
        or bfloat16.
    a, b: as they were divided, of shapes that are broadcast; of the dtype of dy.

    Returns da of the shape of a and db of the shape of b, of the dtype of dy: sums over the axes along which a or b was
    broadcast, formed in float32 (float64 for float64) in an order that depends on the shapes alone.

    Formula: da = dy / b; db = -(dy / b) * (a / b). Source: com.microsoft DivGrad.

    Example:
    >>> a, b = np.array([1.0, 2.0], np.float32), np.array([4.0, 8.0], np.float32)
    >>> opgrad.div_grad(np.ones(2, np.float32), a, b)
    (array([0.25 , 0.125], dtype=float32), array([-0.0625, -0.0312], dtype=float32))
    """
    da = dy / b
    return sum_to(da, a.shape), sum_to(-da * (a / b), b.shape)


# --- shapes --------------------------------------------------------------------------------------------------------


@operator(
    support=IN_GRAPHS,
    results={
        "a_axes": Tensor(INT64, lambda _, of: (len(broadcast_axes(of["a_shape"], of["b_shape"])[0]),)),
        "b_axes": Tensor(INT64, lambda _, of: (len(broadcast_axes(of["a_shape"], of["b_shape"])[1]),)),
    },
    onnx=OnnxName(
        "BroadcastGradientArgs",
        ("a_shape", "b_shape"),
        ("a_axes?", "b_axes?"),
        types={"a_shape": INT64, "b_shape": INT64},
    ),
)
def broadcast_gradient_args(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], *, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """The axes to sum over for the gradients of an operator on two arrays that are broadcast.

    a_shape, b_shape: the shapes of the arrays; tuples of ints or integer arrays.
    out: where to write a_axes and b_axes, int64.

    Returns a_axes and b_axes, int64: the axes of the result along which a, and b, has size 1 or no axis and the other
    has another size, or any axis at all; from the last to the first. Raises TypeError, ValueError for shapes that
    cannot be broadcast.

    Formula: the axes along which a or b was broadcast. Source: com.microsoft BroadcastGradientArgs.

    Example:
    >>> opgrad.broadcast_gradient_args(np.array([3, 4]), np.array([1, 4]))
    (array([], dtype=int64), array([0]))
    """
    a_axes, b_axes = broadcast_axes(tuple(a_shape), tuple(b_shape))
    return np.array(a_axes, np.int64), np.array(b_axes, np.int64)


# --- zeros ---------------------------------------------------------------------------------------------------------


@operator(support=IN_GRAPHS, onnx=OnnxName("ZeroGradient"), **elements("y", "x"))
def zero_gradient(
    x: Annotated[Array, Tensor(FLOATS)],
    unused: Annotated[Array, Tensor(FLOATS + INTEGERS + BYTES + ("bool",), role="alone")],
    *,
    out: Array | None = None,
) -> Array:
    """Zeros in place of an accumulated gradient.

    x: the gradient, any shape; float32, float64, float16 or bfloat16. It is not read.
    unused: any array that must be there first; its numbers are not read. A float, int8, uint8, int32, int64 or bool.

    Returns y, zeros of the shape and dtype of x.

    Formula: y = 0. Source: com.microsoft ZeroGradient.

    Example:
    >>> opgrad.zero_gradient(np.array([1.0, 2.0], np.float32), np.float32(0.0))
    array([0., 0.], dtype=float32)
    """
    return np.zeros_like(x)


# --- accumulation ---------------------------------------------------------------------------------------------------


@operator(
    kind="elements",
    support=IN_GRAPHS,
    results={"sum": like("buffer")},
    in_place={"sum": ("buffer", "value")},
    onnx=OnnxName("InPlaceAccumulator", ("buffer", "value", "update?"), ("sum",), types={"update": ("bool",)}),
)
def accumulate(
    buffer: Annotated[Array, Tensor(FLOATS)], value: Annotated[Array, shaped_like("buffer")], update: bool = True, *,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Add to a sum, or leave it as it is.

    buffer: the sum so far, any shape; float32, float64, float16 or bfloat16.
    value: what is added, of the shape of buffer; any of the four dtypes.
    update: whether it is added at all.

    Returns the sum, of the shape and dtype of buffer.

    Formula: sum = buffer + value if update else buffer. Source: com.microsoft InPlaceAccumulator; the successor of
    it that training graphs have today is in_place_accumulator.

    Example:
    >>> opgrad.accumulate(np.array([1.0, 2.0], np.float32), np.array([10.0, 20.0], np.float32))
    array([11., 22.], dtype=float32)
    """
    return buffer + value if update else buffer.copy()


X = Annotated[Array, Tensor(FLOATS)]
Value = Annotated[Array, shaped_like("buffer")]
Factor = Annotated[Array, one_number("factor", FLOATS + INTEGERS, role="alone")]


@operator(
    kind="elements",
    results={"sum": like("buffer")},
    in_place={"sum": ("buffer", "value")},
    onnx=OnnxName(
        "InPlaceAccumulatorV2", ("buffer", "value", "overwrite?"), ("updated", "sum?"), overwrites={"sum": "buffer"}
    ),
)
def in_place_accumulator(buffer: X, value: Value, overwrite: bool = False, *, out: Array | None = None) -> Array:
    """Add a gradient to its buffer, or start the buffer anew.

    buffer: the gradient so far, any shape; float32, float64, float16 or bfloat16.
    value: what is added, of the shape of buffer; any of the four dtypes.
    overwrite: take value alone, whatever buffer holds.
    out: where to write; with out=buffer the sum is formed in place.

    Returns the sum, of the shape and dtype of buffer.

    Formula: sum = value if overwrite else buffer + value. Source: com.microsoft InPlaceAccumulatorV2.

    Example:
    >>> opgrad.in_place_accumulator(np.array([1.0, 2.0], np.float32), np.array([10.0, 20.0], np.float32))
    array([11., 22.], dtype=float32)
    """
    return value.copy() if overwrite else buffer + value


@operator(onnx=OnnxName("Scale", attributes={"scale_down": 0}), **elements("y", "x"))
def scale(x: X, factor: Factor, scale_down: bool = False, *, out: Array | None = None) -> Array:
    """Multiply or divide by one number that stands in an array.

    x: any shape; float32, float64, float16 or bfloat16.
    factor: shape () or (1,); one of the four dtypes, int32 or int64.
    scale_down: divide instead.

    Formula: y = x / factor if scale_down else x * factor. Source: com.microsoft Scale.

    Example:
    >>> opgrad.scale(np.array([1.0, 2.0], np.float32), np.float32(4.0), scale_down=True)
    array([0.25, 0.5 ], dtype=float32)
    """
    number = np.asarray(factor, dtype=x.dtype).reshape(())
    return x / number if scale_down else x * number
