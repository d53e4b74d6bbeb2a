"""Softmax cross-entropy of a linear layer's results, as one operator of graphs: logits are never whole in memory."""

import math
from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, finite, like, one_of, operator, reference
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes
from opgrad.contract.quantized import not_negative, number_like, quantized, weight_bits, whole_bytes
from opgrad.ops.quantized import Scales, Zeros, floats_of

NODE = {
    "N": 0,
    "K": 0,
    "bits": 0,
    "row_block": 1,
    "column_block": 0,
    "transB": 1,
    "signed": 0,
    "zero_point": 0.0,
    "reduction": "mean",
    "ignore_index": -100,
}
INPUTS = ("x", "b", "labels", "scales?", "zero_points?", "weight?")
TYPES: dict[str, str | tuple[str, ...]] = {
    "b": ("uint8", "float32", "float16", "bfloat16"),
    "labels": ("int64",),
    "zero_points": ("uint8", "float32"),
    "weight": ("float32",),
}


def _x(shapes: Shapes, attributes: Attributes) -> Shape:
    return (*shapes["x"][:-1], attributes["K"])


def _b(shapes: Shapes, attributes: Attributes) -> Shape:
    if attributes["bits"]:
        return number_like("b", shapes, quantized(shapes, attributes).packed)
    sizes = attributes["N"], attributes["K"]
    return sizes if attributes["transB"] else sizes[::-1]


