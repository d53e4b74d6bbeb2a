"""Losses of training graphs and of distillation, over the last axis.

Cross-entropy with dense and with sparse labels, that of a linear layer's results, whose logits are never whole in
memory, and divergences of softmax distributions from those of a teacher.
"""

import math
from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Reduction, Tensor, finite, like, one_of, operator, shaped_like
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes
from opgrad.contract.quantized import not_negative, number_like, quantized, weight_bits, whole_bytes
from opgrad.ops.cross_entropy import Positive, Share, logits_of, reduced
from opgrad.ops.quantized import NODE as QUANTIZED
from opgrad.ops.quantized import Scales, Zeros, floats_of
from opgrad.ops.softmax import log_softmax

LogProb = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]


def _loss_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    return logits_of(shapes)[:-1] if attributes["reduction"] == "none" else ()


def _loss_grad_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    return (1,) if attributes["reduction"] != "none" and shapes["dy"] == (1,) else _loss_shape(shapes, attributes)


LossGrad = Annotated[Array, Tensor(FLOATS, _loss_grad_shape, "what the reduction gives")]
Dense = Annotated[Array, Tensor(FLOATS, lambda shapes, _: logits_of(shapes), "that of the logits")]
Sparse = Annotated[
    Array, Tensor(INTEGERS, lambda shapes, _: logits_of(shapes)[:-1], "that of the logits without the last axis")
]
Weight = Annotated[Array, shaped_like("labels")]

LOSS = {"loss": Tensor(FLOATS, _loss_shape, "what the reduction gives", dtype_of="logits"), "log_prob": like("logits")}
SLOPE = {"dlogits": like("log_prob")}


