"""Losses over the last axis: cross-entropy with dense and with sparse labels."""

from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Reduction, Tensor, like, operator, reference, shaped_like
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes

LogProb = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]


def _of(shapes: Shapes) -> Shape:
    """The shape with a class on the last axis."""
    return shapes["logits" if "logits" in shapes else "log_prob"]


def _loss_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    return _of(shapes)[:-1] if attributes["reduction"] == "none" else ()


def _loss_grad_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    return (1,) if attributes["reduction"] != "none" and shapes["dy"] == (1,) else _loss_shape(shapes, attributes)


LossGrad = Annotated[Array, Tensor(FLOATS, _loss_grad_shape, "what the reduction gives")]
Dense = Annotated[Array, Tensor(FLOATS, lambda shapes, _: _of(shapes), "that of the logits")]
Sparse = Annotated[
    Array, Tensor(INTEGERS, lambda shapes, _: _of(shapes)[:-1], "that of the logits without the last axis")
]
Weight = Annotated[Array, shaped_like("labels")]

LOSS = {"loss": Tensor(FLOATS, _loss_shape, "what the reduction gives", dtype_of="logits"), "log_prob": like("logits")}
SLOPE = {"dlogits": like("log_prob")}


def _reduced(losses: Array, divisor: float, reduction: str) -> Array:
    if reduction == "none":
        return losses
    return np.asarray(losses.sum() / divisor if divisor else 0.0)


