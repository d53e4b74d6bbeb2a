"""Softmax cross-entropy from integer labels: the loss, with log_prob or alone, its gradient, and both at once."""

from typing import Annotated, Any

import numpy as np

from opgrad.contract import FloatDtypes, OnnxName, Reduction, Tensor, like, operator, reference, shaped_like
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes


def _label_shape(logits: Shape) -> Shape:
    return logits[:1] + logits[2:]


def _loss_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["labels"] if attributes["reduction"] == "none" else ()


Logits = Annotated[Array, Tensor(FLOATS, ranks=range(2, 65))]
Labels = Annotated[
    Array,
    Tensor(
        INTEGERS,
        lambda shapes, _: _label_shape(shapes["logits" if "logits" in shapes else "log_prob"]),
        "that of the logits without axis 1",
        role="sample",
    ),
]
Weight = Annotated[
    Array,
    Tensor(
        FLOATS,
        lambda shapes, _: shapes["logits" if "logits" in shapes else "log_prob"][1:2],
        "the number of classes",
        role="alone",
    ),
]
LossGrad = Annotated[
    Array,
    Tensor(
        FLOATS,
        lambda shapes, attributes: (
            _label_shape(shapes["log_prob"])
            if attributes["reduction"] == "none"
            else ((1,) if shapes["dy"] == (1,) else ())
        ),
        "what the reduction gives",
        role="sample",
    ),
]
Bias = Annotated[Array, shaped_like("log_prob")]

LOSS = Tensor(FLOATS, _loss_shape, "what the reduction gives", dtype_of="logits", role="sample")

WITH_INDEX = {"reduction": "mean", "ignore_index": -1}


def _class_weights(labels: Array, weight: Array | None, ignore_index: int | None, classes: int) -> tuple[Array, Array]:
    """Per sample: the class to read (0 where ignored) and the weight (0 where ignored)."""
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    picked = np.where(ignored, 0, labels)
    each = np.ones(max(classes, 1)) if weight is None else weight.astype(np.float64)
    return picked, np.where(ignored, 0.0, each[picked] if classes else 0.0)


def _reduce(loss: Array, weights: Array, reduction: str) -> Any:
    if reduction == "none":
        return loss
    total = weights.sum() if reduction == "mean" else 1.0
    return loss.sum() / total if total != 0 else np.zeros(())