@operator(
    support=IN_GRAPHS,
    results=LOSS,
    in_place={"log_prob": ("logits",)},
    onnx=OnnxName("SoftmaxCrossEntropy", outputs=("loss", "log_prob?"), attributes={"reduction": "mean"}),
)
def softmax_cross_entropy(
    logits: LogProb, labels: Dense, *, reduction: Reduction = "mean", out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Cross-entropy between softmax(logits) over the last axis and probabilities, such as smoothed labels.

    logits: shape (…, C), of at least one dimension; float32, float64, float16 or bfloat16.
    labels: the probability of each class, of the shape of logits; one of the four dtypes. They are used as given.
    reduction: "none" (a loss for each sample), "sum", or "mean" (the sum divided by the number of samples; 0 if there
        is none).

    Returns (loss, log_prob): loss of shape logits.shape[:-1] or (), log_prob = log_softmax(logits). Where a label is 0
    its class adds nothing, even if its probability is 0.

    Formula: loss_i = -sum_k(labels[i, k] * log_prob[i, k]); log_prob = log_softmax(logits). Source: com.microsoft
    SoftmaxCrossEntropy, which negates no loss with reduction "none", and adds them up.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], np.float32)
    >>> opgrad.softmax_cross_entropy(logits, labels)
    (array(1.0013, dtype=float32), array([[-0.4076, -2.4076, -1.4076],
           [-3.0949, -0.0949, -3.0949]], dtype=float32))
    """
    log_prob = log_softmax(logits)
    losses = -np.where(labels == 0, 0.0, labels * log_prob).sum(-1)
    return reduced(losses, np.ones(losses.shape), reduction), log_prob


@operator(
    forward="softmax_cross_entropy",
    support=IN_GRAPHS,
    results=SLOPE,
    in_place={"dlogits": ("log_prob", "labels")},
    onnx=OnnxName("SoftmaxCrossEntropyGrad", attributes={"reduction": "mean"}),
)
def softmax_cross_entropy_grad(
    dy: LossGrad, log_prob: LogProb, labels: Dense, *, reduction: Reduction = "mean", out: Array | None = None
) -> Array:
    """Gradient of softmax_cross_entropy with respect to logits, for labels of which each sample's add up to 1.

    dy: gradient with respect to loss: shape log_prob.shape[:-1] for reduction "none", else () or (1,).
    log_prob: the second result of the forward function, shape (…, C). It is not normalised again.
    labels, reduction: as given to the forward function.

    Formula: dlogits[i, k] = dy_i * (exp(log_prob[i, k]) - labels[i, k]) / W, where W is the number of samples for
    "mean", else 1. Source: com.microsoft SoftmaxCrossEntropyGrad, whose result with reduction "none" is undefined.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], np.float32)
    >>> _, log_prob = opgrad.softmax_cross_entropy(logits, labels)
    >>> opgrad.softmax_cross_entropy_grad(np.float32(1.0), log_prob, labels)
    array([[-0.1674,  0.045 ,  0.1224],
           [ 0.0226,  0.2047, -0.2274]], dtype=float32)
    """
    samples = log_prob[..., 0].size if log_prob.shape[-1] else 1
    divisor = max(samples, 1) if reduction == "mean" else 1.0
    upstream = dy[..., np.newaxis] if reduction == "none" else dy.reshape(())
    return upstream * (np.exp(log_prob) - labels) / divisor


@operator(
    support=IN_GRAPHS,
    results=LOSS,
    in_place={"log_prob": ("logits",)},
    onnx=OnnxName(
        "SparseSoftmaxCrossEntropy", outputs=("loss", "log_prob?"), attributes={"reduction": "mean"}, origin=""
    ),
)
def sparse_softmax_cross_entropy(
    logits: LogProb, labels: Sparse, weight: Weight | None = None, *, reduction: Reduction = "mean",
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Cross-entropy between softmax(logits) over the last axis and integer labels, with a weight for each sample.

    logits: shape (…, C), of at least one dimension; float32, float64, float16 or bfloat16.
    labels: shape logits.shape[:-1]; int32 or int64 classes in [0, C).
    weight: a factor for each sample, of the shape of labels; one of the four dtypes; None: all 1.
    reduction: "none" (a loss for each sample), "sum", or "mean" (the sum divided by the sum of the weights; 0 if that
        is 0).

    Returns (loss, log_prob): loss of shape labels.shape or (), log_prob = log_softmax(logits).

    Formula: loss_i = -weight_i * log_prob[i, label_i]; log_prob = log_softmax(logits). Source: ONNX Runtime's
    SparseSoftmaxCrossEntropy, which adds the losses up with reduction "none", too.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> opgrad.sparse_softmax_cross_entropy(logits, labels)
    (array(1.7513, dtype=float32), array([[-0.4076, -2.4076, -1.4076],
           [-3.0949, -0.0949, -3.0949]], dtype=float32))
    """
    log_prob = log_softmax(logits)
    weights = np.ones(labels.shape) if weight is None else weight
    losses = np.zeros(labels.shape)
    if labels.size:
        losses = -weights * np.take_along_axis(log_prob, labels[..., np.newaxis], -1)[..., 0]
    return reduced(losses, weights, reduction), log_prob


