"""Softmax and log-softmax over any axis, with everything that may be done to the result, and their gradients."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from opgrad.contract import Axes, OnnxName, Tensor, divisor, finite, like, one_of, operator
from opgrad.contract.arrangement import sum_to
from opgrad.contract.attributes import FLOATS, Array
from opgrad.ops.reference import post_ops as chain
from opgrad.ops.reference import primitive
from opgrad.ops.reference.dropout import Dropout, keep_mask
from opgrad.ops.reference.post_ops import PostOp

X = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]
Y = Annotated[Array, like("dy", ranks=range(1, 65))]
Factor = Annotated[float, finite]
Divisor = Annotated[float, divisor]
Accumulation = Annotated[str, one_of("strict", "relaxed", "any")]


@operator(kind="rows", results={"y": like("x")}, in_place={"y": ("x",)}, general=primitive.SOFTMAX)
def softmax(
    x: X, axis: Axes = -1, *, out: Array | tuple[Array, ...] | None = None, out_dtype: Any = None,
    where: Array | None = None, logit_scale: Factor = 1.0, inf_as_zero: bool = False, result_scale: Factor = 1.0,
    dropout: Dropout | None = None, post_ops: Sequence[PostOp] = (), out_scale: Divisor = 1.0,
    accumulation: Accumulation = "any", stats: bool = False, save: bool = False,
) -> Any:  # fmt: skip
    """Probabilities from logits.

    x: any shape of at least one dimension; float32, float64, float16, bfloat16, float8_e5m2, float8_e4m3fn, int8
        or uint8.
    axis: the axis, or tuple of adjacent axes, over which the probabilities sum to 1.
    out: where to write the result, of the shape of x; may be x. For several results a tuple.
    out_dtype: the dtype of y, one of those of x. Without it that of `out`; without that x's own, float32 for integers.
        Integers are rounded to even and saturate; NaN becomes 0.
    where: bool, broadcasts to x; elements where it is False take no part, their probability is 0.
    logit_scale: multiplies the logits first; 1 / temperature.
    inf_as_zero: a row that is all -inf (or False in `where`) gives zeros instead of NaN.
    result_scale: multiplies the probabilities. (oneDNN: the scale of src.)
    dropout: an opgrad.Dropout, or None.
    post_ops: up to 32 of opgrad.post_ops, applied in order.
    out_scale: divides what they leave, before y is rounded to its dtype. (oneDNN: the scale of dst.)
    accumulation: "strict" keeps all digits of the sums: results are within 2 ulp of float32 instead of 4, and take
        longer. "relaxed" and "any" do not ask for that.
    stats: also return the logarithm of each row's sum of exponentials, float32, in the shape of x with 1 for axis.
    save: also return the probabilities before result_scale, which softmax_grad takes as y; the dtype of x, or float32.

    Returns y, or a tuple: y, then the log-sum-exp, the saved probabilities and dropout's mask as asked for. The order
    of operations is logit_scale, where, softmax, result_scale, dropout, post_ops, out_scale, rounding. A NaN or +inf
    makes its whole row NaN, as does a row of -inf.

    Formula: y = exp(x - max(x)) / sum(exp(x - max(x))). Source: ONNX Softmax-13; oneDNN's softmax primitive.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], np.float32)
    >>> opgrad.softmax(x)
    array([[0.09  , 0.2447, 0.6652],
           [0.3333, 0.3333, 0.3333]], dtype=float32)
    """
    z, top, s = _exponentials(x, axis, where, logit_scale)
    with np.errstate(all="ignore"):
        p = np.exp(z - top) / s
        if inf_as_zero:
            p = np.where(np.isneginf(top), 0.0, p)
    return _finished(p, top, s, result_scale, dropout, post_ops, out_scale, stats, save)


@operator(kind="rows", results={"y": like("x")}, in_place={"y": ("x",)}, general=primitive.SOFTMAX)
def log_softmax(
    x: X, axis: Axes = -1, *, out: Array | tuple[Array, ...] | None = None, out_dtype: Any = None,
    where: Array | None = None, logit_scale: Factor = 1.0, result_scale: Factor = 1.0,
    dropout: Dropout | None = None, post_ops: Sequence[PostOp] = (), out_scale: Divisor = 1.0,
    accumulation: Accumulation = "any", stats: bool = False, save: bool = False,
) -> Any:  # fmt: skip
    """Logarithms of the softmax probabilities.

    x: any shape of at least one dimension; the dtypes of softmax.
    axis: the axis, or tuple of adjacent axes, over which the probabilities sum to 1.
    out: where to write the result, of the shape of x; may be x. For several results a tuple.
    out_dtype, where, logit_scale, result_scale, dropout, post_ops, out_scale, accumulation, stats: as for softmax;
        elements where `where` is False give -inf.
    save: also return the log-probabilities before result_scale, which log_softmax_grad takes as y.

    Returns y, or a tuple as softmax. A NaN or +inf makes its whole row NaN, as does a row of -inf.

    Formula: y = x - max(x) - log(sum(exp(x - max(x)))). Source: ONNX LogSoftmax-13; oneDNN's softmax primitive.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], np.float32)
    >>> opgrad.log_softmax(x)
    array([[-2.4076, -1.4076, -0.4076],
           [-1.0986, -1.0986, -1.0986]], dtype=float32)
    """
    z, top, s = _exponentials(x, axis, where, logit_scale)
    with np.errstate(all="ignore"):
        return _finished(z - top - np.log(s), top, s, result_scale, dropout, post_ops, out_scale, stats, save)


def _exponentials(x: Array, axis: Axes, where: Any, logit_scale: float) -> tuple[Array, Array, Array]:
    """The logits as they count, the largest of each row, and the sums of exp(logit - largest)."""
    with np.errstate(all="ignore"):
        z = np.multiply(x, logit_scale) if logit_scale != 1.0 else x
        if where is not None:
            z = np.where(where, z, -np.inf)
        top = np.max(z, axis, keepdims=True, initial=-np.inf)
        return z, top, np.exp(z - top).sum(axis, keepdims=True)


def _finished(
    v: Array, top: Array, s: Array, result_scale: float, dropout: Dropout | None, post_ops: Sequence[PostOp],
    out_scale: float, stats: bool, save: bool,
) -> Any:  # fmt: skip
    """What is made of the probabilities or their logarithms."""
    extra = [np.where(np.isneginf(top), top, top + np.log(s))] if stats else []
    extra += [v] if save else []
    if result_scale != 1.0:
        v = v * result_scale
    if dropout is not None:
        kept = keep_mask(v.shape, dropout.probability, dropout.seed, dropout.offset)
        v = np.where(kept, v / (1 - dropout.probability), 0.0)
        extra += [kept] if dropout.mask else []
    for each in post_ops:
        v = chain.apply(each, v)
    y = v / out_scale if out_scale != 1.0 else v
    return (y, *extra) if extra else y


def _through_attributes(
    dy: Array, y: Array, where: Any, result_scale: float, dropout: Dropout | None, post_ops: Sequence[PostOp],
    out_scale: float,
) -> tuple[Array, list[Array]]:  # fmt: skip
    """The gradient with respect to the (log-)probabilities y, and those of the post-ops' operands."""
    v: Any = y * result_scale
    if dropout is not None:
        kept = keep_mask(y.shape, dropout.probability, dropout.seed, dropout.offset)
        v = np.where(kept, v / (1 - dropout.probability), 0.0)
    before = []
    for each in post_ops:
        before.append(v)
        v = chain.apply(each, v)
    g, operands = dy / out_scale, []
    for each, s in zip(reversed(post_ops), reversed(before), strict=True):
        if each.operands and np.asarray(each.operands[-1]).dtype.kind not in "iub":
            operands.append(sum_to(g * chain.OPERAND_SLOPES[each.name](s, *each.operands), np.shape(each.operands[-1])))
        g = g * chain.slope(each, s)
    if dropout is not None:
        g = np.where(kept, g / (1 - dropout.probability), 0.0)
    g = g * result_scale
    return (g if where is None else np.where(where, g, 0.0)), operands[::-1]