@operator(
    "loss = -weight[label] * log_prob[label], reduced; log_prob = log_softmax(logits)",
    kind="classes",
    results={"loss": LOSS, "log_prob": like("logits")},
    in_place={"log_prob": ("logits",)},
    onnx=OnnxName(
        "SoftmaxCrossEntropyLossInternal",
        ("logits", "labels", "weight?", "ignore_index?"),
        ("loss", "log_prob"),
        {"reduction": "mean", "output_type": None},
    ),
)
def softmax_cross_entropy_loss(
    logits: Logits, labels: Labels, weight: Weight | None = None,
    *, ignore_index: int | None = None, reduction: Reduction = "mean", out_dtype: FloatDtypes = None,
    check: bool = False, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Cross-entropy between softmax(logits) over axis 1 and integer labels.

    logits: shape (N, C) or (N, C, D1, …, Dk); float32, float64, float16 or bfloat16.
    labels: shape (N,) or (N, D1, …, Dk); int32 or int64 classes in [0, C).
    weight: shape (C,), one of the four dtypes; a factor for the samples of each class; None: all 1.
    ignore_index: samples with this label have loss 0 and do not count; None: none.
    reduction: "none" (a loss for each sample), "sum", or "mean" (sum divided by the sum of the samples' weights;
        0 if that is 0).
    out_dtype: the dtype of both results, or a tuple with one for each; None: that of logits.
    check: on CUDA, wait for the device and raise for labels out of range instead of giving NaN; the CPU always
        checks.
    out: a tuple of arrays for the results; the second may be logits.

    Returns (loss, log_prob): loss of shape labels.shape or (), log_prob = log_softmax(logits, 1).
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, or a label outside [0, C) that is not
    ignored, naming the first one, before anything is written.

    Formula: loss_i = -weight[label_i] * log_prob[i, label_i]. Source: ONNX SoftmaxCrossEntropyLoss-13,
    com.microsoft SoftmaxCrossEntropyLossInternal.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> opgrad.softmax_cross_entropy_loss(logits, labels)
    (array(1.7513, dtype=float32), array([[-0.4076, -2.4076, -1.4076],
           [-3.0949, -0.0949, -3.0949]], dtype=float32))
    """
    log_prob = reference("log_softmax")(logits, 1)
    picked, weights = _class_weights(labels, weight, ignore_index, logits.shape[1])
    if not logits.shape[1]:
        return _reduce(np.zeros(labels.shape), weights, reduction), log_prob
    nll = -np.take_along_axis(log_prob, np.expand_dims(picked, 1), 1)[:, 0]
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    return _reduce(np.where(ignored, 0, nll * weights), weights, reduction), log_prob


@operator(
    "loss = -weight[label] * log_softmax(logits)[label], reduced; log_prob never stored",
    kind="classes",
    results={"loss": LOSS},
)
def softmax_cross_entropy_loss_only(
    logits: Logits, labels: Labels, weight: Weight | None = None,
    *, ignore_index: int | None = None, reduction: Reduction = "mean", out_dtype: FloatDtypes = None,
    check: bool = False, out: Array | None = None,
) -> Array:  # fmt: skip
    """The loss alone, for evaluation: the logits are read from memory once, and nothing of their size is written.

    The arguments are those of softmax_cross_entropy_loss.
    out_dtype: the dtype of the loss; None: that of logits.
    out: where to write the loss.

    Returns loss, of shape labels.shape for reduction "none", else (). Raises TypeError for a wrong dtype;
    ValueError for a wrong shape, or a label outside [0, C) that is not ignored, naming the first one, before
    anything is written.

    Formula: loss_i = -weight[label_i] * log_softmax(logits, 1)[i, label_i]. Source: ONNX
    SoftmaxCrossEntropyLoss-13 without its second output.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> opgrad.softmax_cross_entropy_loss_only(logits, labels, reduction="none")
    array([0.4076, 3.0949], dtype=float32)
    """
    options = {"ignore_index": ignore_index, "reduction": reduction}
    loss, _ = reference("softmax_cross_entropy_loss")(logits, labels, weight, **options)
    return loss


@operator(
    "dlogits = weight[label] * dy * (exp(log_prob) - onehot(label)) / (sum of weights for mean) + bias",
    forward="softmax_cross_entropy_loss",
    kind="classes",
    results={"dlogits": like("log_prob")},
    in_place={"dlogits": ("log_prob", "bias")},
    onnx=(
        OnnxName("SoftmaxCrossEntropyLossGrad", ("dy", "log_prob", "labels", "weight?"), ("dlogits",), WITH_INDEX),
        OnnxName(
            "SoftmaxCrossEntropyLossInternalGrad",
            ("dy", "log_prob", "labels", "weight?", "ignore_index?", "bias?"),
            ("dlogits",),
            {"reduction": "mean", "output_type": None},
            types={"bias": "B"},
        ),
    ),
)
def softmax_cross_entropy_loss_grad(
    dy: LossGrad, log_prob: Logits, labels: Labels, weight: Weight | None = None, bias: Bias | None = None,
    *, ignore_index: int | None = None, reduction: Reduction = "mean", out_dtype: FloatDtypes = None,
    check: bool = False, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of softmax_cross_entropy_loss with respect to logits.

    dy: gradient with respect to loss: shape labels.shape for reduction "none", else () or (1,).
    log_prob: the second result of the forward function, shape (N, C, D1, …, Dk). It is not normalised again.
    labels, weight, ignore_index, reduction: as given to the forward function.
    bias: added to the result, in the shape of log_prob; None: nothing.
    out_dtype: the dtype of the result; None: that of log_prob.
    check: on CUDA, wait for the device and raise for labels out of range instead of giving NaN; the CPU always
        checks.
    out: where to write; may be log_prob or bias.

    Returns dlogits, of the shape of log_prob; exactly 0 (+ bias) for ignored samples and where the mean's
    divisor is 0. Raises TypeError for a wrong dtype; ValueError for a wrong shape or label, before anything
    is written.

    Formula: dlogits[i, k] = weight[label_i] * dy_i * (exp(log_prob[i, k]) - [k == label_i]) / W, where W is
    the sum of the samples' weights for "mean", else 1. Source: com.microsoft SoftmaxCrossEntropyLossGrad,
    SoftmaxCrossEntropyLossInternalGrad.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> _, log_prob = opgrad.softmax_cross_entropy_loss(logits, labels)
    >>> opgrad.softmax_cross_entropy_loss_grad(np.float32(1.0), log_prob, labels)
    array([[-0.1674,  0.045 ,  0.1224],
           [ 0.0226,  0.4547, -0.4774]], dtype=float32)
    """
    classes = log_prob.shape[1]
    picked, weights = _class_weights(labels, weight, ignore_index, classes)
    total = weights.sum() if reduction == "mean" else 1.0
    upstream = dy if reduction == "none" else dy.reshape(())
    factor = np.expand_dims(np.zeros(weights.shape) if total == 0 else weights * upstream / total, 1)
    onehot = np.expand_dims(picked, 1) == np.arange(classes).reshape(1, -1, *[1] * (labels.ndim - 1))
    ignored = np.expand_dims(np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index, 1)
    dead = ignored | (total == 0)
    dlogits = np.where(dead, 0, factor * (np.exp(log_prob) - onehot))
    return dlogits if bias is None else dlogits + bias


@operator(
    "(loss, dloss/dlogits), log_prob never stored",
    forward="softmax_cross_entropy_loss",
    kind="classes",
    results={"loss": LOSS, "dlogits": like("logits")},
    in_place={"dlogits": ("logits",)},
    onnx=OnnxName("SoftmaxCrossEntropyLossAndGrad", ("logits", "labels", "weight?"), ("loss", "dlogits"), WITH_INDEX),
)
def softmax_cross_entropy_loss_and_grad(
    logits: Logits, labels: Labels, weight: Weight | None = None,
    *, ignore_index: int | None = None, reduction: Reduction = "mean", out_dtype: FloatDtypes = None,
    check: bool = False, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The loss and its gradient for dy = 1, in one pass over the logits.

    The arguments are those of softmax_cross_entropy_loss. The logits are read from memory once, the gradient
    is written once, and nothing else of their size is allocated.
    out_dtype: as there; ("float32", "bfloat16") stores the loss in float32, the gradient in bfloat16.
    out: a tuple of arrays for the results; the second may be logits.

    Returns (loss, dlogits). For reduction "none" dlogits is the gradient of the sum of the losses.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, or a label outside [0, C) that is not
    ignored, naming the first one, before anything is written.

    Formula: dlogits[i, k] = weight[label_i] * (softmax(logits)[i, k] - [k == label_i]) / W, where W is the
    sum of the samples' weights for "mean", else 1. Source: ONNX
    SoftmaxCrossEntropyLoss; in graphs SoftmaxCrossEntropyLossAndGrad, a name of opgrad's own in com.microsoft.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, -1])
    >>> opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, ignore_index=-1)
    (array(0.4076, dtype=float32), array([[-0.3348,  0.09  ,  0.2447],
           [ 0.    ,  0.    ,  0.    ]], dtype=float32))
    """
    options = {"ignore_index": ignore_index, "reduction": reduction}
    loss, log_prob = reference("softmax_cross_entropy_loss")(logits, labels, weight, **options)
    dy = np.ones(loss.shape)
    return loss, reference("softmax_cross_entropy_loss_grad")(dy, log_prob, labels, weight, **options)
