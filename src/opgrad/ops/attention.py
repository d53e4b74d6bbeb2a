"""Softmax as attention uses it: with a bias before it, with dropout behind it."""

import math
from typing import Annotated

import numpy as np

from opgrad.contract import FLOATS, IN_GRAPHS, Array, Attributes, Axis, OnnxName, Shape, Shapes, Tensor, operator
from opgrad.ops.dropout import ratio_checked
from opgrad.random import kept_scale

X = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65), role="alone")]


def _bias_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    """The bias's own shape if it fits; else that of a single row."""
    x, bias, start = shapes["x"], shapes["bias"], attributes["axis"].start
    row = x[start:]
    rows, given = math.prod(x[:start]), math.prod(bias[: len(bias) - len(row)])
    fits = len(bias) >= len(row) and bias[len(bias) - len(row) :] == row
    return bias if fits and (rows % given == 0 if given else not rows) else row


Bias = Annotated[
    Array,
    Tensor(
        FLOATS,
        _bias_shape,
        "the shape of x from axis on, behind dimensions whose product divides the number of rows",
        dtype_of="x",
        role="alone",
    ),
]
Saved = Annotated[Array, Tensor(FLOATS, lambda shapes, _: shapes["dy"], "the shape of dy", dtype_of="dy", role="alone")]
Mask = Annotated[Array, Tensor(("bool",), lambda shapes, _: shapes["dy"], "the shape of dy", role="alone")]


def _rows(array: Array, axis: int) -> Array:
    """The array as rows, each of all axes from `axis` on."""
    start = axis % array.ndim
    return array.reshape(math.prod(array.shape[:start]), math.prod(array.shape[start:]))


@operator(
    "y = softmax(x + bias)",
    support=IN_GRAPHS,
    results={"y": Tensor(FLOATS, lambda shapes, _: shapes["x"], "the shape of x", dtype_of="x", role="alone")},
    in_place={"y": ("x",)},
    onnx=(
        OnnxName(
            "BiasSoftmax",
            ("x", "bias"),
            ("y",),
            {"axis": 1, "is_inner_broadcast": 0},
            types={"x": "T", "bias": "T"},
        ),
    ),
)
def bias_softmax(
    x: X, bias: Bias, axis: Axis = -1, is_inner_broadcast: bool = False, *, out: Array | None = None
) -> Array:
    """Softmax of the sum of scores and a bias, or an additive mask, that repeats.

    x: the scores, of at least one dimension; float32, float64, float16 or bfloat16.
    bias: shape x.shape[axis:], or that behind further dimensions whose product B divides the number of rows of x; of
        the dtype of x.
    axis: a row is all of x from this axis on, and has one sum of 1.
    is_inner_broadcast: which of its B rows the bias has for row r of x's R rows: with False r % B, as for a bias of
        shape (1, 1, L, S) with scores of shape (N, H, L, S); with True r // (R / B), as for one of shape (N, 1, 1, S).
    out: where to write; may be x.

    Returns y, of the shape and dtype of x; NaN in rows of -inf alone. Raises TypeError, ValueError.

    Formula: y = softmax(x + bias), the sum rounded to float32, or float64 for float64.
    Source: com.microsoft BiasSoftmax.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], np.float32)
    >>> bias = np.array([[0.0, 0.0, -np.inf], [0.0, 0.0, 0.0]], np.float32)
    >>> opgrad.bias_softmax(x, bias)
    array([[0.2689, 0.7311, 0.    ],
           [0.3333, 0.3333, 0.3333]], dtype=float32)
    """
    if not x.size:
        return x.copy()
    scores = _rows(x, axis)
    every = bias.reshape(-1, scores.shape[1])
    repeats = len(scores) // len(every)
    z = scores + (np.repeat(every, repeats, 0) if is_inner_broadcast else np.tile(every, (repeats, 1)))
    e = np.exp(z - z.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True)).reshape(x.shape)


@operator(
    "dx = y * (g - sum(y * g)), g = where(mask, dy / (1 - ratio), 0)",
    support=IN_GRAPHS,
    results={
        "dx": Tensor(
            FLOATS, ratio_checked("softmax_dropout_grad", "dy"), "the shape of dy", dtype_of="dy", role="alone"
        )
    },
    in_place={"dx": ("dy", "y")},
    onnx=(
        OnnxName(
            "SoftmaxDropoutGrad",
            ("dy", "mask", "y", "ratio?"),
            ("dx",),
            {"axis": 1},
            types={"dy": "T", "y": "T", "ratio": ("float32", "float64", "float16", "bfloat16")},
        ),
    ),
)
def softmax_dropout_grad(
    dy: X, mask: Mask, y: Saved, ratio: float = 0.5, axis: Axis = -1, *, out: Array | None = None
) -> Array:
    """Gradient of dropout(softmax(x)).

    dy: gradient with respect to the output of dropout, of at least one dimension; float32, float64, float16 or
        bfloat16.
    mask: bool, of the shape of dy; True where dropout kept an element.
    y: the output of softmax, of the shape and dtype of dy.
    ratio: as given to dropout; with 1 the gradient is 0.
    axis: a row is all of y from this axis on.
    out: where to write; may be dy or y.

    Returns dx, of the shape and dtype of dy; dy counts for nothing where mask is False, even if it is NaN there.
    Raises TypeError, ValueError.

    Formula: g = where(mask, dy / (1 - ratio), 0); dx = y * (g - sum(y * g)), the sum over a row.
    Source: com.microsoft SoftmaxDropoutGrad.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], np.float32)
    >>> dy = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], np.float32)
    >>> mask = np.array([[True, True, False], [True, True, True]])
    >>> opgrad.softmax_dropout_grad(dy, mask, opgrad.softmax(x), ratio=0.5)
    array([[ 0.1639, -0.0441, -0.1198],
           [-0.2222, -0.2222,  0.4444]], dtype=float32)
    """
    g = _rows(np.where(mask, dy * kept_scale(ratio), 0.0), axis)
    p = _rows(y, axis)
    return (p * (g - (p * g).sum(1, keepdims=True))).reshape(y.shape)
