"""Softmax and log-softmax over any axis, and their gradients."""

from typing import Annotated

import numpy as np

from opgrad.contract import FLOATS, Array, OnnxName, Tensor, operator

X = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]
Y = Annotated[
    Array,
    Tensor(FLOATS, lambda shapes, _: shapes["dy"], "the shape of dy", dtype_of="dy", ranks=range(1, 65)),
]
Axis = int | tuple[int, ...]

LIKE_X = Tensor(FLOATS, lambda shapes, _: shapes["x"], "the shape of x", dtype_of="x")
LIKE_DY = Tensor(FLOATS, lambda shapes, _: shapes["dy"], "the shape of dy", dtype_of="dy")


@operator("y = exp(x - max(x)) / sum(exp(x - max(x)))", kind="rows", results={"y": LIKE_X}, in_place={"y": ("x",)})
def softmax(x: X, axis: Axis = -1, *, out: Array | None = None) -> Array:
    """Probabilities from logits.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16.
    axis: the axis, or tuple of adjacent axes, over which the probabilities sum to 1.
    out: where to write the result, of the shape and dtype of x; may be x.

    Returns y, of the shape and dtype of x. A NaN or +inf makes its whole row NaN, as does a row of -inf.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or out.

    Formula: y = exp(x - max(x)) / sum(exp(x - max(x))). Source: ONNX Softmax-13.
    """
    e = np.exp(x - np.max(x, axis, keepdims=True, initial=-np.inf))
    return e / e.sum(axis, keepdims=True)


@operator("y = x - max(x) - log(sum(exp(x - max(x))))", kind="rows", results={"y": LIKE_X}, in_place={"y": ("x",)})
def log_softmax(x: X, axis: Axis = -1, *, out: Array | None = None) -> Array:
    """Logarithms of the softmax probabilities.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16.
    axis: the axis, or tuple of adjacent axes, over which the probabilities sum to 1.
    out: where to write the result, of the shape and dtype of x; may be x.

    Returns y, of the shape and dtype of x. A NaN or +inf makes its whole row NaN, as does a row of -inf.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or out.

    Formula: y = x - max(x) - log(sum(exp(x - max(x)))). Source: ONNX LogSoftmax-13.
    """
    shifted = x - np.max(x, axis, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


@operator(
    "dx = y * (dy - sum(y * dy))",
    forward="softmax",
    kind="rows",
    results={"dx": LIKE_DY},
    in_place={"dx": ("dy", "y")},
    onnx=(
        OnnxName("SoftmaxGrad_13", ("dy", "y"), ("dx",), {"axis": -1}),
        OnnxName("SoftmaxGrad", ("dy", "y"), ("dx",), {"axis": 1}, until_13=True),
    ),
)
def softmax_grad(dy: X, y: Y, axis: Axis = -1, *, out: Array | None = None) -> Array:
    """Gradient of softmax.

    dy: gradient of the loss with respect to y; float32, float64, float16 or bfloat16.
    y: the output of softmax (not its input), of the shape and dtype of dy. It is used as it is.
    axis: the axis, or tuple of adjacent axes, that softmax reduced. ONNX's SoftmaxGrad(axis=k) of opset < 13
        is axis=tuple(range(k, rank)).
    out: where to write the result; may be dy or y.

    Returns dx, of the shape and dtype of dy. Raises TypeError for a wrong dtype, ValueError for a wrong
    shape, axis or out.

    Formula: dx = y * (dy - sum(y * dy)). Source: com.microsoft SoftmaxGrad_13, SoftmaxGrad.
    """
    return y * (dy - (y * dy).sum(axis, keepdims=True))


@operator(
    "dx = dy - exp(y) * sum(dy)",
    forward="log_softmax",
    kind="rows",
    results={"dx": LIKE_DY},
    in_place={"dx": ("dy", "y")},
    onnx=(
        OnnxName("LogSoftmaxGrad_13", ("dy", "y"), ("dx",), {"axis": -1}),
        OnnxName("LogSoftmaxGrad", ("dy", "y"), ("dx",), {"axis": 1}, until_13=True),
    ),
)
def log_softmax_grad(dy: X, y: Y, axis: Axis = -1, *, out: Array | None = None) -> Array:
    """Gradient of log_softmax.

    dy: gradient of the loss with respect to y; float32, float64, float16 or bfloat16.
    y: the output of log_softmax (not its input), of the shape and dtype of dy. It is used as it is.
    axis: the axis, or tuple of adjacent axes, that log_softmax reduced.
    out: where to write the result; may be dy or y.

    Returns dx, of the shape and dtype of dy. Raises TypeError for a wrong dtype, ValueError for a wrong
    shape, axis or out.

    Formula: dx = dy - exp(y) * sum(dy). Source: com.microsoft LogSoftmaxGrad_13, LogSoftmaxGrad.
    """
    return dy - np.exp(y) * dy.sum(axis, keepdims=True)
