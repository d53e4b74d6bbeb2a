"""Softmax with a sink: a logit of each head that takes a share of the probability and has no place in the result."""

from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, Tensor, like, operator
from opgrad.contract.attributes import FLOATS, Array

X = Annotated[Array, Tensor(FLOATS, ranks=range(4, 5))]
OF_HEADS = "the heads of x, its second axis"
Sink = Annotated[
    Array, Tensor(FLOATS, lambda shapes, _: shapes["x"][1:2], OF_HEADS, dtype_of="x", besides=("float32",))
]
Y = Annotated[Array, like("dy")]
Lse = Annotated[Array, Tensor(("float32", "float64"), lambda shapes, _: shapes["dy"][:-1], "the rows of dy")]
SavedSink = Annotated[
    Array, Tensor(FLOATS, lambda shapes, _: shapes["dy"][1:2], OF_HEADS, dtype_of="dy", besides=("float32",))
]


@operator(
    "y = exp(x) / (sum(exp(x)) + exp(sink)), lse = log(sum(exp(x)) + exp(sink))",
    support=IN_GRAPHS,
    results={
        "y": like("x"),
        "lse": Tensor(("float32", "float64"), lambda shapes, _: shapes["x"][:-1], "the rows of x", dtype_of="x"),
    },
    in_place={"y": ("x",)},
)
def sink_softmax(x: X, sink: Sink, *, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """Softmax of the last axis beside a logit of each head that takes a share and has no place in the result.

    x: scores, shape (N, H, L, S); float32, float64, float16 or bfloat16.
    sink: shape (H,), of the dtype of x or float32.
    out: where to write y and lse; y may be x.

    Returns (y, lse): y like x, whose rows sum to 1 less the share of the sink; lse of shape (N, H, L), the logarithm of
    the sum of exponentials, that of the sink included, in float32, or float64 for float64. Rows of -inf with a sink of
    -inf are 0. Raises TypeError, ValueError.

    Formula: y = exp(x) / (sum(exp(x)) + exp(sink)).
    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023, as trained in gpt-oss.

    Example:
    >>> x = np.log(np.array([[[[1.0, 2.0]]]], np.float32))
    >>> y, lse = opgrad.sink_softmax(x, np.zeros(1, np.float32))
    >>> y, np.exp(lse)
    (array([[[[0.25, 0.5 ]]]], dtype=float32), array([[[4.]]], dtype=float32))
    """
    beside = sink[:, None, None]
    m = np.maximum(x.max(-1, keepdims=True, initial=-np.inf), beside)
    base = np.where(m == -np.inf, 0, m)
    e = np.exp(x - base)
    total = e.sum(-1, keepdims=True) + np.exp(beside - base)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + base
    return e / np.where(total == 0, 1, total), lse[..., 0]


@operator(
    "dx = y * (dy - sum(y * dy)), dsink = -sum(exp(sink - lse) * sum(y * dy))",
    forward="sink_softmax",
    support=IN_GRAPHS,
    results={"dx": like("dy"), "dsink": like("sink")},
    in_place={"dx": ("dy", "y")},
)
def sink_softmax_grad(
    dy: X, y: Y, lse: Lse, sink: SavedSink, *, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Gradients of sink_softmax's y with respect to x and sink.

    dy: gradient with respect to y, shape (N, H, L, S); float32, float64, float16 or bfloat16.
    y, lse: the results of sink_softmax, y of the dtype of dy. sink: as given to it.
    out: where to write dx and dsink; dx may be dy or y.

    Returns (dx, dsink): dx like dy, dsink of the shape and dtype of sink. Sums over rows are formed in one order.
    Raises TypeError, ValueError.

    Formula: dx = y * (dy - sum(y * dy)); dsink = -sum over rows of exp(sink - lse) * sum(y * dy). Source: that of
    sink_softmax.

    Example:
    >>> x, sink = np.log(np.array([[[[1.0, 2.0]]]], np.float32)), np.zeros(1, np.float32)
    >>> y, lse = opgrad.sink_softmax(x, sink)
    >>> opgrad.sink_softmax_grad(np.array([[[[1.0, 0.0]]]], np.float32), y, lse, sink)
    (array([[[[ 0.1875, -0.125 ]]]], dtype=float32), array([-0.0625], dtype=float32))
    """
    total = (y * dy).sum(-1)
    rest = np.exp(sink[:, None] - np.where(lse == -np.inf, 0, lse))
    return y * (dy - total[..., None]), -(rest * total).sum((0, 2))