@operator(
    forward="sparse_softmax_cross_entropy",
    support=IN_GRAPHS,
    results=SLOPE,
    in_place={"dlogits": ("log_prob",)},
    onnx=OnnxName("SparseSoftmaxCrossEntropyGrad", attributes={"reduction": "mean"}, origin=""),
)
def sparse_softmax_cross_entropy_grad(
    dy: LossGrad, log_prob: LogProb, labels: Sparse, weight: Weight | None = None, *, reduction: Reduction = "mean",
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of sparse_softmax_cross_entropy with respect to logits.

    dy: gradient with respect to loss: shape labels.shape for reduction "none", else () or (1,).
    log_prob: the second result of the forward function, shape (…, C). It is not normalised again.
    labels, weight, reduction: as given to the forward function.

    Returns dlogits, of the shape and dtype of log_prob; 0 where the mean's divisor is 0.

    Formula: dlogits[i, k] = weight_i * dy_i * (exp(log_prob[i, k]) - [k == label_i]) / W, where W is the sum of the
    weights for "mean", else 1. Source: ONNX Runtime's SparseSoftmaxCrossEntropyGrad, which takes the first dy for all
    with reduction "none".

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> _, log_prob = opgrad.sparse_softmax_cross_entropy(logits, labels)
    >>> opgrad.sparse_softmax_cross_entropy_grad(np.float32(1.0), log_prob, labels)
    array([[-0.1674,  0.045 ,  0.1224],
           [ 0.0226,  0.4547, -0.4774]], dtype=float32)
    """
    weights = np.ones(labels.shape) if weight is None else weight
    divisor = float(weights.sum()) if reduction == "mean" else 1.0
    if not divisor:
        return np.zeros(log_prob.shape)
    factor = weights * (dy if reduction == "none" else dy.reshape(())) / divisor
    onehot = labels[..., np.newaxis] == np.arange(log_prob.shape[-1])
    return factor[..., np.newaxis] * (np.exp(log_prob) - onehot)


Logits = Annotated[Array, Tensor(FLOATS, ranks=range(2, 3))]
Teacher = Annotated[Array, like("logits")]
OF_ROWS = Tensor(
    ("float32", "float64"), lambda shapes, _: shapes["logits"][:1], "the rows of logits", dtype_of="logits"
)
OfRow = Annotated[Array, Tensor(FLOATS, lambda shapes, _: shapes["logits"][:1], "the rows of logits")]


def _share(p: Array, log_ratio: Array) -> Array:
    """p * log_ratio, and 0 where p is, whatever the ratio is there."""
    return np.where(p == 0, 0, p * np.where(p == 0, 0, log_ratio))


@operator(
    "loss = beta * KL(teacher || mixture) + (1 - beta) * KL(student || mixture), and dlogits",
    support=IN_GRAPHS,
    results={"loss": OF_ROWS, "dlogits": like("logits")},
    in_place={"dlogits": ("logits",)},
)
def softmax_divergence_and_grad(
    logits: Logits, teacher_logits: Teacher, dloss: OfRow | None = None, beta: Share = 0.5,
    temperature: Positive = 1.0, *, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """How far each row's softmax is from a teacher's, by the generalized Jensen-Shannon divergence, and its gradient.

    logits: the student's, shape (N, C); float32, float64, float16 or bfloat16.
    teacher_logits: of the shape and dtype of logits; they get no gradient.
    dloss: gradient with respect to loss, shape (N,), any of the four dtypes; None: all 1.
    beta: in [0, 1], the share of the teacher in the mixture. 0 stands for KL(teacher || student), 1 for KL(student ||
        teacher), which are the limits of the divergence over beta, and over 1 - beta.
    temperature: above 0; divides both logits.

    Returns (loss, dlogits): loss of shape (N,) in float32, or float64 for float64; dlogits of the shape and dtype of
    logits. Classes of probability 0 count nothing. NaN and +inf in a row make it NaN.

    Formula: p, q = softmax(teacher_logits / temperature), softmax(logits / temperature); m = beta * p + (1 - beta) * q;
    loss = sum(beta * p * log(p / m) + (1 - beta) * q * log(q / m)); dlogits = dloss / temperature * q *
    (d - sum(q * d)), d = (1 - beta) * log(q / m).
    Source: Agarwal et al., "On-Policy Distillation of Language Models", 2024.

    Example:
    >>> student = np.array([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]], np.float32)
    >>> teacher = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]], np.float32)
    >>> loss, dlogits = opgrad.softmax_divergence_and_grad(student, teacher, beta=0.0)
    >>> loss.round(4) + 0.0, dlogits.round(4) + 0.0
    (array([0.   , 0.732], dtype=float32), array([[ 0.    ,  0.    ,  0.    ],
           [ 0.2881,  0.2881, -0.5761]], dtype=float32))
    """
    log_q, log_p = (log_softmax(x / temperature) for x in (logits, teacher_logits))
    p, q = np.exp(log_p), np.exp(log_q)
    slope = (np.ones(len(logits)) if dloss is None else dloss)[:, None] / temperature
    if beta == 0:
        return _share(p, log_p - log_q).sum(1), slope * (q * p.sum(1, keepdims=True) - p)
    if beta == 1:
        loss, d = _share(q, log_q - log_p), log_q - log_p
    else:
        # log(q / m) and log(p / m) by log(p / q): a difference from log(m) is inexact where p / q is near 1.
        near = np.clip(log_p - log_q, -700, 700)
        log_ratio = -np.log1p(beta * np.expm1(near))
        loss = beta * _share(p, log_ratio + near) + (1 - beta) * _share(q, log_ratio)
        d = (1 - beta) * log_ratio
    d = np.where(q == 0, 0, d)
    mean = (q * d).sum(1, keepdims=True) / q.sum(1, keepdims=True)
    return loss.sum(1), slope * q * (d - mean)


NODE = {**QUANTIZED, "bits": 0, "reduction": "mean", "ignore_index": -100}
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
LINEAR_LOSS = Tensor(
    ("float32", "float64"),
    lambda shapes, attributes: _tokens(shapes, attributes) if attributes["reduction"] == "none" else (),
    "what the reduction gives",
    dtype_of="x",
)
DX = like("x")


@operator(
    support=IN_GRAPHS,
    results={"loss": LINEAR_LOSS},
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

    Returns the loss, float32 (float64 for float64); 0 if no token counts. Logits are computed in float32.

    Formula: loss = sum(weight * (log(sum(exp(z))) - z[label])) / W, z = x @ w.T, W = sum(weight) for "mean", else 1.
    Source: torch.nn.functional.linear_cross_entropy; LinearCrossEntropyLoss is the node in com.microsoft here.

    Example:
    >>> x, w = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32), np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    >>> opgrad.linear_cross_entropy_loss(x, w, np.array([0, 1]), N=2, K=2)
    array(0.2201, dtype=float32)
    """
    layer = x, b, labels, scales, zero_points, weight, N, K, bits, row_block, column_block, transB, signed, zero_point
    return linear_cross_entropy_loss_and_grad(*layer, reduction=reduction, ignore_index=ignore_index)[0]