@operator(
    "loss = -sum(labels * log_prob), reduced; log_prob = log_softmax(logits)",
    support=IN_GRAPHS,
    results=LOSS,
    in_place={"log_prob": ("logits",)},
    onnx=OnnxName("SoftmaxCrossEntropy", ("logits", "labels"), ("loss", "log_prob?"), {"reduction": "mean"}),
)
def softmax_cross_entropy(
    logits: LogProb, labels: Dense, *, reduction: Reduction = "mean", out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Cross-entropy between softmax(logits) over the last axis and probabilities, such as smoothed labels.

    logits: shape (…, C), of at least one dimension; float32, float64, float16 or bfloat16.
    labels: the probability of each class, of the shape of logits; one of the four dtypes. They are used as given.
    reduction: "none" (a loss for each sample), "sum", or "mean" (the sum divided by the number of samples; 0 if there
        is none).
    out: a tuple of arrays for the results; the second may be logits.

    Returns (loss, log_prob): loss of shape logits.shape[:-1] or (), log_prob = log_softmax(logits). Where a label is 0
    its class adds nothing, even if its probability is 0. Raises TypeError, ValueError.

    Formula: loss_i = -sum_k(labels[i, k] * log_prob[i, k]). Source: com.microsoft SoftmaxCrossEntropy, which negates no
    loss with reduction "none", and adds them up.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], np.float32)
    >>> opgrad.softmax_cross_entropy(logits, labels)
    (array(1.0013, dtype=float32), array([[-0.4076, -2.4076, -1.4076],
           [-3.0949, -0.0949, -3.0949]], dtype=float32))
    """
    log_prob = reference("log_softmax")(logits)
    losses = -np.where(labels == 0, 0.0, labels * log_prob).sum(-1)
    return _reduced(losses, losses.size if reduction == "mean" else 1.0, reduction), log_prob


@operator(
    "dlogits = dy * (exp(log_prob) - labels) / (number of samples for mean)",
    forward="softmax_cross_entropy",
    support=IN_GRAPHS,
    results=SLOPE,
    in_place={"dlogits": ("log_prob", "labels")},
    onnx=OnnxName("SoftmaxCrossEntropyGrad", ("dy", "log_prob", "labels"), ("dlogits",), {"reduction": "mean"}),
)
def softmax_cross_entropy_grad(
    dy: LossGrad, log_prob: LogProb, labels: Dense, *, reduction: Reduction = "mean", out: Array | None = None
) -> Array:
    """Gradient of softmax_cross_entropy with respect to logits, for labels of which each sample's add up to 1.

    dy: gradient with respect to loss: shape log_prob.shape[:-1] for reduction "none", else () or (1,).
    log_prob: the second result of the forward function, shape (…, C). It is not normalised again.
    labels, reduction: as given to the forward function.
    out: where to write; may be log_prob or labels.

    Returns dlogits, of the shape and dtype of log_prob. Raises TypeError, ValueError.

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
    "loss = -weight * log_prob[label], reduced; log_prob = log_softmax(logits)",
    support=IN_GRAPHS,
    results=LOSS,
    in_place={"log_prob": ("logits",)},
    onnx=OnnxName(
        "SparseSoftmaxCrossEntropy",
        ("logits", "labels", "weight?"),
        ("loss", "log_prob?"),
        {"reduction": "mean"},
        origin="",
    ),
)
def sparse_softmax_cross_entropy(
    logits: LogProb,
    labels: Sparse,
    weight: Weight | None = None,
    *,
    reduction: Reduction = "mean",
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Cross-entropy between softmax(logits) over the last axis and integer labels, with a weight for each sample.

    logits: shape (…, C), of at least one dimension; float32, float64, float16 or bfloat16.
    labels: shape logits.shape[:-1]; int32 or int64 classes in [0, C).
    weight: a factor for each sample, of the shape of labels; one of the four dtypes; None: all 1.
    reduction: "none" (a loss for each sample), "sum", or "mean" (the sum divided by the sum of the weights; 0 if that
        is 0).
    out: a tuple of arrays for the results; the second may be logits.

    Returns (loss, log_prob): loss of shape labels.shape or (), log_prob = log_softmax(logits).
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, or a label outside [0, C), naming the first one,
    before anything is written.

    Formula: loss_i = -weight_i * log_prob[i, label_i]. Source: ONNX Runtime's SparseSoftmaxCrossEntropy, which adds the
    losses up with reduction "none", too.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> opgrad.sparse_softmax_cross_entropy(logits, labels)
    (array(1.7513, dtype=float32), array([[-0.4076, -2.4076, -1.4076],
           [-3.0949, -0.0949, -3.0949]], dtype=float32))
    """
    log_prob = reference("log_softmax")(logits)
    weights = np.ones(labels.shape) if weight is None else weight
    losses = np.zeros(labels.shape)
    if labels.size:
        losses = -weights * np.take_along_axis(log_prob, labels[..., np.newaxis], -1)[..., 0]
    return _reduced(losses, float(weights.sum()) if reduction == "mean" else 1.0, reduction), log_prob


@operator(
    "dlogits = weight * dy * (exp(log_prob) - onehot(label)) / (sum of weights for mean)",
    forward="sparse_softmax_cross_entropy",
    support=IN_GRAPHS,
    results=SLOPE,
    in_place={"dlogits": ("log_prob",)},
    onnx=OnnxName(
        "SparseSoftmaxCrossEntropyGrad",
        ("dy", "log_prob", "labels", "weight?"),
        ("dlogits",),
        {"reduction": "mean"},
        origin="",
    ),
)
def sparse_softmax_cross_entropy_grad(
    dy: LossGrad,
    log_prob: LogProb,
    labels: Sparse,
    weight: Weight | None = None,
    *,
    reduction: Reduction = "mean",
    out: Array | None = None,
) -> Array:
    """Gradient of sparse_softmax_cross_entropy with respect to logits.

    dy: gradient with respect to loss: shape labels.shape for reduction "none", else () or (1,).
    log_prob: the second result of the forward function, shape (…, C). It is not normalised again.
    labels, weight, reduction: as given to the forward function.
    out: where to write; may be log_prob.

    Returns dlogits, of the shape and dtype of log_prob; 0 where the mean's divisor is 0. Raises TypeError for a wrong
    dtype; ValueError for a wrong shape or label, before anything is written.

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