@operator(
    forward="softmax",
    kind="rows",
    results={"dx": like("dy")},
    in_place={"dx": ("dy", "y")},
    onnx=(
        OnnxName("SoftmaxGrad_13", attributes={"axis": -1}),
        OnnxName("SoftmaxGrad", attributes={"axis": 1}, until_13=True),
    ),
    general=primitive.SOFTMAX_GRAD,
)
def softmax_grad(
    dy: X, y: Y, axis: Axes = -1, *, out: Array | None = None, out_dtype: Any = None, where: Array | None = None,
    logit_scale: Factor = 1.0, result_scale: Factor = 1.0, dropout: Dropout | None = None,
    post_ops: Sequence[PostOp] = (), out_scale: Divisor = 1.0, post_op_grads: bool = False,
) -> Any:  # fmt: skip
    """Gradient of softmax.

    dy: gradient of the loss with respect to the result; float32, float64, float16, bfloat16 or a float8.
    y: the output of softmax (not its input), of the shape of dy and any of its dtypes. It is used as it is. If softmax
        had attributes: the probabilities that `save=True` returned.
    axis: the axis, or tuple of adjacent axes, that softmax reduced. ONNX's SoftmaxGrad(axis=k) of opset < 13
        is axis=tuple(range(k, rank)).
    out: where to write dx; may be dy or y. out_dtype: the dtype of dx; without it that of `out`, without that dy's.
    where, logit_scale, result_scale, dropout, post_ops, out_scale: what softmax was given; the seed and offset of
        dropout tell which elements it dropped. round and the comparisons have no gradient.
    post_op_grads: also return the gradients of the post-ops' floating-point operands.

    Returns dx, of the shape of dy; with post_op_grads a tuple of dx and a gradient for each such operand (select's
    `other`), of its shape and dtype. Raises TypeError for a wrong dtype or attribute, ValueError for a wrong shape,
    axis, value or out, and for a post-op that has no gradient.

    Formula: dx = y * (dy - sum(y * dy)). Source: com.microsoft SoftmaxGrad_13, SoftmaxGrad.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], np.float32)
    >>> dy = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], np.float32)
    >>> opgrad.softmax_grad(dy, opgrad.softmax(x))
    array([[ 0.0819, -0.022 , -0.0599],
           [-0.1111, -0.1111,  0.2222]], dtype=float32)
    """
    g, operands = _through_attributes(dy, y, where, result_scale, dropout, post_ops, out_scale)
    dx = logit_scale * (y * (g - (y * g).sum(axis, keepdims=True)))
    return (dx, *operands) if post_op_grads else dx