@operator(
    support=IN_GRAPHS,
    forward="linear_cross_entropy_loss",
    results={"loss": LINEAR_LOSS, "dx": DX},
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

    Returns (loss, dx), dx of the shape and dtype of x, 0 for ignored tokens.

    Formula: dx = weight * (softmax(z) - onehot(label)) @ w / W, z = x @ w.T, W = sum(weight) for "mean", else 1.
    Source: torch.nn.functional.linear_cross_entropy; LinearCrossEntropyLossAndGrad is the node in com.microsoft here.

    Example:
    >>> x, w = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32), np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    >>> opgrad.linear_cross_entropy_loss_and_grad(x, w, np.array([0, 1]), N=2, K=2)
    (array(0.2201, dtype=float32), array([[-0.1345,  0.1345],
           [ 0.0596, -0.0596]], dtype=float32))
    """
    given = {"N": N, "K": K, "bits": bits, "row_block": row_block, "column_block": column_block, "transB": transB}
    w = b
    if bits and scales is not None:
        w = floats_of(b, scales, zero_points, None, given, signed, zero_point)
    w = w if transB else w.T
    logits, counts = x.reshape(math.prod(x.shape[:-1]), K) @ w.T, labels != ignore_index
    weights = (np.ones(labels.shape) if weight is None else weight)[counts]
    loss, slope, kept = np.zeros(labels.shape), np.zeros(logits.shape), counts.reshape(-1)
    losses, log_prob = sparse_softmax_cross_entropy(logits[kept], labels[counts], weights, reduction=reduction)
    dy = np.ones(losses.shape)
    slope[kept] = sparse_softmax_cross_entropy_grad(dy, log_prob, labels[counts], weights, reduction=reduction)
    loss[counts] = losses
    return loss if reduction == "none" else losses, (slope @ w).reshape(x.shape)