def _tokens(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["x"][:-1]


X = Annotated[Array, Tensor(FLOATS, _x, "whose last size is K", ranks=range(1, 65))]
Weights = Annotated[
    Array, Tensor(("uint8", *FLOATS), _b, "the sizes of the weights, or their bytes", ranks=range(1, 65))
]
Labels = Annotated[Array, Tensor(INTEGERS, _tokens, "that of x without its last axis")]
TokenWeights = Annotated[Array, Tensor(FLOATS, _tokens, "that of x without its last axis")]
Bits = Annotated[int, weight_bits]
Size = Annotated[int, not_negative]
Columns = Annotated[int, whole_bytes]
Zero = Annotated[float, finite]
Reduced = Annotated[str, one_of("mean", "sum", "none")]
LOSS = Tensor(
    ("float32", "float64"),
    lambda shapes, attributes: _tokens(shapes, attributes) if attributes["reduction"] == "none" else (),
    "what the reduction gives",
    dtype_of="x",
)
DX = like("x")


@operator(
    "loss = sum(weight * (log(sum(exp(z))) - z[label])) / W, z = x @ w.T",
    support=IN_GRAPHS,
    results={"loss": LOSS},
    onnx=OnnxName("LinearCrossEntropyLoss", INPUTS, ("loss",), NODE, types=TYPES),
)
def linear_cross_entropy_loss(
    x: X, b: Weights, labels: Labels, scales: Scales | None = None, zero_points: Zeros | None = None,
    weight: TokenWeights | None = None, N: Size = 0, K: Size = 0, bits: Bits = 0, row_block: Size = 1,
    column_block: Columns = 0, transB: bool = True, signed: bool = False, zero_point: Zero = 0.0,
    *, reduction: Reduced = "mean", ignore_index: int = -100, out: Array | None = None,
) -> Array:  # fmt: skip
    """Softmax cross-entropy of the logits x @ w.T, for w of floats or of a few bits; a chunk of tokens at a time.

    x: what the layer is given for each token, shape [.., K]; float32, float64, float16 or bfloat16.
    b: the weights: with bits 0 floats, [N, K], or [K, N] if transB is False; else bytes, as quantized_matmul_grad
        takes them.
    labels: the class of each token, the shape of x without its last axis; int32 or int64 in [0, N), or ignore_index.
    scales, zero_points, bits, row_block, column_block, transB, signed, zero_point: as quantized_matmul_grad takes them.
    weight: what each token's loss is multiplied with, the shape of labels; any float dtype. None: 1.
    N, K: the number of classes, and that of the numbers of a token.
    reduction: "mean", over the weights of tokens that are not ignored, "sum", or "none": a loss for each token.
    ignore_index: the label of tokens that do not count.
    out: where to write.

    Returns the loss, float32 (float64 for float64); 0 if no token counts. Logits are computed in float32.
    Raises TypeError, ValueError, the latter for a label out of range, too, naming the first one, before anything is
    written.

    Formula: loss = sum(weight * (log(sum(exp(z))) - z[label])) / W, z = x @ w.T, W = sum(weight) for "mean", else 1.
    Source: torch.nn.functional.linear_cross_entropy; LinearCrossEntropyLoss is the node in com.microsoft here.

    Example:
    >>> x, w = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32), np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    >>> opgrad.linear_cross_entropy_loss(x, w, np.array([0, 1]), N=2, K=2)
    array(0.2201, dtype=float32)
    """
    given = {"N": N, "K": K, "bits": bits, "row_block": row_block, "column_block": column_block, "transB": transB}
    logits, _ = _logits(x, b, scales, zero_points, given, signed, zero_point)
    options: Attributes = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    return _loss_and_slope(logits, labels, **options)[0]


@operator(
    "loss as of linear_cross_entropy_loss; dx = weight * (softmax(z) - onehot(label)) @ w / W",
    support=IN_GRAPHS,
    forward="linear_cross_entropy_loss",
    results={"loss": LOSS, "dx": DX},
    onnx=OnnxName("LinearCrossEntropyLossAndGrad", INPUTS, ("loss", "dx"), NODE, types=TYPES),
)
def linear_cross_entropy_loss_and_grad(
    x: X, b: Weights, labels: Labels, scales: Scales | None = None, zero_points: Zeros | None = None,
    weight: TokenWeights | None = None, N: Size = 0, K: Size = 0, bits: Bits = 0, row_block: Size = 1,
    column_block: Columns = 0, transB: bool = True, signed: bool = False, zero_point: Zero = 0.0,
    *, reduction: Reduced = "mean", ignore_index: int = -100, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The loss of linear_cross_entropy_loss and its gradient with respect to x, of which the logits are computed once.

    x, b, labels, scales, zero_points, weight, N, K, bits, row_block, column_block, transB, signed, zero_point,
    reduction, ignore_index: as linear_cross_entropy_loss takes them.
    out: a tuple of arrays for the results, which must not overlap the arguments.

    Returns (loss, dx), dx of the shape and dtype of x, 0 for ignored tokens. Raises TypeError, ValueError, as
    linear_cross_entropy_loss.

    Formula: dx = weight * (softmax(z) - onehot(label)) @ w / W, z = x @ w.T, W = sum(weight) for "mean", else 1.
    Source: torch.nn.functional.linear_cross_entropy; LinearCrossEntropyLossAndGrad is the node in com.microsoft here.

    Example:
    >>> x, w = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32), np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    >>> opgrad.linear_cross_entropy_loss_and_grad(x, w, np.array([0, 1]), N=2, K=2)
    (array(0.2201, dtype=float32), array([[-0.1345,  0.1345],
           [ 0.0596, -0.0596]], dtype=float32))
    """
    given = {"N": N, "K": K, "bits": bits, "row_block": row_block, "column_block": column_block, "transB": transB}
    logits, w = _logits(x, b, scales, zero_points, given, signed, zero_point)
    options: Attributes = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    loss, slope = _loss_and_slope(logits, labels, **options)
    return loss, (slope @ w).reshape(x.shape)


def _logits(
    x: Array, b: Array, scales: Array | None, zero_points: Array | None, given: Attributes, signed: bool, zero: float
) -> tuple[Array, Array]:
    """The logits [tokens, N], and the weights [N, K]."""
    w = b
    if given["bits"] and scales is not None:
        w = floats_of(b, scales, zero_points, None, given, signed, zero)
    w = w if given["transB"] else w.T
    return x.reshape(math.prod(x.shape[:-1]), given["K"]) @ w.T, w


def _loss_and_slope(
    logits: Array, labels: Array, *, weight: Array | None, ignore_index: int, reduction: str
) -> tuple[Array, Array]:
    """The loss, and its gradient with respect to the logits."""
    shape, labels = labels.shape if reduction == "none" else (), labels.reshape(-1)
    counts = labels != ignore_index
    picked = np.where(counts, labels, 0)
    weights = np.where(counts, 1.0 if weight is None else weight.reshape(-1), 0.0)
    total = weights.sum() if reduction == "mean" else np.float64(1)
    if not logits.size or not total:
        return np.zeros(shape), np.zeros(logits.shape)
    log_prob = reference("log_softmax")(logits)
    each = np.where(counts, -np.take_along_axis(log_prob, picked[:, None], 1)[:, 0] * weights, 0.0)
    loss = each.reshape(shape) if reduction == "none" else each.sum() / total
    slope = np.exp(log_prob) - (np.arange(logits.shape[1]) == picked[:, None])
    return np.asarray(loss), np.where(counts[:, None], slope * (weights / total)[:, None], 0.0)