@operator(
    forward="log_softmax",
    kind="rows",
    results={"dx": like("dy")},
    in_place={"dx": ("dy", "y")},
    onnx=(
        OnnxName("LogSoftmaxGrad_13", attributes={"axis": -1}),
        OnnxName("LogSoftmaxGrad", attributes={"axis": 1}, until_13=True),
    ),
    general=primitive.SOFTMAX_GRAD,
)
def log_softmax_grad(
    dy: X, y: Y, axis: Axes = -1, *, out: Array | None = None, out_dtype: Any = None, where: Array | None = None,
    logit_scale: Factor = 1.0, result_scale: Factor = 1.0, dropout: Dropout | None = None,
    post_ops: Sequence[PostOp] = (), out_scale: Divisor = 1.0, post_op_grads: bool = False,
) -> Any:  # fmt: skip
    """Gradient of log_softmax.

    dy: gradient of the loss with respect to the result; float32, float64, float16, bfloat16 or a float8.
    y: the output of log_softmax (not its input), of the shape of dy and any of its dtypes. It is used as it is. If
        log_softmax had attributes: the log-probabilities that `save=True` returned.
    axis: the axis, or tuple of adjacent axes, that log_softmax reduced.
    out: where to write dx; may be dy or y. out_dtype: the dtype of dx; without it that of `out`, without that dy's.
    where, logit_scale, result_scale, dropout, post_ops, out_scale, post_op_grads: as for softmax_grad.

    Returns dx, of the shape of dy; with post_op_grads a tuple as softmax_grad. Raises TypeError for a wrong dtype or
    attribute, ValueError for a wrong shape, axis, value or out, and for a post-op that has no gradient.

    Formula: dx = dy - exp(y) * sum(dy). Source: com.microsoft LogSoftmaxGrad_13, LogSoftmaxGrad.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], np.float32)
    >>> dy = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], np.float32)
    >>> opgrad.log_softmax_grad(dy, opgrad.log_softmax(x))
    array([[ 0.91  , -0.2447, -0.6652],
           [-0.3333, -0.3333,  0.6667]], dtype=float32)
    """
    g, operands = _through_attributes(dy, y, where, result_scale, dropout, post_ops, out_scale)
    dx = logit_scale * (g - np.exp(y) * g.sum(axis, keepdims=True))
    return (dx, *operands) if post_op_grads else dx
